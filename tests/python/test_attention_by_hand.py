"""Training through attention that is written out: what stands between its two products."""

from __future__ import annotations

import pytest
import selection
import torch
from ingot.capture import token_chains
from live_memory import bytes_kept
from test_gradients import (
    backwards_of,
    calls_of,
    check_against_fp64,
    error,
    gradients_of,
    near_under_autocast,
    three_of,
)
from test_token_chains import second_derivatives
from torch import nn
from torch.nn import functional as F

HEADS, WIDTH, LENGTH = 2, 16, 7


pytestmark = pytest.mark.usefixtures("chains_alone")


def causal(scores):
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


# How the scores become weights.
KINDS = {
    "scaled": lambda self, a: F.softmax(a, -1),
    "causal": lambda self, a: F.softmax(causal(a), -1),
    "kept": lambda self, a: F.softmax(a.masked_fill(self.kept == 0, -1e9), -1),
    "where": lambda self, a: F.softmax(torch.where(self.kept, a, torch.finfo(a.dtype).min), -1),
    "padding": lambda self, a: F.softmax(a + (1.0 - self.padding[:, None, None]) * -1e4, -1),
    "bias of heads": lambda self, a: F.softmax(a + self.bias, -1),
    "bias from a table": lambda self, a: F.softmax(a + self.table[self.at].permute(2, 0, 1), -1),
    "in fp32": lambda self, a: F.softmax(a, -1, dtype=torch.float32).to(a.dtype),
    "by method": lambda self, a: (a / 2).softmax(dim=-1) * 0.5,
}


class Attention(nn.Module):
    def __init__(self, kind, rate=0.0, heads=HEADS):
        super().__init__()
        self.heads = heads
        torch.manual_seed(1)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "bias of heads":
            self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        if kind == "bias from a table":
            self.table = nn.Parameter(torch.randn(9, HEADS))
        self.register_buffer("at", torch.randint(0, 9, (LENGTH, LENGTH)))
        self.register_buffer("kept", torch.rand(LENGTH, LENGTH) > 0.3)
        self.register_buffer("padding", (torch.rand(1, LENGTH) > 0.3).float())
        self.weights_of, self.rate = KINDS[kind], rate

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(x).split(WIDTH, dim=-1)
        )
        weights = self.weights_of(self, (q @ k.transpose(-2, -1)) * (WIDTH // self.heads) ** -0.5)
        weights = F.dropout(weights, self.rate, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def takes_softmaxes(module):
    """Whether regions hold them, alone, and their derivatives are programs."""
    operators = [entry["what"] for call in calls_of(module) for entry in call.region.operators]
    assert "softmax" in operators and not {"linear", "matmul"} & set(operators)
    assert all(way.programs for way in backwards_of(module))


def test_other_sizes_of_another_module():
    """Dynamo would capture the second module of a class for any length and any number of heads."""
    for length, heads in ((5, 2), (12, 4)):
        three = three_of(Attention("scaled", heads=heads))
        check_against_fp64(*three, [torch.randn(4, length, WIDTH)])
        takes_softmaxes(three[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    three = three_of(Attention(kind))
    for batch in (4, 9):
        check_against_fp64(*three, [torch.randn(batch, LENGTH, WIDTH)])
    takes_softmaxes(three[0])
    assert len(backwards_of(three[0])) == len(calls_of(three[0]))  # for both batches


@pytest.mark.parametrize("kind", selection.quick(["causal", "bias of heads", "in fp32"], KINDS))
def test_autocast(kind):
    three = three_of(Attention(kind))
    near_under_autocast(three, torch.randn(4, LENGTH, WIDTH), 1e-3)
    takes_softmaxes(three[0])


@pytest.mark.parametrize("kind", ["scaled", "causal", "bias of heads", "in fp32", "where"])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_more_is_kept_than_in_eager_mode(kind, autocast):
    module, twin, _ = three_of(Attention(kind))
    x = torch.randn(4, LENGTH, WIDTH)
    kept = [bytes_kept(each, x, autocast) for each in (module, twin)]
    takes_softmaxes(module)
    assert kept[0] <= kept[1]


def test_rows_that_a_mask_hides_are_nan_as_in_eager_mode():
    module, twin, _ = three_of(Attention("causal"))
    x = torch.randn(4, LENGTH, WIDTH)
    x[1] = float("nan")
    found, eager = gradients_of(module, [x]), gradients_of(twin, [x])
    for own, other in zip(found, eager):
        torch.testing.assert_close(own, other, equal_nan=True, atol=1e-5, rtol=1e-4)
    takes_softmaxes(module)


def test_dropout_behind_it_draws_eagers_numbers():
    module, twin, _ = three_of(Attention("causal", rate=0.4))
    x = torch.randn(4, LENGTH, WIDTH)
    for own, other in zip(gradients_of(module, [x]), gradients_of(twin, [x])):
        assert error(own, other) < 1e-5
    takes_softmaxes(module)


@pytest.mark.parametrize("kind", ["causal", "bias of heads"])
def test_second_derivatives(kind):
    module, twin, exact = three_of(Attention(kind))
    x = torch.randn(4, LENGTH, WIDTH)
    found, eager = second_derivatives(module, x), second_derivatives(twin, x)
    truth = second_derivatives(exact, x.double())
    assert calls_of(module)
    for own, other, exactly in zip(found, eager, truth):
        if exactly.norm() > 1e-6:
            assert error(own, exactly) <= max(4 * error(other, exactly), 1e-5)


def test_in_fp32_only_chains_with_a_softmax_are_taken(monkeypatch):
    """On a GPU, where regions have the products: what stands around norms is theirs."""
    seen = []
    monkeypatch.setattr(token_chains, "takes_everything", False)
    monkeypatch.setattr(token_chains, "may_be_taken", lambda cut: True)
    pays = token_chains.pays
    monkeypatch.setattr(
        token_chains, "pays", lambda cut, chain: seen.append((cut, chain)) or pays(cut, chain)
    )
    module = three_of(nn.Sequential(nn.LayerNorm(WIDTH), Attention("scaled")))[0]
    module(torch.randn(64, LENGTH, WIDTH)).sum().backward()
    names = [{token_chains.schema_name(node.target) for node in chain} for _, chain in seen]
    assert any("aten::softmax" in found for found in names)
    monkeypatch.setattr(token_chains, "host_seconds", lambda cut, chain: 1.0)
    monkeypatch.setattr(token_chains, "bytes_saved", lambda cut, chain: 1e9)
    for (cut, chain), found in zip(seen, names):
        assert pays(cut, chain) == ("aten::softmax" in found)
