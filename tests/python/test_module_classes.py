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


def test_registers_of_subclasses_hear_nothing_of_ours():
    class Registered(Layer):
        names: list = []  # noqa: RUF012

        def __init_subclass__(cls, *, tag, **keywords):
            super().__init_subclass__(**keywords)
            cls.tag = tag
            cls.names.append(tag)

    class First(Registered, tag="first"):
        pass

    class New(ingot.OptimizedModule, First, tag="new"):
        pass

    assert ingot.optimize(First()).tag == "first"
    assert New.tag == "new" and Registered.names == ["first", "new"]


def test_a_class_that_cannot_be_shared_is_named():
    class Slotted(Layer):
        __slots__ = ("gain",)

    with pytest.raises(TypeError, match="a Slotted cannot be optimised"):
        ingot.optimize(Slotted())


def test_a_parametrized_module_is_copied_with_its_settings():
    # PyTorch gives such a class a __deepcopy__ that goes through the slots.
    optimised = ingot.optimize(Layer(), precision="ieee")
    parametrizations.weight_norm(optimised)
    optimised(x())
    copied = copy.deepcopy(optimised)
    with torch.no_grad():
        copied.bias += 1
    fed = x()
    with regions_run() as ran:
        found = copied(fed)
    assert ran and programs_of(copied)[0].precision == "ieee"
    weight, bias = copied.weight, copied.bias
    expected = functional.gelu(functional.linear(fed, weight, bias))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(copied.bias, optimised.bias)


class _Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.spectral_norm,
        lambda module: parametrize.register_parametrization(module, "weight", _Halved()),
    ],
)
def test_parametrized_modules_are_freed(change):
    module = Layer()
    change(module)
    optimised = ingot.optimize(module)
    optimised(x())
    kept = weakref.ref(module), weakref.ref(optimised._ingot)
    del module, optimised
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


_ENDS = """
import ingot, torch
from torch import nn
from torch.nn import functional
class Layer(nn.Linear):
    def forward(self, x):
        return functional.gelu(super().forward(x))
def run():
    layer = Layer(8, 8)
    nn.utils.parametrizations.spectral_norm(layer)
    ingot.optimize(layer)(torch.rand(4, 8))
run()
"""


def test_a_process_ends_as_it_should():
    # What one graph writes and another reads is watched; the watch kept what was compiled.
    subprocess.run([sys.executable, "-W", "ignore", "-c", _ENDS], check=True, timeout=120)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = ingot.optimize(nn.Sequential(nn.Linear(8, 6), nn.ReLU()))

    def forward(self, x):
        return functional.gelu(self.layers(x)) * 2


def test_torch_jit_script_reads_the_original():
    optimised = ingot.optimize(Scripted())
    scripted, fed = torch.jit.script(optimised), x()
    torch.testing.assert_close(scripted(fed), optimised(fed))
    assert isinstance(optimised.layers, ingot.OptimizedModule)
    assert all(a is b for a, b in zip(scripted.parameters(), optimised.parameters()))


def test_a_forward_that_is_replaced_in_the_class_is_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x):
            return self.linear(x).relu()

    x, before = torch.randn(4, 16), Model()
    fast = ingot.optimize(before)
    torch.testing.assert_close(fast(x), before(x))
    Model.forward = lambda self, x: self.linear(x).tanh() * 2
    after = Model()
    for module, optimised in ((before, fast), (after, ingot.optimize(after))):
        torch.testing.assert_close(optimised(x), module(x))
        torch.testing.assert_close(optimised(x), torch.tanh(module.linear(x)) * 2)
