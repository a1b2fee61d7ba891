"""What is computed part by part and then put together, computed where it belongs.

Rotary embeddings (Su et al., RoFormer, 2021, eq. 34) turn each pair of a head's features by an
angle: `x * cos + cat((-x2, x1)) * sin`, with the halves x1 and x2 of x. A concatenation is a pass
over memory, and ends a region. So what follows it is computed for each part by itself, from the
same part of every operand, and the parts are put together at the end:

    cat((a, b)) ∘ y  =  cat((a ∘ y1, b ∘ y2))      for ∘ that acts on each element

A region reads parts where they lie (PART), and writes its results where they belong in one tensor
(JOINED). The derivative of a slice is a tensor of zeros with the slice's gradient in it; the sum of
those of all of a tensor's parts is their concatenation.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Sequence

import torch

from ingot.capture.nodes import (
    JOINED,
    OF_CONCATENATION,
    PART,
    is_pure,
    moves_statistics,
    mutates,
)
from ingot.capture.surgery import example

_aten = torch.ops.aten
_POINTWISE = {
    _aten.mul.Tensor,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.div.Tensor,
    _aten.neg.default,
    _aten._to_copy.default,
    _aten.to.dtype,
}
_SPLITS = {
    _aten.chunk.default,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
}
# Of a tensor: each is a result of a region's graph.
_MOST_PARTS = 4


def join_parts(graph: torch.fx.Graph, refused: Container[str]) -> None:
    """refused: names of nodes that PyTorch must run."""
    if any(mutates(node) for node in graph.nodes):
        return  # a part is read later than it was taken
    for node in list(graph.nodes):
        if node.target is _aten.cat.default and node.args and not node.kwargs:
            _Parts(graph, node).push(refused)
    graph.eliminate_dead_code(lambda node: moves_statistics(node) or not is_pure(node))


def join_gradients(graph: torch.fx.Graph) -> None:
    """Of a derivative: sums of all of a tensor's parts' gradients, and the parts of others."""
    for node in list(graph.nodes):
        if node.target is _aten.add.Tensor and not _is_term(node):
            _join_terms(graph, node)
    graph.eliminate_dead_code()
    if any(JOINED in node.meta for node in graph.nodes):
        for node in graph.nodes:
            found = _slice(node)
            if found is not None:
                _mark(node, *found[1:])


def lay_out_as(node: torch.fx.Node, leaf: torch.Tensor) -> None:
    """What is joined, in the memory order of a tensor of the same shape."""
    value = node.meta.get("val")
    if JOINED in node.meta and value.dim() == leaf.dim():
        node.meta["val"] = value.new_empty_strided(value.shape, leaf.stride())


def lay_out_gradient(gradient: torch.fx.Node, order: Sequence[int]) -> None:
    """Of what a region joined: PyTorch's operators lay it out as they found that."""
    value = gradient.meta["val"]
    strides, step = [1] * value.dim(), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step = step * value.shape[dimension]
    gradient.meta["val"] = value.new_empty_strided(value.shape, strides)


def concatenated(order: Sequence[int], parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """As PyTorch runs what is joined, laid out as what stood in its place. order: of dimensions in
    memory, outermost first."""
    turned = torch.cat([part.permute(order) for part in parts], order.index(dim)).contiguous()
    return turned.permute([order.index(at) for at in range(len(order))])


class _Parts:
    """A concatenation whose parts are of one size, and what follows from it alone."""

    def __init__(self, graph: torch.fx.Graph, cat: torch.fx.Node):
        self.graph, self.cat = graph, cat
        whole, parts = example(cat), [example(part) for part in cat.args[0]]
        self.rank, self.count = whole.dim(), len(parts)
        self.dim = (cat.args[1] if len(cat.args) > 1 else 0) % self.rank
        alike = all(part.dim() == self.rank and part.dtype == whole.dtype for part in parts)
        alike = alike and _plain(*(part.shape[self.dim] for part in parts))
        sizes = {part.shape[self.dim] for part in parts} if alike else set()
        self.size = sizes.pop() if len(sizes) == 1 and 1 < self.count <= _MOST_PARTS else 0
        self.behind = list(self._followers()) if self.size else []
        self.slices: dict[tuple[torch.fx.Node, int, int, int], torch.fx.Node] = {}
        self.made: dict[tuple[torch.fx.Node, int], torch.fx.Node] = {}

    def _followers(self) -> Iterator[torch.fx.Node]:
        """What is computed of the concatenation, element by element, and of nothing else read."""
        node = self.cat
        while len(node.users) == 1:
            (user,) = node.users
            same = user.target in _POINTWISE and example(user).shape == example(node).shape
            if not same:
                return
            yield user
            node = user

    def push(self, refused: Container[str]) -> None:
        nodes = [self.cat, *self.behind]
        if not self.behind or any(node.name in refused for node in nodes):
            return
        if not any(self._is_of_a_slice(part) for part in self.cat.args[0]):
            return
        last = self.behind[-1]
        with self.graph.inserting_before(last):
            parts = [self._of(last, at) for at in range(self.count)]
            joined = self.graph.call_function(_aten.cat.default, (parts, self.dim))
        joined.meta = {**last.meta, JOINED: True}
        last.replace_all_uses_with(joined)
        for node in reversed(nodes):
            self.graph.erase_node(node)

    def _is_of_a_slice(self, node: torch.fx.Node) -> bool:
        while node.target in _POINTWISE and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return _slice(node) is not None

    def _of(self, node: torch.fx.Node, at: int) -> torch.fx.Node:
        """A part of what a node gives."""
        found = self.made.get((node, at))
        if found is None:
            found = self.made[node, at] = self._computed(node, at)
        return found

    def _computed(self, node: torch.fx.Node, at: int) -> torch.fx.Node:
        if node is self.cat:
            return self._again(node.args[0][at])
        if not isinstance(example(node), torch.Tensor):
            return node
        dim = self.dim - (self.rank - example(node).dim())
        if dim < 0 or example(node).shape[dim] == 1:
            return node  # the same for all parts
        if node in self.behind or (node.target in _POINTWISE and len(node.users) == 1):
            made = self._copy(node, lambda operand: self._of(operand, at))
            if self.cat in node.all_input_nodes:
                made.meta[OF_CONCATENATION] = self._of(self.cat, at)
            return made
        return self._part(node, dim, at * self.size, (at + 1) * self.size)

    def _again(self, node: torch.fx.Node) -> torch.fx.Node:
        """What the concatenation's part is computed from, with slices that regions read."""
        found = _slice(node)
        if found is not None:
            return self._part(*found)
        one = node.target in _POINTWISE and len(node.users) == len(node.all_input_nodes) == 1
        return self._copy(node, self._again) if one else node

    def _copy(self, node: torch.fx.Node, operand) -> torch.fx.Node:
        args = torch.fx.node.map_arg(node.args, operand)
        made = self.graph.call_function(node.target, args, dict(node.kwargs))
        sizes = list(example(node).shape)
        dim = self.dim - (self.rank - len(sizes))
        sizes[dim] = self.size
        made.meta = {**node.meta, "val": example(node).new_empty(sizes)}
        return made

    def _part(self, whole: torch.fx.Node, dim: int, start: int, end: int) -> torch.fx.Node:
        key = (whole, dim, start, end)
        if key not in self.slices:
            made = self.graph.call_function(_aten.slice.Tensor, (whole,))
            made.meta = {key: value for key, value in whole.meta.items() if key != JOINED}
            _mark(made, dim, start, end)
            self.slices[key] = made
        return self.slices[key]


def _mark(node: torch.fx.Node, dim: int, start: int, end: int) -> None:
    whole = node.args[0]
    value = example(whole)
    sizes = list(value.shape)
    sizes[dim] = end - start
    node.args, node.kwargs = (whole, dim, start, end, 1), {}
    # As it lies in the whole: what took it for dense would have it copied.
    part = value.new_empty_strided(sizes, value.stride())
    node.meta = {**node.meta, PART: True, "val": part}


def _slice(node: torch.fx.Node) -> tuple[torch.fx.Node, int, int, int] | None:
    """What a node is a part of, along which dimension, from where, to where."""
    if node.target is operator.getitem and node.args[0].target in _SPLITS:
        split, index = node.args
        whole, arguments = split.args[0], split.args[1:]
        dim = arguments[1] if len(arguments) > 1 else split.kwargs.get("dim", 0)
        dim %= example(whole).dim()
        sizes = [part.shape[dim] for part in example(split)]
        index %= len(sizes)
        start, end = sum(sizes[:index]), sum(sizes[: index + 1])
    elif node.target is _aten.slice.Tensor and not node.kwargs:
        whole, *arguments = node.args
        dim, start, end, step = (*arguments, *(0, None, None, 1)[len(arguments) :])
        size = example(whole).shape[dim]
        if step != 1 or not isinstance(size, int):
            return None
        dim %= example(whole).dim()
        bounds = slice(start, end).indices(size) if _plain(start, end) else (None, None)
        start, end = bounds[:2]
    else:
        return None
    return (whole, dim, start, end) if _plain(start, end) and start is not None else None


def _plain(*numbers) -> bool:
    return all(number is None or isinstance(number, int) for number in numbers)


def _is_term(node: torch.fx.Node) -> bool:
    """Whether a sum is a term of another one alone."""
    return len(node.users) == 1 and next(iter(node.users)).target is _aten.add.Tensor


def _terms(node: torch.fx.Node) -> list[torch.fx.Node]:
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return [node]
    return [
        term
        for operand in node.args
        for term in ([operand] if len(operand.users) > 1 else _terms(operand))
    ]


def _join_terms(graph: torch.fx.Graph, total: torch.fx.Node) -> None:
    """A sum of gradients of slices that are all of a tensor, each element once."""
    terms = _terms(total)
    if not 1 < len(terms) <= _MOST_PARTS:
        return
    found = {}
    for term in terms:
        if term.target is not _aten.slice_backward.default:
            return
        part, _, dim, start, end, step = term.args
        size = example(term).shape[dim]
        if step != 1 or not _plain(start, end) or not isinstance(size, int):
            return
        start, end, _ = slice(start, end).indices(size)
        if start in found:
            return
        found[start] = (end, dim % example(term).dim(), part)
    ordered = sorted(found.items())
    ends = [end for _, (end, _, _) in ordered]
    dims = {dim for _, (_, dim, _) in ordered}
    if [0, *ends[:-1]] != [start for start, _ in ordered] or len(dims) > 1 or ends[-1] != size:
        return
    with graph.inserting_before(total):
        parts = [part for _, (_, _, part) in ordered]
        joined = graph.call_function(_aten.cat.default, (parts, dims.pop()))
    joined.meta = {**total.meta, JOINED: True}
    total.replace_all_uses_with(joined)
    graph.erase_node(total)
