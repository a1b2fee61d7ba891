"""nn.TransformerEncoderLayer where gradients are off, as the operators that it is made of.

There PyTorch runs one operator for all of the layer, which tells TorchDynamo nothing of its result
while the batch is dynamic: a forward would fall apart at it, and what holds the layer would be
PyTorch's whole. `traceable` tells it, while Dynamo captures; `stand_in` writes the operators.

Masks of padding stay PyTorch's: nn.TransformerEncoder then packs the tokens that are left, and
gives zeros for the others, but not while it is compiled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from ingot.capture.attention import self_attention
from ingot.capture.nodes import named_arguments

_LAYER, _ATTENTION = "_transformer_encoder_layer_fwd", "_native_multi_head_attention"
_WITH_MASK = 19  # the layer's arguments behind the first
_NEED_WEIGHTS = 9  # the place of one of attention's, behind the first
NATIVE_ATTENTION = getattr(torch.ops.aten, _ATTENTION).default
_PADDING = 1  # the type of a mask of padding alone


def _fake_layer(x, *others, mask=None, mask_type=None):
    if len(others) == _WITH_MASK:
        mask, mask_type = others[-2:]
    if x.is_nested or (mask is not None and mask_type == _PADDING):
        raise UnsupportedOperatorException(getattr(torch.ops.aten, _LAYER).default)
    return x.new_empty(x.shape)


def _fake_attention(x, *others, **named):
    if others[_NEED_WEIGHTS:][:1] != (False,):
        raise UnsupportedOperatorException(getattr(torch.ops.aten, _ATTENTION).default)
    return x.new_empty(x.shape), x.new_empty(0)


_FAKES = {_LAYER: _fake_layer, _ATTENTION: _fake_attention}
_lock = threading.Lock()
_users = 0
_library: torch.library.Library | None = None


@contextlib.contextmanager
def traceable() -> Iterator[None]:
    """Within it Dynamo knows what the layer's operator gives."""
    global _users, _library
    with _lock:
        _users += 1
        if _users == 1:
            _library = _told()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _library is not None:
                _library._destroy()
                _library = None


def _told() -> torch.library.Library:
    library = torch.library.Library("aten", "FRAGMENT")
    for name, fake in _FAKES.items():
        with contextlib.suppress(RuntimeError):  # a release of PyTorch that knows it by itself
            torch.library.register_fake(f"aten::{name}", fake, lib=library)
    return library


def stand_in(graph: torch.fx.Graph) -> None:
    """Puts `encoder_layer` in the place of PyTorch's operator, in a graph of TorchDynamo's. Under
    autocast of the CPU, which casts all that the operator reads, what it is made of reads it cast.
    (Under a GPU's the module does not call it.)"""
    in_few_bits = torch.is_autocast_enabled("cpu")
    for node in graph.nodes:
        if node.op == "call_function" and node.target is getattr(torch, _LAYER, None):
            node.target = _cast_layer if in_few_bits else encoder_layer


def _cast_layer(*given, **named) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cpu")

    def cast(value):
        wide = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if wide else value

    values = [cast(value) for value in given]
    return encoder_layer(*values, **{name: cast(value) for name, value in named.items()})


def make_causal(node: torch.fx.Node) -> None:
    """In the place of PyTorch's attention for inference (NATIVE_ATTENTION) by a causal mask, the
    operators that it is made of, without the mask."""
    given = named_arguments(node)
    names = ("query", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
    read = [given[name] for name in names]
    values = [each.meta["val"] for each in read]

    def attend(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return self_attention(x, given["num_head"], *weights, is_causal=True)

    with tracing(None), values[0].fake_mode, enable_python_dispatcher(), torch.no_grad():
        made = make_fx(attend, pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    inside = dict(zip(made.graph.find_nodes(op="placeholder"), read))
    for each in made.graph.nodes:
        each.meta = {**node.meta, **each.meta}
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(made.graph, inside)
    for taken in list(node.users):  # behind the first there are weights, which nobody asked for
        if taken.args[1] == 0:
            taken.replace_all_uses_with(result)
        node.graph.erase_node(taken)
    node.graph.erase_node(node)


def encoder_layer(
    x: torch.Tensor,
    width: int,
    heads: int,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    first_scale: torch.Tensor,
    first_shift: torch.Tensor,
    second_scale: torch.Tensor,
    second_shift: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """As torch._transformer_encoder_layer_fwd, x and its result [batch, length, width]. PyTorch's
    GELU is the one by tanh here on a GPU, and the exact one on the CPU."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        weights = in_weight, in_bias, out_weight, out_bias
        if mask is None:
            return self_attention(x, heads, *weights)
        return torch._native_multi_head_attention(
            x, x, x, width, heads, *weights, mask, False, True, mask_type
        )[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        inner = functional.linear(x, up, up_bias)
        approximate = "tanh" if x.is_cuda else "none"
        inner = functional.gelu(inner, approximate=approximate) if use_gelu else inner.relu()
        return functional.linear(inner, down, down_bias)

    def norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (width,), scale, shift, eps)

    if norm_first:
        x = x + attend(norm(x, first_scale, first_shift))
        return x + feed_forward(norm(x, second_scale, second_shift))
    x = norm(x + attend(x), first_scale, first_shift)
    return norm(x + feed_forward(x), second_scale, second_shift)
