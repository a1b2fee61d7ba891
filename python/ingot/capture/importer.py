"""Cuts an ATen graph into regions that Ingot runs and steps that PyTorch runs.

Operators are visited in order. One that the table takes joins the region of its arguments; every
change of hands on the way to an operator raises its level by one, and what Ingot takes at one level
makes one region. So no region waits for a step that waits for the region.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# For their rows of the table.
import ingot.capture.normalisations
import ingot.capture.pointwise
import ingot.capture.products
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
    named_arguments,
    operator_name,
    origin_or_name,
    own_path,
    region_name,
    schema_name,
    where,
)
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
) -> Captured:
    """Captures a module's forward with its training flags as they are.

    example_inputs: tensors on the module's device; only their shapes, dtypes and strides matter,
    and of the batch size only whether it is there. forward: stands for the class's own. refused:
    graph nodes that PyTorch must run (`node` among a region's operators), with the reason.
    autocast: whether it is on around the call. Raises CaptureError with the reason where PyTorch
    must run the whole module.
    """
    exported = export_module(module, example_inputs, example_kwargs, forward)
    program = exported.program
    if any(_mutates(node) for node in program.graph.nodes):
        program = exported.program = program.run_decompositions({})
    _check_signature(program)
    decompose(program.graph)
    merge_leading_axes(program.graph)
    refused = dict(refused or {})
    while True:
        captured, weak = _Import(exported, refused, autocast).run()
        if captured is not None:
            return captured
        refused.update(dict.fromkeys(weak, ""))


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check_signature(program) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            raise CaptureError(f"its forward writes into {own_path(spec.target)}")
        if spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError("its forward writes into its input")
        if spec.kind.name != "USER_OUTPUT":
            raise CaptureError(f"its outputs have the kind {spec.kind.name}")


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


class _Import:
    def __init__(self, exported: Exported, refused: dict[str, str], autocast: bool):
        self.exported, self.refused, self.autocast = exported, refused, autocast
        self.program = exported.program
        self.device_type = _device_type(self.program)
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
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self._constant(node, _attribute(self.program.graph_module, node.target))
            elif node.op == "call_function":
                self._call(node)
        outputs = next(n for n in self.program.graph.nodes if n.op == "output").args[0]
        weak = self._weak_nodes(outputs)
        if weak:
            return None, weak
        try:
            return self._assemble(outputs), set()
        except _NotStoredError as error:
            return None, {error.node.name}

    def _placeholder(self, node: torch.fx.Node) -> None:
        signature = self.program.graph_signature
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        spec = specs[node.name]
        kind, path = spec.kind.name, own_path(spec.target)
        if kind == "USER_INPUT":
            index = sum(1 for _, source in self.sources if source.kind == "input")
            source = Source("input", f"input {index}", index)
            role = ("input", _input_name(node, index))
        elif kind == "PARAMETER":
            source, role = Source("parameter", path), ("parameter", path)
        elif kind == "BUFFER":
            source, role = Source("buffer", path), ("buffer", path)
        elif kind in ("CONSTANT_TENSOR", "CUSTOM_OBJ"):
            constant = self.program.constants[spec.target]
            source, role = Source("constant", path, tensor=constant), ("buffer", path)
            if _is_literal(path, constant):
                self.sources.append((node, source))
                self.entries[node] = _Entry(0, constant.item())
                return
        else:
            raise CaptureError(f"its graph has an input of kind {kind}")
        self.sources.append((node, source))
        self._outside(node, 0, role, batched=self._is_batched(source))

    def _is_batched(self, source: Source) -> bool:
        return source.kind == "input" and self.exported.batched[source.index]

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
                symbolic = self.exported.batch is None and leading_batch and dimension == 0
                sizes.append(-1 if symbolic else size)
                continue
            factor = size.node.expr / self.exported.batch
            if not factor.is_Integer or factor <= 0:
                return None
            sizes.append(-int(factor))
        return tuple(sizes)

    # Deciding --------------------------------------------------------------------------------

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem and self._getitem(node):
            return
        if is_made_from_nothing(node):
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
        self.by_torch[node] = level
        if reason and name and name not in SHAPE_OPERATORS and computes(node):
            self.unsupported[node] = Unsupported(name.rpartition(":")[2], where(node), reason)
        self._outside(node, level, ("input", node.name), self._carries_batch(node))

    def _carries_batch(self, node: torch.fx.Node) -> bool:
        """Whether dimension 0 is the batch, for a graph of one batch size."""
        result = node.meta.get("val")
        if self.exported.batch is not None or not isinstance(result, torch.Tensor):
            return False
        return (
            result.dim() >= 1
            and result.shape[0] == self.exported.static_batch
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
            if computing and not products and len(computing) < 2:
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
        spec_count = len(outputs) + len(self.exported.constant_outputs)
        final = []
        for index in range(spec_count):
            if index in self.exported.constant_outputs:
                final.append(self.exported.constant_outputs[index])
                continue
            output = next(results)
            final.append(Slot(slots[output]) if isinstance(output, torch.fx.Node) else output)
        self._check_buffer_readers(outputs)
        return Captured(
            sources=sources,
            steps=steps,
            slots=len(slots),
            outputs=final,
            out_spec=self.exported.out_spec,
            static_batch=self.exported.static_batch,
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
                path = next(source.path for node, source in self.sources if node is buffer)
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
            self._positions = {n: i for i, n in enumerate(self.program.graph.nodes)}
        return self._positions[node]

    def _region_step(self, level, region: RegionBuilder, wanted, slots) -> Region | None:
        results, layouts, names, stored = [], [], [], []
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
            stored.append(slots[node])
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
            results=stored,
            leaf_layouts=[layout for _, layout in region.leaves],
            result_layouts=layouts,
            operators=operators,
        )

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


def _device_type(program) -> str:
    """Of the tensors that a call passes."""
    given = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"}
    values = [node.meta["val"] for node in program.graph.nodes if node.name in given]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return max(tensors, key=lambda tensor: tensor.dim()).device.type


def _is_literal(path: str, constant: Any) -> bool:
    """`torch.tensor(0.5)` in a forward: the same number at every call."""
    made = path.rpartition(".")[2].startswith("lifted_tensor")
    return made and isinstance(constant, torch.Tensor) and constant.dim() == 0


def _attribute(root: nn.Module, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def _input_name(node: torch.fx.Node, index: int) -> str:
    return f"input_{index}"
