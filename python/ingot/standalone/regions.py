"""A region of a standalone file: its kernels' programs, what they take, its function."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ingot.capture import Captured
from ingot.capture.captured import Region
from ingot.capture.derivative import Derivative, derivative_of
from ingot.capture.feed import batched_inputs
from ingot.capture.recorded import outputs_of
from ingot.capture.reference import gradients_reach
from ingot.standalone.backward import DEVICE, FileBackward, backward_of
from ingot.standalone.functions import FunctionPrinter, compute_late, simplify
from ingot.standalone.printing import Names, assigned, wrapped
from ingot.standalone.programs import BATCHES, FileProgram, Layouts, list_of_specs


def sources_of(captured: Captured, module: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable:
    """What fills the first slots of a run without data, by the batch size (None: the inputs')."""
    batched, _ = batched_inputs(list(inputs))

    def values(batch: int | None) -> list:
        found: list[Any] = []
        for source in captured.sources:
            if source.kind == "input":
                sizes = list(inputs[source.index].shape)
                if batch is not None and batched[source.index]:
                    sizes[0] = batch
                found.append(torch.empty(sizes, dtype=inputs[source.index].dtype, device="meta"))
                continue
            tensor = tensor_of(source, module)
            found.append(tensor.to("meta") if isinstance(tensor, torch.Tensor) else tensor)
        return found

    return values


def tensor_of(source, module: nn.Module) -> Any:
    """A source's that is no input."""
    if source.kind == "constant":
        return source.tensor
    path, _, name = source.path.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if source.kind == "parameter" else owner._buffers)[name]


class FileRegion(FileProgram):
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
        self.region, self.written, self._how = region, written, (precision, sm)
        super().__init__(
            region.graph,
            region.leaf_layouts,
            region.result_layouts,
            layouts.specs_of(region),
            batch,
            precision,
            sm,
        )
        self.class_name = ""
        self.modes: list[str] = []
        # The same with the results of products among its results, and what backward makes of them.
        self.storing: FileRegion | None = None
        self.derivative: Derivative | None = None
        self.backward: FileBackward | None = None  # kernels of it

    def key(self) -> tuple:
        return *super().key(), self.written

    def binding(self) -> str:
        if not self._stores():
            return super().binding()
        count = len(self.results)
        assert self.storing.results[:count] == self.results
        lines = [f"Tensors {self.name}(const Tensors& given, bool storing) {{"]
        lines += [f"  const int64_t batch = {self._batch_text()};"]
        lines += list_of_specs("leaves", self.leaves)
        lines += list_of_specs("made", self.results, constant=False)
        lines += list_of_specs("stored", self.storing.results[count:])
        lines += ["  if (storing) made.insert(made.end(), stored.begin(), stored.end());"]
        kernels = f"storing ? run_{self.storing.name} : run_{self.name}"
        return "\n".join([*lines, f"  return run({kernels}, batch, given, leaves, made);", "}"])

    def programs(self) -> list[str]:
        return [*super().programs(), *(self.storing.programs() if self._stores() else [])]

    def _stores(self) -> bool:
        return self.storing is not None and self.storing is not self

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

    def take_gradients(self, storing: FileRegion | None, example: int) -> None:
        """storing: as captured for gradients; None where it has no product. example: a batch size,
        by which it is decided what pays."""
        updates = any(spec.updated for spec in self.leaves)
        if storing is None and not updates:
            return  # PyTorch's operators do as well
        self.storing = storing if storing and storing.key() != self.key() else self
        needed = [
            role != "buffer" and spec.dtype.is_floating_point
            for spec, role in zip(self.leaves, self._roles(), strict=True)
        ]
        source = storing or self
        self.products = source.region.reference.products
        if storing is not None:
            inputs = [role == "input" for role in self._roles()]
            size = self.batch or example * source.region.per_sample
            of_call = (needed, inputs, self.batch, size, self._how)
            self.backward = backward_of(source.region, (self.leaves, source.results), *of_call)
        if self.backward is not None:
            found = self.backward.derivative
        else:
            size = self.batch or BATCHES[0]
            leaves = [spec.on_host(size) for spec in self.leaves]
            found = derivative_of(source.region, leaves, needed, None if self.batch else size)
        if found.batch in (None, self.batch):
            self.derivative = found
            if self.backward is None:
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
        found = self.derivative
        names = Names(["torch", "needs", "given", "unused", DEVICE])
        leaves = [names.new(spec.name) for spec in self.leaves]
        of_place = {place: name for name, place in self.products.items()}
        results = (self.storing or self).results  # statistics among them, which have names there
        stored = [names.new(of_place.get(at, results[at].name)) for at in found.stored]
        kept = self._kept()
        read = [n for n, place in zip(stored, found.stored) if place in kept["stored"]]
        gradients = [
            names.new(f"d_{spec.name}")
            for spec, differs in zip(self.results, found.differentiable, strict=True)
            if differs
        ]
        arguments = [*leaves, *stored, *gradients]
        given = [*(leaves[at] for at in kept["read"]), *read, *gradients]
        held = [name for name, role in zip(leaves, self._roles(), strict=True) if role != "input"]
        inside = indent + "    "
        # What nothing reads any more is freed: the list must not hold it.
        targets = given if len(given) > 1 else [f"({given[0]},)"]
        taken = [*assigned(targets, "given", inside), f"{inside}given.clear()"]
        if self.backward is not None:
            lines = self.backward.lines(arguments, given, held, len(leaves), inside)
        else:
            lines = self._by_operators(arguments, held, inside)
        return [f"{indent}def derivative(needs, given):", *taken, *lines]

    def _by_operators(self, arguments: list[str], held: list[str], indent: str) -> list[str]:
        found, graph = self.derivative, self.derivative.graph.graph
        results: list[Any] = [None] * len(self.leaves)
        needs = [""] * len(self.leaves)
        for at, result in zip(found.wanted, outputs_of(graph), strict=True):
            results[at], needs[at] = result, f"needs[{at}]"
        printer = FunctionPrinter(graph, arguments, needs, results, free=True, held=held)
        return printer.lines(indent)

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
