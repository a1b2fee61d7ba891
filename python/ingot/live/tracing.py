"""From TorchDynamo's graph to the ATen graph that the importer reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ingot.capture import CaptureError, attention, encoder_layer, recurrent
from ingot.capture.captured import Source
from ingot.capture.causal import take_causal_masks
from ingot.capture.feed import Feed, Placeholder, device_type_of
from ingot.capture.layout import hint, is_symbolic
from ingot.capture.masks import leave_full_masks_away
from ingot.capture.nodes import (
    PARAMETER,
    is_pure,
    moves_statistics,
    mutates,
)
from ingot.live import aliases, functional, overlaps, switches, vmapped
from ingot.live.pieces import has_pieces_inside

_batch_norm = torch.nn.functional.batch_norm


class Lengths(Enum):
    """What becomes of sizes beside the batch's that Dynamo has seen to change: BOUND to what they
    are, by guards of Dynamo's; KEPT symbolic; or, of a graph that only a trial looks at, TRIED as
    numbers that nothing guards."""

    BOUND, KEPT, TRIED = range(3)


def feed_of(
    gm: torch.fx.GraphModule,
    examples: Sequence[Any],
    batch_at: tuple[int, int] | None = None,
    device_type: str | None = None,
    lengths: Lengths = Lengths.BOUND,
) -> Feed:
    """examples: what Dynamo hands to a backend: tensors without data, and symbolic numbers.
    batch_at: the input, and its dimension, that is to be the batch (`other_batches`). device_type:
    where the tensors are taken to be, in place of where they are. Raises CaptureError where PyTorch
    must run the graph whole."""
    inputs, values, found = _inputs_of(gm, examples)
    if any(isinstance(value, torch.Tensor) and value.is_neg() for value in values):
        raise CaptureError("an input is a negated view: its memory holds other numbers")
    others = {type(value).__name__ for value in values if is_traceable_wrapper_subclass(value)}
    if others:
        raise CaptureError(f"operators of {', '.join(sorted(others))} tensors are their own")
    if has_pieces_inside(gm):
        raise CaptureError("a branch, a loop or vmap holds an operator with a backward of its own")
    vmapped.refuse_other_transforms(gm.graph)
    copy = _with_own_batch_norm(gm, {n.name: p.source.path for n, p in zip(inputs, found)})
    recurrent.stand_in(copy.graph)
    attention.stand_in(copy.graph)
    encoder_layer.stand_in(copy.graph)
    if device_type is not None:
        values = [_moved(value, device_type) for value in values]
        _move_what_it_makes(copy.graph, device_type)
    copy.recompile()
    if batch_at is not None:
        ways = _with_this_batch(values, batch_at)
    elif lengths is Lengths.KEPT:
        ways = _with_lengths(values, found)
    else:
        if lengths is Lengths.TRIED:
            values = [_with_numbers(value, hint) for value in values]
        ways = _with_batch(values, found)
    for tried, batch in ways:
        graph, attributes = _traced(copy, tried)
        if lengths is Lengths.KEPT:
            if not any(map(_is_bound, tried)):
                break
        elif batch is None or is_symbolic(batch):
            break
    leave_full_masks_away(graph)
    take_causal_masks(graph)
    # What nothing reads has no gradient, and would have one in a region.
    graph.eliminate_dead_code(lambda n: mutates(n) or moves_statistics(n) or not is_pure(n))
    is_dynamos = batch is not None and batch.node.shape_env is _shape_env(values)
    size = None if is_dynamos else _leading_size(values, found)
    if batch_at is not None:
        size = int(values[batch_at[0]].shape[batch_at[1]])
    placeholders = {}
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    for node, known, value in zip(nodes, found, tried):
        if known.role[0] == "input" and isinstance(value, torch.Tensor) and value.dim() >= 2:
            known.batched = batch is None and value.shape[0] == size
        placeholders[node] = known
        if known.source.kind == "parameter":
            node.meta[PARAMETER] = known.source.path
    symbol = None if batch is None else batch.node.expr
    feed = Feed(graph, attributes, placeholders, device_type_of(tried), symbol, size)
    feed.lays_out, feed.only_planned = True, device_type is not None
    feed.example_batch = size if batch is None else int(batch.node.hint)
    feed.has_lengths = lengths is Lengths.KEPT
    overlaps.refuse(overlaps.watched(feed, True), list(map(value_at_capture, inputs)))
    feed.apart = overlaps.watched(feed, False)  # who makes a parameter a part does so before
    return feed


def other_batches(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> list[tuple[int, int]]:
    """Inputs, and dimensions of them, that could be the batch in the place of the first one's
    leading dimension, in a graph in which no size is symbolic."""
    _, values, found = _inputs_of(gm, examples)
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    if any(map(is_symbolic, sizes)):
        return []
    matrices = [
        at
        for at, (value, known) in enumerate(zip(values, found))
        if known.source.kind == "input" and isinstance(value, torch.Tensor) and value.dim() >= 2
    ]
    places = [(at, 0) for at in matrices[1:]]
    places += [(at, 1) for at in matrices if values[at].dim() == 2]
    return [(at, dim) for at, dim in places if int(values[at].shape[dim]) > 1]


def _value(node: torch.fx.Node, example: Any) -> Any:
    value = node.meta.get("example_value", example)
    source = getattr(node.meta.get("grapharg"), "source", None)
    if type(source).__name__ == "RandomValueSource" and value.dtype == torch.float32:
        # Of Python's generator: Dynamo passes them in fp64, whatever it traced.
        with tracing(None), value.fake_mode:
            return value.double()
    return value


def _shape_env(values: Sequence[Any]) -> ShapeEnv | None:
    """Dynamo's."""
    return next((v.fake_mode.shape_env for v in values if isinstance(v, FakeTensor)), None)


# Inputs ----------------------------------------------------------------------------------------


def _inputs_of(
    gm: torch.fx.GraphModule, examples: Sequence[Any]
) -> tuple[list[torch.fx.Node], list[Any], list[Placeholder]]:
    """A graph's inputs, what tracing takes for them, and what they are."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = [_value(node, example) for node, example in zip(inputs, examples)]
    found = [_placeholder(*each) for each in zip(inputs, range(len(inputs)), examples)]
    return inputs, values, found


def _placeholder(node: torch.fx.Node, index: int, example: Any) -> Placeholder:
    name = _source_name(node)
    path = _path(name) or node.name
    if not isinstance(example, torch.Tensor):
        return Placeholder(Source("input", path, index), ("input", node.name))
    kind = "input"
    if isinstance(example, nn.Parameter) or isinstance(
        node.meta.get("example_value"), nn.Parameter
    ):
        kind = "parameter"
    elif "_buffers[" in name:
        kind = "buffer"
    role = kind, path if kind != "input" else node.name
    return Placeholder(Source(kind, path, index), role, requires_grad=example.requires_grad)


def _source_name(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else str(name)


def value_at_capture(node: torch.fx.Node) -> torch.Tensor | None:
    """What a call gave for a graph's input when TorchDynamo captured it, where it is known and may
    be read."""
    value = getattr(node.meta.get("grapharg"), "example", None)
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return None
    capturing = value.is_cuda and torch.cuda.is_current_stream_capturing()
    return None if capturing or value.is_meta else value


_CONTAINERS = ("_modules", "_parameters", "_buffers")


def _path(name: str) -> str:
    """ "gemm.weight" for "L['self']._modules['gemm']._parameters['weight']"."""
    found = re.findall(r"\['([^']+)'\]|\.(\w+)", name)
    words = [a or b for a, b in found]
    if len(words) > 1:  # what the frame calls the module
        words = words[1:]
    return ".".join(w for w in words if w not in _CONTAINERS)


# The batch -------------------------------------------------------------------------------------


def _leading(values: Sequence[Any], found: Sequence[Placeholder]) -> list[torch.Tensor]:
    return [
        v
        for v, p in zip(values, found)
        if p.source.kind == "input" and isinstance(v, torch.Tensor) and v.dim() >= 2
    ]


def _leading_size(values, found) -> int:
    leading = _leading(values, found)
    return hint(leading[0].shape[0]) if leading else 1


def sizes_of_inputs(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Iterator[tuple]:
    """Of the tensors that calls bring: (where it comes from, dimension), the size, and the node."""
    for node, value, known in zip(*_inputs_of(gm, examples)):
        if isinstance(value, torch.Tensor) and known.source.kind == "input":
            for dimension, size in enumerate(value.shape):
                yield (_source_name(node) or node.name, dimension), size, node


def changing_sizes(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> dict:
    """Those that are symbolic and not the batch's, by where they come from, and the dimension."""
    _, values, found = _inputs_of(gm, examples)
    batch = _symbolic_batch(values, found)
    batches = set() if batch is None else {batch.node.expr}
    return {
        place: size
        for place, size, _ in sizes_of_inputs(gm, examples)
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols - batches
    }


def _with_lengths(values: list, found: Sequence[Placeholder]) -> Iterator[tuple[list, Any]]:
    """With all that is symbolic, but what the last trace has bound to a number."""
    while True:
        settled = [_settled(_number(value), None, set()) for value in values]
        yield settled, _symbolic_batch(settled, found)


def _with_batch(values: list, found: Sequence[Placeholder]) -> Iterator[tuple[list, Any]]:
    """Values to trace with, and among them the symbolic size of the batch (or None); further ones
    where tracing has bound it to a number.

    Numbers that are symbolic elsewhere are bound to the batch where they lead an input and are the
    same, else to their values: a guard of Dynamo's, as if the model's own code had asked. Where
    nothing is symbolic, the batch is made so for the tracing: what is written for any size is
    imported better, and Dynamo's guards hold it to this one. First of all inputs of the first one's
    size, then of that alone: an operand of the same size need not have the batch in front.
    """
    batch, batches = _symbolic_batch(values, found), set()
    for value in values:
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                other = batch is None or size.node.expr.free_symbols - {batch.node.expr}
                joined = other and axis == 0 and _are_joined(size, batch)
                if joined:
                    batches.add(size.node.expr)
                elif other and not size.node.expr.is_number:
                    int(size)
    settled = [_settled(value, batch, batches) for value in values]
    if batch is not None:
        yield settled, batch
    if any(map(is_symbolic, values)):
        if batch is None:  # numbers that the model computes with stay as they are
            yield settled, None
            return
    values = [_with_numbers(value) for value in values]
    if any(map(_holds_number, values)):  # a symbol of Dynamo's: there are no others beside it
        yield values, None
        return
    batched = [
        at
        for at, (value, known) in enumerate(zip(values, found))
        if known.source.kind == "input"
        and isinstance(value, torch.Tensor)
        and value.dim() >= 2
        and value.shape[0] == _leading_size(values, found) > 1
    ]
    for chosen in (batched, batched[:1]):
        if chosen:
            yield _with_symbolic_batch(values, dict.fromkeys(chosen, 0))
    yield values, None


def _symbolic_batch(values: list, found: Sequence[Placeholder]) -> torch.SymInt | None:
    """A symbol that leads an input: where there are several, one that is no length elsewhere, as
    that of a mask [length, length] is."""
    leading = [v.shape[0] for v in _leading(values, found)]
    symbols = [s for s in leading if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol]
    inner = {
        size.node.expr
        for value in values
        for size in (value.shape[1:] if isinstance(value, torch.Tensor) else ())
        if isinstance(size, torch.SymInt)
    }
    return next((s for s in symbols if s.node.expr not in inner), next(iter(symbols), None))


def _with_this_batch(values: list, batch_at: tuple[int, int]) -> Iterator[tuple[list, Any]]:
    yield _with_symbolic_batch([_with_numbers(value) for value in values], dict([batch_at]))


def _are_joined(size: torch.SymInt, batch: torch.SymInt | None) -> bool:
    """Whether a size is the batch's now, and a guard of Dynamo's keeps it so: two inputs of one
    batch that nothing in the model brings together."""
    if batch is None or not size.node.expr.is_Symbol or size.node.hint != batch.node.hint:
        return False
    return bool(size == batch)


def _settled(value: Any, batch: torch.SymInt | None, batches: set) -> Any:
    """With integers for the sizes that were bound, and the batch for symbols that are known to be
    it, but are still written otherwise: where it follows from sums."""

    def settled(size: Any) -> Any:
        return batch if isinstance(size, torch.SymInt) and size.node.expr in batches else size

    if not isinstance(value, torch.Tensor):
        return settled(value)
    given = tuple(value.shape)
    sizes = [settled(_number(size)) for size in given]
    if all(size is before for size, before in zip(sizes, given)):
        return value
    return _like(value, sizes, [_number(s) for s in value.stride()])


def _with_numbers(value: Any, number: Callable[[Any], int] = int) -> Any:
    """number: int, which binds a symbolic size, or hint, which does not."""
    if isinstance(value, torch.SymInt):
        return number(value)
    if not isinstance(value, torch.Tensor) or _holds_number(value):
        return value
    return _like(value, list(map(number, value.shape)), list(map(number, value.stride())))


def _holds_number(value: Any) -> bool:
    """Whether it is Dynamo's for a number that changes from call to call, and knows its symbol:
    another tensor in its place would not."""
    is_scalar = isinstance(value, FakeTensor) and value.dim() == 0
    return is_scalar and getattr(value, "item_memo", None) is not None


def _is_bound(value: Any) -> bool:
    """Whether a size that was symbolic is a number now."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) and size.node.expr.is_number for size in sizes)


def _number(size: Any) -> Any:
    return int(size) if isinstance(size, torch.SymInt) and size.node.expr.is_number else size


def _like(
    value: torch.Tensor, sizes: Sequence, strides: Sequence, mode: Any = None, device: Any = None
) -> torch.Tensor:
    with tracing(None), mode or value.fake_mode:
        made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=device or value.device)
    return made.requires_grad_(value.requires_grad)


def _moved(value: Any, device_type: str) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    return _like(value, value.shape, value.stride(), device=device_type)


def _move_what_it_makes(graph: torch.fx.Graph, device_type: str) -> None:
    """Devices that the model's code names, or asks its tensors for, are numbers in its graph."""

    def moved(argument: Any) -> Any:
        return torch.device(device_type) if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))


def _with_symbolic_batch(values: list, batched: dict[int, int]) -> tuple[list, torch.SymInt]:
    """batched: of inputs, the dimension that is the batch."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made = []
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            dynamic = [
                DimDynamic.DUCK if batched.get(at) == dimension else DimDynamic.STATIC
                for dimension in range(value.dim())
            ]
            context = StatelessSymbolicContext(dynamic_sizes=dynamic)
            blank = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
            fake = mode.from_tensor(blank, symbolic_context=context)
            value = _like(value, fake.shape, fake.stride(), mode)
        made.append(value)
    first, dimension = next(iter(batched.items()))
    return made, made[first].shape[dimension]


# Operators --------------------------------------------------------------------------------------


def _traced(gm: torch.fx.GraphModule, values: Sequence[Any]) -> tuple[torch.fx.Graph, nn.Module]:
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        raise CaptureError("it takes no tensors")
    switches.refuse(gm.graph, switches.INFERENCE)  # which tracing does not note
    runner = switches.Runner(gm, watching=True)
    try:
        # The mode may be our own: Dynamo's, found through its context, would not mix with it.
        with tracing(None), mode, enable_python_dispatcher(), preserve_node_meta():
            traced = aliases.declared(functional.traced(runner.run, values), values)
            if any(mutates(node) for node in traced.graph.nodes):
                traced = functional.without_writes(traced, values)
    except CaptureError:
        raise
    except Exception as error:  # many kinds
        raise CaptureError(f"it cannot be traced: {_first_line(error)}") from error
    runner.put_attributes_back(traced)
    switches.settle(traced.graph, values)
    return traced.graph, traced


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _with_own_batch_norm(gm: torch.fx.GraphModule, paths: dict[str, str]) -> torch.fx.GraphModule:
    """Batch norms as the operator that carries the counter of batches beside the statistics, which
    PyTorch's does not: one step moves all three."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    counters = _counters(graph, paths)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _batch_norm:
            continue
        x, mean, var, weight, bias, training, momentum, eps = _batch_norm_arguments(node)
        if training and momentum is None:
            continue
        count = None
        if training and isinstance(mean, torch.fx.Node):
            owner = paths.get(mean.name, "").rpartition(".")[0]
            if counters.get(owner):
                counted = counters[owner].pop(0)
                count = counted.args[0]
                counted.replace_all_uses_with(count)
                graph.erase_node(counted)
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.ingot.batch_norm.default,
                (x, weight, bias, mean, var, count, bool(training), momentum, eps),
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return torch.fx.GraphModule(gm, graph)


def _batch_norm_arguments(node: torch.fx.Node) -> tuple:
    given = inspect.signature(_batch_norm).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    return given.args


def _counters(graph: torch.fx.Graph, paths: dict[str, str]) -> dict[str, list[torch.fx.Node]]:
    """By the path of a norm, the nodes that count its batches, one for each time that it runs."""
    found: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "add_" and node.args[1:] == (1,):
            owner, _, name = paths.get(node.args[0].name, "").rpartition(".")
            if name == "num_batches_tracked" and not any(u.op == "output" for u in node.users):
                found.setdefault(owner, []).append(node)
    return found
