"""What the tests of live modules share."""

from __future__ import annotations

import copy

import ingot
import pytest
import torch
from regions import regions_run
from torch.utils import _pytree as pytree


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def agree(optimised, twin, *inputs, tolerance=1e-5):
    """Calls both; compares results and the whole state."""
    found, expected = optimised(*inputs), twin(*inputs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(
            optimised.state_dict()[name], tensor, rtol=tolerance, atol=tolerance, msg=name
        )
    return found


def compare(make, script, *, taken=True, gradients=(True, False), tolerance=3e-5, graphs=None):
    """Runs a script, a generator of results, with a module and with a copy of it by PyTorch alone:
    results, what PyTorch makes of their gradients, and the whole state are to be the same.
    taken: whether regions must have run. graphs: how many captures may have been made."""
    for enabled in gradients:
        torch.manual_seed(0)
        module = make()
        twin = copy.deepcopy(module)
        optimised = ingot.optimize(module)
        with torch.set_grad_enabled(enabled):
            expected = outcome(twin, script)
            with regions_run() as ran:
                found = outcome(optimised, script)
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
        )
        assert bool(ran) or not taken, f"nothing was taken: {optimised.ingot_report()}"
        captured = len(optimised._ingot.graphs)
        assert graphs is None or captured <= graphs, f"{captured} captures"


def outcome(module, script):
    """Everything to compare, as trees of tensors and plain values."""
    torch.manual_seed(1)
    results = [pytree.tree_leaves(result) for result in script(module)]
    assert results
    tensors = [t for result in results for t in result if isinstance(t, torch.Tensor)]
    assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    needing = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    if needing and torch.is_grad_enabled():
        sum((t.double() * t.double()).sum() for t in needing).backward()
    leaves = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "results": [[_told(value) for value in result] for result in results],
        "needs gradients": [t.requires_grad for t in tensors],
        "state": {name: t.detach().clone() for name, t in module.state_dict().items()},
        "gradients": {n: torch.zeros(()) if t.grad is None else t.grad for n, t in leaves.items()},
    }


def _told(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float)) else tuple(repr(value).encode())


def programs_of(module):
    """All that was compiled for an optimised module so far."""
    compiled = [graph.compiled for graph in module._ingot.graphs if graph.compiled is not None]
    return [program for made in compiled for program in made.programs]


def x(batch=4):
    return torch.randn(batch, 8)
