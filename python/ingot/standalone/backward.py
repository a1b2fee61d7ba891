"""The backward pass of a region of a standalone file, as kernels.

As in a live module (live/backward.py) the region's derivative is a graph that is cut into regions
again, with products over the batch between them, which give the weights' gradients. The products
that give the inputs' stand alone, too, so that they run where these are needed. Where a region
computes such gradients all the same, a second graph is written, without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ingot.capture.backward_operators import BACKWARD_OPERATORS
from ingot.capture.captured import Captured, CaptureError, Region, Slot, TorchStep, slots_read
from ingot.capture.derivative import derivative_of
from ingot.capture.nodes import schema_name
from ingot.capture.recorded import outputs_of
from ingot.capture.table import SHAPE_OPERATORS
from ingot.live.backward import captured_derivative, like
from ingot.live.products import gains, graph_of, transposed_product
from ingot.log import logger
from ingot.runtime.library import STATUS_UNSUPPORTED, IngotError
from ingot.runtime.signature import BATCH
from ingot.standalone.constants import Constants
from ingot.standalone.functions import any_of
from ingot.standalone.printing import Names, assigned, tuple_text, value_text, wrapped
from ingot.standalone.programs import (
    BatchProduct,
    FileProgram,
    Layouts,
    TensorSpec,
    check_written,
)
from ingot.standalone.steps import StepPrinter

_aten = torch.ops.aten
_PRODUCTS = (transposed_product, _aten.mm.default)
# A batch product's samples, up to which it is not PyTorch's (TF32's sums are no longer), and the
# fewest features of either operand.
_MOST_SAMPLES, _FEWEST = {"fp32": 1 << 17, "tf32": 1 << 15}, 4
_MOST_CONSTANTS = 1 << 10  # numbers of a tensor, written down as text
# Where the file is written: the importer's rules for a GPU ask what tensors of one are.
_WRITTEN_ON = "cpu"
DEVICE = "device"  # that of the tensors given, by name


class FileBackward:
    """variants: for all gradients, and without the inputs' where that is another graph; derivative:
    the first one's, as if it read what any of them reads."""

    def __init__(self, variants: Sequence[Variant]):
        self.variants = variants
        reads = zip(*(variant.derivative.reads for variant in variants), strict=True)
        self.derivative = replace(variants[0].derivative, reads=tuple(map(any, reads)))

    def share(
        self, known: dict[tuple, FileProgram], constants: Constants, named: Callable[[str], str]
    ) -> None:
        """Equal programs of the file become one, and equal constants. named: gives a new program a
        name of its own, from what it is."""

        def one(program: FileProgram, kind: str) -> FileProgram:
            found = known.setdefault(program.key(), program)
            if found is program:
                program.name = named(kind)
            return found

        for variant in self.variants:
            for slot, source in enumerate(variant.captured.sources):
                if source.kind == "constant":
                    variant.constants[slot] = constants.text(source.tensor, DEVICE)
            variant.regions = [one(program, "backward") for program in variant.regions]
            for at, program in variant.products.items():
                over_batch = variant.captured.steps[at].target is transposed_product
                kind = "batch_product" if over_batch else "product"
                variant.products[at] = one(program, kind)

    def lines(
        self,
        arguments: Sequence[str],
        given: Sequence[str],
        held: Sequence[str],
        leaves: int,
        indent: str,
    ) -> list[str]:
        """The statements that give the gradients of so many leaves. arguments: names of what the
        derivative takes, given: of those that are there; held: those that others hold, so that
        nothing is let go of by them."""
        body: list[str] = []
        for at, variant in enumerate(self.variants):
            last = at == len(self.variants) - 1
            printer = BackwardPrinter(variant, arguments, set(given) - set(held), leaves)
            if not last:
                (rest,) = self.variants[at + 1 :]
                only = [w for w in variant.derivative.wanted if w not in rest.derivative.wanted]
                body += wrapped(f"if {any_of([f'needs[{w}]' for w in only])}:", indent)
                printer.certain = set(only) if len(only) == 1 else set()
            body += printer.lines(indent + ("" if last else "    "))
        return body


class Variant:
    """One graph: its regions' programs, in order, and those of the products between them, by their
    steps' places."""

    def __init__(self, region, specs, needed, inputs, batch: int | None, example: int, how: tuple):
        """region: with what it stores among its results; specs: what its leaves and results are;
        needed: which leaves have gradients, inputs: which are the model's; how: precision and
        compute capability."""
        leaves, results = specs
        given = [spec.on_host(example) for spec in leaves]
        call = (region, given, needed, None if batch else example)
        self.derivative = derivative_of(*call, BACKWARD_OPERATORS)
        if self.derivative.batch not in (None, batch):
            raise CaptureError("it is for one batch size alone")
        if not any(map(_is_large, self.derivative.graph.graph.nodes)):
            raise CaptureError("its products are small")
        alone = dict.fromkeys(self._last_products(inputs), "its result is needed at times alone")
        how_captured = _WRITTEN_ON, how[0], alone
        self.captured = captured_derivative(self.derivative, region, *how_captured)
        constants = (s.tensor for s in self.captured.sources if s.kind == "constant")
        if any(tensor.numel() > _MOST_CONSTANTS for tensor in constants):
            raise CaptureError("it reads a constant tensor of many numbers")
        self.layouts = Layouts(self.captured, self._sources(leaves, results, example))
        self.regions = [
            FileProgram.of_region(step, self.layouts, self.captured.static_batch, *how)
            for step in self.captured.regions
        ]
        self.constants: dict[int, str] = {}  # by slot how they are read
        self.products: dict[int, FileProgram] = {}
        for at, step in enumerate(self.captured.steps):
            if isinstance(step, TorchStep) and step.target in _PRODUCTS:
                if program := self._product(step, example, how):
                    self.products[at] = program
        for program in self.regions:
            check_written(program)

    def takes_what(self, other: Variant) -> bool:
        """Whether both are given the same tensors."""
        own, others = self.derivative, other.derivative
        return own.stored == others.stored and own.differentiable == others.differentiable

    def _last_products(self, inputs: Sequence[bool]) -> list[str]:
        """Nodes whose result is an input's gradient, or that with other dimensions."""
        outputs, found = outputs_of(self.derivative.graph.graph), []
        for at, node in zip(self.derivative.wanted, outputs, strict=True):
            while isinstance(node, torch.fx.Node) and len(node.users) == 1:
                if inputs[at] and node.target is _aten.mm.default:
                    found.append(node.name)
                if schema_name(node.target) not in SHAPE_OPERATORS:
                    break
                node = node.args[0]
        return found

    def computes_in_vain(self, inputs: Sequence[bool]) -> bool:
        """Whether a region with a product gives inputs' gradients beside others."""
        needs = needs_of(self.captured, self.derivative.wanted)
        for step in self.captured.regions:
            of_results = [needs.get(slot, set()) for slot in step.results]
            only_inputs = [bool(n) and all(inputs[at] for at in n) for n in of_results]
            multiplies = any(value["op"] == "matmul" for value in step.graph["values"])
            if multiplies and any(only_inputs) and not all(only_inputs):
                return True
        return False

    def _sources(self, leaves, results, example: int):
        """Leaves, what was stored, and gradients of results, which the file makes contiguous."""
        derivative = self.derivative
        specs = [*leaves, *(results[place] for place in derivative.stored)]
        gradients = [r for r, has in zip(results, derivative.differentiable) if has]

        def values(batch: int | None) -> list:
            known = [spec.on_meta(batch or example) for spec in specs]
            known += [
                torch.empty(spec.on_meta(batch or example).shape, dtype=spec.dtype, device="meta")
                for spec in gradients
            ]
            return [
                source.tensor.to("meta") if source.kind == "constant" else known[source.index]
                for source in self.captured.sources
            ]

        return values

    def _product(self, step: TorchStep, example: int, how: tuple) -> FileProgram | None:
        """aᵀ·b, or a·b; None where PyTorch's is to run."""
        slots = [self.layouts.slots[argument.index] for argument in step.args[-2:]]
        if None in slots or any(size < 0 for _, sizes, _ in slots for size in sizes[1:]):
            return None
        specs = [TensorSpec(name, *slot) for name, slot in zip("ab", slots)]
        a, b = (spec.on_meta(example) for spec in specs)
        if not gains(a, b):
            return None
        over_batch = step.target is transposed_product
        if over_batch and not (a.is_contiguous() and b.is_contiguous() and _is_wide(a, b)):
            return None
        if not over_batch:
            if specs[1].sizes[0] < 0 or specs[0].strides != (a.size(1), 1):
                return None
            # Its rows, whatever they are, are the batch of its graph.
            specs[0] = replace(specs[0], sizes=(BATCH, a.size(1)))
        graph, leaf_layouts, result_layout = graph_of(a.t() if over_batch else a, b)
        layouts = leaf_layouts, [result_layout]
        try:
            if over_batch:
                program = BatchProduct(graph, layouts, a, b, _MOST_SAMPLES[how[0]], *how)
            else:
                program = FileProgram(graph, *layouts, lambda at, *_: specs[at], None, *how)
            check_written(program)
        except IngotError as error:
            if error.status != STATUS_UNSUPPORTED:
                raise
            return None
        return program


def _is_large(node: torch.fx.Node) -> bool:
    """A product that is worth a kernel."""
    if node.target is not _aten.mm.default:
        return False
    a, b = map(like, node.args)
    return a is not None and b is not None and gains(a, b)


def _is_wide(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether neither is a vector, in which nothing tells rows from columns."""
    return min(*a.shape, *b.shape) >= _FEWEST


def backward_of(
    region: Region,
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    needed: Sequence[bool],
    inputs: Sequence[bool],
    batch: int | None,
    example: int,
    how: tuple,
) -> FileBackward | None:
    """None where PyTorch's operators are to run: what the importer or a file does not take, or
    products so small that a launch costs as much."""
    how_made = (inputs, batch, example, how)
    first = _variant(region, specs, needed, *how_made)
    if first is None or not first.products:
        return None
    variants = [first]
    parameters = [n and not i for n, i in zip(needed, inputs, strict=True)]
    if any(parameters) and first.computes_in_vain(inputs):
        rest = _variant(region, specs, parameters, *how_made)
        if rest is not None and rest.takes_what(first):
            variants.append(rest)
    return FileBackward(variants)


def _variant(region: Region, *how) -> Variant | None:
    try:
        return Variant(region, *how)
    except (CaptureError, IngotError) as error:
        logger.debug("the backward pass of %s is PyTorch's: %s", region.graph["name"], error)
    except Exception as error:  # a fault of ours must not stop a file that can do without
        logger.error("backward of %s failed: %r", region.graph["name"], error, exc_info=True)
    return None


class BackwardPrinter(StepPrinter):
    """What a variant computes, each step only where one of the gradients that follow from it is
    needed."""

    def __init__(self, variant: Variant, arguments: Sequence[str], freed: set[str], leaves: int):
        captured = variant.captured
        names = Names([*arguments, "torch", "needs", "given", DEVICE])
        super().__init__(captured, names, DEVICE)
        self.variant, self.leaves, self.arguments = variant, leaves, arguments
        for slot, source in enumerate(captured.sources):
            self.texts[slot] = variant.constants.get(slot) or arguments[source.index]
        self.made = set(freed)
        self.regions = iter(variant.regions)
        self.needs = needs_of(captured, variant.derivative.wanted)
        self.certain: set[int] = set()  # leaves whose gradients are needed where this runs
        self.every = {w for needs in self.needs.values() for w in needs}
        outputs = zip(variant.derivative.wanted, captured.outputs, strict=True)
        self.gradients = {o.index: f"d_{arguments[at]}" for at, o in outputs if isinstance(o, Slot)}

    def lines(self, indent: str) -> list[str]:
        body = self.statements(indent)
        if any(re.search(rf"\b{DEVICE}\b", line) for line in body):
            body.insert(0, f"{indent}{DEVICE} = {self.arguments[-1]}.device")
        return [*body, *self._return(indent)]

    def _run(self, step: Region, indent: str) -> list[str]:
        call = self._kernels(next(self.regions), [self.texts[slot] for slot in step.leaves])
        return self._where_needed(self._results(step), call, step.results, indent)

    def _operate(self, step: TorchStep, position: int, indent: str) -> list[str]:
        program = self.variant.products.get(position)
        if step.target is transposed_product:
            a, b = (self._text(slot) for slot in step.args[1:])
            text = f"{a}.t() @ {b}"
            if program is not None:
                text = f'_ingot_product("{program.name}", {a}, {b}, {program.most_contracted})'
        elif program is not None:
            text = self._kernels(program, [self._text(slot) for slot in step.args])
        else:
            text = self._operation(step)
        return self._where_needed([self._result(step)], text, [step.result], indent)

    def _wanted(self, slot: int, name: str) -> str:
        return self.gradients.get(slot, name)

    @staticmethod
    def _kernels(program: FileProgram, leaves: Sequence[str]) -> str:
        return f'_ingot_backward("{program.name}", {", ".join(leaves)})'

    def _where_needed(self, names, text: str, slots: Sequence[int], indent: str) -> list[str]:
        needs = {w for slot in slots for w in self.needs.get(slot, ())}
        if not needs or needs == self.every or needs & self.certain:
            return assigned(names, text, indent)
        condition = any_of([f"needs[{w}]" for w in sorted(needs)])
        return [
            *wrapped(f"{' = '.join(names)} = None", indent),
            *wrapped(f"if {condition}:", indent),
            *assigned(names, text, indent + "    "),
        ]

    def _return(self, indent: str) -> list[str]:
        results: list[Any] = ["None"] * self.leaves
        for at, output in zip(self.variant.derivative.wanted, self.captured.outputs, strict=True):
            text = value_text(output, self._text)
            # What stands in for a step reads what is None where it is not needed.
            results[at] = text if text.isidentifier() else f"{text} if needs[{at}] else None"
        return wrapped(f"return {tuple_text(results)}", indent)


def needs_of(captured: Captured, wanted: Sequence[int]) -> dict[int, set[int]]:
    """By slot the leaves whose gradients follow from it."""
    found: dict[int, set[int]] = {}
    for at, output in zip(wanted, captured.outputs, strict=True):
        if isinstance(output, Slot):
            found.setdefault(output.index, set()).add(at)
    for step in reversed(captured.steps):
        results = step.results if isinstance(step, Region) else [step.result]
        needs = {w for slot in results for w in found.get(slot, ())}
        for slot in slots_read(step):
            found.setdefault(slot, set()).update(needs)
    return found
