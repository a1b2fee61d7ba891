"""Tensors of no dimensions in a forward: `torch.tensor(-1e4)` where others would write a number."""

from __future__ import annotations

import copy

import ingot
import pytest
import selection
import torch
from test_gradients import error
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


def like(number, a):
    return torch.tensor(number, dtype=a.dtype)


FUNCTIONS = {
    "chosen": lambda self, a: torch.where(self.kept, a, like(-1e4, a)),
    "chosen first": lambda self, a: torch.where(self.kept, like(0.5, a), a),
    "lowest": lambda self, a: torch.where(
        self.kept, a, torch.full([], torch.finfo(a.dtype).min, dtype=a.dtype)
    ),
    "chosen, fp32": lambda self, a: torch.where(self.kept, a, torch.tensor(-1e4)),
    "filled": lambda self, a: a.masked_fill(self.kept, like(-1e4, a)),
    "filled, fp32": lambda self, a: a.masked_fill(self.kept, torch.tensor(-3.0)),
    "largest": lambda self, a: torch.maximum(a, like(0.1, a)),
    "compared, fp32": lambda self, a: a * (a > torch.tensor(0.1)),
    "scaled, fp32": lambda self, a: a * torch.tensor(0.1),
    "divided": lambda self, a: torch.tensor(1.5) / (a.abs() + 1),
    "power": lambda self, a: torch.pow(a.abs() + 1, like(1.5, a)),
    "from an integer": lambda self, a: torch.tensor(1) - a,
}
SETTINGS = ("fp32", "autocast", "bf16")


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.function = nn.Linear(8, 8), function
        self.register_buffer("kept", torch.rand(8) > 0.5)

    def forward(self, x):
        return torch.softmax(self.function(self, self.linear(x)), -1) * 2


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "name",
    selection.quick(["chosen", "chosen, fp32", "filled", "largest", "compared, fp32"], FUNCTIONS),
)
def test_results_and_gradients(name, setting):
    model = Model(FUNCTIONS[name])
    model = model.bfloat16() if setting == "bf16" else model
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    module = ingot.optimize(model)
    x = torch.randn(4, 8).to(twin.linear.weight.dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
        torch.testing.assert_close(module(x), twin(x), atol=2e-2, rtol=2e-2)
    assert module.ingot_report()["operators_replaced"]
    found = []
    for each in (module, twin, exact):
        given = x.double() if each is exact else x
        autocast = setting == "autocast" and each is not exact
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = each(given)
        (y.double() * torch.arange(8)).sum().backward()
        found.append((y, each.linear.weight.grad))
    for own, other, exactly in zip(*found):
        assert own.dtype == other.dtype
        limit = 1e-5 if setting == "fp32" else 0.02
        assert error(own, exactly) <= max(limit, 1.5 * error(other, exactly))


# Flags beside a whole number of no dimensions are whole numbers to PyTorch.
OF_FLAGS = {
    "chosen": lambda self, a: a * torch.where(a > 0, self.three, self.below),
    "chosen in place of flags": lambda self, a: a * torch.where(a > 0, a > 1, self.three),
    "times": lambda self, a: a * ((a > 0) * self.three),
    "plus": lambda self, a: a * ((a > 0) + self.three),
    "minus": lambda self, a: a * (self.three - (a > 0) * self.below),
    "largest": lambda self, a: a * torch.maximum(a > 0, self.three),
    "compared": lambda self, a: a * ((a > 0) == self.three) + a * ((a > 0) > self.below),
    "filled": lambda self, a: a * (a > 0).masked_fill(self.kept, self.three),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "name", selection.quick(["chosen", "times", "minus", "compared"], OF_FLAGS)
)
def test_flags_and_a_whole_number(name, trained):
    twin = Model(OF_FLAGS[name])
    twin.register_buffer("three", torch.tensor(3))
    twin.register_buffer("below", torch.tensor(-2))
    module, x, found = ingot.optimize(copy.deepcopy(twin)), torch.randn(4, 8), []
    for each in (module, twin):
        with torch.set_grad_enabled(trained):
            y = each(x)
        if trained:
            (y * torch.arange(8)).sum().backward()
        found.append([y, each.linear.weight.grad])
    torch.testing.assert_close(*found)
    assert module.ingot_report()["operators_replaced"]
