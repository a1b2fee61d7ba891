"""Calls that PyTorch refuses: its error, and no capture at each of them."""

from __future__ import annotations

import copy

import ingot
import pytest
import torch
from ingot.live.state import State
from live import no_gradients, regions_run, x  # noqa: F401
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x, factor=1.0):
        y = nn.functional.gelu(self.linear(x)) * factor
        if factor < 0:
            raise ValueError(f"a factor of {factor}")
        return y


@pytest.fixture
def captures(monkeypatch):
    """A list that grows by one at each capture of a model's forward."""
    found, seen = [], State._seen

    def noted(state, module):
        found.extend([module] * isinstance(module, Model))
        seen(state, module)

    monkeypatch.setattr(State, "_seen", noted)
    return found


def _refused(optimised, twin, *bad):
    with pytest.raises(Exception) as expected:
        twin(*bad)
    with pytest.raises(type(expected.value)) as found:
        optimised(*bad)
    assert str(found.value) == str(expected.value)


def test_a_refused_call_is_captured_once_without_a_word(captures, capfd):
    twin = Model()
    optimised = ingot.optimize(copy.deepcopy(twin))
    for bad in ((torch.randn(4, 9),), (torch.randn(4, 8).double(),)):
        before = len(captures)
        for _ in range(5):
            _refused(optimised, twin, *bad)
        assert len(captures) == before + 1
    assert not capfd.readouterr().err
    for _ in range(3):
        _refused(optimised, twin, x(), -1.0)
    fed = x()
    with regions_run() as ran:
        torch.testing.assert_close(optimised(fed), twin(fed))
    assert ran


def test_what_is_refused_no_more_is_captured(captures):
    optimised = ingot.optimize(Model())
    fed = torch.randn(4, 9)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            optimised(fed)
    optimised.linear = nn.Linear(9, 6)
    with regions_run() as ran:
        found = [optimised(fed) for _ in range(3)]
    expected = nn.functional.gelu(optimised.linear(fed))
    for each in found:
        torch.testing.assert_close(each, expected)
    assert len(ran) == 2 and len(captures) == 2


def test_refused_kinds_are_forgotten(monkeypatch):
    monkeypatch.setattr("ingot.live.refused._MOST_KINDS", 3)
    optimised = ingot.optimize(Model())
    for width in range(9, 14):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            optimised(torch.randn(4, width))
    state = optimised._ingot
    assert 0 < len(state._refused.kinds) <= 3
    for _ in range(300):
        optimised(x())
    assert not state._refused.kinds


def test_what_is_refused_among_other_calls_is_captured_once(captures):
    optimised = ingot.optimize(Model())
    for _ in range(300):
        optimised(x())
        optimised(x())
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            optimised(torch.randn(4, 9))
    assert len(captures) == 2
