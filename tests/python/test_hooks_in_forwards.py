"""Hooks that a forward puts on what it computes, which TorchDynamo makes functions of."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from live import regions_run
from torch import nn


class Hooked(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.a, self.b, self.hook, self.seen = nn.Linear(32, 32), nn.Linear(32, 32), hook, None

    def forward(self, x):
        h = torch.relu(self.a(x))
        self.hook(h)
        if self.hook is kept_after_the_hook:
            h.retain_grad()
        self.seen = h
        return self.b(h * h)


def one_behind_the_other(h):
    h.register_hook(lambda g: g * 2)
    h.register_hook(lambda g: g + 1)


def kept_after_the_hook(h):
    h.register_hook(lambda g: g * 2)


def kept_before_the_hook(h):
    h.retain_grad()
    h.register_hook(lambda g: g * 2)


def by_what_follows_from_it(h):
    size = h.detach().norm()
    h.register_hook(lambda g: g / size)


def by_what_has_a_gradient(h):
    size = h.square().mean()
    h.register_hook(lambda g: g * size)


def looking_only(h):
    h.register_hook(lambda g: None)


HOOKS = (
    one_behind_the_other,
    kept_after_the_hook,
    kept_before_the_hook,
    by_what_follows_from_it,
    by_what_has_a_gradient,
    looking_only,
    lambda h: h.register_hook(lambda g: g.sin()),
)


def by_name(module):
    return torch.compile(module, backend="ingot")


def outcome(called, module, x):
    result = called(x)
    asked = torch.autograd.grad(result.sum(), [module.seen, x], retain_graph=True)
    again = torch.autograd.grad(result.square().sum(), x, create_graph=True)[0]
    (result.square().mean() + again.square().mean()).backward()
    kept = module.seen.grad if module.seen.retains_grad else None
    return [result, *asked, again, kept, x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrap", (ingot.optimize, by_name))
def test_hooks_are_called_as_eagers(hook, wrap):
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Hooked(hook)
    twin, x = copy.deepcopy(module), torch.randn(8, 32)
    for batch in (8, 3):
        expected = outcome(twin, twin, x[:batch].clone().requires_grad_())
        with regions_run() as ran, warnings.catch_warnings():
            warnings.simplefilter("ignore", ingot.IngotWarning)
            found = outcome(wrap(module), module, x[:batch].clone().requires_grad_())
        assert ran
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Adversary(nn.Module):
    """A function of the user's own that others do not read through."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(h) + self.c(Reversed.apply(h, 0.5)), self.b(Reversed.apply(self.a(x), 2.0))


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_a_reversed_gradient_is_that_of_its_reader():
    torch.manual_seed(0)
    module, x, found = Adversary(), torch.randn(8, 32), []
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        a, b = called(x)
        (a.square().mean() + b.mean()).backward()
        found.append([a, b, *(p.grad for p in called.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(called(x)[0], a)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("captured", [False, True])
def test_a_forward_hook_looks_at_what_is_returned(captured):
    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.tanh = nn.Linear(32, 32), nn.Linear(32, 4), nn.Tanh()

        def forward(self, x):
            h = self.tanh(self.a(x))
            return self.b(h), h

    torch.manual_seed(0)
    twin, x, found = Returned(), torch.randn(8, 32), []
    module = ingot.optimize(copy.deepcopy(twin))
    if captured:
        module(x)
    module.tanh.register_forward_hook(lambda _, given, h: looking_only(h))
    for called in (module, twin):
        with regions_run() as ran:
            result, h = called(x)
        assert ran or called is twin
        found.append(torch.autograd.grad(result.sum() + h.square().sum(), h))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def largest_and_its_place(layer, h):
    best, at = h.max(1, keepdim=True)
    best.register_hook(lambda g: g * 2)
    return layer(h) * best, at


def halves(layer, h):
    first, second = h.chunk(2, -1)
    first.register_hook(lambda g: g * 2)
    return layer(torch.cat([second, first], -1))


def parts_of_a_list(layer, h):
    parts = h.split([8, 8, 16], -1)
    parts[1].register_hook(lambda g: g * 2)
    return layer(torch.cat([*parts], -1))


def one_reversed(layer, h):
    first, second = h.chunk(2, -1)
    return layer(torch.cat([first, first], -1)), Reversed.apply(second, 0.5).tanh()


class OfSeveral(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(32, 32), nn.Linear(32, 4), function

    def forward(self, x):
        return self.function(self.b, torch.relu(self.a(x)))


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
@pytest.mark.parametrize("function", [largest_and_its_place, halves, parts_of_a_list, one_reversed])
def test_one_of_several_results_has_the_hook(function):
    """The others are read, too; and a loss may need none of what is behind it."""
    torch.manual_seed(0)
    module, x, found = OfSeveral(function), torch.randn(8, 32), []
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        results = called(x)
        results = results if isinstance(results, tuple) else (results,)
        results[0].square().sum().backward()
        found.append([*results, *(p.grad for p in called.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
