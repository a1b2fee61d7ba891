"""Programs that gave silently other numbers than PyTorch where models are trained, most of them
under autocast, in second derivatives or beside writes; and random ones of the kind.

INGOT_TRAININGS=2000 runs that many other ones than the few of every run.
"""

import copy

import ingot
import pytest
import torch
from live import regions_run
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
HALVES = [torch.bfloat16, torch.float16]


class Model(nn.Module):
    """Layers of one size, for a function of them and of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.batch_norm = nn.RMSNorm(32), nn.BatchNorm1d(32)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _both(function, dtype, *inputs):
    """Results by PyTorch and through Ingot, under autocast to `dtype` if there is one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(function)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        expected = twin(*inputs)
        with regions_run() as ran:
            found = ingot.optimize(model)(*inputs)
    assert ran, "nothing was taken"
    return found, expected


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("gradients", [True, False])
def test_an_rms_norm_of_16_bits_has_pytorchs_eps(dtype, gradients):
    x = torch.randn(16, 32) * 0.02

    def function(m, x):
        return m.norm(F.linear(x, m.linear.weight)) * 2

    with torch.set_grad_enabled(gradients):
        found, expected = _both(function, dtype, x)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
