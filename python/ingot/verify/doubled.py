"""What a forward says of types where its module runs in fp64: "float32" is the module's own type.

A forward that makes `torch.zeros(n, m)` for what it scatters, casts a mask by `.float()` or asks a
softmax for `dtype=torch.float32` stays in its type so. The fp64 run would mix two types, which
PyTorch refuses, or round what is to be exact. Casts to another type than the module's own are part
of what it computes, and stay; so do all where its parameters have several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COMPLEX = {
    torch.float16: torch.complex32,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.cfloat: torch.complex64,
}


class OwnTypeIsFp64(TorchFunctionMode):
    """own: the type of the module's parameters, or else inputs."""

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()
        self._own = {own: torch.float64}
        if own in _COMPLEX:
            self._own[_COMPLEX[own]] = torch.complex128

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.view:  # of the bits, where it names a type
            return func(*args, **kwargs)
        if func in _CASTS and _CASTS[func] in self._own:
            args, func = (args[0], _CASTS[func]), torch.Tensor.to
        args = tuple(map(self._meant, args))
        return func(*args, **{name: self._meant(value) for name, value in kwargs.items()})

    def _meant(self, argument: Any) -> Any:
        return self._own.get(argument, argument) if isinstance(argument, torch.dtype) else argument


@contextlib.contextmanager
def own_type_is_fp64(own: torch.dtype | None) -> Iterator[None]:
    """own: None where there is no one type; types are then what the forward says."""
    if own is None:
        yield
        return
    default = torch.get_default_dtype()
    try:
        if own == default:
            torch.set_default_dtype(torch.float64)
        with OwnTypeIsFp64(own):
            yield
    finally:
        torch.set_default_dtype(default)


def own_type(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """The one floating type of tensors, None where there is none or several."""
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None
