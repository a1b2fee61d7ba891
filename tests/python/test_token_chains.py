"""Training through chains around norms of features whose products are PyTorch's."""

import pytest
import selection
import torch
from ingot.capture import token_chains, weighing
from test_gradients import (
    backwards_of,
    calls_of,
    check_against_fp64,
    error,
    gradients_of,
    near_under_autocast,
    three_of,
)
from torch import nn
from torch.nn import functional as F

WIDTH = 16


@pytest.fixture(autouse=True)
def products_are_pytorchs(monkeypatch):
    monkeypatch.setattr(token_chains, "takes_everything", True)
    monkeypatch.setattr(weighing, "_pays", lambda cut, computing: False)


class HandRMS(nn.Module):
    """As transformers writes it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def layer_norm(width=WIDTH, **options):
    norm = nn.LayerNorm(width, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return norm


NORMS = {
    "layer norm": layer_norm,
    "without bias": lambda: layer_norm(bias=False),
    "without parameters": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "large eps": lambda: layer_norm(eps=0.3),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "rms norm by hand": lambda: HandRMS(WIDTH),
}


class PreNorm(nn.Module):
    def __init__(self, norm=layer_norm):
        super().__init__()
        self.norms = nn.ModuleList([norm(), norm()])
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.rate = 0.0

    def attended(self, x):
        made = (linear(x) for linear in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in made)
        x = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.dropout(x, self.rate, self.training)

    def gated(self, x):
        return F.dropout(self.down(F.silu(self.gate(x)) * self.up(x)), self.rate, self.training)

    def forward(self, x):
        x = x + self.attended(self.norms[0](x))
        return x + self.gated(self.norms[1](x))


class PostNorm(PreNorm):
    def forward(self, x):
        x = self.norms[0](x + self.attended(x))
        return self.norms[1](x + self.gated(x))


def network(kind=PreNorm, norm=layer_norm, rate=0.0):
    torch.manual_seed(1)
    made = nn.Sequential(kind(norm), kind(norm))
    for block in made:
        block.rate = rate
    return made


def takes_chains(module):
    """Whether regions hold chains alone, and their derivatives are programs."""
    calls = calls_of(module)
    held = [value["op"] for call in calls for value in call.program.graph["values"]]
    assert calls and "matmul" not in held
    ways = backwards_of(module)
    assert len(ways) == len(calls) and all(way.programs for way in ways)


@pytest.mark.parametrize(("kind", "norm"), selection.checkered([PreNorm, PostNorm], NORMS))
def test_norms(kind, norm):
    three = three_of(network(kind, NORMS[norm]))
    check_against_fp64(*three, [torch.randn(3, 5, WIDTH)])
    takes_chains(three[0])


@pytest.mark.parametrize(("kind", "norm"), selection.checkered([PostNorm, PreNorm], NORMS))
def test_autocast(kind, norm):
    three = three_of(network(kind, NORMS[norm]))
    near_under_autocast(three, torch.randn(3, 5, WIDTH), 1e-3)
    takes_chains(three[0])


@pytest.mark.parametrize(
    "dtype", selection.quick([torch.bfloat16], [torch.bfloat16, torch.float16])
)
@pytest.mark.parametrize(("kind", "norm"), selection.checkered([PreNorm, PostNorm], NORMS))
def test_weights_of_16_bits(kind, norm, dtype):
    """As language models are tuned: no autocast, but casts that are written in the forward."""
    module, twin, exact = three_of(network(kind, NORMS[norm]).to(dtype))
    x = torch.randn(3, 5, WIDTH, dtype=dtype)
    found, eager, truth = (gradients_of(each, [x]) for each in (module, twin, exact))
    rounding = torch.finfo(dtype).eps
    for own, other, exactly in zip(found, eager, truth):
        assert own.dtype == other.dtype
        if exactly.norm() > 1e-2:  # not rounding alone
            assert error(own, exactly) <= max(2 * rounding, 1.5 * error(other, exactly))
    takes_chains(module)


def test_looked_for_where_products_are_of_16_bits(monkeypatch):
    """On a GPU, whatever makes them so."""
    seen = []
    monkeypatch.setattr(token_chains, "may_be_taken", lambda cut: seen.append(cut) or True)
    for dtype, few in ((torch.bfloat16, True), (torch.float32, False)):
        seen.clear()
        module, *_ = three_of(network().to(dtype))
        module(torch.randn(3, 5, WIDTH, dtype=dtype)).sum().backward()
        assert seen and all(cut.multiplies_in_few_bits == few for cut in seen)


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = layer_norm()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, t):
        y = self.norm(x + t)
        return torch.stack([linear(y) for linear in self.linears])


def test_one_cast_for_each_product_whose_gradients_are_added_in_fp32():
    """As eager adds them: a sum in 16 bits would be 1e-3 away from it."""
    torch.manual_seed(2)
    module, twin, _ = three_of(Three())
    inputs, weight = [torch.randn(6, 5, WIDTH) for _ in range(2)], torch.randn(3, 6, 5, WIDTH)
    found = []
    for each in (module, twin):
        given = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            y = each(*given)
        (y.float() * weight).sum().backward()
        found.append([x.grad for x in given])
    for own, other in zip(*found):
        assert error(own, other) < 1e-5
    (call,) = calls_of(module)
    assert [value["op"] for value in call.region.graph["values"]].count("cast") == 3


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_draws_eagers_numbers(autocast):
    module, twin, _ = three_of(network(PostNorm, rate=0.3))
    x = torch.randn(4, 5, WIDTH)
    results = []
    for each in (module, twin):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(gradients_of(each, [x]))
    for own, other in zip(*results):
        if other.norm() > 1e-2:  # not rounding alone
            assert error(own, other) < (2e-2 if autocast else 1e-5)
    takes_chains(module)


def test_batches_of_many_sizes_share_their_programs():
    three = three_of(network())
    for batch in (4, 9, 3):
        check_against_fp64(*three, [torch.randn(batch, 5, WIDTH)])
    assert len(backwards_of(three[0])) == len(calls_of(three[0]))


@pytest.mark.parametrize("batch", [1, 0])
def test_batches_of_one_and_none(batch):
    module, twin, exact = three_of(network())
    check_against_fp64(module, twin, exact, [torch.randn(4, 5, WIDTH)])
    x = torch.randn(batch, 5, WIDTH)
    found, eager = gradients_of(module, [x]), gradients_of(twin, [x])
    for own, other in zip(found, eager):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


class Two(nn.Module):
    """Norms over two dimensions, and of what has no gradient."""

    def __init__(self):
        super().__init__()
        self.norm, self.fixed = layer_norm((4, WIDTH)), layer_norm()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)

    def forward(self, x, t):
        y = self.norm(x + t)
        return self.linear(y) * 0.5 + self.fixed(torch.relu(y) + t)


def test_norms_of_other_kinds():
    torch.manual_seed(2)
    module, twin, exact = three_of(Two())
    inputs = [torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)]
    check_against_fp64(module, twin, exact, inputs)
    assert backwards_of(module)[0].programs


def test_large_means_and_equal_rows():
    torch.manual_seed(3)
    module, twin, exact = three_of(network())
    x = torch.randn(4, 5, WIDTH)
    x[0] += 1e3
    x[1] = 2.5
    check_against_fp64(module, twin, exact, [x])


def test_kept_memory_may_be_written_once_eager_lets_go_of_it():
    torch.manual_seed(4)
    module, twin, _ = three_of(network())
    x = torch.randn(4, 5, WIDTH)
    results = []
    for each in (module, twin):
        given = x.clone().requires_grad_()
        y = each(given)
        y.mul_(2)  # the last sum is kept by nobody
        y.sum().backward()
        results.append(given.grad)
    torch.testing.assert_close(*results)


def test_not_taken_on_a_cpu(monkeypatch):
    monkeypatch.setattr(token_chains, "takes_everything", False)
    module = three_of(network())[0]
    module(torch.randn(3, 5, WIDTH)).sum().backward()
    assert not calls_of(module)


def second_derivatives(module, x):
    parameters = list(module.parameters())
    first = torch.autograd.grad(module(x).pow(3).sum(), parameters, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)


class Feed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize("beside", ["no product", "products"])
@pytest.mark.parametrize("norm", NORMS)
def test_second_derivatives(norm, beside, monkeypatch):
    """The statistics that were stored depend on what was normed."""
    if beside == "products":
        monkeypatch.setattr(weighing, "_pays", lambda cut, computing: True)
    torch.manual_seed(5)
    module, twin, exact = three_of(nn.Sequential(Feed(NORMS[norm]), Feed(NORMS[norm])))
    x = torch.randn(6, WIDTH)
    found, eager = second_derivatives(module, x), second_derivatives(twin, x)
    truth = second_derivatives(exact, x.double())
    assert calls_of(module)
    for own, other, exactly in zip(found, eager, truth):
        assert error(own, exactly) <= max(4 * error(other, exactly), 1e-5)
