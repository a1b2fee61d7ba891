"""Training through attention for which PyTorch has no fused kernel: its products and what is
between them, written out."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from ingot.capture import token_chains, written_out
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


class Positions(nn.Module):
    """As T5's: a bias from an embedding, whose heads lie innermost."""

    def __init__(self, rate=0.0, scale=1.0, dense=False, hides=False):
        super().__init__()
        torch.manual_seed(1)
        self.rate, self.scale, self.dense = rate, scale, dense
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Embedding(9, HEADS)
        self.register_buffer("at", torch.randint(0, 9, (LENGTH, LENGTH)))
        hidden = torch.zeros(LENGTH, LENGTH)
        if hides:
            hidden[torch.rand(LENGTH, LENGTH) > 0.6] = float("-inf")
            hidden[2] = float("-inf")
        self.register_buffer("hidden", hidden)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        bias = self.table(self.at).permute(2, 0, 1).unsqueeze(0) + self.hidden
        bias = bias.contiguous() if self.dense else bias
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, bias, rate, scale=self.scale)
        return mixed.transpose(1, 2).flatten(2)


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


def softmaxes(module):
    operators = [entry["what"] for call in calls_of(module) for entry in call.region.operators]
    return sum("softmax" in what for what in operators)


def is_written_out(module):
    """Whether regions hold the softmax, and its derivative is a program."""
    return softmaxes(module) > 0 and all(way.programs for way in backwards_of(module))


MODELS = {
    "bias": lambda: Positions(),
    "scaled": lambda: Positions(scale=None),
    "turned around": lambda: Positions(scale=-0.5),
    "rows that see nothing": lambda: Positions(hides=True),
    "three dimensions": OneHead,
}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients(kind):
    three = three_of(MODELS[kind]())
    for batch in (4, 9, 1):
        check_against_fp64(*three, [torch.randn(batch, LENGTH, WIDTH)])
    assert is_written_out(three[0])


@pytest.mark.parametrize("kind", ["bias", "rows that see nothing", "three dimensions"])
def test_autocast(kind):
    three = three_of(MODELS[kind]())
    near_under_autocast(three, torch.randn(4, LENGTH, WIDTH), 1e-3)
    assert is_written_out(three[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_of_16_bits(dtype):
    twin = Positions(scale=None).to(dtype)
    module, exact = ingot.optimize(copy.deepcopy(twin)), copy.deepcopy(twin).double()
    x = torch.randn(4, LENGTH, WIDTH).to(dtype)
    found, eager, truth = (gradients_of(m, [x]) for m in (module, twin, exact))
    for own, other, exactly in zip(found, eager, truth):
        assert own.dtype == other.dtype
        assert error(own, exactly) <= max(2e-3, 1.5 * error(other, exactly))
    assert is_written_out(module)


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_draws_eagers_numbers(autocast):
    module, twin, _ = three_of(Positions(rate=0.4))
    x = torch.randn(4, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for own, other in zip(gradients_of(module, [x]), gradients_of(twin, [x])):
            if other.norm() > 0.1:  # a bias of all keys alike has rounding for its gradient
                assert error(own, other) < (2e-2 if autocast else 1e-5)
    assert is_written_out(module)


@pytest.mark.parametrize("autocast", [False, True])
def test_second_derivatives(autocast):
    module, twin, exact = three_of(Positions())
    x = torch.randn(4, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, eager = second_derivatives(module, x), second_derivatives(twin, x)
    truth = second_derivatives(exact, x.double())
    assert is_written_out(module)
    for own, other, exactly in zip(found, eager, truth):
        if exactly.norm() > 1e-6:
            assert error(own, exactly) <= max(4 * error(other, exactly), 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_no_more_is_kept_than_in_eager_mode(autocast):
    """But for what autocast makes 16 bits of, which eager widens again."""
    module, twin, _ = three_of(Positions())
    x = torch.randn(4, LENGTH, WIDTH)
    kept = [bytes_kept(each, x, autocast) for each in (module, twin)]
    assert is_written_out(module)
    assert kept[0] <= kept[1]


def test_what_a_fused_kernel_reads_is_left_alone(monkeypatch):
    x = torch.randn(4, LENGTH, WIDTH)
    module = three_of(Positions(dense=True))[0]
    module(x).sum().backward()
    assert not softmaxes(module)  # a GPU has a kernel for it
    monkeypatch.setattr(torch._C, "_get_mem_efficient_sdp_enabled", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)
    module = three_of(Positions())[0]
    module(x).sum().backward()
    assert not softmaxes(module)  # the user's choice of kernels is not foreseen


def test_without_gradients_it_stays_pytorchs():
    module, twin, _ = three_of(Positions().eval())
    x = torch.randn(4, LENGTH, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(module(x), twin(x))
    assert not softmaxes(module)


def test_many_gradients_at_once():
    """torch.autograd.grad(is_grads_batched=True) hands widened products batches of gradients."""
    a, b = (torch.randn(3, 4, 5, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    made = written_out.product_of_attention(a, b.mT, torch.float32)
    given = torch.randn(6, *made.shape)
    found = torch.autograd.grad(made, (a, b), given, is_grads_batched=True, retain_graph=True)
    for at, each in enumerate(given):
        for own, one in zip(found, torch.autograd.grad(made, (a, b), each, retain_graph=True)):
            torch.testing.assert_close(own[at], one)


def test_the_products_are_told_with_the_models_line():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = ingot.optimize(Positions())
        with torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(4, LENGTH, WIDTH)).sum().backward()
    told = [str(each.message) for each in said if "product_of_attention" in str(each.message)]
    assert len(told) == 1 and "test_written_out.py" in told[0]


def test_a_step_that_waits_for_the_host_keeps_pytorchs(monkeypatch):
    monkeypatch.setattr(token_chains, "takes_everything", False)
    monkeypatch.setattr(token_chains, "are_taken_on", lambda device_type: True)
    for waits in (True, False):
        monkeypatch.setattr(written_out, "is_of_the_host", lambda nodes, waits=waits: waits)
        monkeypatch.setattr(token_chains, "pays", lambda cut, chain: True)
        module = three_of(Positions())[0]
        module(torch.randn(4, LENGTH, WIDTH)).sum().backward()
        assert is_written_out(module) == (not waits)
