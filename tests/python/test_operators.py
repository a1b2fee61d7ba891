"""Operators alone, losses, pooling over windows: PyTorch's results, in fp64's sight."""

import copy
import sys
from pathlib import Path

import ingot
import pytest
import torch
from ingot import model_capture
from ingot.capture import gains
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))

from operators import OPERATORS

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
# Of these PyTorch's own kernels are as good, or there is one operator that no rule names; running
# sums are Ingot's on GPUs alone.
PYTORCHS = {"sum_middle", "mean_middle_odd", "mean_first"}
PYTORCHS |= {operator.name for operator in OPERATORS if operator.name.startswith("cumulative_sum")}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.fixture
def everything(monkeypatch):
    """What pays on GPUs alone, taken on the CPU."""
    monkeypatch.setattr(gains, "takes_everything", True)
    torch.manual_seed(3)
    torch._dynamo.reset()


def replaced(optimised) -> set[str]:
    return {item["what"] for item in optimised.ingot_report()["operators_replaced"]}


def left(optimised) -> set[str]:
    return {item["what"] for item in optimised.ingot_report()["unsupported"]}


def close(found, exact, other) -> None:
    """As near to fp64 as PyTorch is, NaN and infinities where it has them."""
    assert found.shape == other.shape and found.dtype == other.dtype
    plain = exact.isfinite()
    torch.testing.assert_close(found[~plain].double(), exact[~plain], equal_nan=True)
    scale = exact[plain].norm() + 1e-30
    error = (found[plain].double() - exact[plain]).norm() / scale
    assert error <= max(4 * (other[plain].double() - exact[plain]).norm() / scale, 2e-6)


def agrees(module, *inputs: torch.Tensor):
    exact = copy.deepcopy(module).double()
    optimised = ingot.optimize(copy.deepcopy(module))
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    with torch.no_grad():
        close(optimised(*inputs), exact(*doubles).double(), module(*inputs))
    return optimised


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_an_operator_alone_is_pytorchs(operator, everything):
    optimised = agrees(operator.build(True), *operator.inputs(True))
    assert bool(replaced(optimised)) == (operator.name not in PYTORCHS)


def test_nothing_is_taken_alone_on_a_cpu():
    x = torch.randn(64, 1000)
    for function in (lambda x: torch.softmax(x, 1), lambda x: F.layer_norm(x, (1000,))):
        optimised = ingot.optimize(Function(function))
        with torch.no_grad():
            optimised(x)
        assert not replaced(optimised)


def test_where_gradients_are_wanted_operators_alone_are_pytorchs(everything):
    x = torch.randn(6, 50, requires_grad=True)
    optimised = ingot.optimize(Function(lambda x: F.smooth_l1_loss(torch.softmax(x, 1), x)))
    optimised(x).backward()
    assert not replaced(optimised) and x.grad is not None


# Losses ------------------------------------------------------------------------------------------

LOSSES = {
    "l1": F.l1_loss,
    "mse_sum": lambda x, t: F.mse_loss(x, t, reduction="sum"),
    "smooth_l1": lambda x, t: F.smooth_l1_loss(x, t, beta=0.3),
    "smooth_l1_of_0": lambda x, t: F.smooth_l1_loss(x, t, beta=0.0),
    "huber": lambda x, t: F.huber_loss(x, t, delta=0.4),
    "huber_sum": lambda x, t: F.huber_loss(x, t, reduction="sum"),
    "kl_batchmean": lambda x, t: F.kl_div(x, t.abs(), reduction="batchmean"),
    "kl_log": lambda x, t: F.kl_div(x, t, reduction="sum", log_target=True),
    "logits": lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()),
    "logits_weighted": lambda x, t: F.binary_cross_entropy_with_logits(
        x, t.sigmoid(), t.abs(), reduction="sum", pos_weight=t[0].exp()
    ),
    "poisson": lambda x, t: F.poisson_nll_loss(x, t.abs()),
    "poisson_of_rates": lambda x, t: F.poisson_nll_loss(x.abs(), t.abs(), log_input=False),
    "triplet_swap": lambda x, t: F.triplet_margin_loss(x, t, t.flip(0), swap=True),
    "triplet_l1": lambda x, t: F.triplet_margin_loss(x, t, t.flip(0), margin=0.3, p=1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_taken_apart(name, everything):
    x, target = torch.randn(7, 33), torch.randn(7, 33)
    target[2, 5] = target[3, 0] = 0.0  # whose logarithm is infinite
    optimised = agrees(Function(LOSSES[name]), x, target)
    assert replaced(optimised) and not any(what.endswith("loss") for what in left(optimised))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in LOSSES if "triplet" not in name])
def test_losses_of_16_bits(name, dtype, everything):
    """Rounded once, at the end."""
    x, target = torch.randn(7, 33).to(dtype), torch.randn(7, 33).to(dtype)
    module = Function(LOSSES[name])
    optimised = ingot.optimize(module)
    with torch.no_grad():
        found, exact = optimised(x, target), module(x.double(), target.double())
    assert found.dtype == dtype and replaced(optimised)
    assert abs(found.double() - exact) <= torch.finfo(dtype).eps * abs(exact)


@pytest.mark.parametrize(
    "name", ["smooth_l1", "huber", "kl_batchmean", "kl_log", "l1", "logits", "poisson"]
)
def test_losses_of_what_is_not_finite(name, everything):
    x, target = torch.randn(3, 33), torch.rand(3, 33)
    for value in (float("nan"), float("inf")):
        for tensor in (x, target):
            changed = [t.clone() for t in (x, target)]
            changed[0 if tensor is x else 1][1, 7] = value
            torch._dynamo.reset()
            agrees(Function(LOSSES[name]), *changed)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: F.mse_loss(x, t, reduction="none"),
        lambda x, t: F.triplet_margin_loss(x, t, t.flip(0), p=3),
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=t[0].double()),
        lambda x, t: F.poisson_nll_loss(x, t.abs(), full=True),
    ],
    ids="none third_norm promoted full".split(),
)
def test_other_losses_stay_pytorchs(loss, everything):
    optimised = agrees(Function(loss), torch.randn(7, 33), torch.randn(7, 33))
    assert not replaced(optimised) or any(what.endswith("loss") for what in left(optimised))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 4])
def test_cross_entropy_ignores_what_it_is_told(reduction, ignored, everything):
    x = 30 * torch.randn(9, 11) + 500  # what log Σ exp alone would round
    x[3, 2] = float("-inf")
    target = torch.tensor([0, 4, 10, 3, 4, 7, 1, 4, 2])
    loss = Function(lambda x, t: F.cross_entropy(x, t, reduction=reduction, ignore_index=ignored))
    assert {"amax", "exp", "sum", "log"} <= replaced(agrees(loss, x, target))


def test_cross_entropy_of_nothing_but_the_ignored(everything):
    x, target = torch.randn(4, 5), torch.full((4,), -100)
    optimised = agrees(Function(F.cross_entropy), x, target)
    with torch.no_grad():
        assert optimised(x, target).isnan()


def test_cross_entropy_refuses_classes_that_are_none(everything):
    optimised = ingot.optimize(Function(F.cross_entropy))
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        optimised(torch.randn(4, 5), torch.tensor([0, 1, 5, 2]))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda x, t: F.cross_entropy(x, t, weight=x.new_ones(6)),
    ],
    ids="none smoothed weighted".split(),
)
def test_other_cross_entropies_stay_pytorchs(loss, everything):
    optimised = agrees(Function(loss), torch.randn(8, 6), torch.randint(0, 6, (8,)))
    assert "cross_entropy_loss" in left(optimised) or not replaced(optimised)


# Windows -----------------------------------------------------------------------------------------


class Behind(nn.Module):
    def __init__(self, function, dimensions: int = 2):
        super().__init__()
        layer = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.convolution, self.function = layer(3, 6, 3, padding=1), function
        self.scale = nn.Parameter(torch.randn(6, *[1] * dimensions))

    def forward(self, x):
        return self.function(self.convolution(x), self.scale)


POOLED = {
    "relu_avg": lambda y, s: F.avg_pool2d(torch.relu(y), 2),
    "scale_max_sigmoid": lambda y, s: torch.sigmoid(F.max_pool2d(y * s + 0.5, 2)),
    "max_sum": lambda y, s: F.max_pool2d(y, (1, 2)).sum(dim=1),
    "avg_sigmoid_sum": lambda y, s: torch.sigmoid(F.avg_pool2d(y - 1, (4, 3))).sum(dim=(1, 2, 3)),
    "max_of_max": lambda y, s: torch.tanh(F.max_pool2d(torch.tanh(F.max_pool2d(y * s, 2)), 2)),
    "norm_max": lambda y, s: F.max_pool2d(F.group_norm(y, 2) * s, 2) + s,
    "residual": lambda y, s: F.max_pool2d(torch.tanh(y) + y * s, 2),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", POOLED)
def test_windows_join_the_chain_around_them(name, channels_last, everything):
    module, x = Behind(POOLED[name]).eval(), torch.randn(2, 3, 8, 12)
    if channels_last:
        module.convolution.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    optimised = agrees(module, x)
    assert not any("pool" in what for what in left(optimised))
    with torch.no_grad():
        assert optimised(x).stride() == module(x).stride()
        agrees(module, torch.randn(5, 3, 8, 12))


def test_windows_may_leave_a_rest(everything):
    module = Behind(lambda y, s: F.max_pool2d(torch.relu(y * s), 3) + F.avg_pool2d(y - 1, 3))
    optimised = agrees(module, torch.randn(3, 3, 11, 10))
    assert not any("pool" in what for what in left(optimised))


def test_windows_of_three_dimensions(everything):
    module = Behind(lambda y, s: torch.tanh(F.max_pool3d(torch.relu(y), 2)), 3)
    assert "maximum" in replaced(agrees(module, torch.randn(3, 3, 4, 6, 8)))
    # Of five dimensions that are told apart there is no chain.
    module = Behind(lambda y, s: torch.tanh(F.max_pool3d(torch.relu(y * s), 2)), 3)
    torch._dynamo.reset()
    assert "max_pool3d" in left(agrees(module, torch.randn(3, 3, 4, 6, 8)))


def test_the_largest_of_what_is_no_number_is_none(everything):
    x = torch.randn(2, 6, 8, 12)
    x[0, 2, 3, 5], x[1, 0, 0, 0] = float("nan"), float("inf")
    x[1, 3] = float("-inf")
    optimised = agrees(Function(lambda x: F.max_pool2d(x * 2, 2)), x)
    assert "maximum" in replaced(optimised)


OTHER_WINDOWS = {
    "overlapping": lambda y, s: F.max_pool2d(torch.relu(y * s), 3, 2),
    "padded": lambda y, s: F.avg_pool2d(torch.relu(y * s), 2, 2, 1),
    "dilated": lambda y, s: F.max_pool2d(torch.relu(y * s), 2, 2, 0, 2),
    "ceiling": lambda y, s: F.avg_pool2d(torch.relu(y * s), 3, ceil_mode=True),
    "divisor": lambda y, s: F.avg_pool2d(torch.relu(y * s), 2, divisor_override=3),
    "places": lambda y, s: F.max_pool2d(torch.relu(y * s), 2, return_indices=True)[0],
    "alone": lambda y, s: F.max_pool2d(y, 2),
    "wide_alone": lambda y, s: torch.sigmoid(F.avg_pool2d(y, 4)),
    "many": lambda y, s: F.max_pool2d(y * s, 5),
}


@pytest.mark.parametrize("name", OTHER_WINDOWS)
def test_other_windows_are_pytorchs(name, everything):
    optimised = agrees(Behind(OTHER_WINDOWS[name]), torch.randn(2, 3, 8, 11))
    assert not {"maximum", "div"} & replaced(optimised)


def test_what_is_read_beside_the_windows_is_computed_once(everything):
    module = Behind(lambda y, s: F.max_pool2d(torch.relu(y * s), 2).mean() + torch.relu(y * s))
    agrees(module, torch.randn(2, 3, 8, 12))


def test_windows_with_gradients_are_pytorchs(everything):
    module, x = Behind(POOLED["scale_max_sigmoid"]), torch.randn(2, 3, 8, 12)
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    for each in (optimised, twin):
        each(x).square().sum().backward()
    for one, other in zip(optimised.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("function", "shape", "pays"),
    [
        (lambda x: F.layer_norm(x, x.shape[1:]), (2, 1 << 17), True),
        (lambda x: F.layer_norm(x, x.shape[1:]), (2, 2, 1 << 16), True),
        (lambda x: F.layer_norm(x, x.shape[2:]), (2, 8, 1 << 14), False),
        (lambda x: torch.softmax(x, -1), (1, 1 << 19), True),
        (lambda x: torch.softmax(x, -1), (1, 1 << 17), False),
        (lambda x: torch.softmax(x, 1), (1, 1 << 19, 2), False),
        (lambda x: F.group_norm(x, 1), (1, 4, 1 << 16), True),
        (lambda x: F.group_norm(x, 2), (1, 4, 1 << 16), True),
        (lambda x: F.group_norm(x, 4), (1, 4, 1 << 16), False),
        (lambda x: F.instance_norm(x), (1, 2, 1 << 17), True),
    ],
)
def test_few_long_rows_pay_alone(function, shape, pays):
    """Of each of which PyTorch's kernel has one block."""
    made = model_capture.capture(Function(function), (torch.randn(shape),), device_type="cuda")
    assert bool(made.regions) is pays


@pytest.mark.parametrize(
    ("dim", "shape", "dtype", "pays"),
    [
        (1, (16, 4096, 512), torch.float32, True),
        (1, (16, 8, 1 << 18), torch.float32, True),
        (2, (4, 8192, 1024), torch.float32, True),
        (1, (512, 1 << 16), torch.float32, True),
        (1, (256, 1 << 16), torch.float32, False),
        (-1, (1024, 1 << 16), torch.bfloat16, True),
        (-1, (64, 1 << 16), torch.bfloat16, False),
        (0, (512, 65536), torch.float32, False),
        (None, (512, 65536), torch.float32, False),
    ],
)
def test_places_of_many_pay_alone(dim, shape, dtype, pays):
    function = Function(lambda x: torch.argmax(x, dim))
    made = model_capture.capture(function, (torch.empty(shape, dtype=dtype),), device_type="cuda")
    assert bool(made.regions) is pays
