"""PyTorch's own suites, through Ingot against PyTorch alone: every module of torch.nn, and the
operators that the importer knows; float32, forward and backward, both modes.

A sample by SEED runs here; INGOT_TORCH_SUITES=all runs everything, with INGOT_TORCH_SAMPLES inputs
of each.
"""

from __future__ import annotations

import copy
import itertools
import os
import random

import ingot
import pytest
import selection
import torch
from ingot.capture.table import TABLE
from live import regions_run
from torch import nn
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

ALL = os.environ.get("INGOT_TORCH_SUITES") == "all"
SEED = 2211
COUNT = None if ALL else 10
SAMPLES = int(os.environ.get("INGOT_TORCH_SAMPLES", "4" if ALL else "2"))

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    *([pytest.mark.thorough] if ALL else []),
]


def _sample(names, count):
    names = sorted(names)
    return names if count is None else sorted(random.Random(SEED).sample(names, count))


def _short(name):
    return name.removeprefix("nn.").removeprefix("nn.modules.").rpartition(".")[2]


INFOS = {_short(info.name): info for info in module_db}


def _known(op):
    """Whether the importer knows the operator by one of its names."""
    if op.name.startswith(("masked.", "sparse.")) or op.variant_test_name == "complex":
        return False
    names = {op.name.rpartition(".")[2], op.aten_name}
    return any(str(key).split("::")[-1].split(".")[-2:][0] in names for key in TABLE)


OPS = {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if _known(op)}


def _tolerances(info):
    """PyTorch's own for float32, or what its suite says for this one."""
    found = {}
    for decorated in info.decorators:
        for one in getattr(decorated, "decorators", ()):
            if isinstance(one, toleranceOverride) and torch.float32 in one.d:
                found = {"atol": one.d[torch.float32].atol, "rtol": one.d[torch.float32].rtol}
    return found or {"atol": 1e-5, "rtol": 1.3e-6}


def _fresh(tree):
    """Tensors of one's own, that need gradients where these do."""

    def own(t):
        return t.detach().clone().requires_grad_(t.requires_grad)

    return pytree.tree_map_only(torch.Tensor, own, tree)


def _outcome(module, args, kwargs, gradients):
    torch.manual_seed(0)
    args, kwargs = _fresh((args, kwargs))
    try:
        with torch.set_grad_enabled(gradients):
            results = list(pytree.tree_leaves(module(*args, **kwargs)))
    except Exception as error:  # the same is to come from both
        return type(error).__name__
    tensors = [t for t in results if isinstance(t, torch.Tensor)]
    needing = [t for t in tensors if t.requires_grad]
    if needing and gradients:
        weights = [torch.rand(t.shape, generator=torch.Generator().manual_seed(1)) for t in needing]
        torch.autograd.backward(needing, [w.to(t.dtype) for w, t in zip(weights, needing)])
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


def _agree(module, args, kwargs, tolerances, gradients=(True, False)):
    torch._dynamo.reset()
    taken = 0
    for enabled in gradients:
        twin = copy.deepcopy(module)
        optimised = ingot.optimize(copy.deepcopy(module))
        expected = _outcome(twin, args, kwargs, enabled)
        with regions_run() as ran:
            found = _outcome(optimised, args, kwargs, enabled)
        if isinstance(expected, str):
            assert found == expected
            continue
        assert not isinstance(found, str), found
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerances)
        taken += len(ran)
    return taken


class Calls(nn.Module):
    """A module or function, and a chain behind it: what stands alone, Ingot leaves to PyTorch."""

    def __init__(self, called):
        super().__init__()
        self.called = called

    def forward(self, *args, **kwargs):
        result = self.called(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            return torch.tanh(result) * 0.5
        return result


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", selection.every(2, _sample(INFOS, COUNT)))
def test_module(name, training, record_property):
    info = INFOS[name]
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, "cpu", torch.float32, True, training)
    taken = count = 0
    for given in itertools.islice(inputs, SAMPLES):
        if given.forward_input is None:
            continue
        made, called = given.constructor_input, given.forward_input
        module = info.module_cls(*made.args, **made.kwargs).train(training)
        taken += _agree(Calls(module), called.args, called.kwargs, _tolerances(info))
        count += 1
    record_property("regions", taken)
    assert taken or name not in TAKEN, "nothing of it was taken"


@pytest.mark.parametrize("name", _sample(OPS, COUNT))
def test_operator(name, record_property):
    op = OPS[name]
    torch.manual_seed(0)
    taken = 0
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES):
        args = (sample.input, *sample.args)
        taken += _agree(Calls(op.op), args, sample.kwargs, _tolerances(op))
    record_property("regions", taken)


# Of these at least one region must run.
TAKEN = {"Linear", "BatchNorm1d", "LayerNorm", "GroupNorm", "GELU", "Softmax"}
