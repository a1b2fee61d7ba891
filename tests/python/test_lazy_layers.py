"""Layers whose weights their first call makes, which PyTorch runs: they are drawn as it draws."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ingot
import pytest
import torch
from ingot.live.dynamo import _lazy_modules_left
from live import compare, regions_run, x
from torch import nn
from torch._dynamo.variables import nn_module

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


def test_lazy_modules():
    optimised = ingot.optimize(nn.LazyLinear(6))
    assert optimised(x()).shape == (4, 6) and isinstance(optimised, nn.Linear)
    fed = x()
    torch.testing.assert_close(
        optimised(fed), nn.functional.linear(fed, optimised.weight, optimised.bias)
    )


def test_lazy_layers_draw_their_weights_as_pytorchs():
    def script(m):
        for batch in (4, 4, 3):
            yield m(x(batch)), torch.rand(3)

    def make():
        return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(4), nn.Dropout(0.5))

    compare(make, script)
    with pytest.warns(ingot.IngotWarning, match="is captured later: its lazy layers"):
        optimised = ingot.optimize(make(), x())
    with pytest.raises(ingot.IngotError, match="cannot be prepared: its lazy layers"):
        optimised.ingot_prepare(x())
    optimised(x())
    optimised.ingot_prepare(x())


def test_lazy_layers_of_other_threads_are_dynamos():
    """Whichever of two captures that overlap ends first, and what comes after both."""
    own = nn_module.initialize_lazy_module
    first, second = _lazy_modules_left(), _lazy_modules_left()
    first.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        compiled = torch.compile(nn.LazyLinear(6), backend="eager", fullgraph=True)
        assert compiled(x()).shape == (4, 6)
        pool.submit(second.__exit__, None, None, None).result()
    assert nn_module.initialize_lazy_module is own


def test_a_lazy_layer_that_is_called_late():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.late = nn.LazyLinear(6), nn.Linear(6, 4), nn.LazyLinear(2)

        def forward(self, x, late=False):
            y = self.b(torch.relu(self.a(x)))
            return self.late(y) if late else y

    def script(m):
        for late in (False, False, True, True):
            yield m(x(), late), torch.rand(3)

    compare(Model, script)
    optimised = ingot.optimize(Model())
    optimised(x())
    with regions_run() as ran:
        optimised(x())
    assert ran
