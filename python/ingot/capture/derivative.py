"""The derivative of a region, as a graph of ATen operators.

AOTAutograd's way, for one region: PyTorch's autograd runs on tensors without data while its
operators are recorded. What the forward pass stored (results and operands of products, decisions)
stands in for what was computed, so that no product is computed again and no branch chosen anew;
nothing that backward does not read is left.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_autocast_cache, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from ingot.capture.backward_operators import (
    BY_RESULT,
    BatchNormByStatistics,
    ExtremumByPlace,
    GroupNormByStatistics,
    RowNormByStatistics,
)
from ingot.capture.captured import Region
from ingot.capture.feed import MEASURING
from ingot.capture.joining import join_gradients, lay_out_as, lay_out_gradient
from ingot.capture.layout import has_channels_innermost
from ingot.capture.nodes import (
    is_extremum_with_place,
    is_group_norm,
    is_row_norm,
    mutates,
    named_arguments,
)
from ingot.capture.placed import place_by_number
from ingot.capture.recorded import measure_gradients, outputs_of, same_size, simplify
from ingot.capture.reference import Reference
from ingot.runtime.layouts import JoinedLayout, ResultLayout, concrete
from ingot.runtime.signature import BATCH

_aten = torch.ops.aten
_autograd = torch._C._autograd
# Those of saved tensors; where PyTorch does not say, there may be some.
_hooks_of_others = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda tracing: ())
# Zeros like a gradient are one: of round(), say, which eager hands on.
_SIZES_ALONE = MEASURING - {_aten.zeros_like.default}
# What leaves a tensor's elements in their order.
_REGROUPING = {_aten.unflatten.int, _aten.flatten.using_ints, _aten.view.default}


@dataclass
class Derivative:
    """graph: leaves, what was stored, gradients of the differentiable results -> gradients of the
    leaves in `wanted`, in this order; a gradient that is zero everywhere is None.

    differentiable: which results depend on a leaf in `wanted`; stored: places of products, their
    operands, statistics and results of ReLUs among the region's results; reads: which of the
    inputs it uses, batched: which of them have the batch in front; batch: the only batch size that
    it is for, or None; symbol: what the batch size is in the sizes of the graph's values, or None
    where these are numbers; sums: the graph with parts' gradients added up, where it puts them
    together.
    """

    graph: torch.fx.GraphModule
    wanted: tuple[int, ...]
    differentiable: tuple[bool, ...]
    stored: tuple[int, ...]
    reads: tuple[bool, ...]
    batched: tuple[bool, ...]
    batch: int | None
    symbol: Any
    sums: torch.fx.GraphModule | None = None


class Substitute(torch.autograd.Function):
    """What was stored, with the derivative of what computes it."""

    @staticmethod
    def forward(ctx, computed, stored):
        # What has no gradient keeps none: zeros would be one, and NaN behind an infinite slope.
        ctx.set_materialize_grads(False)
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def derivative_of(
    region: Region,
    leaves: Sequence[torch.Tensor],
    needed: Sequence[bool],
    batch: int | None,
    decompositions: dict[Any, Callable] | None = None,
) -> Derivative:
    """leaves: tensors of a call, of which sizes, strides, dtypes and devices are read. needed: of
    which of them a gradient is. batch: the size of the batch that is to stay symbolic, or None for
    a graph of these sizes alone. decompositions: of operators into others."""
    wanted = tuple(i for i, need in enumerate(needed) if need)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    dimensions = [_batch_dimension(region, at) for at in range(len(leaves))]
    samples = _size_of_batch(region, leaves, dimensions) if batch is None else batch
    size = samples if batch is None else _symbolic(mode, batch)
    fakes = [_fake(mode, leaf, *lies, size) for leaf, lies in zip(leaves, dimensions)]
    # Autocast keeps casts of weights, for all threads: one that leaves it would throw a recording's
    # away, and wait for Python to do so, with the lock in hand for which the recording waits.
    with unwatched(), disable_autocast_cache(), mode, enable_python_dispatcher():
        traced = _Trace(region, fakes, size, wanted, by_statistics=bool(decompositions))
        graph = make_fx(traced.gradients, decompositions)(*traced.inputs())
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    gradients = placeholders[len(placeholders) - sum(traced.differentiable) :]
    measure_gradients(graph.graph, gradients)
    simplify(graph.graph)
    if decompositions:
        place_by_number(graph.graph)
    sums = None
    if any(node.target is _aten.slice_backward.default for node in graph.graph.nodes):
        sums = copied(graph)
    join_gradients(graph.graph)
    for index, gradient in zip(wanted, outputs_of(graph.graph)):
        if gradient is not None:
            lay_out_as(gradient, placeholders[index].meta["val"])
    layouts = [la for la, has in zip(region.result_layouts, traced.differentiable) if has]
    for gradient, layout in zip(gradients, layouts):
        if isinstance(layout, JoinedLayout):
            lay_out_gradient(gradient, layout.order)
    bound = batch is None or bool(shapes.replacements) or bool(shapes.guards)
    stored = (*traced.places, *traced.statistics, *traced.kept)
    results = list(stored)
    results += [i for i, has in enumerate(traced.differentiable) if has]
    return Derivative(
        graph,
        wanted,
        traced.differentiable,
        stored,
        tuple(bool(n.users) for n in placeholders),
        (
            *(dimension == 0 for dimension, _ in dimensions),
            *(region.result_layouts[place].shape[:1] == (BATCH,) for place in results),
        ),
        samples if bound else None,
        size.node.expr if isinstance(size, torch.SymInt) else None,
        sums,
    )


def copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """For what rewrites its graph."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def of_some(derivative: Derivative, given: Sequence[bool]) -> Derivative:
    """The same where only some of the differentiable results have a gradient, as `given` says:
    zeros for the others would be NaN where their derivative is infinite. Those that are read all
    the same (for their sizes, or beside the gradients that are given) are to be zeros."""
    if any(mutates(node) for node in derivative.graph.graph.nodes):
        return derivative
    graph = torch.fx.Graph()
    outputs = graph.graph_copy((derivative.sums or derivative.graph).graph, {})
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    gradients = placeholders[len(placeholders) - len(given) :]
    reached = {gradient for gradient, has in zip(gradients, given) if has}
    zeros = set(gradients) - reached
    for node in list(graph.nodes):
        if node.target in _SIZES_ALONE or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if reached.intersection(node.all_input_nodes):
            term = _only_term(node, zeros)
            if term is None:
                reached.add(node)
            else:
                node.replace_all_uses_with(term)
                outputs = [term if output is node else output for output in outputs]
                graph.erase_node(node)
        elif zeros.intersection(node.all_input_nodes):
            zeros.add(node)
    graph.output([None if output in zeros else output for output in outputs])
    graph.eliminate_dead_code()
    reads = tuple(bool(node.users) for node in placeholders)
    return replace(derivative, graph=torch.fx.GraphModule(derivative.graph, graph), reads=reads)


def _only_term(node: torch.fx.Node, zeros: set[torch.fx.Node]) -> torch.fx.Node | None:
    """Of a sum of gradients, the one that is not zero."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    terms = [term for term in node.all_input_nodes if term not in zeros]
    if len(terms) != 1:
        return None
    value, made = terms[0].meta["val"], node.meta["val"]
    same = value.dtype == made.dtype and value.dim() == made.dim()
    return terms[0] if same and all(map(same_size, value.shape, made.shape)) else None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While operators are recorded: what they save for a backward that never comes is nobody's
    business, not even checkpointing's, which counts. Nor is there a number in which to look for
    anomalies."""
    hooks = contextlib.nullcontext()
    if _hooks_of_others(True) is not None:
        hooks = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    before = _autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        # In this thread: one of the engine's may be waiting for what this one holds.
        with torch.autograd.set_multithreading_enabled(False):
            with torch.autograd.set_detect_anomaly(False), hooks, _by_its_own_engine():
                yield
    finally:
        # torch.func's transforms forbid hooks while they run, and may fail before they allow them.
        if before is None and _autograd._saved_tensors_hooks_get_disabled_error_message():
            _autograd._saved_tensors_hooks_enable()


def _by_its_own_engine() -> contextlib.AbstractContextManager:
    """PyTorch's compiler of backward passes, where it is on, would take the recording for one."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if not getattr(compiler, "compiled_autograd_enabled", False):
        return contextlib.nullcontext()
    return getattr(compiler, "_disable", contextlib.nullcontext)()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Trace:
    def __init__(
        self, region: Region, leaves: list, batch: Any, wanted: tuple[int, ...], by_statistics: bool
    ):
        reference = region.reference
        self.leaves, self.wanted = leaves, wanted
        self.places = sorted(set(reference.products.values()))
        norms = reference.statistics if by_statistics else {}
        self.statistics = [place for places in norms.values() for place in places.values()]
        layouts = (region.result_layouts[place] for place in self.statistics)
        self.examples = [
            leaves[0].new_empty(concrete(la.shape, batch), dtype=la.dtype) for la in layouts
        ]
        relus = relus_by_result(reference) if by_statistics else {}
        self.kept = list(relus.values())
        self.module = with_stored(reference, self.places, norms, relus)
        with torch.enable_grad():
            results, products = self._run(leaves, self._nothing())
        self.differentiable = tuple(r.requires_grad for r in results)
        self.results, self.products = results, products
        # As the region hands them out, which need not be as PyTorch's operators would.
        self.laid_out = [
            _laid_out(result, layout) for result, layout in zip(results, region.result_layouts)
        ]

    def _nothing(self) -> list[None]:
        return [None] * (len(self.places) + len(self.statistics) + len(self.kept))

    def inputs(self) -> list[torch.Tensor]:
        gradients = [r for r, has in zip(self.laid_out, self.differentiable) if has]
        kept = [self.results[place] for place in self.kept]
        products, kept, gradients = (
            [torch.empty_like(t.detach()) for t in given]
            for given in (map(self._as_stored, self.places, self.products), kept, gradients)
        )
        leaves = [leaf.detach() for leaf in self.leaves]
        return [*leaves, *products, *self.examples, *kept, *gradients]

    def _as_stored(self, place: int, product: torch.Tensor) -> torch.Tensor:
        """Under the dimensions of the result that it is stored as: h.view(...) for an h."""
        if place >= len(self.results):
            return product
        result = self.laid_out[place]
        same = result.dim() == product.dim() and all(map(same_size, result.shape, product.shape))
        return product if same else result

    def _run(self, leaves, stored):
        leaves = [
            leaf.detach().requires_grad_(index in self.wanted) for index, leaf in enumerate(leaves)
        ]
        self.variables = [leaves[i] for i in self.wanted]
        results = self.module(*leaves, *stored)
        count = len(self.places)
        return results[: len(results) - count], results[len(results) - count :]

    def gradients(self, *inputs: torch.Tensor) -> list:
        count = len(self.leaves)
        behind = count + len(self._nothing())
        leaves, stored, given = inputs[:count], inputs[count:behind], inputs[behind:]
        with torch.enable_grad():
            results, _ = self._run(leaves, stored)
            results = [r for r, has in zip(results, self.differentiable) if has]
        return list(torch.autograd.grad(results, self.variables, given, allow_unused=True))


def _laid_out(result: torch.Tensor, layout: ResultLayout | JoinedLayout) -> torch.Tensor:
    if isinstance(layout, JoinedLayout) or not has_channels_innermost(layout.axes):
        return result
    return result.detach().movedim(1, -1).contiguous().movedim(-1, 1)


def relus_by_result(reference: Reference) -> dict[str, int]:
    """Those whose results tell what they let through, with their places among the results: what a
    norm alone is computed from is read anyway, but what was added to it need not be kept."""
    if reference.products:
        return {}
    found: dict[str, int] = {}
    for place, node in enumerate(outputs_of(reference.module.graph)):
        while node.target in _REGROUPING:
            node = node.args[0]
        computed = node.args[0] if node.target is _aten.relu.default else None
        if computed is not None and computed.target is not _aten.batch_norm.default:
            found[node.name] = place
    return found


def with_stored(
    reference: Reference,
    places: list[int],
    norms: dict[str, dict[str, int]],
    relus: dict[str, int],
) -> torch.fx.GraphModule:
    """The reference with stored products, statistics and results of ReLUs as further inputs, and
    the products as further outputs. Given None, it computes."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(reference.module.graph, copies)
    by_place = {place: name for name, place in reference.products.items()}
    originals = {node.name: node for node in reference.module.graph.nodes}
    last = [copies[n] for n in originals.values() if n.op == "placeholder"][-1]

    def placeholder(place: int) -> torch.fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.placeholder(f"stored_{place}")
        return last

    made = []
    for place in places:
        node, given = copies[originals[by_place[place]]], placeholder(place)
        with graph.inserting_after(node):
            known = (node.target, node, *node.args) if node.target in BY_RESULT else (None, node)
            used = graph.call_function(_stored, (given, *known))
        node.replace_all_uses_with(used, delete_user_cb=lambda user, keep=used: user is not keep)
        output = torch.fx.node.map_arg(output, lambda n, a=node, b=used: b if n is a else n)
        made.append(used)
    for name, places in norms.items():
        node = copies[originals[name]]
        given = {kind: placeholder(at) for kind, at in places.items()}
        if is_group_norm(node):
            node.args, node.target = (given, node.meta["val"].dtype, *node.args), group_norm
        elif is_extremum_with_place(node):
            node.args, node.target = (given, node.target, *node.args), extremum
        elif is_row_norm(node):
            plain, arguments = node.target, named_arguments(node)
            node.target = row_norm
            node.args = (given, node.meta["val"].dtype, plain, arguments)
            node.kwargs = {}
        else:
            node.args, node.target = (given, *node.args), batch_norm
    for name, place in relus.items():
        node = copies[originals[name]]
        node.args = (*node.args, placeholder(place))
        node.target = _relu
    for node in graph.nodes:
        # A norm by its statistics lies as its operand, where PyTorch's is dense.
        if node.target is _aten.view.default:
            node.target = _aten.reshape.default
    graph.output((*output, *made))
    return torch.fx.GraphModule(reference.module, graph)


def batch_norm(stored: dict[str, torch.Tensor | None], *args: Any):
    if stored["mean"] is None:
        return _aten.batch_norm.default(*args)
    x, weight, bias, *_, eps, _ = args
    rstd = stored["rstd"] if "rstd" in stored else torch.rsqrt(stored["variance"] + eps)
    statistics = (stored["mean"], rstd, stored.get("scale"))
    return BatchNormByStatistics.apply(x, weight, bias, *statistics)


def group_norm(stored: dict[str, torch.Tensor | None], dtype: torch.dtype, x, *args: Any):
    """dtype: of the result. Autocast, which may make it a wider one than x's, does not know of an
    autograd.Function."""
    if stored["rstd"] is None:
        return _aten.group_norm.default(x, *args)
    _, weight, bias = (*args[:3], None, None)[:3]
    return GroupNormByStatistics.apply(x.to(dtype), weight, bias, stored["mean"], stored["rstd"])


def row_norm(
    stored: dict[str, torch.Tensor | None], dtype: torch.dtype, plain: Any, arguments: dict
):
    """plain: PyTorch's operator. dtype: as above."""
    if stored["rstd"] is None:
        return plain(**arguments)
    x, shape = arguments["input"].to(dtype), arguments["normalized_shape"]
    statistics = stored.get("mean"), stored["rstd"]
    return RowNormByStatistics.apply(
        x, shape, arguments["weight"], arguments.get("bias"), *statistics
    )


def extremum(stored: dict[str, torch.Tensor | None], plain: Any, x, dim, keepdim=False):
    """plain: as above."""
    place = stored["place"]
    if place is None:
        return plain(x, dim, keepdim)
    return ExtremumByPlace.apply(plain, x, dim, keepdim, place)


def _relu(x: torch.Tensor, result: torch.Tensor | None) -> torch.Tensor:
    if result is None:
        return _aten.relu.default(x)
    return BY_RESULT[_aten.relu.default](result.reshape(x.shape), x)


def _stored(stored: torch.Tensor | None, operator: Any, computed: torch.Tensor, *args: Any) -> Any:
    """operator, args: what computes it."""
    if stored is None:
        return computed
    stored = stored.reshape(computed.shape)  # a region may hand it out under other dimensions
    if operator in BY_RESULT:
        return BY_RESULT[operator](stored, *args)
    # Flags have no derivative.
    return Substitute.apply(computed, stored) if stored.is_floating_point() else stored


def _batch_dimension(region: Region, leaf: int) -> tuple[int | None, int]:
    """The dimension of a leaf's tensor that the batch lies along, and how many of its elements
    each sample has."""
    values = [v for v in region.graph["values"] if v["op"] in ("input", "parameter", "buffer")]
    layout = region.leaf_layouts[leaf]
    axis, split = layout.axes[0], layout.splits[0]
    if values[leaf]["shape"][0] != "B" or not isinstance(axis, int):
        return None, 1
    return axis, split[1] if split else 1


def _size_of_batch(
    region: Region,
    leaves: Sequence[torch.Tensor],
    dimensions: Sequence[tuple[int | None, int]],
) -> int:
    for leaf, layout, (dimension, _) in zip(leaves, region.leaf_layouts, dimensions):
        if dimension is not None:
            return layout.sizes_and_strides(leaf)[0][0]
    return 1


def _fake(
    mode: FakeTensorMode, tensor: torch.Tensor, dimension: int | None, each: int, batch: Any
) -> torch.Tensor:
    """Without data, laid out as the tensor is, for so many samples, of `each` elements along the
    dimension."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if dimension is not None:
        stride = strides[dimension]
        before, sizes[dimension] = sizes[dimension] * stride, each * batch
        # What lies around the samples is as far apart as all of them take.
        for other, apart in enumerate(strides):
            if other != dimension and before and apart >= before and apart % before == 0:
                strides[other] = apart // before * (each * batch * stride)
    with mode:
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def _symbolic(mode: FakeTensorMode, batch: int) -> torch.SymInt:
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    return mode.from_tensor(torch.empty(batch, device="meta"), symbolic_context=context).shape[0]
