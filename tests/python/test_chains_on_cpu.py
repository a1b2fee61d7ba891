"""Captured chains through the whole library on the CPU, in float32, against PyTorch."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import selection
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingot.live.backend import IngotWarning
from test_capture_operators import (
    FEATURE_OPERATORS,
    FEATURES,
    POINTWISE,
    PRODUCTS,
    SHAPED,
    Chain,
    Products,
)
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

# Steps: a last bit of the product may move these by one.
STEPS = {"floor", "ceil", "round", "trunc", "div_trunc", "sign"}
# One operator beside a product that only PyTorch can do: nothing to optimise.
LEFT_ALONE = {"scores_of_batch", "einsum_other"}


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def compare(module: nn.Module, *shapes, batches=(4, 3, 9), taken=True, tolerance=2e-5):
    twin = copy.deepcopy(module)
    inputs = [torch.randn(shape) for shape in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IngotWarning)
        optimised = ingot.optimize(module, inputs)
    if taken:
        problems = [graph.problem for graph in optimised._ingot.graphs]
        assert set(problems) == {None}
    for batch in batches:
        fed = [
            torch.randn(batch, *s[1:]) if s[0] == shapes[0][0] else torch.randn(s) for s in shapes
        ]
        found, expected = optimised(*fed), twin(*fed)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected)):
            assert a.dtype is b.dtype and a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return optimised


@pytest.mark.parametrize("name", selection.every(4, sorted(set(POINTWISE) - STEPS)))
def test_pointwise(name):
    compare(Chain(POINTWISE[name]), (4, 8), tolerance=2e-4 if name in ("tan", "exp") else 2e-5)


@pytest.mark.parametrize("name", selection.every(2, sorted(FEATURE_OPERATORS)))
def test_over_features(name):
    compare(Chain(FEATURE_OPERATORS[name]), (4, 8))


@pytest.mark.parametrize("name", selection.every(2, sorted(SHAPED)))
def test_shapes(name):
    function, shape = SHAPED[name]
    batched = len(shape) > 1
    compare(
        Chain(function),
        shape,
        batches=(shape[0], 3, 9) if batched else (shape[0],),
        taken=name not in LEFT_ALONE,
    )


@pytest.mark.parametrize("name", selection.every(2, sorted(PRODUCTS)))
def test_products(name):
    function, shapes = PRODUCTS[name]
    compare(Products(function), *shapes, taken=name not in LEFT_ALONE)


class Drawn(nn.Module):
    """A chain of drawn operators behind a linear layer."""

    steps = {
        "scale": lambda m, x: x * m.vector,
        "shift": lambda m, x: x + m.other,
        "half": lambda m, x: x * 0.5,
        "relu": lambda m, x: F.relu(x),
        "gelu": lambda m, x: F.gelu(x),
        "tanh": lambda m, x: x.tanh(),
        "silu": lambda m, x: F.silu(x),
        "clamp": lambda m, x: x.clamp(-1.0, 1.0),
        "bn": lambda m, x: m.bn(x),
        "layer_norm": lambda m, x: m.ln(x),
        "group_norm": lambda m, x: m.gn(x),
        "softmax": lambda m, x: torch.softmax(x, dim=1),
        "log_softmax": lambda m, x: torch.log_softmax(x, dim=1),
        "residual": lambda m, x: x + m.linear_out,
        "linear": lambda m, x: m.second(x),
        "centre": lambda m, x: x - x.mean(dim=1, keepdim=True),
        "by_max": lambda m, x: x / (1 + x.abs().amax(dim=1, keepdim=True)),
        "rms": lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
        "groups": lambda m, x: x.view(x.shape[0], 4, -1).tanh().flatten(1),
    }

    def __init__(self, names):
        super().__init__()
        self.first = nn.Linear(8, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.vector = nn.Parameter(torch.rand(FEATURES) + 0.5)
        self.other = nn.Parameter(torch.randn(FEATURES))
        self.bn = nn.BatchNorm1d(FEATURES)
        self.ln = nn.LayerNorm(FEATURES)
        self.gn = nn.GroupNorm(4, FEATURES)
        self.names = names

    def forward(self, x):
        x = self.first(x)
        start = x
        for name in self.names:
            x = x + start if name == "residual" else self.steps[name](self, x)
        return x


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(sorted(Drawn.steps)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(2, 70),
)
def test_drawn_chains(names, training, batch):
    torch.manual_seed(1)
    module = Drawn(names).train(training)
    twin = copy.deepcopy(module).double()
    optimised = compare(module, (batch, 8), batches=(batch,), tolerance=1e-3)
    fed = torch.randn(batch, 8)
    plain = copy.deepcopy(twin)
    for name, tensor in optimised.state_dict().items():
        plain.state_dict()[name].copy_(tensor)
    error = (optimised(fed).double() - plain(fed.double())).norm()
    assert error <= 1e-4 * plain(fed.double()).norm() + 1e-6 or training


@pytest.mark.parametrize("training", [True, False])
def test_batch_size_changes_are_bitwise_those_of_a_fresh_compile(training):
    module = Drawn(["scale", "bn", "softmax"]).train(training)
    sizes = [1 if not training else 2, 5, 64, 33]
    inputs = [torch.randn(size, 8) for size in sizes]
    optimised = ingot.optimize(copy.deepcopy(module))
    several = [optimised(fed) for fed in inputs]
    for fed, result in zip(inputs, several):
        fresh = ingot.optimize(copy.deepcopy(module))
        assert torch.equal(fresh(fed), result)


def test_large_mean_statistics():
    """Batch statistics where the mean is large against the deviation."""
    module = Drawn(["bn"])
    module.first.bias.fill_(1000.0)
    twin = copy.deepcopy(module).double()
    fed = torch.rand(256, 8) * 0.01
    error = (ingot.optimize(module)(fed).double() - twin(fed.double())).abs().max()
    eager = (copy.deepcopy(twin).float()(fed).double() - twin(fed.double())).abs().max()
    assert error <= 2 * eager + 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("names", [["bn"], ["softmax"], ["relu", "layer_norm"], ["silu"]])
def test_non_finite_values_go_where_pytorch_sends_them(names, value):
    module = Drawn(names)
    twin = copy.deepcopy(module)
    fed = torch.randn(6, 8)
    fed[2, 3] = value
    found, expected = ingot.optimize(module)(fed), twin(fed)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_a_sum_over_the_batch_of_equal_terms_is_as_good_as_pytorchs():
    """As the gradient of a mean makes them: rounding errors of one sign."""
    layer = nn.Sequential(nn.Linear(32, 48), nn.Sigmoid())
    new = ingot.optimize(copy.deepcopy(layer), [torch.randn(40, 32)])
    exact = copy.deepcopy(layer).double()
    x, terms = torch.randn(40, 32), torch.full((40, 48), 0.1)
    with torch.enable_grad():
        for module, of in ((new, torch.float32), (exact, torch.float64)):
            module(x.to(of)).backward(terms.to(of))
    (found,) = (p.grad.double() for n, p in new.named_parameters() if n.endswith("bias"))
    wanted = exact[0].bias.grad
    assert (found - wanted).norm() / wanted.norm() < 7e-8
