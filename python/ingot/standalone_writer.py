"""Writes a standalone `model_new.py`: the original's file with a `ModelNew` that needs PyTorch
alone. Its CUDA, made by libingot from the headers of kernels/, travels in the file as text."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot.capture import Captured, CaptureError
from ingot.capture.captured import Region
from ingot.capture.feed import batched_inputs
from ingot.live.compiled import _blamed
from ingot.live.dynamo import NotWholeError
from ingot.live.memory import copies_of_inputs
from ingot.live.reporting import add_program, empty_report
from ingot.live.returned import readers_of_results
from ingot.model_capture import captured_graph, import_whole
from ingot.model_file import ModelFile
from ingot.model_writer import WIDTH, bullet, environment, in_docstring
from ingot.runtime.library import STATUS_UNSUPPORTED, IngotError
from ingot.standalone.constants import Constants
from ingot.standalone.forward import ForwardPrinter, Signature, access
from ingot.standalone.printing import BATCH_NORM, Names, UnprintableError, tuple_text, value_text
from ingot.standalone.programs import FileProgram, Layouts, check_written, cuda_sources
from ingot.standalone.reads import Reads
from ingot.standalone.regions import FileRegion, sources_of

# Names that the written text imports.
_IMPORTED = ("functools", "os", "re", "torch", "warnings")
# What the names that it defines begin with.
_OURS = ("_ingot", "_Ingot", "_INGOT")
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "bilinear", "einsum"}
_MOST_FLAGS = 2  # of which every combination gets its own branch
_SM = 90  # the compute capability to plan for where no GPU is here


class StandaloneError(ValueError):
    """A model that a standalone file cannot hold; the message says what and why."""


class Standalone:
    """A model's compiled graphs, ready to be written."""

    def __init__(self, original: ModelFile, precision: str = "fp32"):
        if precision not in ("fp32", "tf32"):
            raise StandaloneError(
                f"{original.path}: its precision is {precision}, and only fp32 and tf32 have "
                "kernels that can be written down; without --standalone every precision can be had"
            )
        names = vars(sys.modules[original.Model.__module__])
        taken = [name for name in names if name.startswith(_OURS)]
        if taken:
            raise StandaloneError(
                f"{original.path}: its name {taken[0]} begins as those of standalone files do, "
                "which would take its place"
            )
        self.original, self.precision = original, precision
        self.module, self.inputs = original.make_module(), original.make_inputs()
        try:
            self.reads = Reads(self.module, self.inputs)
            self.signature = Signature(type(self.module).forward, self.inputs)
            self.regions: dict[tuple, FileRegion] = {}
            self.modes = self._modes()
            self.constants = Constants()
            self._name_regions()
            for mode in self.modes:
                self._body(mode, "")
            self.common, self.sources = self._sources()
        except (CaptureError, UnprintableError, IngotError) as error:
            in_pieces = isinstance(error, NotWholeError)
            if in_pieces:
                original.check_runs(self.module, self.inputs)  # or it is the model that raises
            instead = "; without --standalone it is taken in pieces" if in_pieces else ""
            raise StandaloneError(f"{original.path}: {error}{instead}") from error
        self.report = self._report()

    def _modes(self) -> list[_Mode]:
        modes: list[_Mode] = []
        for name, flags in _flag_sets(self.module, self.reads.flags):
            self.module.train(name != "eval")
            for path, on in flags.items():
                self.module.get_submodule(path).training = on
            mode = self._captured(name)
            same = next((m for m in modes if m.key == mode.key), mode)
            same.flags.append(tuple(flags.values()))
            if same is mode:
                modes.append(mode)
        return modes

    def _captured(self, name: str) -> _Mode:
        """Products that have no kernels to write down are left to PyTorch."""
        feed = captured_graph(self.module, self.inputs, gradients=True)
        refused = dict.fromkeys(copies_of_inputs(feed) + readers_of_results(feed), "")
        while True:
            captured = import_whole(feed, refused=refused)
            storing = import_whole(feed, refused=refused, gradients=True)
            more: dict[str, str] = {}
            regions = []
            layouts = self._layouts(captured)
            for region in captured.regions:
                try:
                    twin = self._twin(region, storing)
                    regions.append(self._file_region(region, twin, layouts, captured.static_batch))
                except IngotError as error:
                    if error.status != STATUS_UNSUPPORTED:
                        raise
                    more.update(_to_blame(region, str(error)))
            if not set(more) - set(refused):
                return _Mode(name, captured, regions)
            refused.update(more)

    def _layouts(self, captured: Captured) -> Layouts:
        return Layouts(captured, sources_of(captured, self.module, _tensors(self.inputs)))

    def _twin(self, region: Region, storing: Captured) -> tuple[Region, Layouts] | None:
        """The same region as captured for gradients, which may compute statistics beside."""
        values, count = region.graph["values"], len(region.results)
        for found in storing.regions:
            alike = found.graph["values"][: len(values)] == values
            alike = alike and found.graph["results"][:count] == region.graph["results"]
            if alike and found.leaves == region.leaves:
                return found, self._layouts(storing)
        return None

    def _file_region(self, region, twin, layouts: Layouts, batch: int | None) -> FileRegion:
        how = (batch and batch * region.per_sample, self.precision, _SM)
        if twin is not None:
            found = twin[0]
            how = (*how, (found.written_leaves, found.written_inputs, found.written))
        made = FileRegion(region, layouts, *how)
        known = self.regions.get(made.key())
        if known is None:
            check_written(made)
            multiplies = twin is not None and made.has_product()
            storing = FileRegion(*twin, *how) if multiplies else None
            made.take_gradients(storing, batched_inputs(_tensors(self.inputs))[1])
            known = self.regions[made.key()] = made
        return known

    def _name_regions(self) -> None:
        used = [r for m in self.modes for r in m.regions]
        self.regions = {key: r for key, r in self.regions.items() if r in used}
        wanted = [r.region.graph["name"] for r in self.regions.values()]
        names = Names(["given", "batch", "run", "size", "dense"])
        for region in self.regions.values():
            name = region.region.graph["name"]
            region.modes = [m.name for m in self.modes if region in m.regions]
            if wanted.count(name) > 1 and len(region.modes) < len(self.modes):
                name += "_" + region.modes[0]
            region.name = names.new(name)
            camel = "".join(part[:1].upper() + part[1:] for part in region.name.split("_"))
            region.class_name = "_Ingot" + camel
            if region.storing not in (None, region):
                region.storing.name = names.new(region.name + "_storing")
        known: dict[tuple, FileProgram] = {}
        for region in self.regions.values():
            if region.backward is not None:
                own = region.name
                region.backward.share(
                    known, self.constants, lambda kind, own=own: names.new(f"{own}_{kind}")
                )
        self.backward = list(known.values())
        classes = [r.class_name for r in self.regions.values()]
        for at, region in enumerate(self.regions.values()):
            if classes.count(region.class_name) > 1:
                region.class_name += str(at)

    def _body(self, mode: _Mode, indent: str) -> list[str]:
        printer = ForwardPrinter(
            mode.captured, mode.regions, self.module, self.signature, self.constants
        )
        return printer.lines(indent)

    def _sources(self) -> tuple[str, dict[str, dict]]:
        if not self.regions:
            return "", {}
        return cuda_sources([*self._listed(), *self._storing_regions(), *self.backward])

    def _report(self) -> dict:
        report = empty_report()
        batch = next((int(t.shape[0]) for t in _tensors(self.inputs) if t.ndim), 1)
        for mode in self.modes:
            for region in mode.regions:
                shown = "eval" if mode.name == "eval" else "training"
                add_program(report, region.region, region.program, shown, batch)
            for item in mode.captured.unsupported:
                left = {"what": item.what, "where": item.where, "why": item.why}
                if left not in report["unsupported"]:
                    report["unsupported"].append(left)
        return report

    @property
    def kernels(self) -> dict[str, list[str]]:
        """Names in launch order, by region."""
        return {name: source["kernels"] for name, source in self.sources.items()}

    # The text ---------------------------------------------------------------------------------

    def render(self, verification: dict | None = None) -> str:
        """The text of the file. verification: `ingot verify` on it, where that was done."""
        from ingot import __version__

        docstring, source = _split_docstring(self.original.source)
        groups = self._groups()
        texts = [self.common, *(cuda for _, _, cuda in groups)]
        if any("'''" in text or text.endswith("\\") for text in texts):
            raise StandaloneError("the CUDA text cannot be written down as a Python text")
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
        stem = re.sub(r"\W", "_", self.original.path.stem, flags=re.ASCII)
        branches = self._branches()
        template = environment().get_template("standalone.py.j2")
        ours = template.render(
            origin=in_docstring(self.original.path.name),
            version=__version__,
            class_name=self.original.class_name,
            name=f"ingot_{stem}_{digest}",
            common=self.common,
            groups=groups,
            regions=self._listed(),
            backward=self.backward,
            **self._needed(),
            programs=", ".join(
                name for r in [*self._listed(), *self.backward] for name in r.programs()
            ),
            modules=self._modules(),
            declined=self._declined(),
            batch_norm=any(BATCH_NORM in line for _, lines in branches for line in lines),
            constants=self.constants.lines(),
            signature=self.signature,
            branches=branches,
        )
        text = _docstring(self, docstring, verification) + "\n" + source.strip("\n") + "\n"
        text += _renamed(ours, sys.modules.get(self.original.Model.__module__))
        compile(text, "model_new.py", "exec")
        return text

    def _needed(self) -> dict[str, bool]:
        """Which of the runtime's parts a region needs; the others are left out."""
        regions = self._listed()
        partial = any(region.storing and region.leads() for region in regions)
        return {
            "stores": any(region.storing for region in regions),
            "mixed": not all(region.storing for region in regions),
            "copies": any(region.copies() for region in regions),
            "partial": partial,
            "severed": partial or any(r.storing and r.constant_results() for r in regions),
            "updates": any(leaf.updated for region in regions for leaf in region.leaves),
        }

    def _groups(self) -> list[tuple[str, str, str]]:
        """(name, what it is, CUDA text) of what is compiled together."""
        groups = [("_INGOT_PLAIN", "What runs where no gradient is needed.", self._listed())]
        if storing := self._storing_regions():
            what = "The same, with the results of products, which backward reads."
            groups.append(("_INGOT_STORING", what, storing))
        if self.backward:
            what = "What backward runs."
            groups.append(("_INGOT_BACKWARD", what, self.backward))
        return [
            (name, what, "\n".join(self.sources[r.name]["source"] for r in regions))
            for name, what, regions in groups
        ]

    def _storing_regions(self) -> list[FileRegion]:
        return [r.storing for r in self._listed() if r.storing not in (None, r)]

    def _listed(self) -> list[FileRegion]:
        return list(self.regions.values())

    def _modules(self) -> list[tuple[str, str]]:
        """For each submodule its path and what the kernels have built in of it, as text."""
        found = []
        for path, part in self.module.named_modules():
            kind = type(part).__qualname__ if path else ""
            found.append((path, f"({kind!r}, {_dict_text(self.reads.attributes.get(path, {}))})"))
        return found

    def _declined(self) -> str:
        batched, _ = batched_inputs(_tensors(self.inputs))
        names = [t for t, on in zip(self.signature.tensors, batched) if on]
        sizes = frozenset().union(*(m.captured.delegate_batches for m in self.modes))
        only = next((b for m in self.modes if (b := m.captured.static_batch)), None)
        return self.signature.declined(sorted(sizes), only, names[0] if names else "")

    def _branches(self) -> list[tuple[str, list[str]]]:
        """(condition, statements) of each mode; the last has no condition where nothing else is
        possible."""
        pad = " " * 8
        if len(self.modes) == 1:
            return [("", self._body(self.modes[0], pad))]
        owner = self.signature.owner
        flags = [f"{access(self.module, path, owner)}.training" for path in self.reads.flags]
        every = 2 ** len(flags) == sum(len(mode.flags) for mode in self.modes)
        found = []
        for at, mode in enumerate(self.modes):
            last = every and at == len(self.modes) - 1
            condition = "" if last else _condition(flags, mode.flags)
            found.append((condition, self._body(mode, pad if last else pad + "    ")))
        return found


class _Mode:
    """One combination of training flags, or several that make the same of a call."""

    def __init__(self, name: str, captured: Captured, regions: list[FileRegion]):
        self.name, self.captured, self.regions = name, captured, regions
        self.flags: list[tuple[bool, ...]] = []
        steps, numbers = [], iter(regions)
        for step in captured.steps:
            if isinstance(step, Region):
                steps.append((id(next(numbers)), tuple(step.leaves), tuple(step.results)))
            else:
                steps.append((repr(step.target), repr(step.args), repr(step.kwargs), step.result))
        sources = [(s.kind, s.path, s.index) for s in captured.sources]
        self.key = (steps, sources, repr(captured.outputs), captured.delegate_batches)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _to_blame(region: Region, message: str) -> dict[str, str]:
    """Nodes that PyTorch must run, of a region that cannot be written."""
    blamed = _blamed(region, message)
    products = {o["node"] for o in region.operators if o["what"] in _PRODUCTS}
    return {node: why for node, why in blamed.items() if node in products} or blamed


def _flag_sets(module: nn.Module, flags: list[str]) -> list[tuple[str, dict[str, bool]]]:
    """Combinations of the training flags that a forward reads, with names: each one where they are
    few, else all on, all off and, as is usual in fine tuning, all on but the normalisations'."""
    if not flags:
        return [("training", {})]
    on, off = dict.fromkeys(flags, True), dict.fromkeys(flags, False)
    sets = [("training", on), ("eval", off)]
    norms = {f for f in flags if "Norm" in type(module.get_submodule(f)).__name__}
    if norms and norms != set(flags):
        sets.append(("frozen", {f: f not in norms for f in flags}))
    if 1 < len(flags) <= _MOST_FLAGS:
        for first in flags:
            mixed = {f: f == first for f in flags}
            if mixed not in [known for _, known in sets]:
                sets.append((f"mixed{len(sets)}", mixed))
    return sets


def _condition(flags: list[str], wanted: list[tuple[bool, ...]]) -> str:
    def one(values: tuple[bool, ...]) -> str:
        terms = [text if on else f"not {text}" for text, on in zip(flags, values)]
        if len(terms) > 2 and len(set(values)) == 1:
            inner = f"({', '.join(flags)})"
            return f"all({inner})" if values[0] else f"not any({inner})"
        return " and ".join(terms)

    texts = [one(values) for values in wanted]
    return texts[0] if len(texts) == 1 else " or ".join(f"({text})" for text in texts)


def _dict_text(values: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{k!r}: {_literal(v)}" for k, v in values.items()) + "}"


def _literal(value: Any) -> str:
    if type(value) is dict:
        return _dict_text(value)
    if type(value) is set:
        return f"{{{', '.join(map(_literal, value))}}}" if value else "set()"
    if isinstance(value, (tuple, list)):
        items = [_literal(v) for v in value]
        return tuple_text(items) if isinstance(value, tuple) else f"[{', '.join(items)}]"
    return value_text(value, str)


def _renamed(text: str, namespace: Any) -> str:
    """With another name for what the file imports where the model's own text has taken it."""
    held = {name: getattr(namespace, name, None) for name in _IMPORTED}
    taken = {n for n, value in held.items() if value not in (None, sys.modules.get(n))}
    if not taken:
        return text
    lines = text.encode().splitlines(keepends=True)  # columns are counted in bytes
    for found in sorted(_globals(ast.parse(text), taken), key=lambda n: -n.col_offset):
        line, at = lines[found.lineno - 1], found.col_offset
        lines[found.lineno - 1] = line[:at] + b"_ingot_" + line[at:]
    text = b"".join(lines).decode()
    for name in taken:
        text = text.replace(f"import {name}  #", f"import {name} as _ingot_{name}  #")
    return text


def _globals(node: ast.AST, names: set[str]) -> Iterator[ast.Name]:
    """Where one of these is read that is no argument or variable of the function around: those may
    have the model's names."""
    if isinstance(node, ast.Name) and node.id in names:
        yield node
    if isinstance(node, ast.FunctionDef):
        inside = list(ast.walk(node))
        names = names - {n.arg for n in inside if isinstance(n, ast.arg)}
        stored = (n for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        names = names - {n.id for n in stored}
    for child in ast.iter_child_nodes(node):
        yield from _globals(child, names)


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
    name = in_docstring(standalone.original.path.name)
    paragraphs = [
        plain or f"{standalone.original.class_name}, made faster.",
        textwrap.fill(
            f"ModelNew, at the end, computes what {standalone.original.class_name} does. This file "
            f"was written by Ingot from {name} and needs PyTorch from 2.0 on, alone: its CUDA is "
            "compiled at the first call (nvcc and a C++ compiler must be there), for compute "
            "capability 8.0 and up. Tensors on the CPU, autocast, tracers and changed submodules "
            "get the original's operators, which is said once by a warning.",
            WIDTH,
        ),
        _section("Operators replaced", [_replaced(item) for item in report["operators_replaced"]]),
        _section("Optimisations made", _optimisations(report)),
        _section(
            "Kernels, in the order of their launch, behind the splits of the operands",
            [f"{name}: {', '.join(kernels)}" for name, kernels in standalone.kernels.items()],
        ),
        *_left(report["unsupported"]),
        _section("Measured", _figures(verification)),
    ]
    return '"""' + "\n\n".join(paragraphs) + '\n"""'


def _section(title: str, items: list[str]) -> str:
    return "\n".join([title + ":", *(bullet(item, 2) for item in items or ["none"])])


def _left(items: list[dict]) -> list[str]:
    texts = [f"{i['what']} ({i['where']}): {i['why']}" for i in items]
    return [_section("Left to PyTorch", texts)] if texts else []


def _replaced(item: dict) -> str:
    where = f" ({item['where']})" if item["where"] else ""
    return f"{item['what']}{where}: {item['by']}"


def _optimisations(report: dict) -> list[str]:
    made = report["optimisations"]
    sentences = {item["what"] for item in made}
    # A rewrite's rule is there by itself and as a sentence.
    places: dict[str, list[str]] = {}
    for item in made:
        if f"rewrite: {item['what']}" not in sentences:
            why = f": {item['identity_or_reason']}" if item["identity_or_reason"] else ""
            places.setdefault(item["what"] + why, []).append(item["where"])
    found = []
    for text, where in places.items():
        known = "; ".join(dict.fromkeys(filter(None, where)))
        found.append(f"{text} ({known})" if known else text)
    return found


def _figures(verification: dict | None) -> list[str]:
    """verification: VerifyResult.to_dict()."""
    if verification is None:
        return ["not measured here: the file was written on a machine without a GPU"]
    own = [row for row in verification["accuracy"] if row["family"] == "own inputs"]
    timing = verification["timing"]
    times = timing["subjects"].items() if timing else ()
    found = [_error(row) for row in own]
    found += [f"{name}: {subject['median_ms']:.3f} ms a call (median)" for name, subject in times]
    return found or ["not measured here"]


def _error(row: dict) -> str:
    """row: of VerifyResult's accuracy."""
    text = f"{row['tensor']}, {row['mode']} mode: error against fp64 "
    text += f"{row['candidate']['relative_error']:.1e}"
    eager = row["eager"]
    return text + (f", the original's {eager['relative_error']:.1e}" if eager else "")
