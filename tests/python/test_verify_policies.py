"""verify under policies coarser than fp32: honest roundings of operands pass, whatever follows the
product."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import count_false_alarms as honest
from ingot.verify import VerifyOptions, ahead, verify_pair
from ingot.verify.bounds import Disturbance, Roundings
from ingot.verify.criteria import ErrorModel
from ingot.verify.measures import measure
from ingot.verify.terms import Forms

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = Path(__file__).resolve().parents[1] / "models"
# Of each what else would be refused: which number is chosen; a derivative of what is chosen; one of
# a logarithm of exponentials of huge values; a value that is infinite in fp32 and not in fp64, and
# one that is infinite or not a number by the sign of what is nearly zero.
WIDE = ("in_features=512", "out_features=480")
KEPT = {
    "argmax_of_rows": (),
    "several_results": (),
    "subtract_mean_logsumexp_gelu_residual": (),
    "row_and_column_scale": WIDE,
}


@pytest.mark.parametrize("name", KEPT)
def test_rounded_operands_are_verified(name):
    """tools/count_false_alarms.py --rounded does so with all models."""
    policy = "bf16"
    model = MODELS / f"{name}.py"
    many = honest.overrides(model, ["batch_size=1024", *KEPT[name]])
    with (
        mock.patch.object(ahead, "CandidateProcess", honest.HonestProcess),
        mock.patch.object(honest.HonestProcess, "policy", policy),
    ):
        options = VerifyOptions(seed=1, precision=policy, overrides=many)
        result = verify_pair(str(model), str(model), options)
    assert result.verified, [f"{c.name} [{c.mode}]: {c.message}" for c in result.failures]


def disturbed(function, *inputs):
    """In fp64, of leaves that hold their gradients afterwards."""
    leaves = [value.double().requires_grad_() for value in inputs]
    roundings = Roundings.of("bf16", torch.float32, ErrorModel.STATED_BOUND)
    disturbance = Disturbance(roundings, Forms(), [])
    disturbance.start_run(leaves)
    with disturbance:
        result = function(*leaves)
        result.sum().backward()
    return result, leaves


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w).amax(1),
        lambda x, w: (x @ w).max(1).values,
        lambda x, w: torch.maximum(x @ w, x),
        lambda x, w: torch.logsumexp((x @ w * 1e18)[:, :1], 1),
    ],
    ids=["amax", "max", "maximum", "logsumexp"],
)
def test_what_is_disturbed_has_its_derivative(function):
    inputs = torch.rand(8, 6), torch.rand(6, 6)
    _, (x, w) = disturbed(function, *inputs)
    exact = [value.double().requires_grad_() for value in inputs]
    function(*exact).sum().backward()
    for found, true in zip((x, w), exact):
        assert torch.isfinite(found.grad).all()
        assert (found.grad - true.grad).norm() < 0.5 * true.grad.norm()


def test_rows_share_the_rounding_of_their_softmaxs_sum():
    x = torch.rand(50, 4000) / 10
    result, (leaf,) = disturbed(lambda x: torch.log_softmax(x, 1), x)
    error = (result - torch.log_softmax(leaf, 1)).detach()
    shared = error.mean(1, keepdim=True)
    assert shared.norm() * 4000**0.5 > 0.5 * (error - shared).norm()
    scaled, (leaf,) = disturbed(lambda x: torch.softmax(x, 1), x)
    relative = (scaled / torch.softmax(leaf, 1)).detach() - 1
    assert relative.mean(1).norm() * 4000**0.5 > 0.5 * relative.norm()


def test_measures_leave_out_what_the_outputs_type_cannot_hold():
    truth = torch.tensor([[1.0, 1e60], [2.0, 1.0]], dtype=torch.float64)
    found = torch.tensor([[1.1, 1e60], [2.0, 1.0]], dtype=torch.float64)
    assert measure(truth, found, 2).relative_error < 1e-50
    assert measure(truth, found, 2, dtype=torch.float32).relative_error == pytest.approx(
        0.1 / 6**0.5
    )
