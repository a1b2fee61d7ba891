"""Training steps on a CPU: regions that gain less than they cost the host are PyTorch's."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import ingot
import pytest
import torch
from ingot.capture import host_time
from ingot.model_file import load_model_file
from ingot.standalone_writer import Standalone
from live import agree, no_gradients, regions_run  # noqa: F401
from torch import nn

MODELS = Path(__file__).resolve().parents[1] / "models"


class Chain(nn.Module):
    def __init__(self, *behind: nn.Module, features: int = 48):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, features), *behind)

    def forward(self, x):
        return self.layers(x)


@pytest.fixture(autouse=True)
def users_setting(monkeypatch):
    monkeypatch.setattr(host_time, "takes_small_steps", False)


def step(module, x):
    module.zero_grad()
    result = module(x)
    result.square().mean().backward()
    return [result.detach(), *(p.grad for p in module.parameters())]


def captured(name, **sizes):
    """A model of tests/models, after a training step."""
    loaded = load_model_file(MODELS / f"{name}.py", sizes)
    module = ingot.optimize(loaded.make_module().train())
    with torch.enable_grad(), regions_run() as ran:
        for _ in range(3):
            module(*loaded.make_inputs()).square().mean().backward()
    return ran


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_what_a_region_gains_is_what_eager_takes():
    # A batch of products is PyTorch's in a region, too; a layer norm is one operator.
    assert not captured("baddbmm_relu", batch_size=512)
    assert not captured("add_layernorm_twice")
    assert captured("groupnorm_swish_multiply_swish")
    assert captured("var_over_features")


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_a_small_step_is_pytorchs_and_inference_ours():
    module, x = Chain(nn.Sigmoid()), torch.randn(20, 32)
    optimised = ingot.optimize(copy.deepcopy(module))
    with torch.enable_grad(), regions_run() as ran:
        for _ in range(20):
            found, expected = step(optimised, x), step(module, x)
            assert all(map(torch.equal, found, expected))
    assert not ran
    assert [item["why"] for item in optimised.ingot_report()["unsupported"]] == [
        "PyTorch runs it: a training step of this size gains less than regions cost"
    ]
    with regions_run() as ran:
        for _ in range(20):
            agree(optimised, module, x)
    assert len(ran) == 20


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_what_gains_nothing_needs_no_preparation():
    """And is no error: PyTorch runs it."""
    module, x = Chain(nn.Sigmoid()), torch.randn(20, 32)
    with torch.enable_grad():
        optimised = ingot.optimize(copy.deepcopy(module), [x])
        optimised.ingot_prepare(x)
        optimised.ingot_prepare(x)
        assert all(map(torch.equal, step(optimised, x), step(module, x)))


@pytest.mark.parametrize(
    ("behind", "rows"),
    [([nn.GroupNorm(4, 48), nn.SiLU()], 1024), ([nn.SiLU(), nn.Tanh(), nn.Mish()] * 3, 20)],
    ids=["a norm of many rows", "many operators"],
)
def test_a_step_that_gains_is_ours(behind, rows):
    module, x = Chain(*behind), torch.randn(rows, 32)
    optimised = ingot.optimize(copy.deepcopy(module))
    with torch.enable_grad(), regions_run() as ran:
        torch.testing.assert_close(step(optimised, x), step(module, x), rtol=1e-4, atol=1e-5)
    assert ran


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_steps_and_inference_in_turn_stay_on_their_ways():
    """What is left of one kind of call does not slow the other's way down."""
    module, x = Chain(nn.Sigmoid()), torch.randn(20, 32)
    optimised = ingot.optimize(copy.deepcopy(module))
    for _ in range(40):
        with torch.enable_grad():
            step(optimised, x)
        agree(optimised, module, x)
    training, gradients, _ = optimised._ingot_left
    assert training and gradients
    assert not optimised._ingot.left.hold_again(optimised, (x,), {})


def test_a_file_for_a_gpu_is_the_same_wherever_it_is_written(monkeypatch):
    original = load_model_file(str(MODELS / "three_layer_sequential.py"))
    found = Standalone(original).render()
    monkeypatch.setattr(host_time, "takes_small_steps", True)
    assert found == Standalone(original).render()


TAKEN = """
import torch, ingot, warnings
warnings.simplefilter("ignore")
module = ingot.optimize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
module(torch.randn(4, 8)).sum().backward()
print(len(module.ingot_report()["operators_replaced"]))
"""


@pytest.mark.parametrize(
    ("asked", "taken"), [("all", "2"), pytest.param("", "0", marks=pytest.mark.thorough)]
)
def test_the_environment_may_ask_for_all(asked, taken):
    environment = {**os.environ, "INGOT_TAKE": asked}
    run = [sys.executable, "-c", TAKEN]
    answer = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [taken]
