"""Writes a standalone `model_new.py`: the original's file with a `ModelNew` that needs PyTorch
alone. Its CUDA, made by libingot from the headers of kernels/, travels in the file as text."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import textwrap
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ingot.capture import Captured, CaptureError, capture
from ingot.model_file import ModelFile, write_whole
from ingot.model_writer import WIDTH, bullet, environment
from ingot.reporting import add_program, empty_report
from ingot.runtime.library import IngotError, library
from ingot.runtime.program import BATCH, LeafLayout, Program, ResultLayout

# A leaf's place in a module, as the file writes it: ("input", position, shape, dtype) or
# (owner, name).
_CONTAINERS = frozenset(nn.Module().__dict__)
_LITERALS = (bool, int, float, str, type(None))


class StandaloneError(ValueError):
    """A model that a standalone file cannot hold; the message says what and why."""


class Standalone:
    """A model's compiled graphs, ready to be written.

    sm: the compute capability to plan for where no GPU is here.
    """

    def __init__(self, original: ModelFile, precision: str = "fp32", sm: int = 90):
        self.original = original
        module = original.make_module()
        inputs = original.make_inputs()
        if not all(isinstance(value, torch.Tensor) for value in inputs):
            raise StandaloneError(
                f"{original.path}: get_inputs() gives something that is no tensor, which a "
                "standalone file cannot pass on"
            )
        self.arguments = len(inputs)
        self.facts = _facts(original, module)
        self.programs: list[_Part] = []
        self.program_of_flags: dict[tuple, str] = {}
        for name, flags in _flag_sets(module):
            self._add(module, inputs, name, flags, precision, sm)
        self.batch = next((int(v.shape[0]) for v in inputs if v.ndim), 1)
        self.report = empty_report()
        for part in self.programs:
            add_program(self.report, part.region, part.program, part.mode, self.batch)
        self.cuda_source, self.kernels = _cuda_source(self.programs)

    def _add(self, module, inputs, name: str, flags: list[bool], precision: str, sm: int) -> None:
        for part, training in zip(module.modules(), flags, strict=True):
            part.training = training
        try:
            captured = capture(module, tuple(inputs))
        except CaptureError as error:
            raise StandaloneError(f"{self.original.path}: {error}") from error
        known = next((p for p in self.programs if p.same_as(captured)), None)
        if known is None:
            known = _Part(self.original, name, captured, module, inputs, precision, sm)
            self.programs.append(known)
        self.program_of_flags[tuple(flags)] = known.name

    def render(self, verification: dict | None = None) -> str:
        """The text of the file. verification: `ingot verify` on it, where that was done."""
        from ingot import __version__

        docstring, source = _split_docstring(self.original.source)
        if "'''" in self.cuda_source or self.cuda_source.endswith("\\"):
            raise StandaloneError("the CUDA text cannot be written down as a Python text")
        text = (
            environment()
            .get_template("standalone.py.j2")
            .render(
                docstring=_docstring(self, docstring, verification),
                source=source.strip("\n") + "\n",
                origin=self.original.path.name,
                version=__version__,
                class_name=self.original.class_name,
                identifier=re.sub(r"\W", "_", self.original.path.stem),
                cuda_source=self.cuda_source,
                arguments=self.arguments,
                facts=self.facts,
                programs=[part.for_template() for part in self.programs],
                program_of_flags=list(self.program_of_flags.items()),
            )
        )
        compile(text, "model_new.py", "exec")
        return text


def write_standalone(
    path: os.PathLike | str, standalone: Standalone, verification: dict | None = None
) -> None:
    """Writes the file, whole or not at all. Raises ModelFileError where it cannot."""
    write_whole(path, standalone.render(verification))


# Programs -----------------------------------------------------------------------------------------


def _flag_sets(module: nn.Module) -> list[tuple[str, list[bool]]]:
    """Combinations of training flags that have kernels: all on, all off, and, as is usual in fine
    tuning, all on but the normalisations."""
    modules = list(module.modules())
    frozen = [not re.search(r"(Batch|Instance)Norm", type(m).__name__) for m in modules]
    sets = [("training", [True] * len(modules)), ("eval", [False] * len(modules))]
    return sets if all(frozen) else [*sets, ("frozen", frozen)]


class _Part:
    """One compiled graph with what its calls need to know."""

    def __init__(self, original, name, captured: Captured, module, inputs, precision, sm):
        self.name, self.mode, self.captured = (
            name,
            "eval" if name == "eval" else "training",
            captured,
        )
        self.region = _only_region(original, captured)
        self.result = self.region.result_layouts[0]
        sources = [captured.sources[slot] for slot in self.region.leaves]
        tensors = [_tensor_of(original, source, module, inputs) for source in sources]
        layouts = self.region.leaf_layouts
        self.leaves = [_leaf(*each) for each in zip(sources, tensors, layouts, strict=True)]
        self.strides = [
            _strides(original, *each) for each in zip(sources, tensors, layouts, strict=True)
        ]
        self.updated = _updated(self.region.graph)
        try:
            self.program = Program(
                self.region.graph,
                device="cuda",
                precision=precision,
                leaf_layouts=layouts,
                result_layouts=self.region.result_layouts,
                options={"sm": sm},
            )
        except IngotError as error:
            raise StandaloneError(f"{original.path}: {error}") from error

    def same_as(self, captured: Captured) -> bool:
        return (
            len(captured.steps) == 1
            and captured.regions
            and captured.regions[0].graph == self.region.graph
            and captured.sources == self.captured.sources
            and captured.delegate_batches == self.captured.delegate_batches
        )

    def for_template(self) -> dict:
        sizes, strides = _result_expressions(self.result)
        return {
            "name": self.name,
            "leaves": self.leaves,
            "updated": self.updated,
            "result_sizes": sizes,
            "result_strides": strides,
            "result_dtype": str(self.result.dtype),
            "original_batches": tuple(sorted(self.captured.delegate_batches)),
            "batch": self.captured.static_batch,
        }


def _only_region(original: ModelFile, captured: Captured):
    for item in captured.unsupported:
        raise StandaloneError(
            f"{original.path}: a standalone file cannot hold {item.what} ({item.where}), which "
            f"PyTorch would run: {item.why}; without --standalone it can"
        )
    steps, single = captured.steps, captured.out_spec.is_leaf() and len(captured.outputs) == 1
    if len(steps) != 1 or not captured.regions:
        raise StandaloneError(
            f"{original.path}: a standalone file holds one graph; this model makes {len(steps)} "
            "steps, PyTorch's among them"
        )
    region = captured.regions[0]
    if not single or region.results != [getattr(captured.outputs[0], "index", None)]:
        raise StandaloneError(f"{original.path}: a standalone file returns one tensor, not several")
    return region


def _tensor_of(original: ModelFile, source, module: nn.Module, inputs) -> torch.Tensor:
    if source.kind == "input":
        return inputs[source.index]
    if source.kind == "constant":
        raise StandaloneError(
            f"{original.path}: its forward makes or reads the tensor {source.path}, which is no "
            "parameter or buffer; register it as a buffer"
        )
    path, _, name = source.path.rpartition(".")
    owner = module.get_submodule(path)
    members = owner._parameters if source.kind == "parameter" else owner._buffers
    return members[name]


def _leaf(source, tensor: torch.Tensor, layout: LeafLayout) -> tuple:
    if source.kind != "input":
        path, _, name = source.path.rpartition(".")
        return (path, name)
    shape = tuple(tensor.shape)
    if layout.axes[0] == 0:
        shape = (-1, *shape[1:])
    return ("input", source.index, shape, str(tensor.dtype))


def _strides(original, source, tensor: torch.Tensor, layout: LeafLayout) -> list[int]:
    """Over the graph's axes, of a contiguous tensor."""
    if layout.axes[0] not in (None, 0) or layout.splits[0] is not None:
        raise StandaloneError(
            f"{original.path}: the batch of {source.path} is not its first dimension, or is split"
        )
    contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return layout.sizes_and_strides(contiguous)[1]


def _updated(graph: dict) -> tuple[int, ...]:
    """Positions among the leaves of the buffers that a run writes."""
    leaves = [
        i for i, v in enumerate(graph["values"]) if v["op"] in ("input", "parameter", "buffer")
    ]
    found = set()
    for value in graph["values"]:
        moves = value["op"] in ("batch_norm", "instance_norm")
        if moves and value["attributes"].get("training"):
            found |= {leaves.index(i) for i in value["args"][3:] if i >= 0}
    return tuple(sorted(found))


def _result_expressions(layout: ResultLayout) -> tuple[str, str]:
    """Texts of the result's sizes and strides for a `batch`."""

    def size(extent: int) -> str:
        if extent >= 0:
            return str(extent)
        return "batch" if extent == BATCH else f"{-extent} * batch"

    def listed(items: Sequence[str]) -> str:
        return "(" + "".join(f"{item}, " for item in items).rstrip() + ")"

    # The batch is the outermost axis, so that no stride depends on it but those of dimensions
    # along no axis, whose extent is 1.
    strides = layout.allocation(2)[1]
    return listed([size(s) for s in layout.shape]), listed([str(s) for s in strides])


def _cuda_source(parts: list[_Part]) -> tuple[str, dict[str, list[str]]]:
    loaded = library()
    handles = (ctypes.c_void_p * len(parts))(*[part.program._handle.value for part in parts])
    options = {
        "names": [part.name for part in parts],
        "leaf_strides": [part.strides for part in parts],
    }
    text = ctypes.c_void_p()
    try:
        loaded.check(
            loaded.ingot_standalone_source(
                handles, len(parts), json.dumps(options).encode(), ctypes.byref(text)
            )
        )
    except IngotError as error:
        raise StandaloneError(str(error)) from error
    found = loaded.take_json(text)
    return found["cuda_source"], {p["name"]: p["kernels"] for p in found["programs"]}


# What the kernels are for ------------------------------------------------------------------------


class _Facts(types.SimpleNamespace):
    """modules: (name, class, attributes); tensors: ((owner, name), text); ties."""


def _facts(original: ModelFile, module: nn.Module) -> _Facts:
    modules, tensors, ties = [], [], []
    owners: dict[int, tuple[str, str]] = {}
    home = original.Model.__module__
    for path, part in module.named_modules():
        cls = type(part)
        kind = (
            cls.__qualname__ if cls.__module__ == home else f"{cls.__module__}.{cls.__qualname__}"
        )
        attributes = {
            key: _written(original, home, f"{path}.{key}".lstrip("."), value)
            for key, value in part.__dict__.items()
            if key not in _CONTAINERS
        }
        modules.append((path, kind, attributes))
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            text = "None" if tensor is None else f"({tuple(tensor.shape)!r}, {tensor.dtype})"
            tensors.append(((path, name), text))
            if tensor is None:
                continue
            if id(tensor) in owners:
                ties.append((owners[id(tensor)], (path, name)))
            owners.setdefault(id(tensor), (path, name))
    return _Facts(modules=modules, tensors=tensors, ties=ties)


def _written(original: ModelFile, home: str, where: str, value: Any) -> Any:
    """A plain attribute as the file writes it: a literal, or ("name of", text)."""
    if isinstance(value, _LITERALS):
        return value
    if type(value) in (tuple, list):
        return type(value)(_written(original, home, where, item) for item in value)
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, torch.dtype):
        return ("name of", str(value))
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        owner = value.__module__
        owner = "" if owner in (None, home) else owner + "."
        return ("name of", owner + value.__qualname__)
    if isinstance(value, torch.Tensor):
        raise StandaloneError(
            f"{original.path}: the attribute {where} is a plain tensor; register it as a buffer"
        )
    raise StandaloneError(
        f"{original.path}: the attribute {where} is a {type(value).__name__}, which a standalone "
        "file cannot compare at its calls; keep plain values, functions and classes in attributes"
    )


# The docstring ------------------------------------------------------------------------------------


def _split_docstring(source: str) -> tuple[str, str]:
    """A file's docstring and the rest: the written file has its own in that place."""
    tree = ast.parse(source)
    first = tree.body[0] if tree.body else None
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return "", source
    if not isinstance(first.value.value, str):
        return "", source
    lines = source.splitlines(keepends=True)
    before, after = lines[: first.lineno - 1], lines[first.end_lineno :]
    rest = lines[first.end_lineno - 1].encode()[first.end_col_offset :].decode().lstrip("; \t")
    return first.value.value.strip(), "".join([*before, rest.lstrip("\n"), *after])


def _docstring(standalone: Standalone, original: str, verification: dict | None) -> str:
    plain = original.replace("\\", "\\\\").replace('"""', "'''")
    report = standalone.report
    name = standalone.original.path.name
    paragraphs = [
        plain or f"{standalone.original.class_name}, made faster.",
        textwrap.fill(
            f"ModelNew, at the end, computes what {standalone.original.class_name} does. This file "
            f"was written by Ingot from {name} and needs PyTorch from 2.0 on, alone: its CUDA is "
            "compiled at the first call (nvcc and a C++ compiler must be there), for compute "
            "capability 8.0 and up. Calls that need gradients, tensors on the CPU and modules that "
            "were changed run the original's operators, which is said once by a warning.",
            WIDTH,
        ),
        _section("Operators replaced", [_replaced(item) for item in report["operators_replaced"]]),
        _section("Optimisations made", _optimisations(report)),
        _section(
            "Kernels, in the order of their launch, behind the splits of the operands",
            [f"{name} mode: {', '.join(kernels)}" for name, kernels in standalone.kernels.items()],
        ),
        _section("Measured", _figures(verification)),
    ]
    return '"""' + "\n\n".join(paragraphs) + '\n"""'


def _section(title: str, items: list[str]) -> str:
    return "\n".join([title + ":", *(bullet(item, 2) for item in items or ["none"])])


def _replaced(item: dict) -> str:
    where = f" ({item['where']})" if item["where"] else ""
    return f"{item['what']}{where}: {item['by']}"


def _optimisations(report: dict) -> list[str]:
    made = report["optimisations"]
    sentences = {item["what"] for item in made}
    # A rewrite's rule is there by itself and as a sentence.
    return [_optimisation(i) for i in made if f"rewrite: {i['what']}" not in sentences]


def _optimisation(item: dict) -> str:
    why = f": {item['identity_or_reason']}" if item["identity_or_reason"] else ""
    return item["what"] + why + (f" ({item['where']})" if item["where"] else "")


def _figures(verification: dict | None) -> list[str]:
    timing = (verification or {}).get("timing")
    if verification is None:
        return ["not measured here: the file was written on a machine without a GPU"]
    found = []
    for accuracy in verification.get("accuracy", ()):
        if accuracy["family"] == "own inputs":
            found.append(
                f"error against fp64, {accuracy['mode']} mode, own inputs: "
                f"{accuracy['candidate']['relative_error']:.1e}, the original's "
                f"{accuracy['reference']['relative_error']:.1e}"
            )
    if timing:
        for name, subject in timing["subjects"].items():
            found.append(f"{name}: {subject['median_ms']:.3f} ms a call (median)")
    return found or ["not measured here"]
