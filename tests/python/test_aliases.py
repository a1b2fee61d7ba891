"""Operators that hand back memory of an argument unsaid: what is written into it, and what results
have in common."""

from __future__ import annotations

import copy
import itertools

import ingot
import pytest
import selection
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")

ALIASES = {
    "dropout_in_evaluation": lambda h: F.dropout(h, 0.5, training=False),
    "dropout_of_nothing": lambda h: F.dropout(h, 0.0, training=True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, training=False),
    "feature_dropout": lambda h: F.dropout1d(h.unsqueeze(0), 0.5, training=False)[0],
    "type_as": lambda h: h.type_as(h),
    "einsum": lambda h: torch.einsum("ij->ji", h),
    "diagonal": lambda h: torch.einsum("ii->i", h),
    "sum_to_size": lambda h: h.sum_to_size(h.shape),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, h[:1])[0],
    "meshgrid": lambda h: torch.meshgrid(h[0], h[1], indexing="ij")[0][:, 0],
    "atleast": lambda h: torch.atleast_2d(h[0], h[1])[1],
    "to_dense": lambda h: h.to_dense(),
    "conj_physical": lambda h: torch.conj_physical(h),
    "as_strided": lambda h: h.as_strided(h.shape, h.stride()),
    "several": lambda h: F.dropout(torch.einsum("ij->ji", h).type_as(h), 0.5, training=False),
    "none": lambda h: F.dropout(h, 0.5, training=True),
}


class Written(nn.Module):
    def __init__(self, alias):
        super().__init__()
        self.first, self.last, self.alias = nn.Linear(4, 4), nn.Linear(4, 4), alias

    def forward(self, x):
        h = self.first(x)
        y = self.alias(h)
        y += 1
        return torch.tanh(self.last(h)), y


class WrittenInput(Written):
    def forward(self, x):
        x = x * 1 if x.requires_grad else x
        z = self.alias(x)
        z *= 2
        return torch.relu(self.last(self.first(x)))


class WrittenBuffer(Written):
    def __init__(self, alias):
        super().__init__(alias)
        self.register_buffer("state", torch.rand(4, 4))

    def forward(self, x):
        y = torch.relu(self.first(x))
        self.alias(self.state).add_(y.detach().mean())
        return self.last(y) + self.state


class WrittenBehind(Written):
    """An operator that is off, whose argument is written."""

    def forward(self, x):
        h = self.first(x)
        y = self.alias(h)
        h.mul_(0.5)
        return torch.tanh(self.last(y))


class UnseenWrite(Written):
    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            self.alias(h).clamp_(-0.1, 0.1)
        return torch.tanh(self.last(h * 2))


class Returned(Written):
    def forward(self, x):
        h = torch.relu(self.first(x))
        return h, self.alias(h), self.last(h)


class ReturnedInput(Written):
    def forward(self, x):
        return self.alias(x), torch.relu(self.last(self.first(x)))


MODELS = (
    Written,
    WrittenInput,
    WrittenBuffer,
    WrittenBehind,
    UnseenWrite,
    Returned,
    ReturnedInput,
)


@pytest.mark.parametrize("alias", selection.every(3, ALIASES.values()), ids=ALIASES)
@pytest.mark.parametrize("model", MODELS)
def test_memory_is_shared_as_eagers_is(model, alias):
    for gradients in (False, True):
        torch.manual_seed(0)
        module = model(alias)
        expected = _run(copy.deepcopy(module), gradients)
        torch._dynamo.reset()
        found = _run(ingot.optimize(copy.deepcopy(module)), gradients)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_write_behind_dropout_leaves_the_rest_to_ingot():
    module = Written(nn.Dropout(0.1)).eval()
    optimised = ingot.optimize(module)
    with torch.no_grad():
        optimised(torch.randn(4, 4))
    taken = [item["what"] for item in optimised.ingot_report()["operators_replaced"]]
    assert taken.count("linear") == 2 and "tanh" in taken


@pytest.mark.parametrize(
    "dropout", [nn.Dropout(), nn.Dropout1d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]
)
def test_an_input_that_dropout_hands_back_leaves_the_rest_to_ingot(dropout):
    class Handed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.dropout = nn.Linear(16, 16), nn.LayerNorm(16), dropout

        def forward(self, x):
            y = self.dropout(x)
            return F.gelu(self.norm(self.linear(y))), y

    module, x = Handed().eval(), torch.rand(5, 3, 16)
    optimised = ingot.optimize(copy.deepcopy(module))
    with torch.no_grad():
        found, expected = optimised(x), module(x)
    torch.testing.assert_close(found, expected)
    assert found[1].data_ptr() == x.data_ptr()
    assert len(optimised.ingot_report()["operators_replaced"]) == 3


class Divergence(nn.Module):
    """From a normal distribution given by numbers, which are tensors that share memory."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ELU(), nn.Linear(32, 4))

    def forward(self, x):
        zero, one = torch.broadcast_tensors(torch.tensor(0.0), torch.tensor(1.0))
        mean = self.encoder(x)
        return (((mean - zero) / one) ** 2 - 1 - one.log()).sum(1)


def test_numbers_that_share_memory_are_no_reason_to_take_nothing():
    module = Divergence()
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    x = torch.randn(8, 12)
    for each in (optimised, twin):
        each(x).sum().backward()
    torch.testing.assert_close(optimised(x), twin(x))
    for own, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad)
    replaced = optimised.ingot_report()["operators_replaced"]
    assert {"linear", "elu", "div"} <= {each["what"] for each in replaced}


TYPED = {
    "number": lambda h: torch.relu(h + torch.tensor(3.0).type_as(h)),
    "written": lambda h: torch.relu(h + torch.zeros(4).fill_(2.0).type_as(h)),
    "mask": lambda h: torch.relu(h @ torch.full((4, 4), 0.1).triu_(1).type_as(h)),
    "other_type": lambda h: torch.relu(h.double() + torch.tensor(3.0).type_as(h.double())).float(),
}


@pytest.mark.parametrize("name", TYPED)
def test_what_is_brought_to_a_tensors_type_is_taken(name):
    """PyTorch makes a number a tensor by what counts as a write."""
    module = Written(lambda h: TYPED[name](h) + 0)
    optimised = ingot.optimize(copy.deepcopy(module))
    own, other = (torch.linspace(-2, 3, 16).view(4, 4).requires_grad_() for _ in range(2))
    torch.testing.assert_close(optimised(own), module(other))
    optimised(own)[1].sum().backward()
    module(other)[1].sum().backward()
    torch.testing.assert_close(own.grad, other.grad)
    report = optimised.ingot_report()
    assert "relu" in {each["what"] for each in report["operators_replaced"]}
    assert report["unsupported"] == []


@pytest.mark.parametrize(
    "gradients, why",
    [(False, "shares memory with an argument"), (True, "a write .* unseen by autograd")],
)
def test_what_cannot_be_taken_apart_is_pytorchs_aloud(gradients, why):
    """Whole, or the write alone, where autograd knows of no view."""
    module = Written(_swapped)
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    with pytest.warns(ingot.IngotWarning, match=why):
        found = _run(optimised, gradients)
    torch.testing.assert_close(found, _run(twin, gradients))


def _swapped(h):
    return torch.channel_shuffle(h.view(1, 4, 2, 2), 1).view(4, 4)


def _run(module, gradients):
    """Results, gradients, state, and which of the results and the input share memory, twice."""
    told = []
    for _ in range(2):
        torch.manual_seed(1)
        x = torch.randn(4, 4, requires_grad=gradients)
        with torch.set_grad_enabled(gradients):
            results = module(x)
        results = results if isinstance(results, tuple) else (results,)
        tensors = (x, *results)
        told.append([_told(t) for t in tensors])
        told.append([a.untyped_storage()._cdata == b.untyped_storage()._cdata
                     for a, b in itertools.combinations(tensors, 2)])  # fmt: skip
        if gradients:
            sum((t * torch.linspace(1, 2, t.numel()).view_as(t)).sum() for t in results).backward()
            leaves = (x, *module.parameters())
            told.append([torch.zeros(()) if t.grad is None else _told(t.grad) for t in leaves])
        told.append([_told(buffer) for buffer in module.buffers()])
    return told


def _told(tensor):
    return tensor.detach().clone()
