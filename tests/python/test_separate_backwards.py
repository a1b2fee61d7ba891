"""Several backward calls for results of one forward: what one frees, others need not have read."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from ingot.live import gradients
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


def backwards_of(model, calls):
    """Results whose backward calls, of a place and whether the graph is retained, gave equal
    gradients: the optimised module's, and the original's."""
    torch.manual_seed(0)
    modules = both(model())
    x = torch.randn(8, 16)
    found = [module(x) for module in modules]
    for results in found:
        for at, retain in calls:
            results[at].square().mean().backward(retain_graph=retain)
    for ours, theirs in zip(*(module.parameters() for module in modules)):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    return found


@pytest.mark.parametrize("model", [Twin, Probe])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_halves_that_have_nothing_in_common_have_a_backward_each(model, order):
    for results in backwards_of(model, [(at, False) for at in order]):
        with pytest.raises(RuntimeError, match="second time"):
            results[order[0]].sum().backward()


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


class Normed(Twin):
    """Whose halves have in common what PyTorch keeps nothing for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(16))
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        x = (x - self.mean) / 2 + self.shift
        return self.one(x), self.two(x)


@pytest.mark.parametrize("model", [Twin, Normed])
@pytest.mark.parametrize(
    "calls",
    [
        ((0, False), (1, False)),
        ((0, True), (1, False), (0, False)),
        ((0, False), (1, True), (1, False)),
    ],
)
def test_what_frees_nothing_is_no_obstacle(model, calls):
    backwards_of(model, calls)


def test_hooks_of_the_other_half_are_not_called():
    """Those that DDP puts where gradients are added up among them: it would take the other half's
    for done."""
    optimised, _ = both(Twin())
    called, nodes = [], []
    for name, parameter in optimised.named_parameters():
        parameter.register_hook(lambda gradient, name=name: called.append(name))
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, name=name: called.append(name))
        nodes.append(node)
    optimised(torch.randn(8, 16))[0].sum().backward()
    assert called and all(name.startswith("one") for name in called)


class Chosen(Twin):
    """With results that have no gradient."""

    def forward(self, x):
        one, two = super().forward(x)
        return two.argmax(1), one, one > 0, two


def test_results_without_a_gradient_are_with_the_first(monkeypatch):
    torch.manual_seed(0)
    optimised, twin = both(Chosen())
    x, applied = torch.randn(8, 16), []
    apply = gradients._apply
    monkeypatch.setattr(
        gradients, "_apply", lambda *given: applied.append(given[2]) or apply(*given)
    )
    for ours, theirs in zip(optimised(x), twin(x)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert ours.requires_grad == theirs.requires_grad
    assert list(map(len, applied)) == [3, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_second_derivative_of_one_half(first):
    """Of which the other half's results, and what only these are computed from, are no part."""
    torch.manual_seed(0)
    optimised, twin = both(Chosen())
    x, found = torch.randn(8, 16), []
    for module in (optimised, twin):
        _, one, _, two = module(x)
        half, result = [(module.one, one), (module.two, two)][first]
        variables = list(half.parameters())
        gradients_ = torch.autograd.grad(result.square().mean(), variables, create_graph=True)
        sum(g.square().sum() for g in gradients_).backward()
        found.append([p.grad for p in module.parameters()])
    for ours, theirs in zip(*found):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).norm() < 1e-4 * theirs.norm()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return torch.sigmoid(self.left(h)), torch.sigmoid(self.right(h)) * 2


@pytest.mark.parametrize("hooked", ["left", "right", "body"])
def test_a_hook_of_a_weight_that_a_loss_does_not_reach_is_not_called(hooked):
    module = TwoHeads()
    twin = copy.deepcopy(module)
    ours = ingot.optimize(module)
    calls = []
    for each in (module, twin):
        weight = getattr(each, hooked).weight
        weight.register_hook(lambda gradient: calls.append(gradient is None) or gradient * 0.5)
    for _ in range(3):
        x = torch.randn(6, 8)
        for each in (ours, twin):
            each.zero_grad()
            each(x)[0].sum().backward()
        for a, b in zip(ours.parameters(), twin.parameters()):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-5)
    assert not any(calls) and len(calls) == (0 if hooked == "right" else 6)
