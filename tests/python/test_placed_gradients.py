"""Gradients that reach one element of many: of maxima, with where they lie."""

import pytest
import torch
from ingot.capture import gains
from live import compare
from regions import regions_run
from test_gradients import backwards_of, check_against_fp64, near_under_autocast, peak_of, three_of
from torch import nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def every_chain_pays(monkeypatch):
    monkeypatch.setattr(gains, "least_saved", lambda *_: 0.0)


class Points(nn.Module):
    """A layer of a PointNet, and its head."""

    def __init__(self, pooled, channels=24):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, channels, 1), nn.BatchNorm1d(channels)
        self.pooled, self.head = pooled, nn.Linear(channels, 5)

    def forward(self, x):
        return self.head(self.pooled(torch.relu(self.norm(self.conv(x)))))


class Tokens(nn.Module):
    def __init__(self, pooled, channels=24):
        super().__init__()
        self.layer, self.pooled, self.head = nn.Linear(3, channels), pooled, nn.Linear(channels, 5)

    def forward(self, x):
        return self.head(self.pooled(torch.tanh(self.layer(x.transpose(1, 2)))))


POINTS = {
    "max": lambda y: y.max(2).values,
    "min": lambda y: y.min(dim=-1, keepdim=True)[0].squeeze(2),
    "max_pool1d": lambda y: F.max_pool1d(y, y.shape[2]).squeeze(2),
    "adaptive": lambda y: F.adaptive_max_pool1d(y, 1).flatten(1),
    "where it lies, too": lambda y: sum(y.max(2)),
    "of a softmax": lambda y: y.softmax(1).max(2).values,
}
TOKENS = {
    "max": lambda y: y.max(1).values,
    "min": lambda y: y.min(-2)[0],
}


def regions_of_a_step(module: nn.Module, x: torch.Tensor) -> int:
    with regions_run() as ran:
        module(x).sum().backward()
    return len(ran)


@pytest.mark.parametrize("batch", [6, 1])
@pytest.mark.parametrize("name", POINTS)
def test_over_points(name, batch):
    torch.manual_seed(0)
    three = three_of(Points(POINTS[name]).train())
    x = torch.randn(batch, 3, 50)
    check_against_fp64(*three, [x])
    # Forward, and all of backward, from the head to the convolution; there what the head reads is
    # put together for itself where it is more than was stored.
    assert regions_of_a_step(three[0], x) == (3 if name == "where it lies, too" else 2)


@pytest.mark.parametrize("name", TOKENS)
def test_over_tokens(name):
    torch.manual_seed(0)
    three = three_of(Tokens(TOKENS[name]).train())
    x = torch.randn(6, 3, 50)
    check_against_fp64(*three, [x])
    assert regions_of_a_step(three[0], x) == 2


class Edges(nn.Module):
    """What neighbours say, between convolutions: a chain without a product."""

    def __init__(self, rank, pooled=lambda y: y.max(-1, keepdim=True)[0]):
        super().__init__()
        self.pooled = pooled
        conv, norm = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d))[rank - 1]
        self.conv, self.norm, self.end = conv(3, 24, 1), norm(24), conv(24, 8, 1)

    def forward(self, x):
        y = F.leaky_relu(self.norm(self.conv(x)), 0.2)
        return self.end(self.pooled(y))


def check_chain(module: nn.Module, *shape: int) -> None:
    three = three_of(module.train())
    x = torch.randn(shape)
    check_against_fp64(*three, [x])
    with regions_run() as ran:
        three[0](x).sum().backward()
    assert len(ran) == 2 and "max" in ran[0], ran


@pytest.mark.parametrize("shape", [(6, 3, 50), (4, 3, 9, 20)])
def test_behind_a_norm_without_a_product(shape):
    torch.manual_seed(0)
    check_chain(Edges(len(shape) - 2), *shape)


def test_windows_that_are_whole_rows():
    torch.manual_seed(0)
    check_chain(Edges(2, lambda y: F.max_pool2d(y, (1, y.shape[3]))), 4, 3, 9, 20)


OTHERS = {"stride": (2, 20)}, {"kernel_size": (2, 20)}, {"kernel_size": 3}, {"padding": (0, 1)}


@pytest.mark.parametrize("given", OTHERS)
def test_other_windows_are_pytorchs(given):
    torch.manual_seed(0)
    how = {"kernel_size": (1, 20), **given}
    three = three_of(Edges(2, lambda y: F.max_pool2d(y, **how)).train())
    check_against_fp64(*three, [torch.randn(4, 3, 9, 20)])


def test_of_equal_elements_the_first():
    def script(module):
        x = torch.randn(4, 3, 10)
        x[..., 5:] = x[..., :5]
        yield module(x.requires_grad_())
        yield x

    compare(lambda: Points(POINTS["max"]).train(), script)


def test_of_what_is_no_number_the_gradient_is_none():
    def script(module):
        x = torch.randn(4, 3, 10)
        x[1, 2, 7] = float("nan")
        yield module(x)

    compare(lambda: Tokens(TOKENS["max"]), script)


def test_batches_of_other_sizes_are_the_same_program():
    torch.manual_seed(0)
    three = three_of(Points(POINTS["max"]).train())
    for batch in (6, 9, 2):
        check_against_fp64(*three, [torch.randn(batch, 3, 50)])
    assert len(backwards_of(three[0])) == 1


def test_lengths_that_change():
    torch.manual_seed(0)
    three = three_of(Points(POINTS["max_pool1d"]).train())
    for length in (50, 20, 31):
        check_against_fp64(*three, [torch.randn(6, 3, length)])


def test_autocast():
    torch.manual_seed(0)
    near_under_autocast(three_of(Points(POINTS["max"]).train()), torch.randn(6, 3, 50), 5e-2)


def test_a_step_holds_no_zeros():
    """Of the widest tensor's size: its operand, the gradient of that, and what the convolution's
    derivative makes of it."""
    torch.manual_seed(0)
    model, twin, _ = three_of(Points(POINTS["max"], channels=64).train())
    x = torch.randn(8, 3, 4096)

    def step(module):
        module(x).sum().backward()

    for module in (model, twin):
        step(module)
    own, eager = (peak_of(lambda m=m: step(m)) for m in (model, twin))
    assert own <= 0.75 * eager, (own, eager)
