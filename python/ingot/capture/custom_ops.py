"""Operators that stand in for PyTorch's in a captured graph.

BatchNorm counts its batches by an in-place addition beside its arithmetic, and reads the count on
the host when momentum is None. `ingot::batch_norm` carries all of the module's arguments to the
importer, the counter among them. It is never run on real tensors.

Losses that are written apart have operators of their own, which run as what they are made of.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.nn.modules.batchnorm import _BatchNorm

_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
    "Tensor? num_batches_tracked, bool training, float? momentum, float eps) -> Tensor"
)


@torch.library.custom_op("ingot::batch_norm", mutates_args=(), schema=_SCHEMA)
def batch_norm(
    x, weight, bias, running_mean, running_var, num_batches_tracked, training, momentum, eps
):
    raise RuntimeError("ingot::batch_norm exists for captures only")


@batch_norm.register_fake
def _(x, weight, bias, running_mean, running_var, num_batches_tracked, training, momentum, eps):
    if x.device.type == "cpu":  # whose kernels know two formats
        return torch.empty_like(x, memory_format=suggest_memory_format(x))
    return torch.empty_like(x)


# Its updates of the running statistics are not visible in the graph.
torch.fx.node.has_side_effect(torch.ops.ingot.batch_norm.default)


def is_plain_batch_norm(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and "forward" not in module.__dict__
    )


def batch_norm_forward(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """`_BatchNorm.forward` with the operator of ours in place of its arithmetic."""
    module._check_input_dim(x)
    tracking = module.training and module.track_running_stats
    use_batch = module.training or (module.running_mean is None and module.running_var is None)
    use_running = not module.training or module.track_running_stats
    if use_batch:
        # Raises PyTorch's own message where a channel has a single value.
        torch.nn.functional._verify_batch_size(x.size())
    return torch.ops.ingot.batch_norm.default(
        x,
        module.weight,
        module.bias,
        module.running_mean if use_running else None,
        module.running_var if use_running else None,
        module.num_batches_tracked if tracking else None,
        use_batch,
        None if module.momentum is None else float(module.momentum),
        float(module.eps),
    )


def run_batch_norm(
    x, weight, bias, running_mean, running_var, num_batches_tracked, training, momentum, eps
):
    """What PyTorch does with these arguments: for graphs that leave the operator to PyTorch."""
    factor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            factor = 1.0 / float(num_batches_tracked)
    return torch.nn.functional.batch_norm(
        x, running_mean, running_var, weight, bias, training, factor, eps
    )


# What a loss is written in (losses.py): operators of PyTorch's, which autograd sees, that belong
# together wherever a region begins or ends.
_WRITTEN = torch.library.Library("ingot", "FRAGMENT")
_WRITTEN.define("where_equal(Tensor a, Tensor b, Tensor x) -> Tensor")
_WRITTEN.define("nan_outside(Tensor x, Tensor number, float end) -> Tensor")
_WRITTEN.define("largest(Tensor x) -> Tensor")
_WRITTEN.define("log_total(Tensor x, Tensor largest) -> Tensor")


def _where_equal(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x where a and b are equal, else 0."""
    return torch.where(a == b, x, 0.0)


def _nan_outside(x: torch.Tensor, number: torch.Tensor, end: float) -> torch.Tensor:
    """NaN where the number is below 0, or not below the end; the gradient is x's own."""
    number = number.detach()
    return x + torch.where(number < 0, math.nan, torch.where(number >= end, math.nan, 0.0))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Of each row. Any number would do where it is taken off and added again: no gradient."""
    return x.detach().amax(1, keepdim=True)


def _log_total(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """log Σ exp(x - m) of each row."""
    return torch.log(torch.exp(x - largest).sum(1))


# What a gradient of one element of many is written in (placed.py).
_WRITTEN.define("placed(Tensor a, Tensor b, Tensor x, int dim) -> Tensor")


def _placed(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """where_equal of the numbers of elements along a dimension and of a place, by the place."""
    shape = [*x.shape]
    shape[dim] = a.numel()
    return x.new_zeros(shape).scatter(dim, b, x)


for _function in (_where_equal, _nan_outside, _largest, _log_total, _placed):
    _WRITTEN.impl(_function.__name__[1:], _function, "CompositeImplicitAutograd")


def autocast_off(device_type: str) -> contextlib.AbstractContextManager:
    """Where it is off, which is asked in a tenth of the time, nothing."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def without_autocast(target: Callable, device_type: str) -> Callable:
    """An operator as it is where autocast is off."""

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast_off(device_type):
            return target(*args, **kwargs)

    return call
