"""Puts a cut graph together: steps in order, each region with its graph, leaves and results."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch

from ingot.capture.captured import Captured, CaptureError, Region, Slot, TorchStep
from ingot.capture.convolution_bias import in_place
from ingot.capture.custom_ops import run_batch_norm, without_autocast
from ingot.capture.cutting import Cut
from ingot.capture.joining import concatenated
from ingot.capture.kept import Kept
from ingot.capture.layout import (
    Joined,
    Leaf,
    UnfitError,
    Value,
    has_channels_innermost,
    hint,
    may_lie_channels_last,
)
from ingot.capture.nodes import (
    IMPLIED,
    JOINED,
    RETURNED,
    WITHOUT_AUTOCAST,
    hands_out_memory,
    is_pure,
    may_share_memory,
    moves_statistics,
    mutates,
    operator_name,
    origin_or_name,
    region_name,
    schema_name,
    where,
)
from ingot.capture.recurrent import run_recurrent
from ingot.capture.reference import reference_of
from ingot.capture.region import RegionBuilder
from ingot.capture.table import SHAPE_OPERATORS
from ingot.capture.wide_samples import share_wide_samples
from ingot.runtime.layouts import JoinedLayout

_aten = torch.ops.aten
_RESHAPE = _aten.reshape.default


class NotStoredError(Exception):
    """A node's tensor is wanted outside its region, where only operators inside can have it."""

    def __init__(self, node: torch.fx.Node):
        super().__init__(node.name)
        self.node = node


class StatisticsElsewhereError(Exception):
    """Running statistics that these nodes of regions move or read are moved or read elsewhere."""

    def __init__(self, nodes: list[torch.fx.Node]):
        super().__init__(", ".join(node.name for node in nodes))
        self.nodes = nodes


def assembled(cut: Cut) -> Captured:
    """Raises NotStoredError, UnknownSizeError, StatisticsElsewhereError, and CaptureError where
    PyTorch must run the whole graph."""
    return _Assembly(cut).run()


class _Assembly:
    def __init__(self, cut: Cut):
        self.cut, self.feed, self.gradients = cut, cut.feed, cut.gradients
        self.entries, self.regions, self.taken = cut.entries, cut.regions, cut.taken
        self.by_torch = dict(cut.by_torch)
        self.positions = {node: at for at, node in enumerate(cut.feed.graph.nodes)}
        self.regrouped: dict[int, list[torch.fx.Node]] = {}

    def run(self) -> Captured:
        outputs = next(n for n in self.feed.graph.nodes if n.op == "output").args[0]
        slots: dict[torch.fx.Node, int] = {}
        sources = []
        for node, source in self.cut.sources:
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
            delegate_batches=frozenset(self.cut.delegate_batches),
            unsupported=list(self.cut.unsupported.values()),
        )

    def _check_buffer_readers(self, outputs) -> None:
        """One region may move a buffer several times, in order, and so may PyTorch; nothing else
        may look at it."""
        for buffer in self.cut.updated | self.cut.shared_statistics:
            readers = list(buffer.users)
            if all(reader in self.by_torch and not may_share_memory(reader) for reader in readers):
                continue
            # A norm that reads them reads them in backward again, where they have been moved.
            levels = {
                self.taken.get(reader) if _moves(reader, self.gradients) else None
                for reader in readers
            }
            if len(levels) > 1 or None in levels or buffer in outputs:
                norms = [r for r in readers if r in self.taken and moves_statistics(r)]
                if norms and buffer not in outputs:
                    raise StatisticsElsewhereError(norms)
                paths = (source.path for node, source in self.cut.sources if node is buffer)
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
                    steps += [self._torch_step(node, slots) for node in self.regrouped[level]]
            elif RETURNED in item.meta:
                slots[item] = slots[item.args[0]]
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
            if node in self.by_torch or self._regroups(node):
                for argument in node.all_input_nodes:
                    want(argument)

        for output in outputs:
            if isinstance(output, torch.fx.Node):
                want(output)
        for node in [n for n in self.by_torch if moves_statistics(n) or not is_pure(n)]:
            want(node)
        for region in self.regions.values():
            for node, _ in region.leaves:
                want(node)
        # Results of one region that are leaves of another were wanted above.
        self.by_torch = dict(
            sorted(self.by_torch.items(), key=lambda item: self.positions[item[0]])
        )
        return wanted

    def _regroups(self, node: torch.fx.Node) -> bool:
        """Of a backward pass: whether a node of a region is another one's memory, seen in other
        dimensions, and nobody can write into it. Both may then be results, without a copy."""
        if not self.feed.staged or node not in self.taken or node.target is not _RESHAPE:
            return False
        whole = node.args[0]
        dense = whole.target is _RESHAPE or schema_name(whole.target) not in SHAPE_OPERATORS
        return dense and not _is_handed_out(node)

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
            if isinstance(layout, JoinedLayout):
                continue  # which lies as PyTorch's does
            if has_channels_innermost(layout.axes) and may_lie_channels_last(node):
                continue
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
            if own == level
            and node in wanted
            and isinstance(self.entries[node].value, (Value, Joined))
        }
        self.regrouped[level] = [n for n in given if self._regroups(n) and n.args[0] in given]
        for node in self.regrouped[level]:
            del given[node]
        taken = {value.id for value in given.values() if isinstance(value, Value)}
        for node, value in given.items():
            try:
                identity, layout = self._result(region, node, value, taken)
            except UnfitError as unfit:
                raise NotStoredError(node) from unfit
            layouts.append(layout)
            results.append(identity)
            names.append(node.name)
            slots[node] = len(slots)
            made.append(slots[node])
        same = _same_memory(region, given)
        kept = Kept(self.cut, level, list(given), results, layouts, names)
        nodes = [node for node, own in self.taken.items() if own == level]
        updates = any(self.entries[n].level == level and moves_statistics(n) for n in nodes)
        if not results and not updates:
            return None
        computing = [
            node
            for node in nodes
            if node.target is not operator.getitem
            and schema_name(node.target) not in SHAPE_OPERATORS
        ]
        named = [node for node in computing if IMPLIED not in node.meta] or computing
        operators = [
            {
                "what": operator_name(node),
                "where": where(node),
                "module": origin_or_name(node),
                "node": node.name,
            }
            for node in named
        ]
        graph = {
            "ingot_graph": 1,
            "name": region_name(named),
            "values": region.values,
            "results": [
                {"value": v, "name": n}
                for value, name in zip(results, names)
                for v, n in _apart(value, name)
            ],
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
                kept.values,
                kept.statistics,
                self._literals(),
            ),
            written=kept.written,
            written_leaves=kept.written_leaves,
            written_inputs=kept.written_inputs,
            tables=kept.tables,
            same=same,
            streamed=self.cut.gradients and share_wide_samples(nodes, self.cut.needing),
            per_sample=self.cut.per_sample[level],
        )

    def _result(self, region: RegionBuilder, node, value: Value | Joined, taken: set[int]):
        """The id of what is stored for a node, several for what is joined, and how it lies. taken:
        ids of what is stored besides."""
        tensor = node.meta["val"]
        single = _strides_of_single(tensor)
        if isinstance(value, Joined):
            order = _memory_order_of(tensor)
            return tuple(part.id for part in value.parts), region.joined_layout(
                value, order, single
            )
        computed = region.behind_views(value)
        if region.is_leaf(computed) or computed.id in taken:
            computed = value  # two results do not share memory
        taken.add(computed.id)
        return computed.id, region.result_layout(value, computed, single)

    def _literals(self) -> dict[torch.fx.Node, Any]:
        numbers = (bool, int, float)
        return {n: e.value for n, e in self.entries.items() if isinstance(e.value, numbers)}

    def _torch_step(self, node: torch.fx.Node, slots: dict) -> TorchStep:
        def reference(argument):
            return Slot(slots[argument]) if isinstance(argument, torch.fx.Node) else argument

        args = torch.fx.node.map_aggregate(node.args, reference)
        kwargs = torch.fx.node.map_aggregate(node.kwargs, reference)
        target = in_place(node, node.target)
        if target is torch.ops.ingot.batch_norm.default:
            target = run_batch_norm
        if target is torch.ops.ingot.recurrent.default:
            target = run_recurrent
        if JOINED in node.meta:
            target = partial(concatenated, _memory_order_of(node.meta["val"]))
        if WITHOUT_AUTOCAST in node.meta:
            target = without_autocast(target, self.feed.device_type)
        slots[node] = len(slots)
        return TorchStep(target, args, kwargs, slots[node], operator_name(node), where(node))


def _same_memory(region: RegionBuilder, given: dict) -> dict[int, int]:
    """Region.same of these results. What a convolution reads as an image, and the next region with
    its dimensions merged, are two results, whose gradients come apart."""
    first: dict[int, int] = {}
    found = {}
    for at, (node, value) in enumerate(given.items()):
        if isinstance(value, Value) and not hands_out_memory(node):
            computed = region.behind_views(value).id
            if computed in first:
                found[at] = first[computed]
            first.setdefault(computed, at)
    return found


def _apart(value: int | tuple[int, ...], name: str) -> list[tuple[int, str]]:
    """The graph's values of one of a region's results, with names."""
    if isinstance(value, int):
        return [(value, name)]
    return [(each, f"{name}_{at}") for at, each in enumerate(value)]


def _memory_order_of(tensor: torch.Tensor) -> list[int]:
    """Of dimensions, outermost first, as PyTorch lays the tensor out."""
    strides = [hint(stride) for stride in tensor.stride()]
    return sorted(range(len(strides)), key=lambda at: -strides[at])


def _strides_of_single(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """PyTorch's strides of dimensions of extent 1, where they depend on no batch; () for none."""
    found = tuple(
        stride if type(size) is int and size == 1 and type(stride) is int else None
        for size, stride in zip(tensor.shape, tensor.stride())
    )
    return found if any(stride is not None for stride in found) else ()


def _is_handed_out(node: torch.fx.Node) -> bool:
    """Whether it, or a view of it, is a result of the graph, or written. (To hands_out_memory(),
    which asks of any graph, what Ingot's products in a backward pass give might be a view.)"""
    return any(
        user.op == "output"
        or mutates(user)
        or (schema_name(user.target) in SHAPE_OPERATORS and _is_handed_out(user))
        for user in node.users
    )


def _moves(reader: torch.fx.Node, gradients: bool) -> bool:
    is_own = reader.target is torch.ops.ingot.batch_norm.default
    return moves_statistics(reader) and not (gradients and is_own and not reader.args[6])


def _other_order(tensor: torch.Tensor, axes: tuple) -> list[int] | None:
    """Of dimensions, outermost first, as PyTorch lays a tensor out that a region would lay out in
    another one; None where the two agree, or PyTorch's elements overlap."""
    sizes = [hint(size) for size in tensor.shape]
    strides = [hint(stride) for stride in tensor.stride()]
    varying = [at for at, size in enumerate(sizes) if size > 1]
    if len({strides[at] for at in varying}) < len(varying) or 0 in sizes:
        return None
    order = sorted(varying, key=lambda at: -strides[at])
    if order == sorted(varying, key=lambda at: axes[at]):
        return None
    return [*(at for at in range(len(sizes)) if at not in varying), *order]
