"""nn.MultiheadAttention of one tensor with itself, captured without PyTorch's copies."""

import copy

import ingot
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

BATCH, LENGTH, WIDTH, HEADS = 3, 5, 16, 4


class Block(nn.Module):
    """As in an encoder: norm, attention, sum, norm, product."""

    def __init__(self, **options):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def attend(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = x + self.attend(self.before(x))
        return x + self.down(torch.relu(self.up(self.behind(x))))


class Masked(Block):
    def attend(self, x):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.attention(x, x, x, need_weights=False, attn_mask=mask)[0]


class Weighted(Block):
    def attend(self, x):
        made, weights = self.attention(x, x, x)
        return made * weights.sum()


class Crossed(Block):
    def attend(self, x):
        return self.attention(x, 2 * x, x + 1, need_weights=False)[0]


class SequenceFirst(Block):
    def attend(self, x):
        self.attention.batch_first = False
        return self.attention(x, x, x, need_weights=False)[0]


def check(module: nn.Module, x: torch.Tensor, training: bool):
    exact, eager = copy.deepcopy(module).double(), copy.deepcopy(module)
    made = ingot.optimize(module.train(training))
    results = {}
    for name, m, given in (("own", made, x), ("eager", eager, x), ("exact", exact, x.double())):
        m.train(training)
        given = given.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            result = m(given)
        parts = [result]
        if training:
            result.square().sum().backward()
            parts += [given.grad, *(p.grad for p in m.parameters())]
        results[name] = [part.detach() for part in parts]
    for own, other, exactly in zip(*results.values()):
        assert own.shape == other.shape and own.dtype == other.dtype
        norm = exactly.norm()
        error, allowed = (own.double() - exactly).norm(), (other.double() - exactly).norm()
        assert error <= 3 * allowed + 1e-6 * norm
    return made


def copies_of(call, *args) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as watched, torch.no_grad():
        call(*args)
    return sum(event.name in ("aten::clone", "aten::copy_") for event in watched.events())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "no bias"])
def test_attention_is_right_and_copies_nothing(options, training):
    x = torch.randn(BATCH, LENGTH, WIDTH)
    module = Block(**options)
    made = check(module, x, training)
    with torch.no_grad():
        made(x)  # without gradients another graph
    assert copies_of(made, x) == 0
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert copies_of(module.train(training), x) > 0
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("kind", [Masked, Weighted, Crossed, SequenceFirst])
@pytest.mark.parametrize("training", [False, True])
def test_what_is_unusual_is_pytorchs_own(kind, training):
    check(kind(), torch.randn(BATCH, LENGTH, WIDTH), training)


def test_another_batch_size_and_length():
    module = Block().eval()
    made = ingot.optimize(module)
    with torch.no_grad():
        for batch, length in ((3, 5), (7, 5), (1, 5), (3, 9)):
            x = torch.randn(batch, length, WIDTH)
            torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)


def test_dropout_draws_pytorchs_numbers():
    torch.manual_seed(5)
    module = Block(dropout=0.3).train()
    made = ingot.optimize(copy.deepcopy(module))
    x = torch.randn(BATCH, LENGTH, WIDTH)
    results = []
    for m in (made, module):
        torch.manual_seed(6)
        results.append(m(x))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_masks_of_flags_in_other_types_than_fp32(dtype):
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).to(dtype)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
    mask[1, 0] = True

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False, attn_mask=mask)[0]

    x = torch.randn(BATCH, LENGTH, WIDTH).to(dtype)
    with torch.no_grad():
        expected = Called()(x)
        torch.testing.assert_close(ingot.optimize(Called())(x), expected, rtol=2e-2, atol=2e-2)
