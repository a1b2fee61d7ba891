"""PyTorch's derivatives of activations as its kernels for single elements compute them.

On a CPU, some of them (of ELU, Hardtanh, Hardswish and their like) send a NaN another way than the
vectorised kernels: `x > low ? gradient : 0` is not `x <= low ? 0 : gradient` where x is NaN. Both
are PyTorch's: which of them an element meets depends on its place and on how its tensor lies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_DERIVATIVES = frozenset(
    (
        _aten.elu_backward,
        _aten.hardshrink_backward,
        _aten.hardsigmoid_backward,
        _aten.hardswish_backward,
        _aten.hardtanh_backward,
        _aten.leaky_relu_backward,
        _aten.softshrink_backward,
        _aten.threshold_backward,
    )
)


class ElementByElement(TorchDispatchMode):
    """Within it, derivatives that take an element to an element find their operands spread out,
    which no vectorised kernel takes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _DERIVATIVES:
            args = tuple(map(_spread, args))
        return func(*args, **(kwargs or {}))


def _spread(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    room = value.new_empty((*value.shape, 2))
    room[..., 0] = value
    return room[..., 0]
