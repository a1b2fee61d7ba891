"""Running statistics that several calls of a norm move, or something else reads."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from torch import nn
from torch.nn import functional as F


def both(model):
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ingot.optimize(model), twin


class TwiceNormed(nn.Module):
    """A norm for two tensors, whose calls lie in different regions, or outside of them."""

    def __init__(self, second):
        super().__init__()
        self.a, self.b, self.second = nn.Linear(16, 16), nn.Linear(16, 16), second
        self.norm = nn.BatchNorm1d(16, momentum=0.5)

    def forward(self, x):
        h = F.gelu(self.b(F.layer_norm(F.gelu(self.a(x)), (16,))))
        first = self.norm(h.cumsum(0)).cumsum(0)
        return first, self.second(self.norm, x.cumsum(0))


def read_only(norm, x):
    return F.batch_norm(x, norm.running_mean, norm.running_var)


@pytest.mark.parametrize("second", [lambda norm, x: norm(x).cumsum(0), read_only])
@pytest.mark.parametrize("gradients", [True, False])
def test_statistics_of_a_norm_that_is_called_twice_move_in_order(second, gradients):
    optimised, twin = both(TwiceNormed(second))
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            x = torch.rand(12, 16)
            torch.testing.assert_close(optimised(x), twin(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(optimised.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-4)
    assert optimised.ingot_report()["operators_replaced"]
