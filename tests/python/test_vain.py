"""Sizes beside the batch that change from call to call."""

import copy
import warnings

import ingot
import pytest
import torch
from live import regions_run
from torch import nn


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        return torch.softmax(self.linear(x).transpose(1, 2) * 2, dim=-1)


def _call(optimised, eager, length, batch=2):
    """Whether a region ran."""
    x = torch.randn(batch, length, 8)
    with torch.no_grad(), regions_run() as ran:
        torch.testing.assert_close(optimised(x), eager(x), rtol=1e-5, atol=1e-5)
    return bool(ran)


@pytest.fixture
def pair():
    eager = Tokens()
    return ingot.optimize(copy.deepcopy(eager)), eager


def test_sizes_that_never_come_back_are_captured_a_few_times(pair):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        taken = [_call(*pair, length) for length in range(3, 20)]
    assert taken == [True] * 6 + [False] * 11
    assert len(pair[0]._ingot.graphs) == 6
    assert sum("hardly called again" in str(warning.message) for warning in said) == 1
    assert _call(*pair, 4) and _call(*pair, 4, batch=5)


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_others_are_captured_once_those_there_were_used(pair):
    for length in range(3, 9):
        assert _call(*pair, length)
    assert not _call(*pair, 9)
    for _ in range(2):
        assert _call(*pair, 3)
    assert _call(*pair, 9)


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_one_in_some_calls_is_captured_all_the_same(pair):
    for length in range(3, 9):
        assert _call(*pair, length)
    taken = [_call(*pair, 20) for _ in range(66)]
    assert taken == [False] * 63 + [True] * 3


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_what_is_prepared_is_captured(pair):
    for length in range(3, 10):
        _call(*pair, length)
    with torch.no_grad():
        pair[0].ingot_prepare(torch.randn(2, 30, 8))
    assert _call(*pair, 30)
