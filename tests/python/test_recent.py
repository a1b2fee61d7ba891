"""What a call must have in common with the last one to run like it, with PyTorch's own check of
tensors and without."""

from __future__ import annotations

import contextlib

import ingot
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm, self.bn, self.gain = nn.Linear(8, 12), nn.BatchNorm1d(12), 1.5

    def forward(self, x):
        return self.bn(self.gemm(x)) * self.gain


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(8, 12)

    def forward(self, x, y, unread=None):
        return self.gemm(x) + self.gemm(y)


@pytest.fixture(params=["PyTorch's check", "compared here"], autouse=True)
def native(request, monkeypatch):
    torch.manual_seed(0)
    if request.param == "compared here":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    with torch.no_grad():
        yield request.param == "PyTorch's check"


@pytest.fixture
def x():
    return torch.randn(4, 8)


@pytest.fixture
def recent(x, native):
    # Kept alive by the fixture: guards hold on to the module's parts, not to the module.
    optimised = ingot.optimize(Model().eval(), (x,))
    optimised(x)
    recent = optimised._ingot.last
    assert (type(recent._like).__name__ == "function") != native
    yield recent
    del optimised


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Overriding(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


AROUND = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "gradients": torch.enable_grad,
    "a dispatch mode": Watching,
    "a function mode": Overriding,
    "a device mode": lambda: torch.device("cpu"),
    "forward differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("around", AROUND)
def test_what_is_around_a_call(recent, x, around):
    assert recent.leaves((x,)) is not None
    with AROUND[around]():
        assert recent.leaves((x,)) is None
    assert recent.leaves((x,)) is not None


def test_transforms_and_traces(recent, x):
    seen = []

    def look(y):
        seen.append(recent.leaves((y,)) or recent.leaves((x,)))
        return y + 1

    torch.vmap(look)(x)
    torch.func.grad(lambda y: look(y).sum())(x)
    torch.jit.trace(look, (x,), check_trace=False)
    assert seen == [None] * 3
    assert recent.leaves((x,)) is not None


ARGUMENTS = {
    "none": lambda x: (),
    "two": lambda x: (x, x),
    "text": lambda x: ("x",),
    "another batch": lambda x: (torch.randn(5, 8),),
    "another dtype": lambda x: (x.double(),),
    "other strides": lambda x: (torch.randn(8, 4).t(),),
    "another device": lambda x: (x.to("meta"),),
    "a sparse tensor": lambda x: (x.to_sparse(),),
    "a negated view": lambda x: (torch._neg_view(x),),
    "one with a gradient": lambda x: (x.clone().requires_grad_(),),
    "a subclass": lambda x: (x.as_subclass(type("Sub", (torch.Tensor,), {})),),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_other_arguments(recent, x, kind):
    args = ARGUMENTS[kind](x)
    if kind == "one with a gradient":
        # Gradients are off: at worst it is looked at in full.
        with torch.enable_grad():
            assert recent.leaves(args) is None
    else:
        assert recent.leaves(args) is None
    assert recent.leaves((torch.randn(4, 8),)) is not None


def test_modes_decide_what_is_compared(x):
    """A call inside autocast is like one inside the same autocast, and no other."""
    model = Model().eval()
    optimised = ingot.optimize(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimised(x)
        recent = optimised._ingot.last
        assert recent.leaves((x,)) is not None
    assert recent.leaves((x,)) is None
    with torch.autocast("cpu", dtype=torch.float16):
        assert recent.leaves((x,)) is None


def test_the_same_tensor_twice(x):
    model = Sum()
    optimised = ingot.optimize(model)
    y = torch.randn(4, 8)
    for args in ((x, x), (x, y), (y, y), (x, x)):
        torch.testing.assert_close(optimised(*args), model(*args))
        assert optimised._ingot.last.leaves(args) is not None


def test_an_argument_that_is_not_read(x):
    optimised = ingot.optimize(Sum())
    args = (x, torch.randn(4, 8), torch.randn(4, 3))
    torch.testing.assert_close(
        optimised(*args), optimised._ingot.original_forward(optimised, *args)
    )
    recent = optimised._ingot.last
    assert recent is not None and recent.leaves(args) is not None
    assert recent.leaves((*args[:2], "text")) is None
    assert recent.leaves(args[:2]) is None


def test_inference_mode_runs_compiled(x):
    optimised = ingot.optimize(Model().eval(), (x,))
    with torch.inference_mode():
        assert optimised(x).is_inference()
        assert optimised._ingot.last.leaves((x,)) is not None
    assert not optimised(x).is_inference()
    assert optimised._ingot.last.leaves((x,)) is not None


def test_modules_are_freed_at_once(x):
    """Without waiting for the garbage collector: a model's memory may be most of a GPU's."""
    import gc
    import weakref

    model = Model().eval()
    optimised = ingot.optimize(model, (x,))
    optimised(x)
    weight = weakref.ref(model.gemm.weight)
    gc.collect()
    gc.disable()
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable)
        del model, optimised
        assert weight() is None
