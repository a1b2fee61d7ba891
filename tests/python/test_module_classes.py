"""Classes of models that do more than define a forward: what they hand on, register and copy stays
what it is without Ingot."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
import weakref

import ingot
import pytest
import torch
from live import no_gradients, programs_of, regions_run, x  # noqa: F401
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(8, 6)

    def forward(self, x):
        return functional.gelu(super().forward(x))


def _same(optimised, original):
    fed = x()
    torch.testing.assert_close(optimised(fed), original(fed), rtol=1e-5, atol=1e-5)


class Wrapper(nn.Module):
    """Hands out what the module inside it has, as trainers' wrappers do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x) * 3

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_a_wrapper_is_not_taken_for_what_it_wraps():
    class WrapperNew(ingot.OptimizedModule, Wrapper):
        pass

    inner = Layer()
    _same(WrapperNew(ingot.optimize(copy.deepcopy(inner))), Wrapper(inner))


class _Doubles:
    def __call__(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "forward",
    [
        property(lambda self: lambda x: Layer.forward(self, x) * 5),
        functools.partialmethod(lambda self, x, factor: Layer.forward(self, x) * factor, factor=2),
        staticmethod(torch.sigmoid),
        classmethod(lambda cls, x: x + len(cls.__mro__)),
        _Doubles(),
    ],
    ids=lambda forward: type(forward).__name__,
)
def test_forwards_that_are_no_functions(forward):
    original = type("Other", (Layer,), {"forward": forward})()
    optimised = ingot.optimize(copy.deepcopy(original))
    fed, longer = x(), isinstance(forward, classmethod)
    torch.testing.assert_close(optimised(fed), original(fed) + (2 if longer else 0))
