"""Linears on inputs of more than two axes.

[batch, H, W, C] is [batch, rows, C] to a product and to whatever follows it along C alone. From a
product on, such a graph is rewritten to three axes; a view gives the axes back where something else
reads a tensor. A contiguous input costs nothing to see so.

Where two axes in front have sizes that change from call to call, [batch, length, C], they are one:
a region knows of one such size, which then is batch · length.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Container, Sequence

import torch

from ingot.capture.feed import Feed
from ingot.capture.layout import hint, is_symbolic, written
from ingot.capture.nodes import LEFT_ALONE, names_four_dimensions
from ingot.capture.surgery import Writer, example, sizes_of

_aten = torch.ops.aten

# Their only operand with more than one axis is the first.
_PRODUCTS = {_aten.linear.default, _aten.matmul.default}
# Over the last dimension if their second argument says so.
_ALONG = {
    _aten.softmax.int,
    _aten.log_softmax.int,
    _aten._safe_softmax.default,
    _aten._softmax.default,
    _aten._log_softmax.default,
}
_NORMS = {_aten.layer_norm.default, _aten.rms_norm.default}
_REDUCTIONS = {
    _aten.mean.dim,
    _aten.sum.dim_IntList,
    _aten.amax.default,
    _aten.amin.default,
    _aten.logsumexp.default,
}
_SAME = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.contiguous.default,
    _aten.dropout.default,
    _aten.to.dtype,
    _aten._to_copy.default,
}


# Parts along the dimension that their third argument says.
_SPLITS = {_aten.chunk.default, _aten.split.Tensor, _aten.split_with_sizes.default}


def merge_leading_axes(graph: torch.fx.Graph) -> None:
    merging = _Merging(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or LEFT_ALONE in node.meta:
            continue
        if len(sizes_of(node)) >= 4:
            merging.visit(node)
    merging.sweep()


def merge_lengths(feed: Feed, refused: Container[str]) -> None:
    """Makes the product of all axes in front the batch of a graph with several symbolic sizes: of
    those axes that most of its work is on. refused: names of nodes that stay as they are."""
    lead = _busiest_lead(feed.graph)
    if lead is None or not any(map(is_symbolic, lead[1:])):
        return
    merging = _MergingLengths(feed.graph, lead)
    for node in list(feed.graph.nodes):
        if node.op == "call_function" and LEFT_ALONE not in node.meta and node.name not in refused:
            merging.visit(node)
    merging.sweep()
    rows = math.prod(lead)
    feed.batch, feed.static_batch = rows.node.expr, None
    feed.example_batch = hint(rows)


def _busiest_lead(graph: torch.fx.Graph) -> tuple | None:
    work: Counter = Counter()
    leads: dict[tuple, tuple] = {}
    for node in graph.nodes:
        sizes = sizes_of(node)
        if node.op == "call_function" and len(sizes) > 1 and _is_dense_product(node):
            key = _written(sizes[:-1])
            leads[key] = sizes[:-1]
            work[key] += math.prod(map(hint, sizes)) * hint(sizes_of(node.args[0])[-1])
    return leads[max(work, key=lambda key: work[key])] if work else None


def _is_dense_product(node: torch.fx.Node) -> bool:
    return node.target in _PRODUCTS and len(sizes_of(node.args[1])) == 2


def _written(sizes: Sequence) -> tuple:
    return tuple(map(written, sizes))


class _Merging:
    """first: of the dimensions that become one, up to the last but one."""

    first, along = 1, _ALONG

    def __init__(self, graph: torch.fx.Graph):
        self.graph = graph
        # With the first of the dimensions that are one.
        self.merged: dict[tuple[torch.fx.Node, int], torch.fx.Node] = {}
        self.made: list[torch.fx.Node] = []

    def visit(self, node: torch.fx.Node) -> None:
        lead = sizes_of(node)[:-1]
        if not self._fits(node, lead) or names_four_dimensions(node):
            return
        writer = Writer(self.graph, node)
        if node.target in _PRODUCTS:
            x = node.args[0]
            if not _is_dense_product(node) or _written(sizes_of(x)[:-1]) != _written(lead):
                return
            args = [self._merge(writer, x, lead), *node.args[1:]]
        elif self._follows(node):
            args = self._arguments(writer, node, lead)
        else:
            return
        if args is None or args[0] is None:
            return
        sizes = sizes_of(node)
        rows = (*lead[: self.first], math.prod(lead[self.first :]))
        made = writer.call(node.target, (*rows, sizes[-1]), *args, **node.kwargs)
        self._replace(node, writer, made)

    def _replace(self, node: torch.fx.Node, writer: Writer, made: torch.fx.Node) -> None:
        sizes = sizes_of(node)
        back = self._inner(writer, sizes[:-1])
        whole = writer.call(_aten.unflatten.int, sizes, made, self.first, back)
        whole.meta = dict(node.meta)
        self.made += [made, whole]
        node.replace_all_uses_with(whole)
        self.graph.erase_node(node)
        self.merged[whole, self.first] = made

    def _fits(self, node: torch.fx.Node, lead: tuple) -> bool:
        """What lies otherwise (a sum of what is turned) would lie as its merged operands do."""
        merges = all(isinstance(size, int) for size in lead[1:])
        return merges and _is_dense(node.meta["val"])

    def _follows(self, node: torch.fx.Node) -> bool:
        merged = ((argument, self.first) in self.merged for argument in node.all_input_nodes)
        return self._begins(node) or any(merged)

    def _begins(self, node: torch.fx.Node) -> bool:
        return False

    def _inner(self, writer: Writer, lead: tuple) -> list:
        """Sizes of the dimensions that become one, as an operator's argument."""
        return list(lead[self.first :])

    def _arguments(self, writer: Writer, node: torch.fx.Node, lead: tuple) -> list | None:
        """The operator's, with three axes; None where it is not one along the last dimension."""
        target, args = node.target, list(node.args)
        if node.kwargs and any(isinstance(v, torch.fx.Node) for v in node.kwargs.values()):
            return None
        rank = len(lead) + 1
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
            chosen = [self._merge(writer, argument, lead) for argument in args]
            unfit = (
                isinstance(old, torch.fx.Node) and new is None for old, new in zip(args, chosen)
            )
            return None if any(unfit) else chosen
        if _written(sizes_of(args[0])[:-1]) != _written(lead):
            return None
        if self._begins(node):
            first = self._merge(writer, args[0], lead)
        else:
            first = self.merged.get((args[0], self.first))
        if first is None:
            return None
        if target in self.along:
            if len(args) < 2 or args[1] not in (-1, rank - 1):
                return None
            args[1] = -1
        elif target in _REDUCTIONS:
            # With the dimension kept: without it, the result has fewer axes.
            if len(args) < 3 or args[1] not in ([-1], [rank - 1]) or not args[2]:
                return None
            args[1] = [-1]
        elif target in _NORMS:
            if len(args[1]) != 1:
                return None
        elif target not in _SAME:
            return None
        return [first, *args[1:]]

    def _merge(self, writer: Writer, argument, lead: tuple):
        """An operand with its leading axes merged as those of `lead`; None where that cannot be."""
        if not isinstance(argument, torch.fx.Node):
            return argument
        value = example(argument)
        if not isinstance(value, torch.Tensor):
            return None
        sizes = sizes_of(argument)
        if len(sizes) <= 1:
            return argument
        # What lies along the middle axes must do so along all of them, or along none.
        middle, inner = lead[1:], sizes[:-1][-(len(lead) - 1) :]
        inner = (1,) * (len(middle) - len(inner)) + tuple(inner)
        if inner != middle and any(size != 1 for size in inner):
            return None
        if len(sizes) == 2:
            return argument if len(middle) != 1 and sizes[0] == 1 else None
        return self._flat(writer, argument, 1 if len(sizes) == len(lead) + 1 else 0)

    def _flat(self, writer: Writer, argument: torch.fx.Node, first: int) -> torch.fx.Node:
        if (argument, first) not in self.merged:
            sizes = sizes_of(argument)
            merged = (*sizes[:first], math.prod(sizes[first:-1]), sizes[-1])
            made = writer.call(_aten.flatten.using_ints, merged, argument, first, len(sizes) - 2)
            made.meta["val"] = example(argument).new_empty(merged)
            self.made.append(made)
            self.merged[argument, first] = made
        return self.merged[argument, first]

    def sweep(self) -> None:
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)


class _MergingLengths(_Merging):
    """All dimensions in front, for tensors with these."""

    first, along = 0, {*_ALONG, _aten.slice.Tensor}

    def __init__(self, graph: torch.fx.Graph, lead: tuple):
        super().__init__(graph)
        self.lead = _written(lead)
        self._told: list | None = None
        self._gone: set[torch.fx.Node] = set()

    def visit(self, node: torch.fx.Node) -> None:
        if node.target in _SPLITS:
            self._split(node)
        elif node not in self._gone:
            super().visit(node)

    def _split(self, node: torch.fx.Node) -> None:
        x, count, dim = (*node.args, 0)[:3]
        flat = self.merged.get((x, self.first))
        if flat is None or dim not in (-1, len(self.lead)) or node.kwargs:
            return
        parts = Writer(self.graph, node).call(node.target, sizes_of(flat), flat, count, -1)
        rows = sizes_of(flat)[0]
        parts.meta["val"] = [v.new_empty((rows, v.shape[-1])) for v in node.meta["val"]]
        for user in list(node.users):  # all of them take a part
            writer = Writer(self.graph, user)
            sizes = sizes_of(user)
            made = writer.call(operator.getitem, (rows, sizes[-1]), parts, user.args[1])
            self._replace(user, writer, made)
            self._gone.add(user)
        self.graph.erase_node(node)

    def _fits(self, node: torch.fx.Node, lead: tuple) -> bool:
        return _written(lead) == self.lead and _is_dense(node.meta["val"])

    def _begins(self, node: torch.fx.Node) -> bool:
        return node.target in _NORMS or node.target in _ALONG

    def _merge(self, writer: Writer, argument, lead: tuple):
        sizes = sizes_of(argument)
        if len(sizes) <= 1 or (len(sizes) == 2 and sizes[0] == 1):
            return argument
        if (argument, self.first) not in self.merged:
            dense = _is_dense(example(argument)) or writer.node.target in _PRODUCTS
            rest = _written(sizes[:-1])
            if not dense or (rest != self.lead and any(size != 1 for size in rest)):
                return None
        return self._flat(writer, argument, self.first)

    def _inner(self, writer: Writer, lead: tuple) -> list:
        if self._told is None:
            self._told = [self._size(size) if is_symbolic(size) else int(size) for size in lead]
        return list(self._told)

    def _size(self, size: torch.SymInt) -> torch.fx.Node:
        """A node that gives it, from the first tensor that has it on."""
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
                return node
            for dimension, other in enumerate(_written(sizes_of(node))):
                if other == size.node.expr:
                    return self._measured(node, dimension, size)
        raise AssertionError("no tensor has the size")

    def _measured(self, node: torch.fx.Node, dimension: int, size: torch.SymInt) -> torch.fx.Node:
        behind = node.next
        while behind.op == "placeholder":
            behind = behind.next
        with self.graph.inserting_before(behind):
            made = self.graph.call_function(_aten.sym_size.int, (node, dimension))
        made.meta["val"] = size
        return made


def _is_dense(value: torch.Tensor) -> bool:
    """In the order of its dimensions, by the sizes that the graph was traced with."""
    reached = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if hint(size) != 1:
            if hint(stride) != reached:
                return False
            reached *= hint(size)
    return True
