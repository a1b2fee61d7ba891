"""Operators under other names, and those that a few plain ones make: behind a layer, in evaluation
and in training, and of what is not finite."""

import copy

import ingot
import pytest
import torch
from ingot.capture import gains
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")

SMOOTH = {
    "cosine_similarity": lambda y, z: F.cosine_similarity(y, z),
    "cosine_of_all": lambda y, z: F.cosine_similarity(y[:, None], z[None, :4], dim=-1),
    "cosine_of_heads": lambda y, z: F.cosine_similarity(
        y.view(-1, 4, 8), z.view(-1, 4, 8), dim=2, eps=1.0
    ),
    "cosine_over_the_batch": lambda y, z: F.cosine_similarity(y, z, dim=0),
    "cosine_with_one": lambda y, z: F.cosine_similarity(y, z[0], dim=-1),
    "dot_over_the_batch": lambda y, z: torch.linalg.vecdot(y, z, dim=0),
    "norm_of_all": lambda y, z: torch.linalg.norm(y),
    "pairwise_distance": lambda y, z: F.pairwise_distance(y, z),
    "pairwise_distance_1": lambda y, z: F.pairwise_distance(y, z, p=1, keepdim=True),
    "vecdot": lambda y, z: torch.linalg.vecdot(y, z),
    "vecdot_of_heads": lambda y, z: torch.linalg.vecdot(y.view(-1, 4, 8), z.view(-1, 4, 8), dim=1),
    "einsum": lambda y, z: torch.einsum("bi,bi->b", y, z),
    "einsum_of_heads": lambda y, z: torch.einsum(
        "bhd, bhd -> bd", y.view(-1, 4, 8), z.view(-1, 4, 8)
    ),
    "norm": lambda y, z: torch.linalg.norm(y, dim=1, keepdim=True) * z,
    "norm_1": lambda y, z: torch.linalg.norm(y, 1, dim=1),
    "frobenius": lambda y, z: torch.linalg.norm(y.view(-1, 4, 8), "fro", dim=(1, 2)),
    "matrix_norm": lambda y, z: torch.linalg.matrix_norm(y.view(-1, 4, 8)),
    "movedim": lambda y, z: torch.tanh(y.view(-1, 2, 4, 4).movedim((1, 2), (3, 1))).sum(1),
    "moveaxis": lambda y, z: torch.tanh(y.view(-1, 4, 8).moveaxis(-1, 1)).amax(1),
    "expit": lambda y, z: torch.special.expit(y) * z,
    "softmax": lambda y, z: torch.special.softmax(y, 1) * z,
    "log_softmax": lambda y, z: torch.special.log_softmax(y, 1),
    "logsumexp": lambda y, z: torch.special.logsumexp(y, 1),
    "logit": lambda y, z: torch.logit(torch.sigmoid(y)) + z,
    "logit_clamped": lambda y, z: torch.special.logit(torch.sigmoid(y), eps=0.3),
    "xlogy": lambda y, z: torch.xlogy(y, z.abs() + 0.1),
    "special_xlogy": lambda y, z: torch.special.xlogy(z, y.abs() + 0.1),
    "entropy": lambda y, z: torch.special.entr(torch.softmax(y, 1)).sum(1),
    "degrees": lambda y, z: torch.rad2deg(torch.sin(torch.deg2rad(y))),
    "rrelu": lambda y, z: F.rrelu(y, 0.1, 0.3, training=False) + z,
    "frac": lambda y, z: torch.frac(3 * y) * z,
    "fmax": lambda y, z: torch.fmax(y, z) - torch.fmin(2 * y, z),
    "absolute": lambda y, z: torch.absolute(y) + torch.fix(3 * z),
    "positive": lambda y, z: torch.positive(y) * z,
    "greater": lambda y, z: torch.where(torch.greater(y, z), y, z),
    "less_equal": lambda y, z: torch.where(torch.less_equal(y, 0.1), y, 2 * z),
    "finite": lambda y, z: torch.where(torch.isfinite(y), y, z),
    "any": lambda y, z: y * (y > 1).any(1, keepdim=True) + (z > 2).any(),
    "all": lambda y, z: y.view(-1, 4, 8) * (z.view(-1, 4, 8) > -2).all(1).unsqueeze(1),
    "limit_of_infinite": lambda y, z: torch.clamp(y, max=torch.where(y.isinf().any(), 1.0, 2.0)),
    "xor": lambda y, z: torch.where((y > 0) ^ (z > 0), y, z),
    "logical_xor": lambda y, z: torch.where(torch.logical_xor(y.relu(), z.relu()), y, z),
}


class Behind(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(24, 32), function

    def forward(self, x, z):
        return self.function(self.layer(x), z)


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    monkeypatch.setattr(gains, "takes_everything", True)
    torch.manual_seed(5)
    torch._dynamo.reset()


def runs(module, x, z, grads=False):
    x, z = (t.clone().requires_grad_(grads) for t in (x, z))
    with torch.set_grad_enabled(grads):
        result = module(x, z)
    if not grads:
        return [result]
    (result.double().square().sum() + result.double().sum()).backward()
    return [result.detach(), x.grad, z.grad, *(p.grad for p in module.parameters())]


def left(optimised) -> list[str]:
    return [item["what"] for item in optimised.ingot_report()["unsupported"]]


def compare(function, grads: bool, x, z):
    module = Behind(function)
    exact, optimised = copy.deepcopy(module).double(), ingot.optimize(copy.deepcopy(module))
    found, other = runs(optimised, x, z, grads), runs(module, x, z, grads)
    wanted = runs(exact, x.double(), z.double(), grads)
    for mine, theirs, true in zip(found, other, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is None:
            continue
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        scale = true.double().norm() + 1e-30
        error, eager = ((each.double() - true).norm() / scale for each in (mine, theirs))
        assert error <= max(4 * eager, 3e-6)
    return optimised


@pytest.mark.parametrize("name", SMOOTH)
def test_they_join_the_layer_in_front(name):
    optimised = compare(SMOOTH[name], False, torch.randn(9, 24), torch.randn(9, 32))
    assert not left(optimised)


@pytest.mark.parametrize("name", SMOOTH)
def test_their_gradients_are_pytorchs(name):
    compare(SMOOTH[name], True, torch.randn(9, 24), torch.randn(9, 32))


def test_a_short_vector_is_divided_by_eps_and_its_gradient_knows_its_length():
    """PyTorch bounds the length where autograd does not see it."""
    x, z = torch.randn(9, 24), torch.randn(9, 32)
    compare(lambda y, z: F.cosine_similarity(y, 1e-3 * z, eps=0.5), True, x, z)
    compare(lambda y, z: F.cosine_similarity(y * 0, z), True, x, z)


VALUES = [0.0, -0.0, 1.0, -2.5, 0.5, float("nan"), float("inf"), float("-inf"), 1e-40, 3e38]
ELEMENTS = {
    "isfinite": lambda y, z: torch.isfinite(y).float() + z * 0,
    "isinf": lambda y, z: torch.isinf(y).float(),
    "isposinf": lambda y, z: torch.isposinf(y).float() - torch.isneginf(y).float(),
    "any": lambda y, z: torch.any(y, 1, keepdim=True) * z,
    "all": lambda y, z: torch.all(z, dim=1).float(),
    "any_infinite": lambda y, z: torch.where(torch.isinf(y).any(), y * 0, z),
    "xlogy": torch.xlogy,
    "entr": lambda y, z: torch.special.entr(y),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "frac": lambda y, z: torch.frac(y),
    "logit": lambda y, z: torch.logit(y),
    "logit_clamped": lambda y, z: torch.logit(y, eps=0.1),
    "logical_xor": lambda y, z: torch.logical_xor(y, z).float(),
    "rrelu": lambda y, z: F.rrelu(y),
    "deg2rad": lambda y, z: torch.deg2rad(y),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ELEMENTS)
def test_of_what_is_not_finite(name, dtype):
    class Module(nn.Module):
        def forward(self, y, z):
            return ELEMENTS[name](y + 0, z + 0)

    y = torch.tensor(VALUES, dtype=dtype).repeat(len(VALUES), 1)
    module = Module().eval()
    optimised = ingot.optimize(module)
    with torch.no_grad():
        found, wanted = optimised(y, y.T.contiguous()), module(y, y.T.contiguous())
    assert not left(optimised)
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_what_draws_or_promotes_stays_pytorchs():
    for function in (
        lambda y, z: torch.linalg.norm(y, 3, dim=1),
        lambda y, z: torch.linalg.norm(y.view(-1, 4, 8), 2, dim=(1, 2)),
        lambda y, z: F.cosine_similarity(y, z.double()),
    ):
        torch._dynamo.reset()
        assert left(compare(function, False, torch.randn(9, 24), torch.randn(9, 32)))
