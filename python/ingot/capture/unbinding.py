"""Parts of a tensor, one of each index, taken by one operator: for the gradients' sake.

`q, k, v = qkv` is a select of each index to TorchDynamo. The derivative of a select is a tensor of
zeros with one part written, so three of them write the whole three times and add it up twice;
unbind's writes each part once. Of a permuted tensor the parts are taken before it is permuted: what
its derivative writes lies then as the tensor did, and is not copied again.
"""

from __future__ import annotations

import operator
from collections.abc import Container

import torch

from ingot.capture.nodes import hands_out_memory, schema_name
from ingot.capture.surgery import example
from ingot.capture.table import SHAPE_OPERATORS

_aten = torch.ops.aten
_Parts = list[tuple[int, torch.fx.Node]]  # index, what takes it


def unbind_parts(graph: torch.fx.Graph, needing: Container[torch.fx.Node]) -> None:
    """needing: nodes whose tensors need gradients."""
    for node in list(graph.nodes):
        if node not in needing:
            continue
        if node.target is _aten.unbind.int:
            _take_before_permuting(graph, node)
        for dim in {_dim(user) for user in node.users if user.target is _aten.select.int}:
            selects = [u for u in node.users if u.target is _aten.select.int and _dim(u) == dim]
            size = example(node).shape[dim]
            parts = [(_index(select, size), select) for select in selects]
            if {index for index, _ in parts} == {*range(size if isinstance(size, int) else 0)}:
                _unbind(graph, node, dim, parts)


def _dim(node: torch.fx.Node) -> int:
    """The dimension that is taken away."""
    dim = node.args[1] if len(node.args) > 1 else 0
    return dim % example(node.args[0]).dim()


def _index(select: torch.fx.Node, size) -> int:
    index = select.args[2]
    known = isinstance(index, int) and isinstance(size, int) and size > 0
    return index % size if known else -1


def _take_before_permuting(graph: torch.fx.Graph, unbind: torch.fx.Node) -> None:
    taken = all(user.target is operator.getitem for user in unbind.users)
    if unbind.args[0].target in _ORDERS and taken:
        _unbind(graph, unbind.args[0], _dim(unbind), [(u.args[1], u) for u in unbind.users])


def _unbind(graph: torch.fx.Graph, whole: torch.fx.Node, dim: int, parts: _Parts) -> None:
    """Nothing may write into the parts, or into what they are of: autograd forbids it of views that
    come several at once."""
    if len(parts) < 2 or any(map(hands_out_memory, (_root(whole), *(p for _, p in parts)))):
        return
    order = list(range(example(whole).dim()))
    if whole.target in _ORDERS:
        order = _ORDERS[whole.target](whole, len(order))
        whole = whole.args[0]
    dim = order.pop(dim)
    order = [at - (at > dim) for at in order]
    first = min((part for _, part in parts))
    with graph.inserting_before(first):
        made = graph.call_function(_aten.unbind.int, (whole, dim))
        made.meta = {**first.meta, "val": tuple(example(whole).unbind(dim))}
        for index, part in parts:
            taken = graph.call_function(operator.getitem, (made, index))
            taken.meta = {**part.meta, "val": made.meta["val"][index]}
            if order != sorted(order):
                taken = graph.call_function(_aten.permute.default, (taken, order))
                taken.meta = dict(part.meta)
            part.replace_all_uses_with(taken)
    for _, part in parts:
        source = part.args[0]
        graph.erase_node(part)
        while source is not made and source is not whole and not source.users:
            source, unused = source.args[0], source
            graph.erase_node(unused)


def _root(view: torch.fx.Node) -> torch.fx.Node:
    """What it may be a view of; also behind copies, which PyTorch makes only where needed."""
    while schema_name(view.target) in SHAPE_OPERATORS and view.all_input_nodes:
        view = view.all_input_nodes[0]
    return view


def _transposed(node: torch.fx.Node, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = node.args[1:3]
    order[first], order[second] = order[second], order[first]
    return order


# What leaves a tensor's elements and their sizes: dimensions of its operand, by its own.
_ORDERS = {
    _aten.permute.default: lambda node, rank: [dim % rank for dim in node.args[1]],
    _aten.transpose.int: _transposed,
}
