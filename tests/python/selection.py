"""Which of a test's many cases run in `make test`: the others are marked `thorough`, and run in
`make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest


def quick(kept: Collection, cases: Iterable) -> list:
    """The cases, those that are not kept marked."""
    cases = list(cases)
    unknown = set(kept) - set(cases)
    assert not unknown, f"no such cases: {sorted(unknown)}"
    return [case if case in kept else _thorough(case) for case in cases]


def one_of_each(cases: Iterable, kind: Callable[[Any], Any], step: int = 1) -> list:
    """The first case of each kind is kept; of the kinds, the first and each `step`-th after it."""
    first: dict = {}
    cases = list(cases)
    for case in cases:
        first.setdefault(kind(case), case)
    return quick(list(first.values())[::step], cases)


def every(step: int, cases: Iterable) -> list:
    """Of cases that are alike, the first and each `step`-th after it."""
    return [case if at % step == 0 else _thorough(case) for at, case in enumerate(cases)]


def checkered(*lists: Iterable) -> list:
    """Of all combinations, each second one in every direction."""
    cases = product(*map(enumerate, lists))
    marks = {0: (), 1: (pytest.mark.thorough,)}
    return [
        pytest.param(*(value for _, value in case), marks=marks[sum(at for at, _ in case) % 2])
        for case in cases
    ]


def _thorough(case: Any) -> Any:
    return pytest.param(case, marks=pytest.mark.thorough)


# Of tests/models: between them every kind of product, norm, reduction, view and update that the
# models have, several regions and several results, and whatever a test treats as an exception. All
# models are taken, planned and compared with fp64 in eval mode by test_models.py.
MODELS = (
    "add_layernorm_twice",
    "at_operator_transposed",
    "batched_product",
    "batchnorm_gelu_relu",
    "bmm_instance_norm_residual",
    "buffers_and_mask",
    "concatenated_inputs",
    "dropout_mean_softmax",
    "einsum_elu",
    "four_axes_layernorm",
    "functional_weights",
    "groupnorm_min_bias",
    "half_inside",
    "in_place",
    "low_rank_adapter",
    "masked_softmax",
    "maxpool_overlapping",
    "maxpool_sum_scale",
    "mish_twice",
    "prelu_dropout_eval",
    "several_results",
    "sigmoid_sum_logsumexp",
    "standardise_columns",
    "swiglu_chunk",
    "tied_weights",
    "tokens_batchnorm",
    "tokens_groupnorm",
    "weight_norm",
)
