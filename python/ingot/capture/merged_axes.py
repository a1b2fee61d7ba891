"""Dimensions that no operator tells apart, merged before they are counted.

[N, C, D, H, W] behind a convolution has five dimensions, but an activation does not tell any of
them apart, a norm over channels tells C from the rest, and nothing tells D, H and W from each
other: such a chain is one of [N, C, space], and fits on four axes. For each pair of neighbouring
dimensions of each tensor it is asked whether some operator reads them as two; pairs that an
operator hands on from one tensor to another share the answer. What remains is merged by a view at
every place where the chain begins, and given back by one where it ends.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch

from ingot.capture import pointwise
from ingot.capture.gains import pays_alone
from ingot.capture.layout import CHANNELS_LAST, has_channels_last
from ingot.capture.nodes import (
    LEFT_ALONE,
    dims_from_front,
    is_group_norm,
    moves_statistics,
    names_four_dimensions,
    only,
    schema_name,
)
from ingot.capture.normalisations import norms_tokens
from ingot.capture.surgery import Writer, example, sizes_of
from ingot.capture.table import SHAPE_OPERATORS, TABLE

_aten = torch.ops.aten

_ALONG = {
    f"aten::{name}"
    for name in ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
}
_REDUCTIONS = {
    f"aten::{name}" for name in ("mean", "sum", "amax", "amin", "logsumexp", "var", "std")
}
_WITH_PLACES = {_aten.max.dim, _aten.min.dim}
# Channels on the second dimension, the rest is space.
_OF_CHANNELS = {
    "ingot::batch_norm",
    "aten::batch_norm",
    "aten::group_norm",
    "aten::instance_norm",
    "aten::prelu",
}
_SAME = {
    f"aten::{name}"
    for name in ("clone", "detach", "alias", "contiguous", "dropout", "to", "_to_copy")
}
_LEAST_RANK = 4
# A gap: between a tensor's dimensions i and i + 1.
Gap = tuple[torch.fx.Node, int]


def merge_axes(
    graph: torch.fx.Graph, device_type: str, only: Set | None = None, theirs: Set = frozenset()
) -> None:
    """only: the nodes of chains that are to be rewritten, or None for all of them; theirs: nodes
    that PyTorch will run, whatever Ingot has of their names."""
    if not norms_tokens(device_type):
        theirs = theirs | {node for node in graph.nodes if _is_norm_of_tokens(node)}
    chains = [node for node in graph.nodes if _kind(node) and _in_company(node)]
    chains = [node for node in chains if (only is None or node in only) and node not in theirs]
    if any(len(sizes_of(node)) >= _LEAST_RANK for node in _tensors_of(chains)):
        _Merging(graph, _Gaps(graph, set(chains), theirs)).run(chains)


def may_be_taken(node: torch.fx.Node) -> bool:
    """Whether a node is an operator of a chain."""
    return bool(_kind(node)) and schema_name(node.target) not in _SAME


def _in_company(node: torch.fx.Node) -> bool:
    """Most operators that would be a region by themselves are PyTorch's, with the dimensions that
    tell it how a tensor lies."""
    if pays_alone(node):
        return True
    around = {*node.all_input_nodes, *node.users}
    for other in list(around):
        if other.target is operator.getitem:
            around.update((*other.all_input_nodes, *other.users))
    return any(may_be_taken(other) for other in around - {node})


def _kind(node: torch.fx.Node) -> str:
    """How an operator treats its dimensions; "" where it is none of a chain's."""
    if node.op != "call_function" or LEFT_ALONE in node.meta or _is_pytorchs(node):
        return ""
    name = schema_name(node.target)
    if name in _OF_CHANNELS:
        return "channels"
    if name in _ALONG:
        return "along" if sizes_of(node.args[0]) else ""
    if node.target in _WITH_PLACES or (name in _REDUCTIONS and _has_dimensions(node)):
        return "reduction" if sizes_of(node.args[0]) else ""
    if name in _SAME:
        return "" if names_four_dimensions(node) else "pointwise"
    return "pointwise" if TABLE[name].__module__ == pointwise.__name__ else ""


def _is_pytorchs(node: torch.fx.Node) -> bool:
    """Whatever Ingot has of its name: a norm of planes whose channels lie innermost."""
    name = schema_name(node.target)
    if node.target is operator.getitem or name not in TABLE:
        return True
    return name == "aten::instance_norm" and has_channels_last(node.args[0])


def _is_norm_of_tokens(node: torch.fx.Node) -> bool:
    return is_group_norm(node) and has_channels_last(node.args[0])


def _has_dimensions(node: torch.fx.Node) -> bool:
    names = [argument.name for argument in node.target._schema.arguments]
    return names[1:2] == ["dim"] and len(node.args) > 1 and node.args[1] not in (None, [])


def _tensors_of(nodes: Sequence[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    for node in nodes:
        yield node
        yield from node.all_input_nodes


def _results(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node itself, or what is taken of its tuple."""
    if isinstance(example(node), torch.Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def _reduced(node: torch.fx.Node) -> tuple[set[int], bool]:
    """The dimensions that disappear, and whether they are kept with an extent of 1."""
    names = [argument.name for argument in node.target._schema.arguments]
    at = names.index("keepdim")
    kept = node.args[at] if len(node.args) > at else node.kwargs.get("keepdim", False)
    return set(dims_from_front(node.args[1], example(node.args[0]))), bool(kept)


def _neighbours(sizes: Sequence) -> Iterator[tuple[int, int]]:
    """Dimensions that follow one another where those of extent 1 are left out: what tells such two
    apart is seen by no pair in which one is 1."""
    real = [at for at, size in enumerate(sizes) if not (isinstance(size, int) and size == 1)]
    return zip(real, real[1:])


class _Gaps:
    """Which gaps may be closed."""

    def __init__(self, graph: torch.fx.Graph, chains: Set[torch.fx.Node], theirs: Set):
        self._parent: dict[Gap, Gap] = {}
        self._open: set[Gap] = set()  # representatives of gaps that some operator needs
        for node in graph.nodes:
            if node in chains:
                self._read(node, _kind(node))
                for source in node.all_input_nodes:
                    if source not in chains and source.target is not operator.getitem:
                        self._read_strides(source)
            elif node.op == "call_function" and node not in theirs and not _is_pytorchs(node):
                # Ingot's as it is, axis by axis.
                for each in (node, *node.all_input_nodes):
                    self._need_all(each, schema_name(node.target) in SHAPE_OPERATORS)

    def closed(self, node: torch.fx.Node, at: int) -> bool:
        return self._find((node, at)) not in self._open

    def _find(self, gap: Gap) -> Gap:
        while (parent := self._parent.get(gap, gap)) != gap:
            gap = parent
        return gap

    def _unite(self, a: Gap, b: Gap) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parent[a] = b
            if a in self._open:
                self._open.add(b)

    def _need(self, node: torch.fx.Node, at: int) -> None:
        if 0 <= at < len(sizes_of(node)) - 1:
            self._open.add(self._find((node, at)))

    def _need_all(self, node: torch.fx.Node, relabelled: bool) -> None:
        """relabelled: by a view, which is PyTorch's where there are more dimensions than axes, and
        to which those of extent 1 are nothing."""
        sizes = sizes_of(node)
        for at in range(len(sizes) - 1):
            if not relabelled:
                self._need(node, at)
        for outer, _ in _neighbours(sizes) if len(sizes) <= _LEAST_RANK else ():
            self._need(node, outer)

    def _read_strides(self, node: torch.fx.Node) -> None:
        """Dimensions of a tensor from outside that no view can merge."""
        value = example(node)
        if not isinstance(value, torch.Tensor):
            return
        sizes, strides = value.shape, value.stride()
        for at in range(len(sizes) - 1):
            inner = (sizes[at + 1], strides[at + 1], strides[at], sizes[at])
            if not all(isinstance(number, int) for number in inner):
                self._need(node, at)
        for outer, inner in _neighbours(sizes):
            read = (strides[outer], strides[inner], sizes[inner])
            if all(isinstance(n, int) for n in read) and read[0] != read[1] * read[2]:
                self._need(node, outer)

    def _read(self, node: torch.fx.Node, kind: str) -> None:
        results = _results(node)
        for result in results:
            rank = len(sizes_of(result))
            for at in range(rank - 1):
                if any(not isinstance(size, int) for size in sizes_of(result)[at : at + 2]):
                    self._need(result, at)
            if rank >= _LEAST_RANK:
                self._need(result, 0)  # the batch stays by itself
        first = node.args[0]
        if kind == "pointwise":
            for source in node.all_input_nodes:
                self._hand_on(source, node)
            return
        if len(sizes_of(first)) >= _LEAST_RANK:
            self._need(first, 0)
        if kind == "reduction":
            for result in results:
                self._reduce(first, result, *_reduced(node))
            return
        self._hand_on(first, node)
        if kind == "channels":
            self._need(first, 1)
        elif kind == "along":
            dim = node.args[1] % len(sizes_of(first))
            self._need(first, dim - 1)
            self._need(first, dim)

    def _hand_on(self, source: torch.fx.Node, result: torch.fx.Node) -> None:
        """An operand that is broadcast to the result."""
        own, sizes = sizes_of(source), sizes_of(result)
        lead = len(sizes) - len(own)
        for at in range(lead, len(sizes) - 1):
            self._unite((source, at - lead), (result, at))
        for outer, inner in _neighbours(sizes):
            read = [own[at - lead] if at >= lead else 1 for at in (outer, inner)]
            whole = [sizes[outer], sizes[inner]]
            if all(isinstance(n, int) for n in whole) and read not in (whole, [1, 1]):
                self._need(result, outer)
                self._need(source, outer - lead)

    def _reduce(self, source: torch.fx.Node, result: torch.fx.Node, dims: set, kept: bool) -> None:
        place, places = 0, []  # of each dimension of the source in the result
        for dim in range(len(sizes_of(source))):
            there = kept or dim not in dims
            places.append(place if there else None)
            place += there
        for at in range(len(places) - 1):
            if (at in dims) != (at + 1 in dims):
                self._need(source, at)
                if places[at] is not None:
                    self._need(result, places[at])
            elif places[at] is not None:
                self._unite((source, at), (result, places[at]))
        if not kept:
            for dim in dims:  # its neighbours were none before
                before = [place for place in places[:dim] if place is not None]
                if before:
                    self._need(result, before[-1])


class _Merging:
    def __init__(self, graph: torch.fx.Graph, gaps: _Gaps):
        self.graph, self.gaps = graph, gaps
        self.merged: dict[torch.fx.Node, torch.fx.Node] = {}
        self.made: list[torch.fx.Node] = []

    def run(self, chains: list[torch.fx.Node]) -> None:
        for node in chains:
            tensors = [n for n in (*node.all_input_nodes, *_results(node)) if sizes_of(n)]
            if any(len(sizes_of(n)) >= _LEAST_RANK and self._closes(n) for n in tensors):
                self._rewrite(node)
        for node in reversed(self.made):
            if not node.users and not moves_statistics(node):
                self.graph.erase_node(node)

    def _closes(self, node: torch.fx.Node) -> bool:
        return len(self._parts(node)) < len(sizes_of(node))

    def _parts(self, node: torch.fx.Node) -> list[tuple[int, int]]:
        """The first and last dimension of each that remains."""
        parts: list[tuple[int, int]] = []
        for dim in range(len(sizes_of(node))):
            if parts and self.gaps.closed(node, dim - 1):
                parts[-1] = (parts[-1][0], dim)
            else:
                parts.append((dim, dim))
        return parts

    def _rewrite(self, node: torch.fx.Node) -> None:
        writer = Writer(self.graph, node)
        args = [self._flat(writer, argument) for argument in node.args]
        kwargs = {name: self._flat(writer, value) for name, value in node.kwargs.items()}
        if _kind(node) in ("reduction", "along"):
            parts = self._parts(node.args[0])
            dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            dims = [self._part_of(parts, only(dim)) for dim in dims]
            args[1] = sorted(set(dims)) if isinstance(args[1], (list, tuple)) else dims[0]
        with self.graph.inserting_before(node):
            made = self.graph.call_function(node.target, tuple(args), kwargs)
        made.meta = dict(node.meta)
        self.made.append(made)
        if isinstance(example(node), torch.Tensor):
            if has_channels_last(node):
                made.meta[CHANNELS_LAST] = True
            made.meta["val"] = self._flat_example(node)
            self._give_back(writer, node, made)
            return
        made.meta["val"] = tuple(
            value if not isinstance(value, torch.Tensor) else value.new_empty(())
            for value in example(node)
        )
        for user in _results(node):
            behind = Writer(self.graph, user)
            with self.graph.inserting_before(user):
                part = self.graph.call_function(operator.getitem, (made, user.args[1]))
            part.meta = {**user.meta, "val": self._flat_example(user)}
            self.made.append(part)
            self._give_back(behind, user, part)
        self.graph.erase_node(node)

    @staticmethod
    def _part_of(parts: list[tuple[int, int]], dim: int) -> int:
        dim %= parts[-1][1] + 1
        return next(at for at, (first, last) in enumerate(parts) if first <= dim <= last)

    def _give_back(self, writer: Writer, node: torch.fx.Node, made: torch.fx.Node) -> None:
        """Views with the dimensions of `node`, in its place."""
        whole, sizes, at = made, [], 0
        merged = list(made.meta["val"].shape)
        for first, last in self._parts(node):
            inner = list(sizes_of(node)[first : last + 1])
            if last > first:
                sizes = [*merged[:at], *inner, *merged[at + 1 :]]
                whole = writer.call(_aten.unflatten.int, sizes, whole, at, inner)
                whole.meta["val"] = _laid_out(example(node), sizes, None)
                self.made.append(whole)
                merged = sizes
            at += len(inner)
        if whole is not made:
            whole.meta = dict(node.meta)
        self.merged[whole] = made
        node.replace_all_uses_with(whole)
        self._forget(node, whole)
        self.graph.erase_node(node)

    def _forget(self, node: torch.fx.Node, whole: torch.fx.Node) -> None:
        """What was known of a node is known of what stands in its place."""
        for at in range(len(sizes_of(node)) - 1):
            self.gaps._parent[whole, at] = (node, at)

    def _flat(self, writer: Writer, argument: Any) -> Any:
        """An operand with its dimensions merged."""
        if isinstance(argument, (list, tuple)):
            return [self._flat(writer, item) for item in argument]
        if not isinstance(argument, torch.fx.Node) or not sizes_of(argument):
            return argument
        if argument in self.merged:
            return self.merged[argument]
        made = argument
        for first, last in reversed(self._parts(argument)):
            if last > first:
                sizes = list(example(made).shape)
                sizes[first : last + 1] = [math.prod(sizes[first : last + 1])]
                value = _laid_out(example(made), sizes, (first, last))
                made = writer.call(_aten.flatten.using_ints, sizes, made, first, last)
                made.meta["val"] = value
                self.made.append(made)
        made.meta.pop(CHANNELS_LAST, None)
        if made is not argument and has_channels_last(argument):
            made.meta[CHANNELS_LAST] = True
        self.merged[argument] = made
        return made

    def _flat_example(self, node: torch.fx.Node) -> torch.Tensor:
        value = example(node)
        for first, last in reversed(self._parts(node)):
            if last > first:
                sizes = list(value.shape)
                sizes[first : last + 1] = [math.prod(sizes[first : last + 1])]
                value = _laid_out(value, sizes, (first, last))
        return value


def _laid_out(value: torch.Tensor, sizes: list, merged: tuple[int, int] | None) -> torch.Tensor:
    """A tensor without data of these sizes; where dimensions of `value` were merged, in the order
    in which `value` lies."""
    if merged is None:
        return value.new_empty(sizes)
    first, last = merged
    strides = list(value.stride())
    real = [at for at in range(first, last + 1) if value.shape[at] != 1]
    strides[first : last + 1] = [strides[real[-1] if real else last]]
    return value.new_empty_strided(sizes, strides)
