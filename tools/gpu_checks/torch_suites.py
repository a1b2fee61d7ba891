"""PyTorch's own suites, through Ingot against PyTorch alone: every module of torch.nn
(`module_db`), and the operators of `op_db` that the importer knows; float32, with PyTorch's
tolerances.

What stands alone Ingot leaves to PyTorch: each has a chain behind it here.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import ingot
import ingot.capture.importer  # whose parts fill the table
import torch
from ingot.capture.table import TABLE
from torch import nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "python"))
if importlib.util.find_spec("expecttest") is None:  # PyTorch's suites import it, and want its class
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

from regions import regions_run  # noqa: E402
from torch.testing._internal.common_device_type import toleranceOverride  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402


def _short(name: str) -> str:
    return name.removeprefix("nn.").removeprefix("nn.modules.").rpartition(".")[2]


def _known(op: Any) -> bool:
    """Whether the importer knows the operator by one of its names."""
    if op.name.startswith(("masked.", "sparse.")) or op.variant_test_name == "complex":
        return False
    names = {op.name.rpartition(".")[2], op.aten_name}
    return any(str(key).split("::")[-1].split(".")[-2:][0] in names for key in TABLE)


MODULES = {_short(info.name): info for info in module_db}
OPERATORS = {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if _known(op)}


def _tolerances(info: Any) -> dict[str, float]:
    """PyTorch's own for float32, or what its suite says for this one."""
    found = {}
    for decorated in info.decorators:
        for one in getattr(decorated, "decorators", ()):
            if isinstance(one, toleranceOverride) and torch.float32 in one.d:
                found = {"atol": one.d[torch.float32].atol, "rtol": one.d[torch.float32].rtol}
    return found or {"atol": 1e-5, "rtol": 1.3e-6}


def _fresh(tree: Any) -> Any:
    """Tensors of one's own, that need gradients where these do."""

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    return pytree.tree_map_only(torch.Tensor, own, tree)


def _outcome(module: nn.Module, args: tuple, kwargs: dict, gradients: bool) -> dict | Exception:
    try:
        return _results(module, args, kwargs, gradients)
    except Exception as error:  # the same is to come from both
        return error


def _results(module: nn.Module, args: tuple, kwargs: dict, gradients: bool) -> dict:
    torch.manual_seed(0)
    args, kwargs = _fresh((args, kwargs))
    with torch.set_grad_enabled(gradients):
        results = list(pytree.tree_leaves(module(*args, **kwargs)))
    tensors = [t for t in results if isinstance(t, torch.Tensor)]
    needing = [t for t in tensors if t.requires_grad]
    if needing and gradients:
        weights = [torch.rand(t.shape, generator=torch.Generator().manual_seed(1)) for t in needing]
        torch.autograd.backward(needing, [w.to(t) for w, t in zip(weights, needing)])
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return {
        "results": [t.detach() for t in tensors],
        "needs gradients": [t.requires_grad for t in tensors],
        "of inputs": [torch.zeros(()) if t.grad is None else t.grad for t in leaves],
        "of parameters": [
            torch.zeros(()) if p.grad is None else p.grad for p in module.parameters()
        ],
        "state": dict(module.state_dict()),
    }


def _agree(module: nn.Module, args: tuple, kwargs: dict, tolerances: dict[str, float]) -> int:
    """How many regions ran, with gradients and without. Raises AssertionError where results,
    gradients or state differ, or where only PyTorch raises an exception; else what Ingot raises."""
    torch._dynamo.reset()
    taken = 0
    for gradients in (True, False):
        twin = copy.deepcopy(module)
        optimised = ingot.optimize(copy.deepcopy(module))
        expected = _outcome(twin, args, kwargs, gradients)
        with regions_run() as ran:
            found = _outcome(optimised, args, kwargs, gradients)
        if isinstance(found, Exception) and type(found) is not type(expected):
            raise found
        if isinstance(expected, Exception):
            assert type(found) is type(expected), f"PyTorch alone raises {expected!r}"
            continue
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerances)
        taken += len(ran)
    return taken


class _Behind(nn.Module):
    """A module or function, and a chain behind it."""

    def __init__(self, called: Any):
        super().__init__()
        self.called = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.called(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return torch.tanh(result) * 0.5
        return result


def check_module(name: str, training: bool, device: str, samples: int) -> int:
    """As _agree(), over so many of PyTorch's inputs."""
    info = MODULES[name]
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device, torch.float32, True, training)
    taken = 0
    for given in itertools.islice(inputs, samples):
        if given.forward_input is None:
            continue
        made, called = given.constructor_input, given.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(device).train(training)
        taken += _agree(_Behind(module), called.args, called.kwargs, _tolerances(info))
    return taken


def check_operator(name: str, device: str, samples: int) -> int:
    """As _agree(), over so many of PyTorch's inputs."""
    op = OPERATORS[name]
    torch.manual_seed(0)
    taken = 0
    found = op.sample_inputs(device, torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(found, samples):
        args = (sample.input, *sample.args)
        taken += _agree(_Behind(op.op), args, sample.kwargs, _tolerances(op))
    return taken


# Of these at least one region must run.
TAKEN = {"Linear", "BatchNorm1d", "LayerNorm", "GroupNorm", "GELU", "Softmax"}
