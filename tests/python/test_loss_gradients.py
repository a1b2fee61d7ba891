"""The cross entropy of classes by number where gradients are needed: one pass over the logits each
way, of which nothing but the logits and a number a row is kept."""

import ingot
import pytest
import torch
from ingot.capture import gains
from torch import nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    monkeypatch.setattr(gains, "takes_everything", True)


class Loss(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, x, target):
        return F.cross_entropy(x.float(), target, **self.settings)


class Head(nn.Module):
    """As language models have it: of all positions but the last, the word that comes next."""

    def __init__(self):
        super().__init__()
        self.words = nn.Linear(32, 211, bias=False)

    def forward(self, x, words):
        logits = self.words(x)
        shifted = logits[:, :-1].reshape(-1, logits.shape[-1])
        return logits, F.cross_entropy(shifted.float(), words[:, 1:].reshape(-1))


def classes(rows=48, count=211, ignored=-100):
    target = torch.randint(0, count, (rows,))
    target[::7] = ignored
    return target


def is_taken(optimized) -> bool:
    return any(r["what"] == "where_equal" for r in optimized.ingot_report()["operators_replaced"])


def loss_and_gradient(module, x, target):
    x = x.detach().clone().requires_grad_()
    loss = module(x, target)
    return loss, *torch.autograd.grad(loss, x)


def masked(x):
    """As padded vocabularies are."""
    return x.masked_fill(torch.arange(x.shape[1]) % 5 == 3, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"ignore_index": 3}])
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x * 1e4, masked])
def test_the_loss_and_its_gradient_are_pytorchs(dtype, settings, change):
    x = change(torch.randn(48, 211)).to(dtype)
    target = classes(ignored=settings.get("ignore_index", -100))
    target[target % 5 == 3] += 1  # not what is masked
    module = Loss(**settings)
    optimized = ingot.optimize(module, [x, target])
    exact = loss_and_gradient(lambda x, t: F.cross_entropy(x, t, **settings), x.double(), target)
    loss, gradient = loss_and_gradient(optimized, x, target)
    assert is_taken(optimized)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(loss, exact[0].float())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient.float(), exact[1].float(), rtol=tolerance, atol=1e-7)


def test_nothing_of_the_logits_size_is_kept_beside_them():
    x, target = torch.randn(48, 211, dtype=torch.bfloat16).requires_grad_(), classes()
    optimized = ingot.optimize(Loss(), [x, target])
    optimized(x, target).backward()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        optimized(x, target)
    large = [t for t in kept if t.numel() >= x.numel()]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]


def test_logits_that_were_written_are_refused():
    x, target = torch.randn(48, 211, requires_grad=True), classes()
    optimized = ingot.optimize(Loss(), [x, target])
    loss = optimized(x, target)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_class_that_there_is_not_gives_nan():
    for wrong in (211, -1):
        x, target = torch.randn(48, 211, requires_grad=True), classes()
        optimized = ingot.optimize(Loss(), [x, target])
        target[4] = wrong
        assert optimized(x, target).isnan()


def test_of_infinite_logits_and_of_nothing_the_loss_is_nan_as_pytorchs():
    x, target = torch.randn(48, 211), classes()
    x[5, 7] = torch.inf
    target[5] = 8
    x.requires_grad_()
    for named in (target, torch.full_like(target, -100)):
        optimized = ingot.optimize(Loss(), [x, named])
        assert Loss()(x, named).isnan() and optimized(x, named).isnan()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_language_models_head(autocast):
    module = Head()
    x, words = torch.randn(4, 13, 32), torch.randint(0, 211, (4, 13))
    optimized = ingot.optimize(module, [x, words])
    found = []
    for each in (module, optimized):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits, loss = each(given, words)
        found.append((loss, *torch.autograd.grad(loss, [given, *module.parameters()])))
        assert logits.shape == (4, 13, 211)
    assert is_taken(optimized)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-4, atol=1e-6)


def test_16_bits_are_cast_under_autocast_as_pytorch_casts_them():
    class Plain(nn.Module):
        def forward(self, x, target):
            return F.cross_entropy(x, target)

    x, target = torch.randn(48, 211, dtype=torch.bfloat16), classes()
    for autocast in (True, False):
        optimized = ingot.optimize(Plain(), [x, target])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss, gradient = loss_and_gradient(optimized, x, target)
            theirs = loss_and_gradient(Plain(), x, target)
        assert is_taken(optimized) == autocast, "without it PyTorch rounds the loss"
        assert loss.dtype == theirs[0].dtype
        torch.testing.assert_close(gradient, theirs[1], rtol=1e-2, atol=1e-7)


def test_what_else_a_loss_asks_for_is_pytorchs():
    x, target = torch.randn(48, 211), classes()
    for settings in ({"label_smoothing": 0.1}, {"weight": torch.rand(211)}):
        optimized = ingot.optimize(Loss(**settings), [x, target])
        ours = loss_and_gradient(optimized, x, target)
        theirs = loss_and_gradient(Loss(**settings), x, target)
        assert not is_taken(optimized)
        torch.testing.assert_close(ours, theirs)


def test_a_second_derivative():
    x, target = torch.randn(12, 31, requires_grad=True), classes(12, 31)
    optimized = ingot.optimize(Loss(), [x, target])
    found = []
    for module in (Loss(), optimized):
        (gradient,) = torch.autograd.grad(module(x, target), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert is_taken(optimized)
    torch.testing.assert_close(found[1], found[0])


def test_without_a_gradient_pytorch_finds_the_class():
    x, target = torch.randn(48, 211), classes()
    optimized = ingot.optimize(Loss(), [x, target])
    with torch.no_grad():
        torch.testing.assert_close(optimized(x, target), Loss()(x, target))
    assert not is_taken(optimized)


def test_small_losses_stay_pytorchs(monkeypatch):
    monkeypatch.setattr(gains, "takes_everything", False)
    x, target = torch.randn(48, 211, requires_grad=True), classes()
    optimized = ingot.optimize(Loss(), [x, target])
    optimized(x, target)
    assert not is_taken(optimized)
