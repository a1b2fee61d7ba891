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
from ingot.capture import Region
from ingot.live.backend import IngotWarning
from ingot.model_capture import capture
from ingot.model_file import load_model_file
from ingot.runtime.program import Program
from torch.utils import _pytree as pytree

FOLDER = Path(__file__).resolve().parents[1] / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

# Operators that stay PyTorch's, by model; of all others Ingot takes every operator that computes.
LEFT_TO_PYTORCH = {
    "concatenated_inputs": ["cat"],
    "cumulative_sum": ["cumsum"],
    "groupnorm_min_bias": ["add"],  # [1, C, B, 1]: the batch is not in front
    "tokens_groupnorm": ["group_norm"],  # on the CPU
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


# What a GPU does for a call: the kinds of the sweeps, and PyTorch's operators between regions; one
# text where training and eval mode agree.
SWEEPS = {
    "add_layernorm_twice": "product rows product rows",
    "argmax_of_rows": "product rows",
    "at_operator_transposed": "product product",
    "avgpool_gelu_scale_max": "product rows rows",
    "batched_product": "product rows",
    "batchnorm_bias_divide_swish": ("product map", "product"),
    "batchnorm_gelu_relu": ("product map", "product"),
    "bilinear_sum": "product product rows",
    "bmm_instance_norm_residual": "product rows",
    "buffers_and_mask": "product",
    "cumulative_sum": "product cumsum rows",
    "dropout_mean_softmax": ("product dropout rows", "product rows"),
    "einsum_elu": "product",
    "four_axes": "flatten product",
    "four_axes_layernorm": "flatten rows product product",
    "functional_weights": "product rows",
    "gelu_dropout_scale_layernorm": ("product dropout rows", "product rows"),
    "gelu_softmax": "product rows",
    "glu": "product slice slice map",
    "groupnorm_min_row_bias": "product rows",
    "groupnorm_swish_multiply_swish": "product rows",
    "half_inside": "product rows",
    "in_place": "product",
    "low_rank_adapter": "product product product",
    "masked_softmax": "product rows",
    "max_subtract_mean_gelu": "product rows",
    "maxpool_sum_scale": "product rows rows",
    "min_constant_subtract": "product",
    "mish_twice": "product",
    "raw_weight_divide_sum_scale": "product rows",
    "residual_mlp_block": "rows product product",
    "row_and_column_scale": "product",
    "scale_detached_residual": "product",
    "scale_double_clamp_logsumexp_mish": "product rows",
    "several_results": "product rows",
    "sigmoid_linear_logsumexp": "product product rows",
    "sigmoid_sum_logsumexp": "product rows columns",
    "softmax_by_hand": "product rows",
    "squeeze_excite": "product product",
    "standardise_columns": "product map",
    "sum_max_mean_logsumexp_twice": "product rows",
    "swiglu": "product product product",
    "swiglu_chunk": "product chunk getitem getitem map product",
    "swish_divide_clamp_tanh_clamp": "product",
    "temperature_entropy": "product rows",
    "three_layer_sequential": "product product product rows",
    "tied_weights": "product product",
    "tokens_mean_linear": "product rows product",
    "var_over_features": "product rows",
    "weight_norm": "rows product",
}


@pytest.mark.parametrize("name", sorted(SWEEPS))
def test_plan_for_a_gpu(name):
    wanted = SWEEPS[name]
    both = (wanted, wanted) if isinstance(wanted, str) else wanted
    for mode, kinds in zip(("training", "eval"), both):
        module, inputs = made(name, mode)
        found = []
        for step in capture(module, tuple(inputs)).steps:
            if not isinstance(step, Region):
                found.append(step.what)
                continue
            program = Program(
                step.graph,
                device="cuda",
                leaf_layouts=step.leaf_layouts,
                result_layouts=step.result_layouts,
                options={"sm": 90},
            )
            found += [sweep["kind"] for sweep in program.explain(1024)["sweeps"]]
        assert found == kinds.split(), mode
