"""Group norms over samples whose channels are innermost in memory, as GPUs run them; here by the
CPU's kernels."""

import copy

import ingot
import pytest
import torch
from ingot.capture import cutting, normalisations
from test_gradients import calls_of
from test_kept import kept_bytes
from torch import nn


class Tokens(nn.Module):
    def __init__(self, channels, groups, order, affine):
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.norm = nn.GroupNorm(groups, channels, affine=affine)
        self.order = order
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        return self.norm(self.linear(x).permute(self.order))


@pytest.fixture(autouse=True)
def as_for_a_gpu(monkeypatch):
    make = cutting.Call
    monkeypatch.setattr(cutting, "Call", lambda *given: make(*given[:-1], "cuda"))


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups", "order"),
    [
        ((5, 6, 60), 4, (0, 2, 1)),
        ((3, 5, 4, 48), 6, (0, 3, 1, 2)),
        ((3, 5, 4, 48), 1, (0, 3, 2, 1)),
        ((3, 7, 48), 48, (0, 2, 1)),
    ],
)
def test_it_is_taken_and_right(shape, groups, order, affine, dtype):
    torch.manual_seed(0)
    module = Tokens(shape[-1], groups, order, affine).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    exact = copy.deepcopy(module).double()
    results = []
    for made in (ingot.optimize(copy.deepcopy(module)), module, exact):
        kind = next(made.parameters()).dtype
        given = x.detach().to(kind, copy=True).requires_grad_()
        result = made(given)
        torch.manual_seed(1)
        result.backward(torch.randn(result.shape, dtype=dtype).to(result.dtype))
        results.append((result, given.grad, *(p.grad for p in made.norm.parameters())))
        if made is not module and made is not exact:
            assert made.ingot_report()["unsupported"] == []
    assert results[0][0].stride() == results[1][0].stride()
    least = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}[dtype]
    for found, eager, truth in zip(*results):
        assert error(found, truth) <= 1.5 * error(eager, truth) + least


def test_large_samples_in_groups_are_pytorchs(monkeypatch):
    monkeypatch.setattr(normalisations, "_MOST_OF_GROUPS", 6 * 60 - 1)
    module = Tokens(60, 4, (0, 2, 1), True)
    x = torch.randn(5, 6, 60)
    with torch.no_grad(), pytest.warns(ingot.IngotWarning, match="PyTorch runs group_norm"):
        made = ingot.optimize(copy.deepcopy(module))
        torch.testing.assert_close(made(x), module(x))


class Between(Tokens):
    """Turned, normalised and turned back, between two products or in front of one."""

    def __init__(self, order, back, behind):
        super().__init__(48, 6, order, True)
        self.back, self.behind = back, behind

    def forward(self, x):
        x = self.linear(x) if self.behind else x
        return self.linear(self.norm(x.permute(self.order)).permute(self.back)).relu()


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    ("shape", "order", "back"),
    [
        ((5, 6, 48), (0, 2, 1), (0, 2, 1)),
        ((3, 5, 4, 48), (0, 3, 1, 2), (0, 2, 3, 1)),
    ],
)
def test_no_more_is_kept_than_eager_keeps(shape, order, back, behind, device_type, monkeypatch):
    if device_type == "cpu":
        monkeypatch.undo()
    module, x = Between(order, back, behind), torch.randn(shape, requires_grad=True)
    optimised = ingot.optimize(module)
    optimised(x).sum().backward()
    assert calls_of(optimised)
    assert kept_bytes(optimised, x) <= kept_bytes(module, x)
