"""Results whose dimensions of extent 1 have eager's strides: what reads them as images asks them
where their channels lie."""

from __future__ import annotations

import copy

import ingot
import pytest
import torch
from test_gradients import calls_of
from torch import nn


class Layer(nn.Module):
    def __init__(self, features: int, read):
        super().__init__()
        self.linear, self.read = nn.Linear(8, features), read

    def forward(self, x):
        return self.read(torch.relu(self.linear(x)))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(x))


def images(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes).contiguous(memory_format=torch.channels_last)


CASES = {
    "one feature, moved inside": (Layer(1, lambda y: y.transpose(1, 2)), torch.randn(4, 5, 8)),
    "put in between": (Layer(6, lambda y: y[:, None, :, None]), torch.randn(4, 8)),
    "a column of pixels, channels last": (Norm(), images(5, 8, 3, 1)),
    "a row of pixels, channels last": (Norm(), images(5, 8, 1, 3)),
    "a column of pixels": (Norm(), torch.randn(5, 8, 3, 1)),
    "joined": (Layer(6, lambda y: torch.cat([y, y.tanh()], 1)[..., None]), torch.randn(4, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_strides_are_eagers(name):
    module, x = copy.deepcopy(CASES[name][0]).eval(), CASES[name][1]
    optimized = ingot.optimize(copy.deepcopy(module))
    with torch.no_grad():
        for batch in (len(x), 2, 1):
            expected, found = module(x[:batch]), optimized(x[:batch])
            assert found.stride() == expected.stride(), batch
            torch.testing.assert_close(found, expected)
    assert calls_of(optimized)


def test_a_convolution_behind_it_lies_as_eagers():
    module = nn.Sequential(Norm(), nn.Conv2d(8, 8, 1)).eval()
    module = module.to(memory_format=torch.channels_last)
    optimized = ingot.optimize(copy.deepcopy(module))
    x = images(5, 8, 3, 1)
    with torch.no_grad():
        assert optimized(x).stride() == module(x).stride()
