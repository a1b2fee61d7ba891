"""Gradients of fp32 weights under autocast: the product writes fp32 itself.

PyTorch multiplies in 16 bits, rounds, and casts the gradient to the weight's fp32 in a pass of its
own. cuBLAS has accumulated fp32 anyway, and writes it at two bytes more an element. (H100, bf16:
aᵀ·b of 4096×3072 and 4096×768 36 µs with the cast, 30 without; 2048×11008 and 2048×4096 376 and
257, where what was rounded has left the L2 cache.)
"""

from __future__ import annotations

import torch

from ingot.capture.surgery import example
from ingot.capture.table import is_half
from ingot.live.padded import transposed_product_of_padded

_aten = torch.ops.aten
_IS_OFFERED = hasattr(_aten.mm, "dtype")  # PyTorch 2.8; its CUDA has it, its CPU has not
_VIEWS = (_aten.t.default, _aten.transpose.int, _aten.view.default, _aten._unsafe_view.default)


def widen_gradients(graph: torch.fx.Graph) -> None:
    """Of a backward pass: products aᵀ·b that nothing reads but a cast to fp32 become fp32."""
    for node in list(graph.nodes) if _IS_OFFERED else ():
        wide = _wide_form(node)
        if wide is None or not is_half(example(node)) or not _is_on_a_gpu(node):
            continue
        behind = _as_far_as_cast(node)
        if behind is None:
            continue
        *same, cast = behind
        node.target, node.args = wide
        for each in same:
            each.meta["val"] = example(each).to(torch.float32)
        cast.replace_all_uses_with(same[-1])
        graph.erase_node(cast)


def _wide_form(node: torch.fx.Node) -> tuple | None:
    """Target and arguments of what gives the same in fp32."""
    if node.target is _aten.mm.default and node.args[0].target is _aten.t.default:
        turned, b = node.args
        return transposed_product_in_fp32, (turned.args[0], b)
    if node.target is transposed_product_of_padded:
        return node.target, (*node.args, torch.float32)
    return None


def _is_on_a_gpu(node: torch.fx.Node) -> bool:
    return example(node).device.type == "cuda"


def _as_far_as_cast(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """The node, views of it, and the cast to fp32, where nothing else reads any of them."""
    chain = [node]
    while len(node.users) == 1:
        (node,) = node.users
        chain.append(node)
        if node.target is _aten._to_copy.default:
            return chain if node.kwargs == {"dtype": torch.float32} else None
        if node.target not in _VIEWS:
            return None
    return None


def transposed_product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aᵀ·b in fp32, for a [K, M] and b [K, N] of 16 bits on a GPU."""
    return torch.mm(a.t(), b, out_dtype=torch.float32)
