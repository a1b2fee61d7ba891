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
    "filled by a fraction": lambda self, a: a * (a > 0).masked_fill(self.kept, self.fraction),
    "plus True": lambda self, a: a * ((a > 0) + True),
    "twice added": lambda self, a: a * torch.add(a > 0, a > 0.5, alpha=2),
    "plus True, plus 1": lambda self, a: a * (((a > 0) + True) + 1.0),
    "chosen in place of 1": lambda self, a: a * (torch.where(a > 0.5, 1.0, a > 0) + 0.5),
    "chosen where they are true": lambda self, a: a * torch.where(a > 0, a > 0, self.fraction),
}
# What is handed out, with a result that a region gives.
FLAGS_ALONE = {
    "times True": lambda self, a: (a > 0) * True,
    "plus True": lambda self, a: (a > 0) + True,
    "sum": lambda self, a: ((a > 0) + True).sum(-1),
    "filled": lambda self, a: (a > 0).masked_fill(self.kept, self.fraction),
    "chosen in place of 1": lambda self, a: torch.where(a > 0.5, 1.0, a > 0),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "name",
    selection.quick(["chosen", "times", "minus", "filled by a fraction", "plus True"], OF_FLAGS),
)
def test_flags_and_a_whole_number(name, trained):
    twin = Model(OF_FLAGS[name])
    twin.register_buffer("three", torch.tensor(3))
    twin.register_buffer("below", torch.tensor(-2))
    twin.register_buffer("fraction", torch.tensor(0.5))
    module, x, found = ingot.optimize(copy.deepcopy(twin)), torch.randn(4, 8), []
    for each in (module, twin):
        with torch.set_grad_enabled(trained):
            y = each(x)
        if trained:
            (y * torch.arange(8)).sum().backward()
        found.append([y, each.linear.weight.grad])
    torch.testing.assert_close(*found)
    assert module.ingot_report()["operators_replaced"]


@pytest.mark.parametrize("name", selection.quick(["plus True", "filled"], FLAGS_ALONE))
def test_flags_that_are_handed_out(name):
    function = FLAGS_ALONE[name]

    class Both(Model):
        def forward(self, x):
            y = self.linear(x)
            return self.function(self, y), torch.tanh(y) * 2

    twin = Both(function)
    twin.register_buffer("fraction", torch.tensor(0.5))
    module, x = ingot.optimize(copy.deepcopy(twin)), torch.randn(4, 8)
    torch.testing.assert_close(module(x), twin(x))
    assert module.ingot_report()["operators_replaced"]


# Behind what equals a number but for its rounding to 16 bits.
COMPARED = {
    "gt": lambda h, c: h * (h > c),
    "ge": lambda h, c: h * (h >= c),
    "eq": lambda h, c: h * (h == c),
    "where": lambda h, c: torch.where(h < c, h, 2 * h),
    "masked_fill": lambda h, c: h.masked_fill(h > c, 0.0),
    "clamp": lambda h, c: h.clamp(-c, c),
    "clamp_min": lambda h, c: h.clamp_min(c),
    "hardtanh": lambda h, c: nn.functional.hardtanh(h, -c, c),
    "hardshrink": nn.functional.hardshrink,
    "softshrink": nn.functional.softshrink,
    "threshold": lambda h, c: nn.functional.threshold(h, c, 5.0),
}


class AtTheNumber(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.copy_(torch.linspace(-1, 1, 8))
            self.linear.bias[:4] = number

    def forward(self, x):
        h = self.linear(x)
        return tuple(compare(h, self.number) for compare in COMPARED.values())


@pytest.mark.parametrize("number", [0.1, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_is_compared_in_the_tensors_type(dtype, number):
    twin = AtTheNumber(number).to(dtype)
    module, x, found = ingot.optimize(copy.deepcopy(twin)), torch.randn(3, 8).to(dtype), []
    for each in (module, twin):
        results = each(x)
        gradients = [
            torch.autograd.grad(result.sum(), each.linear.bias, retain_graph=True)[0]
            for result in results
        ]
        found.append([*results, *gradients])
    for name, own, eager in zip([*COMPARED] * 2, *found):
        torch.testing.assert_close(own, eager, msg=lambda text, name=name: f"{name}: {text}")
    assert module.ingot_report()["operators_replaced"]
