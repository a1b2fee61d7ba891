"""What a region computes, by PyTorch's operators: its derivatives are taken from this form."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ingot.capture.nodes import reached, schema_name
from ingot.capture.products import PASSING_ON, REGROUPED_OR_SUMMED
from ingot.capture.table import CASTS, SHAPE_OPERATORS

_aten = torch.ops.aten
_numbers_as_tensors = torch._C._should_allow_numbers_as_tensors
# What reads no more of its tensor than the shape, with the number that it fills in.
_LIKE = {"aten::zeros_like": 0.0, "aten::ones_like": 1.0, "aten::full_like": None}


@dataclass
class Reference:
    """module: leaves -> results, ATen operators only; no buffer is moved. products: names of its
    nodes (products, operands of such, decisions) whose values the region stores, with their place
    among the region's results; statistics:
    of its batch norms in training, the places of "mean" and "variance", or of "mean", "rstd" and,
    where there is a weight, rstd times that ("scale"); of its group norms, of "mean" and "rstd"."""

    module: torch.fx.GraphModule
    products: dict[str, int]
    statistics: dict[str, dict[str, int]] = field(default_factory=dict)


def reference_of(
    leaves: Sequence[torch.fx.Node],
    results: Sequence[torch.fx.Node],
    stored: dict[torch.fx.Node, int],
    statistics: dict[torch.fx.Node, dict[str, int]],
    literals: dict[torch.fx.Node, bool | int | float],
) -> Reference:
    """leaves, results: nodes of the graph that the region was cut from. stored: nodes of products
    with their place among the region's results; statistics: batch norms with those of what is
    stored of them. literals: nodes that stand for plain numbers. Raises UnknownSizeError."""
    return _Extraction(leaves, literals).run(results, stored, statistics)


def gradients_reach(reference: Reference) -> tuple[frozenset[int], ...]:
    """For each result, the leaves to which its gradient flows: not through what was detached, nor
    through whole numbers."""
    graph = reference.module.graph
    places = {n: at for at, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    (output,) = (node for node in graph.nodes if node.op == "output")
    return tuple(
        frozenset(places[node] for node in _behind(result) if node in places)
        for result in output.args[0]
    )


def computed_for(
    reference: Reference, wanted: Iterable[int]
) -> tuple[frozenset[torch.fx.Node], ...]:
    """For each result, the operators for whose derivatives PyTorch keeps something: between it and
    the leaves that want a gradient, but for sums, views and casts, which any backward may go
    through."""
    graph = reference.module.graph
    leaves = [node for node in graph.nodes if node.op == "placeholder"]
    variables = [leaves[at] for at in wanted]
    needing = set(reached(variables, lambda node: node.users, _passes_on))
    (output,) = (node for node in graph.nodes if node.op == "output")
    return tuple(
        frozenset(n for n in _behind(result) if n in needing and _keeps_something(n))
        for result in output.args[0]
    )


def _keeps_something(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    passes = name in PASSING_ON or name in CASTS or name in SHAPE_OPERATORS
    return node.op == "call_function" and not passes and name not in REGROUPED_OR_SUMMED


def _behind(result: torch.fx.Node) -> Iterator[torch.fx.Node]:
    return reached([result], lambda node: node.all_input_nodes, _passes_on)


def _passes_on(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    plain = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return not plain and node.target is not _aten.detach.default


class UnknownSizeError(Exception):
    """An operator of the region takes a number that is no multiple of its leaves' sizes."""

    def __init__(self, node: torch.fx.Node):
        super().__init__(node.name)
        self.node = node


class _Extraction:
    def __init__(self, leaves: Sequence[torch.fx.Node], literals: dict[torch.fx.Node, Any]):
        self.leaves, self.literals = leaves, literals
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for index, leaf in enumerate(leaves):
            made = self.graph.placeholder(f"leaf_{index}")
            made.meta = dict(leaf.meta)
            self.copies[leaf] = made

    def run(self, results, stored, statistics) -> Reference:
        found = self._between(results)
        needed = [node for node in results[0].graph.nodes if node in found] if results else []
        numbers = [node for node in needed if node.op == "placeholder"]
        for node in reached(numbers, lambda node: node.users, found.__contains__):
            if isinstance(node.meta.get("val"), torch.Tensor):
                raise UnknownSizeError(node)
        for node in needed:
            self.copies[node] = self._copy(node)
        self.graph.output(tuple(self.copies[node] for node in results))
        module = torch.fx.GraphModule(self.root, self.graph)
        products = {self.copies[n].name: at for n, at in stored.items() if n in self.copies}
        norms = {self.copies[n].name: at for n, at in statistics.items() if n in self.copies}
        return Reference(module, products, norms)

    def _between(self, results) -> set[torch.fx.Node]:
        """What is computed from the leaves on the way to the results."""
        return set(reached(results, _read, self._is_computed))

    def _is_computed(self, node: torch.fx.Node) -> bool:
        known = node in self.copies or node in self.literals
        return not known and self._size_of_leaf(node.meta.get("val")) is None

    def _copy(self, node: torch.fx.Node) -> torch.fx.Node:
        if node.op == "get_attr":
            name = f"constant_{len(self.copies)}"
            setattr(self.root, name, attrgetter(node.target)(node.graph.owning_module))
            made = self.graph.get_attr(name)
        elif schema_name(node.target) in _LIKE:
            made = self._filled(node)
        else:

            def operand(of: torch.fx.Node) -> Any:
                is_number = of in self.literals and not _takes_numbers(node.target)
                return self._tensor_of(of) if is_number else self._copied(of)

            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
            target, args = _without_updates(node.target, args)
            made = self.graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        return made

    def _filled(self, node: torch.fx.Node) -> torch.fx.Node:
        """What has the shape of a tensor that need not be here: it may be of another region."""
        number = _LIKE[schema_name(node.target)]
        return self._full(node, self._copied_number(node.args[1]) if number is None else number)

    def _tensor_of(self, literal: torch.fx.Node) -> Any:
        is_tensor = isinstance(literal.meta.get("val"), torch.Tensor)
        number = self.literals[literal]
        return self._full(literal, number) if is_tensor else number

    def _full(self, node: torch.fx.Node, number: Any) -> torch.fx.Node:
        """The number everywhere in a tensor like the node's."""
        value = node.meta["val"]
        sizes = [s if isinstance(s, int) else self._size(s) for s in value.shape]
        kind = {"dtype": value.dtype, "device": value.device}
        made = self.graph.call_function(_aten.full.default, (sizes, number), kind)
        made.meta = dict(node.meta)
        return made

    def _copied_number(self, number: Any) -> Any:
        return self._copied(number) if isinstance(number, torch.fx.Node) else number

    def _copied(self, node: torch.fx.Node) -> Any:
        if node in self.literals:
            return self.literals[node]
        if node not in self.copies:
            if self._size_of_leaf(node.meta.get("val")) is None:
                return None  # a buffer that only an update reads
            self.copies[node] = self._size(node.meta["val"])
        return self.copies[node]

    def _size(self, value: torch.SymInt) -> torch.fx.Node:
        leaf, dimension, factor = self._size_of_leaf(value)
        made = self.graph.call_function(_aten.sym_size.int, (self.copies[leaf], dimension))
        made.meta = {"val": leaf.meta["val"].shape[dimension]}
        for step, number in ((operator.mul, factor.p), (operator.floordiv, factor.q)):
            if number != 1:
                made = self.graph.call_function(step, (made, int(number)))
                made.meta = {"val": value}
        return made

    def _size_of_leaf(self, value: Any) -> tuple[torch.fx.Node, int, Any] | None:
        """The leaf and the dimension of whose size a symbolic number is a rational multiple."""
        if not isinstance(value, torch.SymInt):
            return None
        for leaf in self.leaves:
            shape = getattr(leaf.meta.get("val"), "shape", ())
            for dimension, size in enumerate(shape):
                if isinstance(size, torch.SymInt):
                    factor = value.node.expr / size.node.expr
                    if factor.is_Rational:
                        return leaf, dimension, factor
        return None


def _takes_numbers(target: Any) -> bool:
    """Whether an operator takes a number for a tensor, as a sum does and a choice does not."""
    name = schema_name(target).partition("::")[2]
    return not isinstance(target, torch._ops.OpOverload) or _numbers_as_tensors(name)


def _read(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What an operator's result depends on: not the statistics that a norm in training moves."""
    if node.target is torch.ops.ingot.batch_norm.default and node.args[6]:
        return [a for a in node.args[:3] if isinstance(a, torch.fx.Node)]
    if node.target is _aten.instance_norm.default and node.args[5]:
        return [a for a in node.args[:3] if isinstance(a, torch.fx.Node)]
    if schema_name(node.target) in _LIKE:
        return [a for a in node.args[1:] if isinstance(a, torch.fx.Node)]
    return node.all_input_nodes


def _without_updates(target: Any, args: tuple) -> tuple[Any, tuple]:
    if target is torch.ops.ingot.batch_norm.default:
        x, weight, bias, mean, var, _, training, _, eps = args
        if training:
            mean = var = None
        return _aten.batch_norm.default, (x, weight, bias, mean, var, training, 0.0, eps, True)
    if target is _aten.instance_norm.default and args[5]:
        return target, (*args[:3], None, None, *args[5:])
    return target, args
