"""How a region's derivative runs: in regions of its own where the importer takes all of it, by
PyTorch's operators elsewhere; its products by Ingot either way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from ingot.capture.backward_operators import BACKWARD_OPERATORS
from ingot.capture.captured import Captured, CaptureError, Region, Source, TorchStep
from ingot.capture.derivative import Derivative, copied, derivative_of, of_some
from ingot.capture.feed import Feed, Placeholder
from ingot.capture.importer import import_graph
from ingot.capture.layout import hand_on_channels_last
from ingot.capture.nodes import mutates, schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.reference import computed_for, gradients_reach
from ingot.capture.table import SHAPE_OPERATORS
from ingot.live.again import Again
from ingot.live.operands import apart
from ingot.live.padded import PADDED, pad_gradients
from ingot.live.products import (
    compile_product,
    product,
    transposed_product,
    with_own_products,
)
from ingot.live.widened import transposed_product_in_fp32, widen_gradients
from ingot.log import logger
from ingot.runtime.layouts import LeafLayout
from ingot.runtime.library import IngotError
from ingot.runtime.program import Program

compile_lock = torch._dynamo.convert_frame.compile_lock
_aten = torch.ops.aten
# Operators that may stay PyTorch's in a backward pass whose rest runs by regions.
_MOST_LEFT = 4
_COMPUTES_NOTHING = {*SHAPE_OPERATORS, "aten::_to_copy"}


class Backward:
    """Takes a derivative's inputs, in a list that it empties, and gives the gradients.

    programs: those of its regions; none where PyTorch's operators run. products: compile those that
    contract the batch, of the size that it was made for. inputs: how many there are
    before the gradients; kept: which of them it reads; again: the region's results by PyTorch's
    operators, for a second derivative; differentiable: places of the results that have a gradient.
    """

    def __init__(
        self,
        region: Region,
        leaves: Sequence[torch.Tensor],
        needed: Sequence[bool],
        batch: int | None,
        precision: str,
        compile: Callable[[Captured], Any],
    ):
        self._how = (region, leaves[0].device.type, precision, compile)
        self._for_some: dict[tuple, tuple[Callable, tuple[bool, ...]]] = {}
        self._read_by: dict[tuple[bool, ...], tuple[bool, ...]] = {}
        call = (region, leaves, needed, batch)
        made = _by_regions(lambda: derivative_of(*call, BACKWARD_OPERATORS), *self._how)
        self.derivative, compiled = made or _by_operators(derivative_of(*call), *self._how)
        self.programs: list[Program] = compiled.programs
        graph, device_type = self.derivative.graph.graph, leaves[0].device.type
        self.products = _compilations(graph, precision, device_type)
        self.run: Callable = compiled.run
        reads = self.derivative.reads
        has_gradient = self.derivative.differentiable
        self.all_differentiable = all(has_gradient)
        self.differentiable = [at for at, has in enumerate(has_gradient) if has]
        self.inputs = len(reads) - len(self.differentiable)
        self.kept = tuple(at for at in range(self.inputs) if reads[at])
        self.again = Again(region.reference, self.derivative, len(leaves))

    @cached_property
    def computed(self) -> tuple[frozenset, ...]:
        """For each result, the operators of which a backward pass frees something."""
        region, *_ = self._how
        return computed_for(region.reference, self.derivative.wanted)[: len(region.results)]

    @cached_property
    def halves(self) -> list[tuple[int, ...]]:
        """Places of the results, those together whose gradients have an operator or a leaf in
        common; those that have none are with the first."""
        region, *_ = self._how
        reach, wanted = gradients_reach(region.reference), set(self.derivative.wanted)
        alike: list[tuple[set, set]] = []
        for at, nodes in enumerate(self.computed):
            if not self.derivative.differentiable[at]:
                continue
            places, common = {at}, {*nodes, *(reach[at] & wanted)}
            for other in [each for each in alike if not common.isdisjoint(each[1])]:
                alike.remove(other)
                places, common = places | other[0], common | other[1]
            alike.append((places, common))
        halves = sorted(tuple(sorted(places)) for places, _ in alike)
        rest = set(range(len(self.computed))).difference(*halves)
        return [tuple(sorted({*halves[0], *rest})), *halves[1:]] if halves else [()]

    @cached_property
    def partly(self) -> tuple[int, ...]:
        """Leaves that not all results of a half have a gradient for."""
        region, *_ = self._how
        reach, found = gradients_reach(region.reference), set()
        for half in self.halves:
            leaves = [reach[at] for at in half if self.derivative.differentiable[at]]
            if len(leaves) > 1:
                found |= set().union(*leaves).difference(set(leaves[0]).intersection(*leaves[1:]))
        return tuple(sorted(found))

    def read_by(self, results: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which of the inputs it reads for the gradients of these results."""
        found = self._read_by.get(results)
        if found is None:
            given = tuple(results[at] for at in self.differentiable)
            with compile_lock:
                found = self._read_by[results] = of_some(self.derivative, given).reads
        return found

    def of_some(
        self, given: tuple[bool, ...], transformed: bool
    ) -> tuple[Callable, tuple[bool, ...]]:
        """What runs where only some of the differentiable results have a gradient, and which of
        these gradients it reads: the others are to be zeros there. transformed: by torch.vmap,
        whose tensors have no memory."""
        found = self._for_some.get((given, transformed))
        if found is None:
            with compile_lock:
                found = self._for_some[given, transformed] = self._made_for(given, transformed)
        return found

    def _made_for(self, given: tuple[bool, ...], transformed: bool) -> tuple:
        derivative = self.derivative if all(given) else of_some(self.derivative, given)
        if transformed:
            compiled = _InOrder(copied(derivative.graph))
        else:
            made = _by_regions(lambda: derivative, *self._how)
            _, compiled = made or _by_operators(derivative, *self._how)
        return compiled.run, derivative.reads[self.inputs :]


def _by_regions(derivative_of, region, device_type, precision, compile) -> tuple | None:
    """None where the importer does not take all that is worth taking."""
    try:
        derivative = derivative_of()
        captured = captured_derivative(derivative, region, device_type, precision)
        return derivative, compile(with_own_products(captured, precision))
    except (CaptureError, IngotError) as error:
        logger.debug("the backward pass of %s is PyTorch's: %s", region.graph["name"], error)
    except Exception as error:  # a fault of ours must not stop a program that PyTorch can run
        logger.error("backward of %s failed: %r", region.graph["name"], error, exc_info=True)
    return None


def captured_derivative(
    derivative: Derivative,
    region: Region,
    device_type: str,
    precision: str,
    refused: dict[str, str] | None = None,
) -> Captured:
    """Its regions, and between them the products over the batch. refused: as import_graph has it.
    Raises CaptureError where the importer does not take all that is worth taking."""
    module = copied(derivative.graph)
    if any(mutates(node) for node in module.graph.nodes):
        raise CaptureError("it writes into tensors")
    _with_own_products(module.graph, precision, (transposed_product,))
    if not _multiplies(region) and any(map(_has_channels_last, region.leaf_layouts)):
        hand_on_channels_last(module.graph)
    feed = _feed_of(module, derivative, region, device_type, staged=True)
    captured = import_graph(feed, refused=refused)
    _check_gain(captured)
    return apart(captured, device_type)


def _multiplies(region: Region) -> bool:
    return any(schema_name(n.target) in PRODUCTS for n in region.reference.module.graph.nodes)


def _has_channels_last(layout: LeafLayout) -> bool:
    """Of a leaf [N, C, space]."""
    batch, space, _, channels = layout.axes
    return batch is not None and space is not None and channels == 1


def _by_operators(derivative, region, device_type, precision, compile) -> tuple:
    module = copied(derivative.graph)
    _with_own_products(module.graph, precision, (transposed_product, product))
    if any(mutates(node) for node in module.graph.nodes):
        return derivative, _InOrder(module)
    all_of_them = {node.name: "" for node in module.graph.nodes}
    feed = _feed_of(module, derivative, region, device_type)
    return derivative, compile(import_graph(feed, refused=all_of_them))


def _with_own_products(graph: torch.fx.Graph, precision: str, allowed: Sequence) -> None:
    pad_gradients(graph)
    widen_gradients(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (_aten.mm.default, _aten.bmm.default):
            continue
        a, b = node.args
        if _is_over_rows(node) and transposed_product in allowed:
            node.target, node.args = transposed_product, (precision, a.args[0], b)
        elif product in allowed:
            node.target, node.args = product, (precision, a, b)
    graph.eliminate_dead_code()


def _is_over_rows(node: torch.fx.Node) -> bool:
    """Whether it is aᵀ·b."""
    return node.target is _aten.mm.default and node.args[0].target is _aten.t.default


def _compilations(
    graph: torch.fx.Graph, precision: str, device_type: str
) -> list[Callable[[], None]]:
    """Of the products over the batch, those of equal shapes once."""
    found = {}
    for node in graph.nodes if device_type == "cuda" else ():
        if not _is_over_rows(node):
            continue
        a, b = like(node.args[0].args[0]), like(node.args[1])
        if a is not None and b is not None:
            key = tuple((t.shape, t.stride(), t.dtype) for t in (a, b))
            found[key] = partial(compile_product, precision, a.t(), b, device_type)
    return list(found.values())


def like(node: torch.fx.Node) -> torch.Tensor | None:
    """A tensor without memory that is laid out as the node's was when the graph was traced."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    numbers = [n if isinstance(n, int) else n.node.hint for n in (*value.shape, *value.stride())]
    if None in numbers:
        return None
    sizes, strides = numbers[: value.dim()], numbers[value.dim() :]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


class _InOrder:
    """Operators that write into tensors, or that torch.vmap transforms: PyTorch's, in the
    order of the graph, and nothing else."""

    def __init__(self, graph: torch.fx.GraphModule):
        self.programs: list[Program] = []
        for node in graph.graph.nodes:
            if node.target is _aten.sym_size.int:  # torch.vmap has no rule for it
                node.target = torch.Tensor.size
        graph.recompile()
        self.run = lambda inputs: graph(*inputs)


def _check_gain(captured: Captured) -> None:
    """A few operators may stay PyTorch's, as they are in its own backward pass; more of them are
    what was taken apart in vain."""
    left = [s.what for s in captured.steps if isinstance(s, TorchStep) and not _is_free(s)]
    taken = sum(len(region.operators) for region in captured.regions)
    if len(left) > _MOST_LEFT or len(left) >= taken:
        raise CaptureError(f"too much of it stays: {', '.join(sorted(set(left)))}")


def _is_free(step: TorchStep) -> bool:
    """A product, which is the same either way, or what computes nothing: the cast of a weight's
    gradient under autocast is PyTorch's in its own backward pass, too."""
    own = (product, transposed_product, transposed_product_in_fp32, *PADDED)
    if step.target in own or isinstance(step.target, type(operator.mul)):
        return True
    name = schema_name(step.target)
    return name in PRODUCTS or name in _COMPUTES_NOTHING or name.startswith("aten::sym_")


def _feed_of(
    module: torch.fx.GraphModule,
    derivative: Derivative,
    region: Region,
    device_type: str,
    staged: bool = False,
) -> Feed:
    leaves = [
        value for value in region.graph["values"] if value["op"] in ("input", "parameter", "buffer")
    ]
    placeholders = {}
    nodes = (n for n in module.graph.nodes if n.op == "placeholder")
    for index, (node, batched) in enumerate(zip(nodes, derivative.batched)):
        leaf = leaves[index] if index < len(leaves) else {"op": "input", "name": node.name}
        placeholders[node] = Placeholder(
            Source("input", leaf["name"], index),
            (leaf["op"], leaf["name"]),
            batched,
            positions=leaf.get("attributes") == {"positions": True},
        )
    return Feed(
        module.graph,
        module,
        placeholders,
        device_type,
        derivative.symbol,
        derivative.batch if derivative.symbol is None else None,
        staged=staged,
    )
