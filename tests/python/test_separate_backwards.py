"""Several backward calls for results of one forward: what one frees, others need not have read."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from torch import nn
from torch.nn import functional as F


def both(model):
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ingot.optimize(model), twin


def layers(*sizes):
    made = [(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(*(layer for three in made for layer in three))


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = layers(16, 32, 4), layers(16, 32, 4)

    def forward(self, x):
        return self.one(x), self.two(x)


class Probe(Twin):
    def __init__(self):
        super().__init__()
        self.two = layers(4, 32, 4)

    def forward(self, x):
        h = self.one(x)
        return h * 2, self.two(h.detach())


@pytest.mark.parametrize("model", [Twin, Probe])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_halves_that_have_nothing_in_common_have_a_backward_each(model, order):
    optimised, twin = both(model())
    x = torch.randn(8, 16)
    for module in (optimised, twin):
        results = module(x)
        for at in order:
            results[at].square().mean().backward()
        with pytest.raises(RuntimeError, match="second time"):
            results[order[0]].sum().backward()
    for ours, theirs in zip(optimised.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.means = nn.Linear(16, 16), nn.Linear(16, 16), []

    def forward(self, x):
        h = F.gelu(F.layer_norm(self.a(x), (16,)))
        self.means = [*self.means, h.mean()]
        return self.b(h) + sum(self.means).detach(), h


def test_backward_does_not_enter_the_graph_of_an_earlier_call():
    optimised, twin = both(Remembering())
    for _ in range(4):
        x = torch.randn(8, 16)
        for module in (optimised, twin):
            module(x)[0].square().mean().backward()
    torch.testing.assert_close(optimised.a.weight.grad, twin.a.weight.grad, rtol=1e-4, atol=1e-5)
