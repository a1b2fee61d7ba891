"""A graph of operators as a standalone file holds it: its kernels, what they take and give."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ingot.capture import Captured
from ingot.capture.captured import Region, resolved
from ingot.capture.layout import in_parts
from ingot.runtime.layouts import LeafLayout, TensorLayout
from ingot.runtime.library import library
from ingot.runtime.program import Program
from ingot.runtime.signature import BATCH

_CPP_DTYPES = {
    torch.float32: "at::kFloat",
    torch.float64: "at::kDouble",
    torch.float16: "at::kHalf",
    torch.bfloat16: "at::kBFloat16",
    torch.int64: "at::kLong",
    torch.bool: "at::kBool",
}
# Batch sizes at which a run without data is looked at: what differs between them is the batch's.
BATCHES = (6, 10)


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

    def on_host(self, batch: int) -> torch.Tensor:
        """Of which nothing is read but how it lies, and that it is where the file is written."""
        like = self.on_meta(batch)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")

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

    def __init__(self, captured: Captured, sources: Callable[[int | None], list]):
        """sources: a batch size, or None where there is one alone -> what fills the first slots."""
        if captured.static_batch is None:
            runs = [_run_on_meta(captured, sources, batch) for batch in BATCHES]
            self.slots = [_symbolic(*each) for each in zip(*runs, strict=True)]
        else:
            values = _run_on_meta(captured, sources, None)
            self.slots = [_symbolic(value, value) for value in values]

    def specs_of(self, region: Region) -> Callable[[int, str, bool], TensorSpec]:
        """What a FileProgram asks of its leaves."""

        def spec(at: int, name: str, updated: bool) -> TensorSpec:
            found = self.slots[region.leaves[at]]
            assert found is not None, "a leaf that is no tensor"
            dtype, sizes, strides = found
            return TensorSpec(name, dtype, in_parts(sizes, region.per_sample), strides, updated)

        return spec


def _symbolic(first: Any, second: Any) -> tuple | None:
    """(dtype, sizes, strides) of a tensor, seen at both batch sizes."""
    if not isinstance(first, torch.Tensor):
        return None
    a, b = BATCHES
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


def _run_on_meta(captured: Captured, sources: Callable, batch: int | None) -> list:
    values = sources(batch)
    values += [None] * (captured.slots - len(values))
    for step in captured.steps:
        if isinstance(step, Region):
            size = (captured.static_batch if batch is None else batch) or 1
            for slot, layout in zip(step.results, step.result_layouts):
                sizes, strides = layout.allocation(size * step.per_sample)
                values[slot] = torch.empty_strided(
                    sizes, strides, dtype=layout.dtype, device="meta"
                )
            continue
        args, kwargs = _on_meta(resolved((step.args, step.kwargs), values))
        with torch.no_grad():
            values[step.result] = step.target(*args, **kwargs)
    return values


def _on_meta(arguments: tuple) -> tuple:
    """Operators that name a device make what they make without data, too."""
    meta = torch.device("meta")
    return map_aggregate(arguments, lambda v: meta if isinstance(v, torch.device) else v)


class FileProgram:
    """A graph's kernels, what they take and what they give. batch: the only size that they are for,
    or None; most_contracted: as ingot_standalone_source has it."""

    most_contracted: int | None = None

    def __init__(
        self,
        graph: dict,
        leaf_layouts: Sequence[LeafLayout],
        result_layouts: Sequence[TensorLayout],
        spec: Callable[[int, str, bool], TensorSpec],
        batch: int | None,
        precision: str,
        sm: int,
    ):
        """spec: what a leaf is, by its place, its name and whether the kernels write it."""
        self.graph, self.batch, self.name = graph, batch, ""
        self.leaf_layouts, self.result_layouts = leaf_layouts, result_layouts
        self.program = Program(
            graph,
            device="cuda",
            precision=precision,
            leaf_layouts=leaf_layouts,
            result_layouts=result_layouts,
            options={"sm": sm},
        )
        signature = self.program.signature
        self.leaves = [
            spec(at, leaf.name, at in signature.updates) for at, leaf in enumerate(signature.leaves)
        ]
        self.results = [
            TensorSpec(result["name"], layout.dtype, *_made(layout, batch))
            for result, layout in zip(graph["results"], result_layouts, strict=True)
        ]

    @classmethod
    def of_region(cls, region: Region, layouts: Layouts, *how) -> FileProgram:
        return cls(
            region.graph,
            region.leaf_layouts,
            region.result_layouts,
            layouts.specs_of(region),
            *how,
        )

    def key(self) -> tuple:
        """What makes two of them one."""
        values = [
            {k: v for k, v in value.items() if k not in ("name", "origin", "source")}
            for value in self.graph["values"]
        ]
        results = [result["value"] for result in self.graph["results"]]
        text = json.dumps([values, results])
        leaves = [(s.dtype, s.sizes, s.strides, s.updated) for s in self.leaves]
        return text, tuple(leaves), tuple(self.leaf_layouts), tuple(self.result_layouts), self.batch

    def leaf_strides(self) -> list[list[int]]:
        """Over the graph's axes."""
        size = self.batch or 2
        return [
            layout.sizes_and_strides(spec.on_meta(size))[1]
            for spec, layout in zip(self.leaves, self.leaf_layouts, strict=True)
        ]

    def binding(self) -> str:
        """The C++ text of the function that Python calls."""
        lines = [f"Tensors {self.name}(const Tensors& given, bool) {{"]
        lines += [f"  const int64_t batch = {self._batch_text()};"]
        lines += list_of_specs("leaves", self.leaves)
        lines += list_of_specs("made", self.results)
        lines += [f"  return run(run_{self.name}, batch, given, leaves, made);", "}"]
        return "\n".join(lines)

    def programs(self) -> list[str]:
        """Names of what the binding calls."""
        return [f"run_{self.name}"]

    def _batch_text(self) -> str:
        if self.batch is not None:
            return str(self.batch)
        for at, spec in enumerate(self.leaves):
            for dimension, size in enumerate(spec.sizes):
                if size < 0:
                    divisor = f" / {-size}" if size < BATCH else ""
                    return f"given.at({at}).size({dimension}){divisor}"
        return "1"


def list_of_specs(name: str, specs: Sequence[TensorSpec], constant: bool = True) -> list[str]:
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


class BatchProduct(FileProgram):
    """aᵀ·b for [K, M] and [K, N], K being a batch: a multiple of eight up to `most_contracted`."""

    def __init__(self, graph: dict, layouts: tuple, a: torch.Tensor, b: torch.Tensor, most, *how):
        """a, b: of which the columns are told; graph, layouts: of the product of a.t() and b."""
        rows, columns = a.size(1), b.size(1)
        leaves = [
            TensorSpec("a", a.dtype, (rows, BATCH), (1, rows)),
            TensorSpec("b", b.dtype, (BATCH, columns), (columns, 1)),
        ]
        super().__init__(graph, *layouts, lambda at, *_: leaves[at], rows, *how)
        self.most_contracted = most

    def _batch_text(self) -> str:
        return "given.at(1).size(0)"


def check_written(program: FileProgram) -> None:
    """Raises IngotError where a file cannot hold it."""
    name, program.name = program.name, "program"
    cuda_sources([program])
    program.name = name


def cuda_sources(all_of_them: Sequence[FileProgram]) -> tuple[str, dict[str, dict]]:
    """(what all have in common, {name: {"kernels", "source"}}). Raises IngotError."""
    loaded = library()
    programs = [each.program for each in all_of_them]
    handles = (ctypes.c_void_p * len(programs))(*[p._handle.value for p in programs])
    options = {
        "names": [each.name for each in all_of_them],
        "leaf_strides": [each.leaf_strides() for each in all_of_them],
        "batches": [each.batch for each in all_of_them],
        "contracted": [each.most_contracted for each in all_of_them],
    }
    text = ctypes.c_void_p()
    loaded.check(
        loaded.ingot_standalone_source(
            handles, len(programs), json.dumps(options).encode(), ctypes.byref(text)
        )
    )
    found = loaded.take_json(text)
    return found["common"], {p["name"]: p for p in found["programs"]}
