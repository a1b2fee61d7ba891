"""Stages of a backward pass: how far apart its products are.

What a region gives lies in memory until its last launch, and the products of weights' gradients run
behind it. A network's backward pass is therefore cut, by the number of products on the way from
the gradients that are given, into regions of a few layers, or of one where what it makes is large:
what a layer stored is let go that many layers later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ingot.capture.layout import result_bytes
from ingot.capture.nodes import JOINED, reached, schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.table import CASTS, SHAPE_OPERATORS, TABLE, is_half

_MOST_PRODUCTS = 2  # one behind another, in a stage
_Place = tuple[int, int]
_FIRST: _Place = (0, 0)
_LARGE = 32 << 20  # bytes of what a product makes, which take longer than the call of a stage


def stages_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """By node; in none but the first where the graph has few products one behind another, and no
    operator of PyTorch's between what regions take."""
    places = _places(graph)
    order = {place: at for at, place in enumerate(sorted(set(places.values())))}
    return {node: order[place] for node, place in places.items()} if len(order) > 1 else {}


def _places(graph: torch.fx.Graph) -> dict[torch.fx.Node, _Place]:
    """Of each node its products' stage, and how many operators of PyTorch's are before it. What
    reads no product (it computes again what forward did not store) belongs where it is read first.
    """
    depths, hands = _depths(graph), _hands(graph)
    deepest = max(depths.values(), default=0)
    most = 1 if any(map(_is_large, depths)) else _MOST_PRODUCTS
    count = -(-deepest // most) if deepest > most else 0
    places = {
        n: (max(0, depth - 1) * count // max(deepest, 1), hands[n]) for n, depth in depths.items()
    }
    for node in reversed(graph.nodes):
        if not depths.get(node) and node.op == "call_function":
            readers = [places[user] for user in node.users if user in places]
            first = min(readers, default=places[node])
            places[node] = max(first, _read_again(node, depths, places))
    return places


def _read_again(node: torch.fx.Node, depths: dict, places: dict) -> _Place:
    """Of an operand of weights' gradients alone that is computed again from two tensors or more:
    the stage in which what it is computed from is read anyway, and it costs what it is written for
    (silu(g)·u, beside the gradients of g and u). In 16 bits, where passes over memory count, and
    no product's operands are packed beside it."""
    few_bits = is_half(node.meta.get("val"))
    if not few_bits or not _is_upon_each(node) or any(map(_is_of_a_region, node.users)):
        return _FIRST
    sources = _sources(node, depths)
    if len(sources) < 2 or any(result_bytes(source) < result_bytes(node) for source in sources):
        return _FIRST
    readers = [[places[u] for u in _readers(source, depths)] for source in sources]
    return max(min(found, default=_FIRST) for found in readers)


def _is_of_a_region(node: torch.fx.Node) -> bool:
    """Whether it is none of the products of weights' gradients."""
    return _is_upon_each(node) or schema_name(node.target) in PRODUCTS


def _readers(source: torch.fx.Node, depths: dict) -> list[torch.fx.Node]:
    """What follows from a product and from this, too, element by element."""
    found = reached(source.users, lambda n: () if depths.get(n) else n.users, _is_upon_each)
    return [node for node in found if depths.get(node)]


def compute_again(graph: torch.fx.Graph) -> None:
    """What several regions read of an operator upon each element, each computes for itself where
    that loads less than what one would store for the others: x̂ of a norm, from its input in 16 bits
    and two numbers a row. Regions are of a stage, or before and behind an operator of PyTorch's."""
    places, depths = _places(graph), _depths(graph)
    if len(set(places.values())) < 2:
        return
    loaded: dict[_Place, set[torch.fx.Node]] = {}
    for _ in range(2):  # then what costs nothing beside that
        for node in reversed(list(graph.nodes)):
            if not depths.get(node, 1) and _is_upon_each(node):
                _copy_to_readers(node, _sources(node, depths), places, loaded, depths)


def _copy_to_readers(node, sources: set, places: dict, loaded: dict, depths: dict) -> None:
    """loaded: what a place reads for copies that it has."""
    readers: dict[_Place, list[torch.fx.Node]] = {}
    for user in node.users:
        readers.setdefault(places.get(user, _FIRST), []).append(user)
    for place in sorted(readers)[1:]:
        known = loaded.setdefault(place, set())
        if sum(map(result_bytes, sources - known)) >= result_bytes(node):
            continue
        known |= sources
        with node.graph.inserting_before(min(readers[place])):
            again = node.graph.node_copy(node)
        places[again], depths[again] = place, 0
        for user in readers[place]:
            user.replace_input_with(node, again)


def _hands(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Operators that only PyTorch has on the longest way to a node, itself included."""
    return _counted(graph, _is_pytorchs)


def _is_pytorchs(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    computes = isinstance(node.target, torch._ops.OpOverload) and bool(result_bytes(node))
    computes = computes and bool(node.all_input_nodes) and JOINED not in node.meta
    return computes and name not in TABLE and name not in SHAPE_OPERATORS


def _sources(node: torch.fx.Node, depths: dict[torch.fx.Node, int]) -> set[torch.fx.Node]:
    """What it is computed from by operators upon each element; itself where it is none of them."""

    def is_source(one: torch.fx.Node) -> bool:
        return bool(depths.get(one, 1)) or not _is_upon_each(one)

    def further(one: torch.fx.Node) -> Iterable[torch.fx.Node]:
        return () if is_source(one) else filter(result_bytes, one.all_input_nodes)

    return set(filter(is_source, reached([node], further)))


def _is_upon_each(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    tags = getattr(node.target, "tags", ())
    return name in CASTS or name in SHAPE_OPERATORS or torch.Tag.pointwise in tags


def _is_large(node: torch.fx.Node) -> bool:
    """Those of weights' gradients are no products of a region, and no matter."""
    return schema_name(node.target) in PRODUCTS and result_bytes(node) >= _LARGE


def _depths(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Products on the longest way to a node, itself included."""
    return _counted(graph, lambda node: schema_name(node.target) in PRODUCTS)


def _counted(
    graph: torch.fx.Graph, counts: Callable[[torch.fx.Node], bool]
) -> dict[torch.fx.Node, int]:
    """Those that count on the longest way to a node, itself included."""
    found: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            before = max((found.get(a, 0) for a in node.all_input_nodes), default=0)
            found[node] = before + counts(node)
    return found
