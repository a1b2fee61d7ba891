"""Attention masks that hide nothing.

Libraries of models write masks out for a compiler that they leave away otherwise; PyTorch's
attention then takes its slowest way, and draws other random numbers for its dropout.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from ingot.capture.nodes import is_pure

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_MASK = 3  # its position among the attention's arguments
# Whatever their sizes, these give true where they read nothing but true.
_KEEPING = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.reshape.default,
    _aten.slice.Tensor,
    _aten.squeeze.dim,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten.bitwise_and.Tensor,
    _aten.logical_and.default,
    _aten.__and__.Tensor,
}
_MOST_ELEMENTS = 1 << 22


def leave_full_masks_away(graph: torch.fx.Graph) -> None:
    """Of attentions whose mask is true everywhere for any input."""
    for node in graph.nodes:
        if node.target is _ATTENTION and len(node.args) > _MASK:
            mask = node.args[_MASK]
            if isinstance(mask, torch.fx.Node) and _is_true(mask):
                node.update_arg(_MASK, None)


def _is_true(node: torch.fx.Node) -> bool:
    if node.meta["val"].dtype is not torch.bool:
        return False
    if node.target in _KEEPING:
        return all(_is_true(read) for read in node.all_input_nodes if _is_tensor(read))
    known: dict[torch.fx.Node, torch.Tensor] = {}
    return _is_constant(node) and bool(_evaluated(node, known).all())


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether it is computed from numbers that stand in the graph, and is small."""
    if node.op != "call_function" or not is_pure(node) or not _is_tensor(node):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    sizes = node.meta["val"].shape
    if any(not isinstance(size, int) for size in sizes) or sizes.numel() > _MOST_ELEMENTS:
        return False
    return all(map(_is_constant, node.all_input_nodes))


def _evaluated(node: torch.fx.Node, known: dict) -> torch.Tensor:
    if node not in known:

        def value(given: torch.fx.Node) -> torch.Tensor:
            return _evaluated(given, known)

        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}
        with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
            known[node] = node.target(*map_arg(node.args, value), **map_arg(kwargs, value))
    return known[node]
