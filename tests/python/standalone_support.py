"""Standalone files executed without a GPU: the library's evaluator in place of their kernels."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from evaluator import evaluate_fp64
from ingot.model_file import ModelFile, load_model_file
from ingot.standalone_writer import Standalone
from torch import nn

_TWO_LAYERS = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
{init}

    def forward(self, x):
{forward}


def get_inputs():
    return [torch.randn(32, 64)]


def get_init_inputs():
    return []
"""


def two_layers(folder: Path, forward: str, init: str = "pass") -> Standalone:
    """Of a model with two linear layers, `a` and `b`, of 64 features, from its statements."""
    path = folder / "model.py"
    statements = {"forward": forward, "init": init}
    path.write_text(
        _TWO_LAYERS.format(**{k: textwrap.indent(v, " " * 8) for k, v in statements.items()})
    )
    return Standalone(load_model_file(path))


@dataclass
class Pair:
    """The original's module and the file's, equal; inputs for both; the file's namespace and its
    calls, as `on_the_host` has them."""

    reference: nn.Module
    ours: nn.Module
    inputs: list
    namespace: ModuleType
    calls: list


def pair_of(folder: Path, standalone: Standalone, *, double: bool = False) -> Pair:
    file, namespace, calls = on_the_host(folder, standalone, double=double)
    modules = []
    for made in (standalone.original, file):
        torch.manual_seed(1)
        modules.append(made.make_module())
    inputs = standalone.original.make_inputs()
    if double:
        modules = [module.double() for module in modules]
        inputs = [
            v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for v in inputs
        ]
    return Pair(*modules, inputs, namespace, calls)


def loaded(folder: Path, text: str) -> tuple[ModelFile, ModuleType]:
    """A written file and the namespace that it makes."""
    path = folder / "model_new.py"
    path.write_text(text, encoding="utf-8")
    file = load_model_file(path, class_name="ModelNew")
    return file, sys.modules[file.Model.__module__]


def on_the_host(folder: Path, standalone: Standalone, *, double: bool = False):
    """(the file, its namespace, calls): its kernels are the library's evaluator, with the checks of
    the binding; `calls` fills with what runs: (region, whether results are stored for backward).
    double: for models in double precision."""
    text = standalone.render()
    if double:
        head, ours = text.split("# ---- Written by Ingot")
        text = head + "# ---- Written by Ingot" + ours.replace("torch.float32", "torch.float64")
    file, namespace = loaded(folder, text)
    calls: list[tuple[str, bool]] = []
    kernels = {
        region.name: _Kernels(region, double, calls) for region in standalone.regions.values()
    }
    namespace._ingot_extension = lambda text: SimpleNamespace(**kernels)
    namespace._ingot_problem = lambda model, inputs: None
    return file, namespace, calls


class _Kernels:
    def __init__(self, region, double: bool, calls: list):
        self.region, self.double, self.calls = region, double, calls

    def __call__(self, leaves, storing: bool) -> list[torch.Tensor]:
        taken = self.region.storing if storing else self.region
        self.calls.append((self.region.name, storing))
        graph = json.loads(json.dumps(taken.region.graph))
        for value in graph["values"] if self.double else ():
            for holder in (value, value.get("attributes", {})):
                if holder.get("dtype") == "f32":
                    holder["dtype"] = "f64"
        self._check(leaves, taken.leaves)
        given = [leaf.detach() for leaf in leaves]
        layouts = taken.region.result_layouts
        results = evaluate_fp64(graph, given, taken.region.leaf_layouts, layouts)
        return [result.to(self._dtype(spec.dtype)) for result, spec in zip(results, taken.results)]

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if self.double and dtype == torch.float32 else dtype

    def _check(self, leaves, specs) -> None:
        assert len(leaves) == len(specs)
        batch = taken_batch(leaves, specs)
        for leaf, spec in zip(leaves, specs):
            sizes = tuple(-s * batch if s < 0 else s for s in spec.sizes)
            assert tuple(leaf.shape) == sizes and leaf.dtype == self._dtype(spec.dtype), spec.name


def taken_batch(leaves, specs) -> int:
    for leaf, spec in zip(leaves, specs):
        for size, wanted in zip(leaf.shape, spec.sizes):
            if wanted < 0:
                return size // -wanted
    return 1
