"""Masks of attentions: made once for all that read them, and as a fused kernel reads them.

PyTorch's attention adds its mask to the scores: one of flags it converts at each call, with two
fills and a `where`. Libraries of models pass one mask to all layers. (A GPT-2's training step of
twelve layers: 1.4 ms of the host and 0.14 ms of the GPU.) Here the first attention's conversion is
an operator of its own, and all read what it gives: one tensor, where autograd keeps as many as
there are layers. The attentions stay PyTorch's, and are handed the bits that each would make.

Its fused kernels read a mask whose last dimension lies densely; for any other PyTorch computes the
attention in ten operators, in 16 bits by products of fp32. (The positions' bias of T5 is one, which
an embedding gives head by head.) Where no gradient follows, and no dropout draws random numbers,
which another kernel would draw in another order, the first attention's mask is copied for all.
What sees nothing (a row of -inf) comes out as zeros, as the ten operators give it and not every
fused kernel does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Hashable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.capture.layout import hint, written
from ingot.capture.nodes import ASIDE, named_arguments
from ingot.capture.surgery import Writer, sizes_of

_aten = torch.ops.aten
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_OPERANDS = ("query", "key", "value")
# What else PyTorch asks about to choose a kernel.
_OPTIONS = ("dropout_p", "scale", "enable_gqa")
_CUDNN = int(torch._C._SDPBackend.CUDNN_ATTENTION)
_hidden: dict[tuple[torch.dtype, torch.device], torch.Tensor | None] = {}
_functorch_is_active = torch._C._are_functorch_transforms_active


def convert_shared_masks(graph: torch.fx.Graph, needing: Container[torch.fx.Node]) -> None:
    """needing: nodes whose tensors need gradients. Equal views are to be one node, and nothing to
    be written before the graph's end."""
    alike: dict[Hashable, list[torch.fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is _ATTENTION and _adds_flags(node):
            alike[_kind(node, needing)].append(node)
    for attentions in alike.values():
        if len(attentions) > 1:
            _convert(graph, attentions)


def lay_out_masks(graph: torch.fx.Graph) -> None:
    """Of a forward without gradients on a GPU; as convert_shared_masks() wants the graph."""
    dense: dict[tuple, tuple[torch.fx.Node, torch.fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target is not _ATTENTION or named_arguments(node)["dropout_p"]:
            continue
        mask, dtype = named_arguments(node)["attn_mask"], node.meta["val"].dtype
        if not isinstance(mask, torch.fx.Node) or _is_dense(mask.meta["val"]):
            continue
        if (mask, dtype) not in dense:
            dense[mask, dtype] = _laid_out(Writer(graph, node), mask, dtype)
        copy, blind = dense[mask, dtype]
        node.replace_input_with(mask, copy)
        with graph.inserting_after(node):
            seen = graph.call_function(_aten.masked_fill.Scalar, (node, blind, 0.0))
        seen.meta = {**node.meta, ASIDE: True}
        node.replace_all_uses_with(seen, delete_user_cb=lambda user, seen=seen: user is not seen)


def _laid_out(
    writer: Writer, mask: torch.fx.Node, dtype: torch.dtype
) -> tuple[torch.fx.Node, torch.fx.Node]:
    """A dense copy of a mask, in the type of an attention, and which of its rows hide all."""
    sizes, like = sizes_of(mask), mask.meta["val"]

    def made(value: torch.Tensor, target, *arguments, **named) -> torch.fx.Node:
        node = writer.made(value, target, *arguments, **named)
        node.meta[ASIDE] = True
        return node

    how = {"dtype": dtype, "memory_format": torch.contiguous_format}
    copy = made(like.new_empty(sizes, dtype=dtype), _aten._to_copy.default, mask, **how)
    flags = like.new_empty(sizes, dtype=torch.bool)
    hidden = made(flags, _aten.eq.Scalar, copy, -math.inf)
    return copy, made(flags[..., :1], _aten.all.dim, hidden, -1, True)


def _is_dense(mask: torch.Tensor) -> bool:
    return mask.is_cpu or not mask.is_floating_point() or lies_in_rows(mask)


def lies_in_rows(mask: torch.Tensor) -> bool:
    """As fused kernels read one."""
    return hint(mask.stride(-1)) in (0, 1)


def _adds_flags(attention: torch.fx.Node) -> bool:
    given = named_arguments(attention)
    mask = given["attn_mask"]
    is_node = isinstance(mask, torch.fx.Node) and not given["is_causal"]
    return is_node and mask.meta["val"].dtype is torch.bool


def _kind(attention: torch.fx.Node, needing: Container[torch.fx.Node]) -> Hashable:
    """Equal of attentions with one mask for which PyTorch chooses one kernel."""
    given = named_arguments(attention)
    operands = [given[name] for name in _OPERANDS]
    values = [operand.meta["val"] for operand in operands]
    return (
        given["attn_mask"],
        attention.meta["val"].dtype,
        *(tuple(map(written, (*value.shape, *value.stride()))) for value in values),
        *(value.dtype for value in values),
        *(operand in needing for operand in operands),
        *(given[name] for name in _OPTIONS),
    )


def _convert(graph: torch.fx.Graph, attentions: Sequence[torch.fx.Node]) -> None:
    """The result of an attention has the type in which it computes: its query's, or autocast's."""
    first = attentions[0]
    given = named_arguments(first)
    mask, dtype = given["attn_mask"], first.meta["val"].dtype
    arguments = [given[name] for name in (*_OPERANDS, *_OPTIONS)]
    made = Writer(graph, first).call(converted_mask, sizes_of(mask), mask, dtype, *arguments)
    made.meta[ASIDE] = True
    for attention in attentions:
        attention.replace_input_with(mask, made)


def converted_mask(
    mask: torch.Tensor,
    dtype: torch.dtype,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """What PyTorch adds to the scores for a mask of flags. The mask itself where the choice of a
    kernel would be another one: it asks how a mask lies in memory. dtype: in which the attention
    computes."""
    if _functorch_is_active():  # knows no rule for what asks
        return mask
    operands = [_cast(operand, dtype) for operand in (query, key, value)]

    def kernel(given: torch.Tensor) -> int:
        return torch._fused_sdp_choice(
            *operands, given, dropout_p, scale=scale, enable_gqa=enable_gqa
        )

    chosen = kernel(mask)
    if chosen == _CUDNN:
        hidden = _hidden_from_cudnn(mask, *operands)
        if hidden is None:
            return mask
    else:
        hidden = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    made = torch.where(mask, 0.0, hidden)
    return made if kernel(made) == chosen else mask


def _hidden_from_cudnn(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor | None:
    """What PyTorch writes for cuDNN where a mask hides: for some versions another number than
    -inf, with which a row that sees nothing comes out otherwise. Found once, by a call that hides
    all; None where that cannot be seen."""
    place = query.dtype, mask.device
    if place not in _hidden:
        if not mask.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        with torch.no_grad(), _BiasOfCudnn() as seen:
            _ATTENTION(query, key, value, torch.zeros_like(mask))
        _hidden[place] = None if seen.bias is None else seen.bias.flatten()[0].clone()
    return _hidden[place]


class _BiasOfCudnn(TorchDispatchMode):
    bias: torch.Tensor | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_cudnn_attention.default:
            self.bias = args[3]
        return func(*args, **(kwargs or {}))


def _cast(operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast casts it, but for what it holds: nobody reads that."""
    if operand.dtype is dtype:
        return operand
    return torch.empty_like(operand, dtype=dtype).requires_grad_(operand.requires_grad)
