"""Forwards that switch gradients or autocast for a part of themselves, and equal blocks."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from ingot.live.backward import Backward
from live import regions_run
from torch import nn


class Rotated(nn.Module):
    """A table made without gradients and without autocast, as rotary embeddings are."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 16)
        self.rates = nn.Parameter(torch.rand(24))

    def forward(self, x):
        h = torch.relu(self.first(x))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            table = torch.cos(torch.outer(torch.arange(x.shape[0]).float(), self.rates))
        return torch.tanh(self.last(h * table)) * 2


class Written(Rotated):
    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            h.mul_(2.0)
        return torch.tanh(self.last(h))


class Enabled(Rotated):
    def forward(self, x):
        with torch.no_grad():
            a = self.first(x).relu()
            with torch.enable_grad():
                b = torch.tanh(self.first(x))
        return self.last(a + b)


def step(module, x, autocast):
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    (y.float() * torch.linspace(0, 1, y.numel()).view_as(y)).sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}
    return y.detach(), gradients


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [Rotated, Written, Enabled])
def test_a_part_without_gradients_or_autocast_is_eagers(make, autocast):
    torch.manual_seed(0)
    eager, x = make(), torch.randn(6, 16)
    optimised = ingot.optimize(copy.deepcopy(eager))
    expected = step(eager, x, autocast)
    with warnings.catch_warnings(), regions_run() as ran:
        warnings.simplefilter("ignore")
        found = step(optimised, x, autocast)
    assert ran
    tolerance = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (found[1]["rates"] is None) == (expected[1]["rates"] is None)


class Narrow(nn.Module):
    """Autocast would round its product to bf16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            h = torch.sigmoid(self.first(x))
        return h, torch.tanh(self.last(h))


def test_what_is_kept_from_autocast_is_not_rounded():
    torch.manual_seed(0)
    eager, x = Narrow(), torch.randn(6, 16)
    optimised = ingot.optimize(copy.deepcopy(eager))
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = eager(x), optimised(x)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=2e-2)


class Blocks(nn.Module):
    """A softmax between them, over an axis of its own, cuts them apart."""

    def __init__(self, count=5):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.other = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.cumsum(torch.tanh(block(x)) * 2, dim=0)
        return torch.sigmoid(self.other(x))


def test_equal_regions_have_one_derivative(monkeypatch):
    made = []
    monkeypatch.setattr(
        "ingot.live.gradients.Backward", lambda *given: made.append(given) or Backward(*given)
    )
    torch.manual_seed(0)
    eager, x = Blocks(), torch.randn(6, 16)
    optimised = ingot.optimize(copy.deepcopy(eager))
    with warnings.catch_warnings(), regions_run() as ran:
        warnings.simplefilter("ignore")
        found, expected = step(optimised, x, False), step(eager, x, False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    regions = [name for name in ran if not name.startswith("backward")]
    # The first block, whose input needs no gradient, the others, and what follows them.
    assert len(regions) >= 6 and len(made) == 3


class Policy(nn.Module):
    """torch.distributions computes what it keeps under enable_grad."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x):
        logits = self.head(torch.tanh(self.body(x)))
        chosen = torch.distributions.Categorical(logits=logits)
        return chosen.log_prob(torch.zeros(x.shape[0], dtype=torch.long)), chosen.entropy()


class EnabledOverWeights(Policy):
    def forward(self, x):
        h = torch.relu(self.body(x)) * 2
        with torch.enable_grad():
            return self.head(h) * 2, h


class EnabledOverLeaf(Policy):
    def forward(self, x):
        h = torch.relu(self.body(x)) * 2
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            return h * 2 + 1, h


class Declined(Policy):
    def forward(self, x):
        return torch.relu(self.body(x).requires_grad_(False)) * 2, x


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
@pytest.mark.parametrize("make", [Policy, EnabledOverWeights, EnabledOverLeaf, Declined])
def test_gradients_switched_on_inside_no_grad(make):
    torch.manual_seed(0)
    eager, x = make(), torch.randn(6, 16)
    optimised = ingot.optimize(copy.deepcopy(eager))
    with torch.no_grad(), regions_run() as ran:
        found, expected = optimised(x), eager(x)
    assert bool(ran) or make not in (Policy, Declined)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
