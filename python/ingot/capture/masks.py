"""Attention masks that hide nothing.

Libraries of models write masks out for a compiler that they leave away otherwise; PyTorch's
attention then takes its slowest way, and draws other random numbers for its dropout.
"""

from __future__ import annotations

import torch

from ingot.capture.folding import constant_nodes, evaluated

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
    masked = [n for n in graph.nodes if n.target is _ATTENTION and len(n.args) > _MASK]
    constant = constant_nodes(graph) if masked else set()
    for node in masked:
        mask = node.args[_MASK]
        if isinstance(mask, torch.fx.Node) and _is_true(mask, constant):
            node.update_arg(_MASK, None)


def _is_true(node: torch.fx.Node, constant: set[torch.fx.Node]) -> bool:
    value = node.meta["val"]
    if value.dtype is not torch.bool:
        return False
    if node.target in _KEEPING:
        return all(_is_true(read, constant) for read in node.all_input_nodes if _is_tensor(read))
    if node not in constant or value.numel() > _MOST_ELEMENTS:
        return False
    return bool(evaluated(node, {}, "cpu").all())


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
