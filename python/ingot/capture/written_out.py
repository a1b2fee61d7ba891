"""Attention that PyTorch computes operator by operator, written as those operators.

`scaled_dot_product_attention` has fused kernels, each for some operands. For the others PyTorch
multiplies, adds the mask, looks for rows that see nothing, and takes the softmax, all in fp32. (The
positions' bias of T5, which an embedding gives head by head, does not lie as a fused kernel reads
it, and in training has a gradient.) Written out, what stands between the two products is a chain as
of attention by hand (token_chains.py), and dropout draws the numbers that PyTorch's draws.

In 16 bits PyTorch widens the operands and multiplies them in fp32, on no tensor core. The scores,
and the gradient of the weights, are products of what was 16 bits wide: fp32 sums of the same terms.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ingot.capture import token_chains
from ingot.capture.custom_ops import autocast_off
from ingot.capture.feed import Feed
from ingot.capture.host_time import is_of_the_host
from ingot.capture.layout import hint, written
from ingot.capture.nodes import WITHOUT_AUTOCAST, named_arguments
from ingot.capture.shared_masks import lies_in_rows
from ingot.capture.surgery import Writer
from ingot.capture.table import HALVES

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_OPERANDS = ("query", "key", "value")
_BY_OPERATORS = int(torch._C._SDPBackend.MATH)
# Since PyTorch 2.8.
_widens = hasattr(_aten.bmm, "dtype")
_functorch_is_active = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def write_out_attentions(feed: Feed, needing: Container[torch.fx.Node]) -> None:
    """Those with a gradient, where a training step gains by it and has regions for what is between
    their products: these and the region take the host 0.1 to 0.3 ms more than PyTorch's operators.
    Equal views are to be one node. needing: nodes whose tensors need gradients."""
    if not (feed.trains_chains and token_chains.are_taken_on(feed.device_type)):
        return
    found = [node for node in feed.graph.nodes if node.target is _ATTENTION and _is_known(node)]
    found = [node for node in found if _is_by_operators(node, needing)]
    weighs = not (token_chains.takes_everything or feed.is_replayed)
    if not found or (weighs and is_of_the_host(feed.graph.nodes)):
        return
    dense: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in found:
        _write_out(feed.graph, node, dense)


def _is_known(attention: torch.fx.Node) -> bool:
    """Whether its operands are of a kind that no fused kernel reads, and of a form that is written
    here."""
    given = named_arguments(attention)
    query, key, value = (given[name].meta["val"] for name in _OPERANDS)
    mask = given["attn_mask"]
    added = isinstance(mask, torch.fx.Node) and mask.meta["val"].is_floating_point()
    added = added and mask.meta["val"].dim() >= 2
    lead = [list(map(written, each.shape[:-2])) for each in (query, key, value)]
    numbers = (given["dropout_p"], given["scale"] or 0, query.shape[-1])
    return (
        query.dim() in (3, 4)
        and lead[0] == lead[1] == lead[2]
        and (added or mask is None)
        and (query.dim() == 3 or (added and not lies_in_rows(mask.meta["val"])))
        and not (given["is_causal"] or given["enable_gqa"])
        and all(isinstance(number, (int, float)) for number in numbers)
        and attention.meta["val"].dtype in (torch.float32, *HALVES)
        and WITHOUT_AUTOCAST not in attention.meta
    )


def _is_by_operators(attention: torch.fx.Node, needing: Container[torch.fx.Node]) -> bool:
    """Whether PyTorch's choice of a kernel is none, though it may take any."""
    given, dtype = named_arguments(attention), attention.meta["val"].dtype
    operands = [given[name] for name in (*_OPERANDS, "attn_mask")]
    if not any(operand in needing for operand in operands):
        return False
    kernels = torch.backends.cuda
    if not (kernels.flash_sdp_enabled() and kernels.mem_efficient_sdp_enabled()):
        return False

    def like(operand: Any) -> torch.Tensor | None:
        if operand is None:
            return None
        value = operand.meta["val"]
        sizes, strides = (list(map(hint, numbers)) for numbers in (value.shape, value.stride()))
        made = torch.empty_strided(sizes, strides, dtype=dtype, device=value.device)
        return made.requires_grad_(operand in needing)

    with FakeTensorMode():
        chosen = torch._fused_sdp_choice(
            *map(like, operands), given["dropout_p"], scale=given["scale"]
        )
    return chosen == _BY_OPERATORS


def _write_out(
    graph: torch.fx.Graph, attention: torch.fx.Node, dense: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    """dense: masks with their dense copies, which all attentions share."""
    given, result = named_arguments(attention), attention.meta["val"]
    query, key, value = (given[name] for name in _OPERANDS)
    writer = Writer(graph, attention)
    made = writer.made

    def multiplied(a: torch.fx.Node, b: torch.fx.Node, like: torch.Tensor) -> torch.fx.Node:
        if result.dtype in HALVES:
            return made(like, product_of_attention, a, b, like.dtype)
        return made(like, _aten.matmul.default, a, b)

    def cast(operand: torch.fx.Node) -> torch.fx.Node:
        """As autocast does."""
        own = operand.meta["val"]
        if own.dtype == result.dtype:
            return operand
        like = own.to(result.dtype)
        return made(like, _aten._to_copy.default, operand, dtype=result.dtype)

    query, key, value = map(cast, (query, key, value))
    q, k = query.meta["val"], key.meta["val"]
    wide = result.new_empty((*q.shape[:-1], k.shape[-2]), dtype=torch.float32)
    turned = made(k.mT, _aten.transpose.int, key, -2, -1)
    weights = multiplied(query, turned, wide)
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    if scale != 1:
        weights = made(wide, _aten.mul.Tensor, weights, scale)
    mask = given["attn_mask"]
    if mask is not None:
        if mask not in dense:
            dense[mask] = _in_rows(writer, mask)
        weights = made(wide, _aten.add.Tensor, weights, dense[mask])
    weights = made(wide, _aten._safe_softmax.default, weights, -1)
    if given["dropout_p"]:
        weights = made(wide, _aten.dropout.default, weights, given["dropout_p"], True)
    whole = multiplied(weights, value, result)
    whole.meta = dict(attention.meta)
    attention.replace_all_uses_with(whole)
    graph.erase_node(attention)


def _in_rows(writer: Writer, mask: torch.fx.Node) -> torch.fx.Node:
    value = mask.meta["val"]
    if lies_in_rows(value):
        return mask
    like, how = value.new_empty(value.shape), {"memory_format": torch.contiguous_format}
    return writer.made(like, _aten.clone.default, mask, **how)


# Products of 16 bits and of 32 --------------------------------------------------------------------


def product_of_attention(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a·b of batches of matrices, of 16 bits or 32 each: in fp32, rounded to dtype once. Autocast
    does not round them to 16 bits, and PyTorch's autograd differentiates it."""
    with autocast_off(a.device.type):
        made = _multiplied(_one_batch(a), _one_batch(b), dtype)
        return made.view(*a.shape[:-2], *made.shape[-2:])


def _one_batch(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices of heads lie apart, and are copied here once, not for each product that backward
    makes of them. Turned ones stay turned."""
    if matrices.stride(-2) == 1:
        return matrices.mT.flatten(0, -3).mT
    return matrices.flatten(0, -3)


def _multiplied(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if _functorch_is_active() or _is_batched(a) or _is_batched(b):
        return torch.bmm(a.float(), b.float()).to(dtype)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _ProductOfAttention.apply(a, b, dtype)
    return _rounded_once(a, b, dtype)


def _rounded_once(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if _widens and a.is_cuda and a.dtype == b.dtype != torch.float32 == dtype:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a.float(), b.float()).to(dtype)


class _ProductOfAttention(torch.autograd.Function):
    """Of [batch, M, K] and [batch, K, N]."""

    @staticmethod
    def forward(ctx, a, b, dtype):
        ctx.save_for_backward(a, b)
        return _rounded_once(a, b, dtype)

    @staticmethod
    def backward(ctx, gradient):
        """b's lies as b does: a gradient that lies turned would be copied for what comes next."""
        a, b = ctx.saved_tensors
        of_a = of_b = None
        with autocast_off(a.device.type):
            if ctx.needs_input_grad[0]:
                of_a = _multiplied(gradient, b.mT, a.dtype)
            if ctx.needs_input_grad[1] and b.stride(-2) == 1:
                of_b = _multiplied(gradient.mT, a, b.dtype).mT
            elif ctx.needs_input_grad[1]:
                of_b = _multiplied(a.mT, gradient, b.dtype)
        return of_a, of_b, None
