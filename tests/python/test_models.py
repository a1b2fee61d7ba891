"""The models of tests/models, as users write them: what Ingot takes of each, the plan that it makes
for a GPU, and results against fp64.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import ingot
import pytest
import torch
from ingot.model_file import load_model_file
from ingot.dispatch import IngotWarning
from torch.utils import _pytree as pytree

FOLDER = Path(__file__).resolve().parents[1] / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

# Operators that stay PyTorch's, by model; of all others Ingot takes every operator that computes.
LEFT_TO_PYTORCH = {
    "concatenated_inputs": ["cat"],
    "cumulative_sum": ["cumsum"],
    "groupnorm_min_bias": ["add"],  # [1, C, B, 1]: the batch is not in front
    "tokens_groupnorm": ["group_norm"],
    "weight_norm": ["_weight_norm"],
}
LEFT_IN_TRAINING = {
    "dropout_mean_softmax": ["dropout"],
    "gelu_dropout_scale_layernorm": ["dropout"],
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def made(name: str, mode: str):
    torch.manual_seed(1)
    loaded = load_model_file(FOLDER / f"{name}.py")
    return loaded.make_module().train(mode == "training"), loaded.make_inputs()


def left(name: str, mode: str) -> list[str]:
    training = LEFT_IN_TRAINING.get(name, []) if mode == "training" else []
    return LEFT_TO_PYTORCH.get(name, []) + training


def smaller(inputs: list, rows: int) -> list:
    batch = inputs[0].shape[0]
    return [t[:rows] if t.ndim > 1 and t.shape[0] == batch else t for t in inputs]


def distance(found, truth) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(truth))
    return max(
        ((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)).item() for a, b in pairs
    )


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("name", NAMES)
def test_taken_and_right(name, mode):
    module, inputs = made(name, mode)
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IngotWarning)
        optimised = ingot.optimize(module, inputs)
        report = optimised.ingot_report()
    assert sorted(item["what"] for item in report["unsupported"]) == sorted(left(name, mode))
    for fed in (inputs, smaller(inputs, 3)):
        torch.manual_seed(2)
        found = optimised(*fed)
        torch.manual_seed(2)
        expected = eager(*fed)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
        random = mode == "training" and name in LEFT_IN_TRAINING
        truth = expected if random else exact(*[t.double() for t in fed])
        assert distance(found, truth) <= 2e-6 + 3 * distance(expected, truth)
    for (path, buffer), (_, wanted) in zip(module.named_buffers(), exact.named_buffers()):
        torch.testing.assert_close(buffer.double(), wanted.double(), rtol=1e-5, atol=1e-6, msg=path)
