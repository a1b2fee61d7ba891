"""Stages of a backward pass: how far apart its products are.

What a region gives lies in memory until its last launch, and the products of weights' gradients run
behind it. A network's backward pass is therefore cut, by the number of products on the way from
the gradients that are given, into regions of a few layers, or of one where what it makes is large:
what a layer stored is let go that many layers later.
"""

from __future__ import annotations

import torch

from ingot.capture.layout import size_in_bytes
from ingot.capture.nodes import schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.table import CASTS, SHAPE_OPERATORS

_MOST_PRODUCTS = 2  # one behind another, in a stage
_LARGE = 32 << 20  # bytes of what a product makes, which take longer than the call of a stage


def stages_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """By node; in none but the first where the graph has few products one behind another. What
    reads no product (it computes again what forward did not store) belongs where it is read first.
    """
    depths = _depths(graph)
    deepest = max(depths.values(), default=0)
    most = 1 if any(map(_is_large, depths)) else _MOST_PRODUCTS
    if deepest <= most:
        return {}
    count = -(-deepest // most)
    stages = {n: max(0, depth - 1) * count // deepest for n, depth in depths.items()}
    for node in reversed(graph.nodes):
        if not depths.get(node) and node.op == "call_function":
            readers = [stages[user] for user in node.users if user in stages]
            stages[node] = min(readers, default=0)
    return stages


def compute_again(graph: torch.fx.Graph) -> None:
    """What several stages read of an operator upon each element, each computes for itself where
    that loads less than what one would store for the others: x̂ of a norm, from its input in 16 bits
    and two numbers a row."""
    stages = stages_of(graph)
    if not stages:
        return
    depths = _depths(graph)
    for node in reversed(list(graph.nodes)):
        if depths.get(node, 1) or _loaded(node, depths) >= _bytes(node):
            continue
        readers: dict[int, list[torch.fx.Node]] = {}
        for user in node.users:
            readers.setdefault(stages.get(user, 0), []).append(user)
        for stage in sorted(readers)[1:]:
            with graph.inserting_before(min(readers[stage])):
                again = graph.node_copy(node)
            stages[again], depths[again] = stage, 0
            for user in readers[stage]:
                user.replace_input_with(node, again)


def _bytes(node: torch.fx.Node) -> float:
    return size_in_bytes(node.meta.get("val"))


def _loaded(node: torch.fx.Node, depths: dict[torch.fx.Node, int]) -> float:
    """Bytes of what it is computed from, by operators upon each element; its own where it is none
    of them."""
    sources: set[torch.fx.Node] = set()
    pending, seen = [node], {node}
    while pending:
        one = pending.pop()
        if depths.get(one, 1) or not _is_upon_each(one):
            sources.add(one)
            continue
        tensors = [a for a in one.all_input_nodes if _bytes(a) and a not in seen]
        seen.update(tensors)
        pending += tensors
    return sum(map(_bytes, sources))


def _is_upon_each(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    tags = getattr(node.target, "tags", ())
    return name in CASTS or name in SHAPE_OPERATORS or torch.Tag.pointwise in tags


def _is_large(node: torch.fx.Node) -> bool:
    """Those of weights' gradients are no products of a region, and no matter."""
    return schema_name(node.target) in PRODUCTS and _bytes(node) >= _LARGE


def _depths(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Products on the longest way to a node, itself included."""
    depths: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            before = max((depths.get(a, 0) for a in node.all_input_nodes), default=0)
            depths[node] = before + (schema_name(node.target) in PRODUCTS)
    return depths
