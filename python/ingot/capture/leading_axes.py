"""Linears on inputs of more than three axes.

[batch, H, W, C] is [batch, rows, C] to a product and to whatever follows it along C alone. From a
product on, such a graph is rewritten to three axes; a view gives the axes back where something else
reads a tensor. A contiguous input costs nothing to see so.
"""

from __future__ import annotations

import math

import torch

from ingot.capture.nodes import LEFT_ALONE
from ingot.capture.surgery import Writer, example

_aten = torch.ops.aten

# Their only operand with more than one axis is the first.
_PRODUCTS = {_aten.linear.default, _aten.matmul.default}
# Over the last dimension if this argument, by position, says so.
_ALONG = {
    _aten.softmax.int: 1,
    _aten.log_softmax.int: 1,
    _aten._softmax.default: 1,
    _aten._log_softmax.default: 1,
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


def merge_leading_axes(graph: torch.fx.Graph) -> None:
    merging = _Merging(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or LEFT_ALONE in node.meta:
            continue
        if len(_sizes(node)) >= 4:
            merging.visit(node)
    merging.sweep()


def _sizes(node: object) -> tuple:
    value = example(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


class _Merging:
    def __init__(self, graph: torch.fx.Graph):
        self.graph = graph
        # With the first of the dimensions that are one.
        self.merged: dict[tuple[torch.fx.Node, int], torch.fx.Node] = {}
        self.made: list[torch.fx.Node] = []

    def visit(self, node: torch.fx.Node) -> None:
        lead = _sizes(node)[:-1]
        if any(not isinstance(size, int) for size in lead[1:]):
            return
        writer = Writer(self.graph, node)
        if node.target in _PRODUCTS:
            x = node.args[0]
            if len(_sizes(node.args[1])) != 2 or _sizes(x)[:-1] != lead:
                return
            args = [self._merge(writer, x, lead), *node.args[1:]]
        elif any((argument, 1) in self.merged for argument in node.all_input_nodes):
            args = self._arguments(writer, node, lead)
        else:
            return
        if args is None or args[0] is None:
            return
        sizes = _sizes(node)
        rows = math.prod(lead[1:])
        made = writer.call(node.target, (lead[0], rows, sizes[-1]), *args, **node.kwargs)
        whole = writer.call(_aten.unflatten.int, sizes, made, 1, list(lead[1:]))
        whole.meta = dict(node.meta)
        self.made += [made, whole]
        node.replace_all_uses_with(whole)
        self.graph.erase_node(node)
        self.merged[whole, 1] = made

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
        first = args[0]
        if (first, 1) not in self.merged or _sizes(first)[:-1] != lead:
            return None
        if target in _ALONG:
            if args[_ALONG[target]] not in (-1, rank - 1):
                return None
            args[_ALONG[target]] = -1
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
        return [self.merged[first, 1], *args[1:]]

    def _merge(self, writer: Writer, argument, lead: tuple):
        """An operand with its leading axes merged as those of `lead`; None where that cannot be."""
        if not isinstance(argument, torch.fx.Node):
            return argument
        value = example(argument)
        if not isinstance(value, torch.Tensor):
            return None
        sizes = _sizes(argument)
        if len(sizes) <= 1:
            return argument
        # What lies along the middle axes must do so along all of them, or along none.
        middle, inner = lead[1:], sizes[:-1][-(len(lead) - 1) :]
        inner = (1,) * (len(middle) - len(inner)) + tuple(inner)
        if inner != middle and any(size != 1 for size in inner):
            return None
        if len(sizes) == 2:
            return argument if len(middle) != 1 and sizes[0] == 1 else None
        first = 1 if len(sizes) == len(lead) + 1 else 0
        if (argument, first) in self.merged:
            return self.merged[argument, first]
        merged = (*sizes[:first], math.prod(sizes[first:-1]), sizes[-1])
        made = writer.call(_aten.flatten.using_ints, merged, argument, first, len(sizes) - 2)
        made.meta["val"] = value.new_empty(merged)
        self.made.append(made)
        self.merged[argument, first] = made
        return made

    def sweep(self) -> None:
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)
