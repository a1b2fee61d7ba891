"""A region of a standalone file: its kernels' programs, what they take, its function."""

from __future__ import annotations

import ctypes
import functools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ingot.capture import Captured
from ingot.capture.captured import Region, resolved
from ingot.capture.derivative import Derivative, derivative_of
from ingot.capture.feed import batched_inputs
from ingot.capture.reference import gradients_reach
from ingot.runtime.library import library
from ingot.runtime.program import Program
from ingot.runtime.signature import BATCH
from ingot.standalone.functions import FunctionPrinter, compute_late, simplify
from ingot.standalone.printing import Names, assigned, wrapped

_CPP_DTYPES = {
    torch.float32: "at::kFloat",
    torch.float64: "at::kDouble",
    torch.float16: "at::kHalf",
    torch.bfloat16: "at::kBFloat16",
    torch.int64: "at::kLong",
    torch.bool: "at::kBool",
}
# Batch sizes at which a run without data is looked at: what differs between them is the batch's.
_BATCHES = (6, 10)


@dataclass(frozen=True)
class TensorSpec:
    """What a program expects of a tensor, or makes: sizes with -k for k times the batch."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    updated: bool = False

    def on_meta(self, batch: int) -> torch.Tensor:
        sizes = [-size * batch if size < 0 else size for size in self.sizes]
        return torch.empty_strided(sizes, self.strides, dtype=self.dtype, device="meta")

    def cpp(self) -> str:
        """An initialiser of the binding's `Spec`."""
        sizes = [
            "batch" if s == BATCH else f"{-s} * batch" if s < 0 else str(s) for s in self.sizes
        ]
        dense, fp32 = _is_contiguous(self), self.dtype == torch.float32
        fields = [f'"{self.name}"', f"{{{', '.join(sizes)}}}"]
        if not (dense and fp32 and not self.updated):
            fields.append("{}" if dense else f"{{{', '.join(map(str, self.strides))}}}")
        if not fp32 or self.updated:
            fields.append(_CPP_DTYPES[self.dtype])
        if self.updated:
            fields.append("true")
        return f"{{{', '.join(fields)}}}"


def _is_contiguous(spec: TensorSpec) -> bool:
    return all(spec.on_meta(batch).is_contiguous() for batch in (1, 2))


class Layouts:
    """Sizes and strides of every tensor of a capture's run, found by runs without data."""

    def __init__(self, captured: Captured, module: nn.Module, inputs: Sequence[torch.Tensor]):
        if captured.static_batch is None:
            runs = [_run_on_meta(captured, module, inputs, batch) for batch in _BATCHES]
            self.slots = [_symbolic(*each) for each in zip(*runs, strict=True)]
        else:
            values = _run_on_meta(captured, module, inputs, None)
            self.slots = [_symbolic(value, value) for value in values]

    def spec(self, slot: int, name: str, updated: bool) -> TensorSpec:
        found = self.slots[slot]
        assert found is not None, "a leaf that is no tensor"
        return TensorSpec(name, *found, updated)


def _symbolic(first: Any, second: Any) -> tuple | None:
    """(dtype, sizes, strides) of a tensor, seen at both batch sizes."""
    if not isinstance(first, torch.Tensor):
        return None
    a, b = _BATCHES
    sizes = tuple(m if m == n else -(m // a) for m, n in zip(first.shape, second.shape))
    varies = [m > 1 or n > 1 for m, n in zip(first.shape, second.shape)]
    if any(
        s < 0 and (m % a or n != m // a * b) for s, m, n in zip(sizes, first.shape, second.shape)
    ):
        return None
    strides = first.stride()
    if any(v and m != n for v, m, n in zip(varies, strides, second.stride())):
        strides = _batch_outermost(sizes)
    return first.dtype, sizes, tuple(s if v else 1 for v, s in zip(varies, strides))


def _batch_outermost(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides that do not depend on the batch's size."""
    strides, step = [0] * len(sizes), 1
    for dimension in sorted(range(len(sizes)), key=lambda d: (sizes[d] >= 0, d), reverse=True):
        strides[dimension] = step
        step *= max(sizes[dimension], 1)
    return tuple(strides)


def _run_on_meta(captured: Captured, module, inputs, batch: int | None) -> list:
    batched, _ = batched_inputs(list(inputs))
    values: list[Any] = []
    for source in captured.sources:
        if source.kind == "input":
            sizes = list(inputs[source.index].shape)
            if batch is not None and batched[source.index]:
                sizes[0] = batch
            values.append(torch.empty(sizes, dtype=inputs[source.index].dtype, device="meta"))
            continue
        tensor = tensor_of(source, module)
        values.append(tensor.to("meta") if isinstance(tensor, torch.Tensor) else tensor)
    values += [None] * (captured.slots - len(values))
    for step in captured.steps:
        if isinstance(step, Region):
            size = captured.static_batch if batch is None else batch
            for slot, layout in zip(step.results, step.result_layouts):
                sizes, strides = layout.allocation(size or 1)
                values[slot] = torch.empty_strided(
                    sizes, strides, dtype=layout.dtype, device="meta"
                )
            continue
        args, kwargs = resolved((step.args, step.kwargs), values)
        with torch.no_grad():
            values[step.result] = step.target(*args, **kwargs)
    return values


def tensor_of(source, module: nn.Module) -> Any:
    """A source's that is no input."""
    if source.kind == "constant":
        return source.tensor
    path, _, name = source.path.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if source.kind == "parameter" else owner._buffers)[name]


class FileRegion:
    """One region as the file holds it, however often the model's forward runs it."""

    def __init__(
        self,
        region: Region,
        layouts: Layouts,
        batch: int | None,
        precision: str,
        sm: int,
        written: tuple[frozenset[int], ...] = (frozenset(),) * 3,
    ):
        """written: places of leaves and of results that the caller may write into before
        backward, which reads them."""
        self.region, self.batch, self.written = region, batch, written
        graph = region.graph
        self.program = Program(
            graph,
            device="cuda",
            precision=precision,
            leaf_layouts=region.leaf_layouts,
            result_layouts=region.result_layouts,
            options={"sm": sm},
        )
        signature = self.program.signature
        self.leaves = [
            layouts.spec(slot, leaf.name, at in signature.updates)
            for at, (slot, leaf) in enumerate(zip(region.leaves, signature.leaves, strict=True))
        ]
        self.results = [
            TensorSpec(result["name"], layout.dtype, *_made(layout, batch))
            for result, layout in zip(graph["results"], region.result_layouts, strict=True)
        ]
        self.name = self.class_name = ""
        self.modes: list[str] = []
        # The same with the results of products among its results, and what backward makes of them.
        self.storing: FileRegion | None = None
        self.derivative: Derivative | None = None

    def key(self) -> tuple:
        """What makes two regions one."""
        values = [
            {k: v for k, v in value.items() if k not in ("name", "origin", "source")}
            for value in self.region.graph["values"]
        ]
        results = [result["value"] for result in self.region.graph["results"]]
        text = json.dumps([values, results])
        leaves = [(s.dtype, s.sizes, s.strides, s.updated) for s in self.leaves]
        layouts = (tuple(self.region.leaf_layouts), tuple(self.region.result_layouts))
        return text, tuple(leaves), layouts, self.batch, self.written

    def leaf_strides(self) -> list[list[int]]:
        """Over the graph's axes."""
        size = self.batch or 2
        return [
            layout.sizes_and_strides(spec.on_meta(size))[1]
            for spec, layout in zip(self.leaves, self.region.leaf_layouts, strict=True)
        ]

    def binding(self) -> str:
        """The C++ text of the function that Python calls."""
        storing = "bool storing" if self._stores() else "bool"
        lines = [f"Tensors {self.name}(const Tensors& given, {storing}) {{"]
        lines += [f"  const int64_t batch = {self._batch_text()};"]
        lines += _list_of_specs("leaves", self.leaves)
        kernels = f"run_{self.name}"
        if self._stores():
            count = len(self.results)
            assert self.storing.results[:count] == self.results
            kernels = f"storing ? run_{self.storing.name} : {kernels}"
            lines += _list_of_specs("made", self.results, constant=False)
            lines += _list_of_specs("stored", self.storing.results[count:])
            lines += ["  if (storing) made.insert(made.end(), stored.begin(), stored.end());"]
        else:
            lines += _list_of_specs("made", self.results)
        return "\n".join([*lines, f"  return run({kernels}, batch, given, leaves, made);", "}"])

    def programs(self) -> list[str]:
        """Names of what the binding calls."""
        names = [self.name, *([self.storing.name] if self._stores() else [])]
        return [f"run_{name}" for name in names]

    def _stores(self) -> bool:
        return self.storing is not None and self.storing is not self

    def _batch_text(self) -> str:
        if self.batch is not None:
            return str(self.batch)
        for at, spec in enumerate(self.leaves):
            for dimension, size in enumerate(spec.sizes):
                if size < 0:
                    divisor = f" / {-size}" if size < BATCH else ""
                    return f"given.at({at}).size({dimension}){divisor}"
        return "1"

    def description(self) -> str:
        what = ", ".join(o["what"] for o in self.region.operators)
        places: dict[str, list[str]] = {}
        for where in sorted({o["where"] for o in self.region.operators if o["where"]}):
            file, _, line = where.rpartition(":")
            places.setdefault(file, []).append(line)
        lines = ", ".join(f"{file}:{', '.join(found)}" for file, found in places.items())
        text = f"{what} ({lines})" if lines else what
        text = text.replace("\\", "/").replace('"', "'")
        return textwrap.fill(text, 110, subsequent_indent="    ")

    # Gradients --------------------------------------------------------------------------------

    def argument_names(self) -> list[str]:
        names = Names(["torch", "needs"])
        return [names.new(spec.name) for spec in self.leaves]

    def has_product(self) -> bool:
        return any(value["op"] == "matmul" for value in self.region.graph["values"])

    def take_gradients(self, storing: FileRegion | None) -> None:
        """storing: as captured for gradients; None where it has no product."""
        updates = any(spec.updated for spec in self.leaves)
        if storing is None and not updates:
            return  # PyTorch's operators do as well
        self.storing = storing if storing and storing.key() != self.key() else self
        size = self.batch or _BATCHES[0]
        leaves = [
            torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu")
            for meta in (spec.on_meta(size) for spec in self.leaves)
        ]
        needed = [
            role != "buffer" and spec.dtype.is_floating_point
            for spec, role in zip(self.leaves, self._roles(), strict=True)
        ]
        self.products = (storing or self).region.reference.products
        found = derivative_of(
            (storing or self).region, leaves, needed, size if not self.batch else None
        )
        if found.batch in (None, self.batch):
            self.derivative = found
            simplify(found.graph.graph)
            compute_late(found.graph.graph)
            if not any(place >= len(self.results) for place in self._stored()):
                self.storing = self
        elif not self.products and not updates:
            self.storing = None  # backward would compute the product again

    def _roles(self) -> list[str | None]:
        return [leaf.role for leaf in self.program.signature.leaves]

    def attribute_lines(self) -> list[str]:
        lines = [f'name = "{self.name}"']
        if self.storing is not None:
            group = "_INGOT_STORING" if self._stores() else "_INGOT_PLAIN"
            lines += [f"storing, count = {group}, {len(self.results)}"]
            lines += [f"{name} = {places!r}" for name, places in self._kept().items() if places]
            if constant := self.constant_results():
                lines += [f"constant = {constant!r}"]
            if leads := self.leads():
                lines += [f"leads = {leads!r}"]
        return lines

    def reference_lines(self, indent: str) -> list[str]:
        names = self.argument_names()
        printer = FunctionPrinter(self.region.reference.module.graph, names)
        header = wrapped(f"def reference({', '.join(names)}):", indent)
        return [*header, *printer.lines(indent + "    ")]

    def derivative_lines(self, indent: str) -> list[str]:
        if self.derivative is None:
            return []
        found, graph = self.derivative, self.derivative.graph.graph
        names = Names(["torch", "needs", "given", "unused"])
        leaves = [names.new(spec.name) for spec in self.leaves]
        of_place = {place: name for name, place in self.products.items()}
        stored = [names.new(of_place[place]) for place in found.stored]
        kept = self._kept()
        read = [n for n, place in zip(stored, found.stored) if place in kept["stored"]]
        gradients = [
            names.new(f"d_{spec.name}")
            for spec, differs in zip(self.results, found.differentiable, strict=True)
            if differs
        ]
        arguments = [*leaves, *stored, *gradients]
        given = [*(leaves[at] for at in kept["read"]), *read, *gradients]
        results: list[Any] = [None] * len(leaves)
        needs = [""] * len(leaves)
        output = next(n for n in graph.nodes if n.op == "output")
        for at, result in zip(found.wanted, output.args[0], strict=True):
            results[at], needs[at] = result, f"needs[{at}]"
        held = [name for name, role in zip(leaves, self._roles(), strict=True) if role != "input"]
        printer = FunctionPrinter(graph, arguments, needs, results, free=True, held=held)
        inside = indent + "    "
        # What nothing reads any more is freed: the list must not hold it.
        targets = given if len(given) > 1 else [f"({given[0]},)"]
        taken = [*assigned(targets, "given", inside), f"{inside}given.clear()"]
        return [f"{indent}def derivative(needs, given):", *taken, *printer.lines(inside)]

    def copies(self) -> bool:
        """Whether backward reads what may be written before."""
        kept = self._kept() if self.storing is not None else {}
        return any(kept.get(f"copied{of}") for of in ("", "_inputs", "_results"))

    def _kept(self) -> dict[str, tuple[int, ...]]:
        """Places of leaves and results, by what backward does with them."""
        nodes = [n for n in self.region.reference.module.graph.nodes if n.op == "placeholder"]
        read = again = tuple(at for at, node in enumerate(nodes) if node.users)
        stored = self._stored()
        if self.derivative is not None:
            read = tuple(at for at in range(len(nodes)) if self.derivative.reads[at])
        return {
            "read": read,
            "again": tuple(at for at in again if at not in read),
            "stored": stored,
            "copied": tuple(at for at in read if at in self.written[0]),
            "copied_inputs": tuple(at for at in read if at in self.written[1]),
            "copied_results": tuple(place for place in stored if place in self.written[2]),
        }

    def _stored(self) -> tuple[int, ...]:
        """Places of the results that the derivative reads."""
        if self.derivative is None:
            return ()
        stored = enumerate(self.derivative.stored, len(self.leaves))
        return tuple(place for at, place in stored if self.derivative.reads[at])

    def constant_results(self) -> tuple[int, ...]:
        """Results that no gradient goes through."""
        return tuple(at for at, leaves in enumerate(self._reached) if not leaves)

    def leads(self) -> tuple[tuple[int, ...], ...]:
        """By result the leaves that its gradient goes to; nothing where these are all of them, for
        every result."""
        partial = any(leaves and leaves != self._differentiable for leaves in self._reached)
        return self._reached if partial else ()

    @functools.cached_property
    def _differentiable(self) -> tuple[int, ...]:
        specs = enumerate(zip(self.leaves, self._roles(), strict=True))
        return tuple(i for i, (s, role) in specs if role != "buffer" and s.dtype.is_floating_point)

    @functools.cached_property
    def _reached(self) -> tuple[tuple[int, ...], ...]:
        """By result the leaves that its gradient goes to."""
        reached = gradients_reach(self.region.reference)
        return tuple(tuple(at for at in self._differentiable if at in leaves) for leaves in reached)


def _list_of_specs(name: str, specs: Sequence[TensorSpec], constant: bool = True) -> list[str]:
    """Its definition, several of them on a line."""
    lines = [f"  {'const ' if constant else ''}std::vector<Spec> {name} = {{"]
    if len(lines[0]) + sum(len(spec.cpp()) + 2 for spec in specs) > 98:
        lines.append("      ")
    for at, spec in enumerate(specs):
        text = spec.cpp() + (", " if at < len(specs) - 1 else "};")
        if len((lines[-1] + text).rstrip()) > 100:
            lines[-1] = lines[-1].rstrip()
            lines.append("      ")
        lines[-1] += text
    return lines


def _made(layout, batch: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a result."""
    if batch is not None:
        return layout.allocation(batch)
    # The batch is the outermost axis, so that no stride depends on it but those of dimensions
    # along no axis, whose extent is 1.
    return tuple(layout.shape), layout.allocation(2)[1]


def cuda_sources(regions: Sequence[FileRegion]) -> tuple[str, dict[str, dict]]:
    """(what all have in common, {name: {"kernels", "source"}}). Raises IngotError."""
    loaded = library()
    programs = [region.program for region in regions]
    handles = (ctypes.c_void_p * len(programs))(*[p._handle.value for p in programs])
    options = {
        "names": [region.name for region in regions],
        "leaf_strides": [region.leaf_strides() for region in regions],
    }
    text = ctypes.c_void_p()
    loaded.check(
        loaded.ingot_standalone_source(
            handles, len(programs), json.dumps(options).encode(), ctypes.byref(text)
        )
    )
    found = loaded.take_json(text)
    return found["common"], {p["name"]: p for p in found["programs"]}
