"""Common-subexpression elimination: what a graph computes twice alike is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.capture.nodes import (
    BATCHED,
    CAST_FOR,
    JOINED,
    LEFT_ALONE,
    PART,
    WITHOUT_AUTOCAST,
    hands_out_memory,
    is_pure,
    moves_statistics,
    schema_name,
)
from ingot.capture.table import SHAPE_OPERATORS, TABLE

_MARKS = (BATCHED, JOINED, LEFT_ALONE, PART, WITHOUT_AUTOCAST)


def share(
    graph: torch.fx.Graph, shareable: Callable[[torch.fx.Node], bool], results: bool = False
) -> None:
    """Of pure nodes that are `shareable` and alike, the first one stands for all; results of the
    graph stay tensors of their own, unless `results` are gradients, which eager shares. Equal nodes
    have equal operands, so that nothing is reached earlier or later than before."""
    first: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node) or not shareable(node):
            continue
        same = first.setdefault(_computed(node), node)
        if same is not node and (results or not any(u.op == "output" for u in node.users)):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def is_repeatable(node: torch.fx.Node) -> bool:
    """Whether a forward's node may stand for its equals: what Ingot may take, views and sizes,
    unless somebody outside gets its memory and may write into it."""
    if isinstance(node.meta.get("val"), torch.SymInt):
        return True
    name = schema_name(node.target)
    return (name in TABLE or name in SHAPE_OPERATORS) and not (
        moves_statistics(node) or hands_out_memory(node)
    )


def _computed(node: torch.fx.Node) -> tuple:
    size = node.meta.get("val")
    if isinstance(size, torch.SymInt):
        return (size.node.expr,)
    marks = tuple(mark in node.meta for mark in _MARKS)
    return node.target, repr(node.args), repr(node.kwargs), marks, node.meta.get(CAST_FOR)
