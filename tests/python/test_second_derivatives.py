"""`create_graph=True` through regions that were given what nobody keeps."""

from __future__ import annotations

import copy
import weakref

import ingot
import pytest
import torch
from ingot.capture import gains
from test_gradients import calls_of, error
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Block(nn.Module):
    """What PyTorch computes, and a reader of it that is a region."""

    def __init__(self, reader):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.reader = reader

    def forward(self, x):
        return self.reader(self, x, torch.cumsum(x * self.b.bias, 0))


READERS = {
    "added last": lambda m, x, r: F.silu(m.a(x)) + r,
    "added to what is kept": lambda m, x, r: F.silu(m.a(x) + r),
    "added to what a norm reads": lambda m, x, r: m.b(m.norm(m.a(x) + r)),
    "added in front of tanh": lambda m, x, r: m.b(torch.tanh(m.a(x) + r)) * 2,
    "added in front of a softmax": lambda m, x, r: torch.softmax(m.a(x) + r, -1),
    "added in front of ReLU": lambda m, x, r: m.b(torch.relu(m.a(x) + r)).square(),
    "added twice": lambda m, x, r: F.gelu(m.b(F.silu(m.a(x) + r)) + r),
    "a gate": lambda m, x, r: torch.sigmoid(m.a(x)) * r,
    "cast": lambda m, x, r: F.silu(m.a(x) + r.double().float()),
    "without a gradient": lambda m, x, r: F.silu(m.a(x) + r.detach()),
    "the logarithm of what has none": lambda m, x, r: torch.tanh(
        m.a(x) + (r.detach().abs() + 0.1).log2()
    ),
}


def penalty(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of two orders more, so that a second derivative that is a constant is told, too."""
    x = x.to(module.a.weight.dtype).requires_grad_()
    result = module(x * 1)  # which nobody keeps
    (slope,) = torch.autograd.grad(result.pow(3).sum(), x, create_graph=True)
    wanted = [x, *module.parameters()]
    options = {"create_graph": True, "allow_unused": True}
    second = torch.autograd.grad(slope.square().sum() + result.sum(), wanted, **options)
    loss = sum(each.square().sum() for each in second if each is not None)
    third = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*second, *third]


@pytest.mark.parametrize("reader", READERS)
def test_of_what_is_only_added(reader):
    torch.manual_seed(0)
    module = Block(READERS[reader])
    optimised, exact = ingot.optimize(copy.deepcopy(module)), copy.deepcopy(module).double()
    x = torch.randn(5, 16)
    found, eager, truth = (penalty(each, x.clone()) for each in (optimised, module, exact))
    assert calls_of(optimised)
    for own, other, exactly in zip(found, eager, truth, strict=True):
        assert (own is None) == (exactly is None)
        if own is not None and exactly.norm() > 1e-9:
            assert error(own, exactly) <= max(1e-5, 4 * error(other, exactly))


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x, added):
        return F.silu(self.a(x) + added)


def test_what_is_only_added_is_not_kept_and_may_be_written():
    torch.manual_seed(0)
    module, gain, found = Adds(), torch.ones(16, requires_grad=True), []
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        added = gain * 2
        result, gone = called(torch.linspace(-1, 1, 80).view(5, 16), added), weakref.ref(added)
        del added
        assert gone() is None
        with torch.no_grad():
            called.a.bias.add_(1)
        wanted = [called.a.weight, called.a.bias, gain]
        first = torch.autograd.grad(result.square().sum(), wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
        assert called is module or calls_of(called)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class Probed(nn.Module):
    """Two results with no operator in common."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.probe = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h), torch.tanh(self.probe(h.detach()))


@pytest.mark.parametrize("asked", [(0, 1), (0,), (1,)])
def test_of_results_that_have_nothing_in_common(asked):
    torch.manual_seed(0)
    module, x, found = Probed(), torch.randn(5, 16), []
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        results, wanted = called(x), list(called.parameters())
        loss, options = sum(results[at].square().sum() for at in asked), {"allow_unused": True}
        first = torch.autograd.grad(loss, wanted, create_graph=True, **options)
        second = sum(g.square().sum() for g in first if g is not None)
        found.append([*first, *torch.autograd.grad(second, wanted, **options)])
        assert called is module or calls_of(called)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class Normalised(nn.Module):
    """Its statistics are stored, with the weight's product with one of them."""

    def __init__(self, frozen):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.norm.weight.requires_grad_(not frozen)

    def forward(self, x):
        return F.silu(self.norm(x)) + x.detach()


@pytest.mark.parametrize("frozen", [False, True])
def test_of_a_norm_whose_statistics_are_stored(frozen, monkeypatch):
    monkeypatch.setattr(gains, "least_saved", lambda *_: 0.0)
    torch.manual_seed(0)
    module, x, found = Normalised(frozen), torch.randn(4, 8, 5, 6), []
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        wanted = [p for p in called.parameters() if p.requires_grad]
        options = {"create_graph": True}
        first = torch.autograd.grad(called(x).pow(3).sum(), wanted, **options)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted, **options)
        found.append([*first, *second])
        assert called is module or calls_of(called)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


class Scaled(nn.Module):
    """A norm by a weight that its caller computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, weight):
        normalised = F.batch_norm(x, None, None, weight, None, True)
        return normalised, torch.tanh(self.linear(x))


def test_of_a_weight_that_its_gradient_does_not_read():
    """What computes it gets no gradient, either: zeros would be NaN behind the root of zero."""
    torch.manual_seed(0)
    module, x = Scaled(), torch.randn(6, 16)
    squares = torch.arange(16.0, requires_grad=True)
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        weight, matrix = squares.sqrt(), called.linear.weight
        results = called(x, weight)
        ones = [torch.ones_like(result) for result in results]
        first = torch.autograd.grad(results, (matrix, weight), ones, create_graph=True)
        loss = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(loss, (matrix, squares), allow_unused=True)
        assert second[0].isfinite().all() and second[1] is None
        assert called is module or calls_of(called)
