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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
    return [{inputs}]


def get_init_inputs():
    return []
"""


def two_layers(
    folder: Path, forward: str, init: str = "pass", inputs: str = "torch.randn(32, 64)"
) -> Standalone:
    """Of a model with two linear layers, `a` and `b`, of 64 features, from its statements."""
    path = folder / "model.py"
    statements = {"forward": forward, "init": init}
    indented = {k: textwrap.indent(v, " " * 8) for k, v in statements.items()}
    path.write_text(_TWO_LAYERS.format(inputs=inputs, **indented))
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
    programs = [*standalone.regions.values(), *standalone.backward]
    kernels = {program.name: _Kernels(program, double, calls) for program in programs}
    namespace._ingot_extension = lambda text: SimpleNamespace(**kernels)
    namespace._ingot_problem = lambda model, inputs: None
    return file, namespace, calls


class _Kernels:
    def __init__(self, program, double: bool, calls: list):
        self.program, self.double, self.calls = program, double, calls

    def __call__(self, leaves, storing: bool) -> list[torch.Tensor]:
        taken = self.program.storing if storing else self.program
        self.calls.append((self.program.name, storing))
        graph = json.loads(json.dumps(taken.graph))
        for value in graph["values"] if self.double else ():
            value.get("attributes", {}).pop("positions", None)  # read from memory in fp64
            for holder in (value, value.get("attributes", {})):
                if holder.get("dtype") == "f32":
                    holder["dtype"] = "f64"
        given = [leaf.detach() for leaf in leaves]
        if taken.most_contracted:
            assert len(given[1]) <= taken.most_contracted and len(given[1]) % 8 == 0
            return [given[0] @ given[1]]
        self._check(leaves, taken.leaves)
        results = evaluate_fp64(graph, given, taken.leaf_layouts, taken.result_layouts)
        batch = taken.batch or taken_batch(leaves, taken.leaves)
        for result, spec in zip(results, taken.results, strict=True):
            assert result.shape == spec.on_meta(batch).shape, f"{taken.name}: {spec.name}"
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


def tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def close(found, expected, tolerance: float) -> None:
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if b is None or a is None:
            assert a is b
            continue
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def gradients(module, inputs, *, again: bool):
    """Of the inputs and parameters, for fixed gradients of the outputs; with `again`, those of a
    product with these gradients."""
    torch.manual_seed(7)
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
    wanted = [*(t.requires_grad_() for t in wanted), *module.parameters()]
    outputs = [t for t in tensors(module(*inputs)) if t.requires_grad]
    generator = torch.Generator().manual_seed(3)

    def like(t):
        return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)

    along = [like(t) for t in outputs]
    options = {"allow_unused": True, "create_graph": again}
    first = torch.autograd.grad(outputs, wanted, along, **options)
    if not again:
        return first
    kept = [g for g in first if g is not None and g.requires_grad]
    if not kept:
        return first, ()
    total = sum((g * like(g)).sum() for g in kept)
    return first, torch.autograd.grad(total, wanted, allow_unused=True)


def in_mode(pair: Pair, mode: str) -> list[torch.Tensor]:
    """Both modules so; what `gradients` gives those of."""
    for module in (pair.reference, pair.ours):
        module.train(mode == "training")
    like = [t for t in pair.inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return [*like, *pair.reference.parameters()]


def filled(found, like):
    """Gradients that are zero everywhere may be given as None."""
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, like)]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))
