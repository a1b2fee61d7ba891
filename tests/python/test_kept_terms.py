"""What a training step keeps of sums of tensors that come into a region: the sum, as eager does,
where that is less than its terms."""

from __future__ import annotations

import itertools

import ingot
import pytest
import selection
import torch
from test_gradients import calls_of, check_against_fp64, three_of
from test_kept import kept_bytes
from torch import nn

functional = nn.functional


class Tokens(nn.Module):
    """Embeddings, which are PyTorch's to look up, and what `reader` makes of them."""

    def __init__(self, reader):
        super().__init__()
        self.token, self.other = nn.Embedding(90, 64), nn.Embedding(90, 64)
        self.position = nn.Embedding(12, 64)
        self.a, self.b, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.gain, self.reader = nn.Parameter(torch.rand(64)), reader
        self.register_buffer("places", torch.arange(12))

    def forward(self, ids):
        return self.reader(self, self.token(ids), self.other(ids))


SUMS = {
    "a sum": lambda m, t, u: functional.gelu(m.a(t + u)),
    "a difference": lambda m, t, u: m.a(t - u),
    "positions": lambda m, t, u: functional.gelu(m.a(t + m.position(m.places))),
    "three terms": lambda m, t, u: m.a(t + u + m.position(m.places)).relu(),
    "half of it": lambda m, t, u: m.a((t + u) * 0.5).relu(),
    "for two products": lambda m, t, u: m.a(t + u).relu() * m.b(t + u).sigmoid(),
    "normalised": lambda m, t, u: m.a(m.norm(t + u)).relu(),
    "an exponential": lambda m, t, u: m.a(torch.exp(t - u)).relu(),
    "GELU": lambda m, t, u: m.a(functional.gelu(t + u)).relu(),
    "ReLU": lambda m, t, u: m.a(torch.relu(t + u)).relu(),
    "softmax": lambda m, t, u: m.a(torch.softmax(t - u, -1)).relu(),
    "a residual": lambda m, t, u: (lambda h: h + m.a(h).relu())(t + u),
}


def gradients_of(module: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    total = module(ids).square().sum()
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]


@pytest.mark.parametrize("reader", SUMS)
def test_a_sum_is_kept_and_not_its_terms(reader):
    module, ids = Tokens(SUMS[reader]), torch.randint(90, (6, 12))
    optimised = ingot.optimize(module)
    found, eager = (gradients_of(called, ids) for called in (optimised, module))
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)
    assert calls_of(optimised)
    assert kept_bytes(optimised, ids) <= kept_bytes(module, ids)


def frozen(m, t, u):
    m.a.weight.requires_grad_(False)
    return m.a(t + u).tanh()


NO_LESS = {
    "the other is state": (lambda m, t, u: m.a(t + m.gain), 0),
    "one is read anyway": (lambda m, t, u: m.a(t + u) * torch.sigmoid(t) * torch.sigmoid(u), 1),
    "eager keeps both, too": (lambda m, t, u: m.a(t + u) + torch.atan2(t, u), 0),
    "nothing reads it": (lambda m, t, u: (m.a(t) + t - u).sum(-1).sigmoid(), 0),
    "in front of what is frozen": (frozen, 0),
}


@pytest.mark.parametrize("reader", NO_LESS)
def test_a_sum_is_not_stored_where_that_takes_no_less(reader):
    reader, count = NO_LESS[reader]
    module, ids = Tokens(reader), torch.randint(90, (6, 12))
    module(ids)  # what freezes a part has done so
    optimised = ingot.optimize(module)
    found, eager = (gradients_of(called, ids) for called in (optimised, module))
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)
    stored = [len(c.region.graph["results"]) - len(c.region.results) for c in calls_of(optimised)]
    assert sum(stored) == count and stored
    assert kept_bytes(optimised, ids) <= kept_bytes(module, ids)


class Turned(nn.Module):
    """A value that a product reads, and that is handed out turned."""

    def __init__(self, value, turn):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 8)
        self.value, self.turn = value, turn

    def forward(self, x):
        v = self.value(self, x)
        return self.turn(v), self.b(v).relu()


VALUES = {
    "a norm": lambda m, x: nn.functional.layer_norm(x, (16,)),
    "a norm behind a product": lambda m, x: nn.functional.layer_norm(m.a(x), (16,)),
    "a difference": lambda m, x: x - x.logsumexp(-1, True),
    "an activation of a product": lambda m, x: torch.nn.functional.gelu(m.a(x)),
}
TURNS = {
    "turned": lambda v: v.mT.contiguous(),
    "turned and flat": lambda v: v.mT.reshape(-1),
    "in heads": lambda v: v.unflatten(-1, (4, 4)).transpose(-3, -2).contiguous(),
}


@pytest.mark.parametrize("shape", selection.every(2, [(16, 16), (6, 16), (3, 16, 16)]))
@pytest.mark.parametrize("names", selection.every(4, itertools.product(VALUES, TURNS)))
def test_what_is_handed_out_turned_is_not_read_as_it_lies(names, shape):
    value, turn = names
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, twin, exact = three_of(Turned(VALUES[value], TURNS[turn]))
    check_against_fp64(module, twin, exact, [torch.randn(shape)])


OTHER_DIMENSIONS = {
    "pairs": lambda h: h.unsqueeze(1),
    "a row": lambda h: h.unsqueeze(0),
    "heads": lambda h: h.view(*h.shape[:-1], 2, 4),
    "all in one": lambda h: h.flatten(),
}


class InOtherDimensions(nn.Module):
    """A result in dimensions of its own, of what a product reads: heads and a projection."""

    def __init__(self, activation, view):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.activation, self.view = activation, view

    def forward(self, x):
        h = self.activation(self.first(x))
        return self.view(h), self.second(h)


@pytest.mark.parametrize("shape", selection.quick([(3, 5, 8)], [(5, 8), (3, 5, 8), (1, 8)]))
@pytest.mark.parametrize("activation", [torch.tanh, nn.functional.gelu, nn.functional.relu])
@pytest.mark.parametrize("view", OTHER_DIMENSIONS)
def test_what_is_handed_out_in_other_dimensions_is_read_backward(view, activation, shape):
    torch.manual_seed(3)
    three = three_of(InOtherDimensions(activation, OTHER_DIMENSIONS[view]))
    check_against_fp64(*three, [torch.randn(shape)])
    assert calls_of(three[0])
