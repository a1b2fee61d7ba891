"""Sequences whose length changes from call to call: captured once for all lengths, right in every
one, and with the same bits whatever was called before."""

from __future__ import annotations

import copy
import itertools

import ingot
import pytest
import selection
import torch
from ingot.live import lengths
from live import regions_run
from torch import nn
from torch.nn import functional as F

WIDTH = 32
pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


@pytest.fixture(autouse=True)
def _nothing_is_known_of_other_tests():
    """TorchDynamo remembers sizes that changed by where a forward was written."""
    torch._dynamo.reset()


class Block(nn.Module):
    """Attention by PyTorch's operator between linears, norms and a residual chain."""

    def __init__(self, causal=None):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.causal = causal or (lambda length: length > 1 and True)

    def forward(self, x, past=None):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in parts)
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v)))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal(length))
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value), (k, v)


class Encoder(Block):
    def forward(self, x):
        return super().forward(x)[0]


class ByHand(nn.Module):
    """Attention that a region takes where the length is a number."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) * WIDTH**-0.5, -1)
        x = x + self.out(weights @ v)
        return x + self.mlp(x)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = F.gelu(self.norm(self.conv(x))) * 0.5
        return self.head(F.hardswish(y + 1).mean((2, 3)))


def _pair(module):
    torch.manual_seed(0)
    eager = module().eval()
    return ingot.optimize(copy.deepcopy(eager)), eager


def _captures(optimised):
    return len(optimised._ingot.graphs)


def _agrees(optimised, eager, x):
    """With gradients where they are on. The result."""
    with regions_run() as ran:
        found = optimised(x)
    expected = eager(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.stride() == expected.stride() and ran
    if torch.is_grad_enabled():
        given = torch.randn_like(expected)
        for name, gradient in _gradients(optimised, found, given).items():
            wanted = _gradients(eager, expected, given)[name]
            torch.testing.assert_close(gradient, wanted, rtol=2e-4, atol=2e-5, msg=name)
    return found.detach()


def _gradients(module, result, given):
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(result, list(parameters.values()), given, retain_graph=True)
    return dict(zip(parameters, found))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("batch", selection.quick([3], [1, 3]))
def test_two_captures_serve_all_lengths(batch, gradients):
    optimised, eager = _pair(Encoder)
    with torch.set_grad_enabled(gradients):
        for length in (6, 9, 5, 14, 31, 2, 6):
            _agrees(optimised, eager, torch.randn(batch, length, WIDTH))
    assert _captures(optimised) == 2


def test_all_that_follows_the_products_is_taken_with_them():
    optimised, eager = _pair(Encoder)
    with torch.no_grad():
        for length in (6, 9):
            _agrees(optimised, eager, torch.randn(2, length, WIDTH))
    alone, kept = (graph.compiled.captured for graph in optimised._ingot.graphs)
    taken = [
        sorted(each["what"] for region in captured.regions for each in region.operators)
        for captured in (alone, kept)
    ]
    assert taken[0] == taken[1] and {"silu", "mul", "layer_norm"} <= set(taken[1])


def test_batches_change_beside_lengths():
    optimised, eager = _pair(Encoder)
    with torch.no_grad():
        for batch, length in itertools.product((2, 5, 3), (6, 9, 4)):
            _agrees(optimised, eager, torch.randn(batch, length, WIDTH))
    assert _captures(optimised) == 2


def test_bits_do_not_depend_on_what_was_called_before():
    optimised, eager = _pair(Encoder)
    inputs = {length: torch.randn(2, length, WIDTH) for length in (6, 9, 12)}
    with torch.no_grad():
        first = {length: _agrees(optimised, eager, x) for length, x in inputs.items()}
        for length in (12, 6, 9, 6, 12, 9):
            assert torch.equal(optimised(inputs[length]), first[length])
    assert _captures(optimised) == 2


def test_a_cache_that_grows_is_no_reason_to_stop():
    optimised, eager = _pair(Block)
    with torch.no_grad():
        for start in (7, 9, 5):
            x = torch.randn(2, start, WIDTH)
            (found, past), (expected, theirs) = optimised(x), eager(x)
            for _ in range(12):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                x = expected[:, -1:]
                with regions_run() as ran:
                    found, past = optimised(x, past)
                expected, theirs = eager(x, theirs)
                assert ran
            captured = _captures(optimised)
            assert captured <= 7
    assert captured == _captures(optimised)


def test_what_regions_take_of_one_length_alone_is_bound_until_that_is_in_vain():
    optimised, eager = _pair(ByHand)
    with torch.no_grad():
        for length in (6, 9, 12, 15, 18, 21):
            _agrees(optimised, eager, torch.randn(2, length, WIDTH))
        bound = [g.compiled.bound_lengths for g in optimised._ingot.graphs]
        assert bound == [False, True, False]


def test_what_is_used_again_stays_bound():
    optimised, eager = _pair(ByHand)
    with torch.no_grad():
        for length in (6, 9, 12):
            for _ in range(3):
                _agrees(optimised, eager, torch.randn(2, length, WIDTH))
    assert [g.compiled.bound_lengths for g in optimised._ingot.graphs] == [False, True, True]


def test_images_of_several_sizes_are_captured_one_by_one():
    optimised, eager = _pair(Convolutions)
    with torch.no_grad():
        for size in (8, 12, 10, 14):
            _agrees(optimised, eager, torch.randn(2, 3, size, size))
    assert _captures(optimised) == 4


def test_a_size_that_an_operator_cannot_take_as_a_symbol_is_bound():
    """TorchDynamo has no symbolic `is_causal`."""
    optimised, eager = _pair(lambda: Encoder(causal=lambda length: length > 1))
    with torch.no_grad():
        for length in (6, 9, 12):
            _agrees(optimised, eager, torch.randn(2, length, WIDTH))


def test_a_result_may_be_written():
    optimised, eager = _pair(Encoder)
    for length in (6, 9, 12):
        x = torch.randn(2, length, WIDTH)
        results = []
        for module in (optimised, eager):
            y = module(x)
            y.mul_(2).add_(1)
            results.append(torch.autograd.grad(y.square().sum(), module.qkv.weight)[0])
        torch.testing.assert_close(*results, rtol=2e-4, atol=2e-4)


class Modulated(nn.Module):
    """A row a sample, a number a token, and a table of positions beside a token's features."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)
        self.positions = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x, scale, mask):
        y = F.gelu(self.linear(x)) + self.positions[: x.shape[1]]
        y = torch.tanh(self.linear(y * scale[:, None])).masked_fill(mask[..., None], 0.0)
        y = y / (1 + y.abs().amax(-1, keepdim=True)) * x.shape[1]
        return torch.softmax(self.last(y), -1), y.mean(1)


@pytest.mark.parametrize("gradients", selection.quick([True], [False, True]))
def test_operands_of_other_shapes(gradients):
    optimised, eager = _pair(Modulated)
    with torch.set_grad_enabled(gradients):
        for length in (6, 9, 12, 3):
            x, scale = torch.randn(2, length, WIDTH), torch.randn(2, WIDTH)
            mask = torch.rand(2, length) < 0.3
            results = [module(x, scale, mask) for module in (optimised, eager)]
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
            if gradients:
                found, expected = (
                    torch.autograd.grad(sum(r.square().sum() for r in result), module.parameters())
                    for module, result in zip((optimised, eager), results)
                )
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert _captures(optimised) == 3  # the rows of samples are a region's only in the first two


@pytest.mark.parametrize("transposed", [False, True])
def test_an_input_that_does_not_lie_in_order(transposed):
    optimised, eager = _pair(Encoder)
    with torch.no_grad():
        for length in (6, 9, 12):
            x = torch.randn(length, 2, WIDTH).transpose(0, 1)
            x = x if transposed else x[..., ::1].contiguous()[:, :, torch.arange(WIDTH)]
            _agrees(optimised, eager, x)


def test_autocast():
    optimised, eager = _pair(Encoder)
    for length in (6, 9, 12):
        x = torch.randn(2, length, WIDTH)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            with regions_run() as ran:
                found = optimised(x)
            torch.testing.assert_close(found, eager(x), rtol=3e-2, atol=3e-2)
            assert ran
    assert _captures(optimised) == 2


def _compiled(module, **settings):
    return torch.compile(module, backend="ingot", **settings)


@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile(dynamic):
    torch.manual_seed(0)
    eager = Encoder().eval()
    compiled = _compiled(copy.deepcopy(eager), dynamic=dynamic)
    with torch.no_grad(), regions_run() as ran:
        for length in (6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36):
            x = torch.randn(2, length, WIDTH)
            before = len(ran)
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-5)
            assert len(ran) > before, length


def test_a_size_that_the_caller_marks_is_kept():
    torch.manual_seed(0)
    eager = Encoder().eval()
    compiled = _compiled(copy.deepcopy(eager))
    with torch.no_grad(), regions_run() as ran:
        for length in (6, 9):
            x = torch.randn(2, length, WIDTH)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-5)
    assert ran


def test_a_size_that_is_marked_in_vain_is_pytorchs():
    torch.manual_seed(0)
    eager = Convolutions().eval()
    compiled = _compiled(copy.deepcopy(eager))
    x = torch.randn(2, 3, 8, 8)
    torch._dynamo.mark_dynamic(x, 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))


def test_frames_do_not_share_what_is_known_of_lengths():
    lengths._known.clear()
    optimised, eager = _pair(Encoder)
    other, _ = _pair(Encoder)
    with torch.no_grad():
        for each in (optimised, other):
            _agrees(each, eager, torch.randn(2, 6, WIDTH))
    assert len(lengths._known) == 2
