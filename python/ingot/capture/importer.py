"""Cuts an ATen graph into regions that Ingot runs and steps that PyTorch runs.

Operators are visited in order. One that the table takes joins the region of its arguments; every
change of hands on the way to an operator raises its level by one, and what Ingot takes at one level
makes one region. So no region waits for a step that waits for the region.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

# For their rows of the table.
import ingot.capture.normalisations
import ingot.capture.pointwise
import ingot.capture.reductions
import ingot.capture.views  # noqa: F401
from ingot.capture.captured import Captured, Region, Slot, Source, TorchStep, Unsupported
from ingot.capture.custom_ops import run_batch_norm
from ingot.capture.decompose import decompose
from ingot.capture.exporting import CaptureError, Exported, export_module
from ingot.capture.layout import Leaf, UnfitError, Value
from ingot.capture.leading_axes import merge_leading_axes
from ingot.capture.nodes import (
    computes,
    is_batch_norm,
    is_made_from_nothing,
    is_pure,
    is_random,
    mutates,
    named_arguments,
    operator_name,
    origin_or_name,
    own_path,
    region_name,
    schema_name,
    where,
)
from ingot.capture.normalisations import batch_statistics
from ingot.capture.products import PRODUCTS
from ingot.capture.reference import reference_of
from ingot.capture.region import RegionBuilder
from ingot.capture.table import SHAPE_OPERATORS, TABLE, Call
from ingot.runtime.program import DTYPE_NAMES


def capture(
    module: nn.Module,
    example_inputs: tuple,
    example_kwargs: dict | None = None,
    *,
    forward: Callable | None = None,
    refused: dict[str, str] | None = None,
    autocast: bool = False,
    gradients: bool = False,
) -> Captured:
    """Captures a module's forward with its training flags as they are.

    example_inputs: tensors on the module's device; only their shapes, dtypes and strides matter,
    and of the batch size only whether it is there. forward: stands for the class's own. refused:
    graph nodes that PyTorch must run (`node` among a region's operators), with the reason.
    autocast: whether it is on around the call. gradients: as import_graph has it. Raises
    CaptureError with the reason where PyTorch must run the whole module.
    """
    exported = export_module(module, example_inputs, example_kwargs, forward)
    if any(mutates(node) for node in exported.program.graph.nodes):
        exported.program = exported.program.run_decompositions({})
    _check_signature(exported.program)
    return import_graph(
        _fed_by_export(exported), refused=refused, autocast=autocast, gradients=gradients
    )


def import_graph(
    feed: Feed,
    *,
    refused: dict[str, str] | None = None,
    autocast: bool = False,
    gradients: bool = False,
) -> Captured:
    """Regions and steps of an ATen graph, which is rewritten on the way.

    gradients: of what is taken, a backward pass is to follow: regions store what it reads, and what
    is too cheap to gain from a region of its own stays PyTorch's with its derivative. For the rest
    see `capture`.
    """
    if not feed.rewritten:
        decompose(feed.graph)
        merge_leading_axes(feed.graph)
        feed.rewritten = True
    refused = dict(refused or {})
    while True:
        captured, weak = _Import(feed, refused, autocast, gradients).run()
        if captured is not None:
            return captured
        refused.update(dict.fromkeys(weak, ""))


def _check_signature(program) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            raise CaptureError(f"its forward writes into {own_path(spec.target)}")
        if spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("its forward writes into its input")
        if spec.kind.name != "USER_OUTPUT":
            raise CaptureError(f"its outputs have the kind {spec.kind.name}")


_aten = torch.ops.aten
_LAST = 1 << 30


class _NotStoredError(Exception):
    """A node's tensor is wanted outside its region, where only operators inside can have it."""

    def __init__(self, node: torch.fx.Node):
        super().__init__(node.name)
        self.node = node


@dataclass
class _Entry:
    """What is known of a graph node. level: even where PyTorch makes it, odd where Ingot does."""

    level: int
    value: Any = None  # Value, Leaf, number, tuple of these; None for what only PyTorch handles


@dataclass
class Placeholder:
    """What feeds an input of a graph. role: the operator and name of the leaf that it becomes;
    batched: whether dimension 0 is the batch, where sizes do not tell."""

    source: Source
    role: tuple[str, str]
    batched: bool = False


@dataclass
class Feed:
    """An ATen graph with what its inputs are.

    attributes: the module whose attributes its get_attr nodes name; batch: the symbol of the batch
    size in the sizes of its values, or None where the graph is for `static_batch` alone; out_spec,
    constant_outputs: how a module's result is put together from the graph's outputs; rewritten:
    whether the graph has been brought into the form that the importer reads; lays_out: whether
    dimensions of results lie in memory in the order that PyTorch gives them.
    """

    graph: torch.fx.Graph
    attributes: nn.Module
    placeholders: dict[torch.fx.Node, Placeholder]
    device_type: str
    batch: Any | None = None
    static_batch: int | None = None
    out_spec: Any = None
    constant_outputs: dict[int, Any] = field(default_factory=dict)
    rewritten: bool = False
    lays_out: bool = False


class _Import:
    def __init__(self, feed: Feed, refused: dict[str, str], autocast: bool, gradients: bool):
        self.feed, self.refused, self.autocast = feed, refused, autocast
        self.gradients = gradients
        self.device_type = feed.device_type
        self.entries: dict[torch.fx.Node, _Entry] = {}
        self.regions: dict[int, RegionBuilder] = {}
        self.taken: dict[torch.fx.Node, int] = {}  # level of each node in a region
        self.by_torch: dict[torch.fx.Node, int] = {}
        self.unsupported: dict[torch.fx.Node, Unsupported] = {}
        self.roles: dict[torch.fx.Node, tuple[str, str]] = {}
        self.sources: list[tuple[torch.fx.Node, Source]] = []
        self.updated: set[torch.fx.Node] = set()
        self.delegate_batches = {0}
        self.last_random = 0

    # Reading the graph -----------------------------------------------------------------------

    def run(self) -> tuple[Captured, set]:
        for node in self.feed.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node, _attribute(self.feed.attributes, node.target))
            elif node.op == "call_function":
                self._call(node)
        outputs = next(n for n in self.feed.graph.nodes if n.op == "output").args[0]
        weak = self._weak_nodes(outputs)
        if weak:
            return None, weak
        try:
            return self._assemble(outputs), set()
        except _NotStoredError as error:
            return None, {error.node.name}

    def _placeholder(self, node: torch.fx.Node) -> None:
        known = self.feed.placeholders[node]
        self.sources.append((node, known.source))
        constant = known.source.tensor
        if known.source.kind == "constant" and _is_literal(known.source.path, constant):
            self.entries[node] = _Entry(0, constant.item())
            return
        self._outside(node, 0, known.role, batched=known.batched)

    def _constant(self, node: torch.fx.Node, value: Any) -> None:
        self.sources.append((node, Source("constant", str(node.target), tensor=value)))
        if isinstance(value, torch.Tensor):
            self._outside(node, 0, ("buffer", str(node.target)))
        else:
            self.entries[node] = _Entry(0)

    def _outside(self, node, level: int, role: tuple[str, str], batched: bool = False) -> None:
        """A tensor that reaches regions as a leaf."""
        tensor = node.meta.get("val")
        value = None
        # A number on the CPU beside tensors of a GPU is PyTorch's.
        here = isinstance(tensor, torch.Tensor) and tensor.device.type == self.device_type
        if here and tensor.dtype in DTYPE_NAMES:
            sizes = self._sizes(tensor.shape, batched)
            if sizes is not None:
                value = Leaf(node, tuple(range(len(sizes))), sizes, tensor.dtype)
        self.roles[node] = role
        self.entries[node] = _Entry(level, value)

    def _sizes(self, shape, leading_batch: bool = False) -> tuple[int, ...] | None:
        """Sizes with -k for k times the batch; None where they depend on it otherwise."""
        sizes = []
        for dimension, size in enumerate(shape):
            if isinstance(size, int):
                symbolic = self.feed.batch is None and leading_batch and dimension == 0
                sizes.append(-1 if symbolic else size)
                continue
            if self.feed.batch is None:
                return None
            factor = size.node.expr / self.feed.batch
            if not factor.is_Integer or factor <= 0:
                return None
            sizes.append(-int(factor))
        return tuple(sizes)

    # Deciding --------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem and self._getitem(node):
            return
        if is_made_from_nothing(node) and not _escapes(node):
            self._constant(node, node.target(*node.args, **node.kwargs))
            return
        level = self._ingot_level(node)
        name = schema_name(node.target)
        reason = None
        if node.name in self.refused:
            reason = self.refused[node.name]
        elif name not in TABLE:
            reason = "Ingot has no such operator"
        else:
            region = self.regions.get(level)
            if region is None:
                region = self.regions[level] = RegionBuilder()
                region.roles = self.roles
            mark = region.mark()
            try:
                self._take(node, name, level, region)
                return
            except UnfitError as unfit:
                region.rewind(mark)
                reason = str(unfit)
        self._leave_to_torch(node, name, reason)

    def _getitem(self, node: torch.fx.Node) -> bool:
        entry = self.entries[node.args[0]]
        if not isinstance(entry.value, tuple):
            return False
        value = entry.value[node.args[1]]
        if value is None:
            if node.users:
                raise CaptureError(f"it uses result {node.args[1]} of {node.args[0].name}")
            value = entry.value[0]
        self.entries[node] = _Entry(entry.level, value)
        self.taken[node] = entry.level
        return True

    def _ingot_level(self, node: torch.fx.Node) -> int:
        level = 1
        for argument in node.all_input_nodes:
            known = self.entries[argument].level
            level = max(level, known if known % 2 else known + 1)
        return level

    def _take(self, node, name: str, level: int, region: RegionBuilder) -> None:
        arguments = named_arguments(node)
        arguments = {key: self._operand(value, level) for key, value in arguments.items()}
        arguments["name"] = name
        result = node.meta.get("val")
        dtype = result.dtype if isinstance(result, torch.Tensor) else None
        if dtype is not None and dtype not in DTYPE_NAMES:
            raise UnfitError(f"the dtype {dtype}")
        lead = next((v for v in arguments.values() if isinstance(v, (Value, Leaf))), None)
        leading_batch = lead is not None and bool(lead.sizes) and lead.sizes[0] == -1
        sizes = None
        if isinstance(result, torch.Tensor):
            sizes = self._sizes(result.shape, leading_batch)
        used = frozenset(
            user.args[1] for user in node.users if user.target is operator.getitem and user.users
        )
        region.set_origin(origin_or_name(node), where(node))
        call = Call(region, arguments, dtype, sizes, self.autocast, used)
        value = TABLE[name](call)
        self._check(value, sizes)
        if is_batch_norm(node):
            self._note_batch_norm(node)
        self.entries[node] = _Entry(level, value)
        self.taken[node] = level
        if isinstance(value, Leaf):
            # Only relabelled: any region may use it, at the level of what it relabels.
            self.entries[node].level = self.entries[value.node].level
        elif isinstance(value, (bool, int, float)):
            self.entries[node].level = 0

    @staticmethod
    def _check(value: Any, sizes: tuple[int, ...] | None) -> None:
        if isinstance(value, (Value, Leaf)) and sizes is not None and value.sizes != sizes:
            raise UnfitError(f"its shape came out as {value.sizes}, not {sizes}")

    def _operand(self, argument: Any, level: int) -> Any:
        if isinstance(argument, torch.fx.Node):
            entry = self.entries[argument]
            value = entry.value
            if value is None or isinstance(value, tuple):
                raise UnfitError("an argument that is not a tensor of a supported dtype and shape")
            if isinstance(value, Value) and entry.level != level:
                # From an earlier region: what that one stored.
                self.roles.setdefault(argument, ("input", argument.name))
                return Leaf(argument, tuple(range(len(value.sizes))), value.sizes, value.dtype)
            return value
        if isinstance(argument, (list, tuple)):
            return [self._item(item, level) for item in argument]
        return argument

    def _item(self, item: Any, level: int) -> Any:
        """A tensor, or what is no node of the graph."""
        if not isinstance(item, torch.fx.Node):
            return item
        known = isinstance(self.entries[item].value, (Value, Leaf))
        return self._operand(item, level) if known else None

    def _note_batch_norm(self, node: torch.fx.Node) -> None:
        arguments = named_arguments(node)
        if not arguments["training"]:
            return
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = arguments.get(name)
            if isinstance(buffer, torch.fx.Node):
                self.updated.add(buffer)
        sizes = self._sizes(node.meta["val"].shape, True)
        others = [size for size in (sizes or ())[2:] if size != 1]
        if not others:
            self.delegate_batches.add(1)  # one value per channel: PyTorch's own error

    def _leave_to_torch(self, node, name: str, reason: str | None) -> None:
        level = 0
        for argument in node.all_input_nodes:
            known = self.entries[argument].level
            level = max(level, known + 1 if known % 2 else known)
        if is_random(node.target):
            # In the order of the program, so that each draws the numbers it would draw.
            level = self.last_random = max(level, self.last_random)
        if mutates(node):
            level = _LAST  # a graph's writes into its inputs come after all that reads those
        self.by_torch[node] = level
        if reason and name and name not in SHAPE_OPERATORS and computes(node):
            self.unsupported[node] = Unsupported(name.rpartition(":")[2], where(node), reason)
        self._outside(node, level, ("input", node.name), self._carries_batch(node))

    def _carries_batch(self, node: torch.fx.Node) -> bool:
        """Whether dimension 0 is the batch, for a graph of one batch size."""
        result = node.meta.get("val")
        if self.feed.batch is not None or not isinstance(result, torch.Tensor):
            return False
        return (
            result.dim() >= 1
            and result.shape[0] == self.feed.static_batch
            and any(
                isinstance(self.entries[a].value, (Value, Leaf))
                and self.entries[a].value.sizes[:1] == (-1,)
                for a in node.all_input_nodes
            )
        )

    # Putting together ------------------------------------------------------------------------

    def _weak_nodes(self, outputs) -> set:
        """Nodes of regions too small to be worth a program of their own."""
        weak = set()
        for level, region in self.regions.items():
            nodes = [
                node
                for node, own in self.taken.items()
                if own == level and node.name not in self.refused
            ]
            computing = [
                node
                for node in nodes
                if schema_name(node.target) not in SHAPE_OPERATORS
                and node.target is not operator.getitem
                and isinstance(self.entries[node].value, (Value, tuple))
            ]
            products = any(value["op"] == "matmul" for value in region.values)
            # Without a product, what backward computes again costs what forward saves.
            if computing and not products and (self.gradients or len(computing) < 2):
                weak.update(node.name for node in nodes)
        return weak

    def _assemble(self, outputs) -> Captured:
        slots: dict[torch.fx.Node, int] = {}
        sources = []
        for node, source in self.sources:
            slots[node] = len(sources)
            sources.append(source)
        steps = self._steps(outputs, slots)
        results = iter(outputs)
        spec_count = len(outputs) + len(self.feed.constant_outputs)
        final = []
        for index in range(spec_count):
            if index in self.feed.constant_outputs:
                final.append(self.feed.constant_outputs[index])
                continue
            output = next(results)
            final.append(Slot(slots[output]) if isinstance(output, torch.fx.Node) else output)
        self._check_buffer_readers(outputs)
        return Captured(
            sources=sources,
            steps=steps,
            slots=len(slots),
            outputs=final,
            out_spec=self.feed.out_spec,
            static_batch=self.feed.static_batch,
            delegate_batches=frozenset(self.delegate_batches),
            unsupported=list(self.unsupported.values()),
        )

    def _check_buffer_readers(self, outputs) -> None:
        """One region may move a buffer several times, in order; nothing else may look at it."""
        for buffer in self.updated:
            levels = {
                self.taken.get(reader) if is_batch_norm(reader) else None for reader in buffer.users
            }
            if len(levels) > 1 or None in levels or buffer in outputs:
                paths = (source.path for node, source in self.sources if node is buffer)
                path = next(paths, buffer.name)
                raise CaptureError(f"{path} is both updated and read by its forward")

    def _steps(self, outputs, slots: dict) -> list:
        wanted = self._wanted(outputs)
        order: list[tuple[int, int, Any]] = []
        for position, node in enumerate(self.by_torch):
            if node in wanted:
                order.append((self.by_torch[node], position, node))
        for level, region in self.regions.items():
            if region.values:
                order.append((level, 0, region))
        order.sort(key=lambda item: item[:2])
        steps = []
        for level, _, item in order:
            if isinstance(item, RegionBuilder):
                step = self._region_step(level, item, wanted, slots)
                if step is not None:
                    steps.append(step)
                    steps += self._dense_results(step, slots)
            else:
                steps.append(self._torch_step(item, slots))
        return steps

    def _wanted(self, outputs) -> set:
        """Nodes whose tensors something outside their region reads. Relabelled leaves, views and
        literals that PyTorch reads are PyTorch's to make."""
        wanted: set = set()

        def want(node: torch.fx.Node) -> None:
            if node in wanted:
                return
            wanted.add(node)
            entry = self.entries[node]
            relabelled = node in self.taken and isinstance(entry.value, (Leaf, bool, int, float))
            if relabelled:
                self.by_torch[node] = entry.level
            if node in self.by_torch:
                for argument in node.all_input_nodes:
                    want(argument)

        for output in outputs:
            if isinstance(output, torch.fx.Node):
                want(output)
        for node in [n for n in self.by_torch if not is_pure(n)]:
            want(node)
        for region in self.regions.values():
            for node, _ in region.leaves:
                want(node)
        # Results of one region that are leaves of another were wanted above.
        self.by_torch = dict(
            sorted(self.by_torch.items(), key=lambda item: self._position(item[0]))
        )
        return wanted

    def _position(self, node: torch.fx.Node) -> int:
        if not hasattr(self, "_positions"):
            self._positions = {n: i for i, n in enumerate(self.feed.graph.nodes)}
        return self._positions[node]

    def _dense_results(self, region: Region, slots: dict) -> list[TorchStep]:
        """Copies of what PyTorch's operators lay out otherwise than the region does: what reads a
        tensor, the user's code too, may take a view that only PyTorch's layout allows."""
        steps: list[TorchStep] = []
        made = {slot: node for node, slot in slots.items()}

        def step(target: Any, *args: Any) -> None:
            steps.append(TorchStep(target, args, {}, len(slots), "contiguous"))
            slots[node, f"copied {len(slots)}"] = len(slots)

        for slot, layout in zip(region.results, region.result_layouts):
            node = made[slot]
            flat = [axis for run in layout.axes for axis in run]
            if flat != sorted(flat) and node.meta["val"].is_contiguous():
                step(_aten.contiguous.default, Slot(slot))
            elif self.feed.lays_out and (order := _other_order(node.meta["val"], layout.axes)):
                step(_aten.permute.default, Slot(slot), order)
                step(_aten.contiguous.default, Slot(len(slots) - 1))
                back = sorted(range(len(order)), key=order.__getitem__)
                step(_aten.permute.default, Slot(len(slots) - 1), back)
            else:
                continue
            slots[node] = len(slots) - 1
        return steps

    def _region_step(self, level, region: RegionBuilder, wanted, slots) -> Region | None:
        results, layouts, names, made = [], [], [], []
        given = {
            node: self.entries[node].value
            for node, own in self.taken.items()
            if own == level and node in wanted and isinstance(self.entries[node].value, Value)
        }
        taken = {value.id for value in given.values()}
        for node, value in given.items():
            computed = region.behind_views(value)
            if region.is_leaf(computed) or computed.id in taken:
                computed = value  # two results do not share memory
            taken.add(computed.id)
            try:
                layouts.append(region.result_layout(value, computed))
            except UnfitError as unfit:
                raise _NotStoredError(node) from unfit
            results.append(computed.id)
            names.append(node.name)
            slots[node] = len(slots)
            made.append(slots[node])
        stored = self._stored(level, region, list(given), results, layouts) if made else {}
        names += [node.name for node, at in stored.items() if at >= len(names)]
        statistics = self._statistics(level, region, results, layouts) if made else {}
        names += [f"{node.name}_{kind}" for node in statistics for kind in ("mean", "variance")]
        nodes = [node for node, own in self.taken.items() if own == level]
        updates = any(
            self.entries[n].level == level and n.target is torch.ops.ingot.batch_norm.default
            for n in nodes
        )
        if not results and not updates:
            return None
        computing = [
            node
            for node in nodes
            if node.target is not operator.getitem
            and schema_name(node.target) not in SHAPE_OPERATORS
        ]
        operators = [
            {
                "what": operator_name(node),
                "where": where(node),
                "module": origin_or_name(node),
                "node": node.name,
            }
            for node in computing
        ]
        graph = {
            "ingot_graph": 1,
            "name": region_name(computing),
            "values": region.values,
            "results": [{"value": v, "name": n} for v, n in zip(results, names)],
            "updates": [],
        }
        return Region(
            graph=graph,
            leaves=[slots[node] for node, _ in region.leaves],
            results=made,
            leaf_layouts=[layout for _, layout in region.leaves],
            result_layouts=layouts,
            operators=operators,
            reference=reference_of(
                [node for node, _ in region.leaves],
                list(given),
                stored,
                statistics,
                self._literals(),
            ),
        )

    def _literals(self) -> dict[torch.fx.Node, Any]:
        numbers = (bool, int, float)
        return {n: e.value for n, e in self.entries.items() if isinstance(e.value, numbers)}

    def _stored(self, level: int, region, given: list, results: list, layouts: list) -> dict:
        """Products that backward reads, by their place among the region's results, to which those
        that nothing else wants are added."""
        stored: dict[torch.fx.Node, int] = {}
        for node, own in self.taken.items() if self.gradients else ():
            if own != level or schema_name(node.target) not in PRODUCTS:
                continue
            value = self.entries[node].value
            if node in given:
                stored[node] = given.index(node)
            elif isinstance(value, Value) and value.id not in results:
                with contextlib.suppress(UnfitError):
                    layouts.append(region.result_layout(value, value))
                    results.append(value.id)
                    stored[node] = len(results) - 1
        return stored

    def _statistics(self, level: int, region, results: list, layouts: list) -> dict:
        """Of batch norms in training, what backward reads: the places of mean and variance among
        the region's results, to which they are added. The norm's own sweep makes them, from what is
        then rounded where a 16-bit result is stored: x̂ must come from one and the same."""
        found: dict[torch.fx.Node, tuple[int, int]] = {}
        if any(layout.dtype in (torch.float16, torch.bfloat16) for layout in layouts):
            return found
        for node, own in self.taken.items() if self.gradients else ():
            trained = node.target is torch.ops.ingot.batch_norm.default and node.args[6]
            if own != level or not trained:
                continue
            statistics = batch_statistics(region, self.entries[node].value)
            if statistics is not None:
                for identity, layout in statistics:
                    results.append(identity)
                    layouts.append(layout)
                found[node] = (len(results) - 2, len(results) - 1)
        return found

    def _torch_step(self, node: torch.fx.Node, slots: dict) -> TorchStep:
        def reference(argument):
            return Slot(slots[argument]) if isinstance(argument, torch.fx.Node) else argument

        args = torch.fx.node.map_aggregate(node.args, reference)
        kwargs = torch.fx.node.map_aggregate(node.kwargs, reference)
        target = node.target
        if target is torch.ops.ingot.batch_norm.default:
            target = run_batch_norm
        slots[node] = len(slots)
        return TorchStep(target, args, kwargs, slots[node], operator_name(node), where(node))


def _fed_by_export(exported: Exported) -> Feed:
    program = exported.program
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders: dict[torch.fx.Node, Placeholder] = {}
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec = specs[node.name]
        kind, path = spec.kind.name, own_path(spec.target)
        if kind == "USER_INPUT":
            index = sum(1 for p in placeholders.values() if p.source.kind == "input")
            source = Source("input", f"input {index}", index)
            found = Placeholder(source, ("input", f"input_{index}"), exported.batched[index])
        elif kind in ("PARAMETER", "BUFFER"):
            role = (kind.lower(), path)
            found = Placeholder(Source(*role), role)
        elif kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            source = Source("constant", path, tensor=program.constants[spec.target])
            found = Placeholder(source, ("buffer", path))
        else:
            raise CaptureError(f"its graph has an input of kind {kind}")
        placeholders[node] = found
    values = [n.meta["val"] for n, p in placeholders.items() if p.source.kind == "input"]
    return Feed(
        program.graph,
        program.graph_module,
        placeholders,
        device_type_of(values),
        exported.batch,
        exported.static_batch,
        exported.out_spec,
        exported.constant_outputs,
    )


def device_type_of(values: list) -> str:
    """Of the tensors that a call passes."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return max(tensors, key=lambda tensor: tensor.dim()).device.type if tensors else "cpu"


def _escapes(node: torch.fx.Node) -> bool:
    """Whether what sees this tensor could write into it: the caller, or an operator in place."""
    for user in node.users:
        if user.op == "output" or mutates(user) or user.op != "call_function":
            return True
        views = not isinstance(user.target, torch._ops.OpOverload) or any(
            a.alias_info is not None for a in user.target._schema.arguments
        )
        if views and _escapes(user):
            return True
    return False


def _other_order(tensor: torch.Tensor, axes: tuple) -> list[int] | None:
    """Of dimensions, outermost first, as PyTorch lays a tensor out that a region would lay out in
    another one; None where the two agree, or PyTorch's elements overlap."""
    sizes = [_hint(size) for size in tensor.shape]
    strides = [_hint(stride) for stride in tensor.stride()]
    varying = [at for at, size in enumerate(sizes) if size > 1]
    if len({strides[at] for at in varying}) < len(varying) or 0 in sizes:
        return None
    order = sorted(varying, key=lambda at: -strides[at])
    if order == sorted(varying, key=lambda at: axes[at]):
        return None
    return [*(at for at in range(len(sizes)) if at not in varying), *order]


def _hint(size: Any) -> int:
    """The size that the graph was traced with, without binding it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def _is_literal(path: str, constant: Any) -> bool:
    """`torch.tensor(0.5)` in a forward: the same number at every call."""
    made = path.rpartition(".")[2].startswith("lifted_tensor")
    return made and isinstance(constant, torch.Tensor) and constant.dim() == 0


def _attribute(root: nn.Module, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root
