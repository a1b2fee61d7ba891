"""The table of ATen's operators that Ingot takes over: one row each, filled in by the modules that
`cutting.py` names.

A row gives the function that appends the operator to a region. It receives a `Call` with the
operator's arguments by their schema's names and returns a `Value` (or a relabelled `Leaf`), or a
tuple of these for operators with several results; or it raises `UnfitError` with the reason why
PyTorch runs the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.layout import Leaf, UnfitError, Value
from ingot.capture.region import Operand, RegionBuilder

HALVES = (torch.float16, torch.bfloat16)
PIECE = 8  # elements of 16 bits in 16 bytes
FLOATING = (torch.float32, torch.float64, *HALVES)


def is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALVES


def has_uneven_rows(value: Any) -> bool:
    """Of 16 bits: whether rows do not start at multiples of 16 bytes, where they lie densely."""
    if not is_half(value) or not value.dim() or not isinstance(value.shape[-1], int):
        return False
    return value.shape[-1] % PIECE != 0


class Call:
    """One operator's arguments, with the region that takes it."""

    def __init__(
        self,
        region: RegionBuilder,
        arguments: dict[str, Any],
        dtype: torch.dtype | None,
        sizes: tuple[int, ...] | None,
        autocast: bool,
        used: frozenset,
        device_type: str,
    ):
        self.region, self.arguments = region, arguments
        self.dtype, self.sizes = dtype, sizes
        self.autocast = autocast
        self.device_type = device_type
        self.used = used  # which results of a tuple have users

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name, default)
        return default if value is None else value

    def tensor(self, name: str) -> Operand:
        value = self.arguments[name]
        if not isinstance(value, (Value, Leaf)):
            raise UnfitError(f"its argument '{name}' is not a tensor")
        return value

    def number(self, name: str, default: float | None = None) -> int | float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnfitError(f"its argument '{name}' is not a plain number")
        return value

    def value(self, name: str) -> Value:
        """A floating tensor on its natural axes, in the dtype in which PyTorch computes."""
        value = self.region.materialise(self.tensor(name))
        if value.dtype not in FLOATING:
            raise UnfitError(f"{value.dtype} arithmetic")
        if self.autocast and self.dtype in FLOATING:
            value = self.region.cast(value, self.dtype)
        return value

    def dimensions(self, value: Value, dims: Any) -> list[int]:
        rank = len(value.sizes)
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            return list(range(rank))
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        return sorted(d % rank for d in dims) if rank else []

    def axes(self, value: Value, dims: Sequence[int]) -> list[int]:
        axes = [axis for d in dims for axis in value.dims[d]]
        for d in dims:
            if not value.dims[d] and value.sizes[d] != 1:
                raise UnfitError("an expanded tensor")
        if not axes:
            # All those dimensions have extent 1: any axis that nothing runs along will do.
            used = {axis for run in value.dims for axis in run}
            free = [axis for axis in (3, 1, 2) if axis not in used]
            if not free:
                raise UnfitError("more than the four axes")
            axes = [free[0]]
        return axes

    def like(self, value: Value, identity: int) -> Value:
        return Value(identity, value.extents, value.dims, value.sizes, value.dtype)


Row = Callable[[Call], Any]
TABLE: dict[str, Row] = {}
CASTS = {"aten::to", "aten::_to_copy"}
# Taken only where it gives what it is given.
CHANGES_NOTHING = {f"aten::{kind}dropout" for kind in ("", "native_", "feature_", "alpha_")}
# What is PyTorch's where a gradient goes through it.
FORWARD_ONLY = {"aten::cumsum"}
# What computes nothing: it may be left to PyTorch without being called unsupported. Those named
# here have no row: a part of a tensor is a view, which the regions behind it read where it lies.
SHAPE_OPERATORS: set[str] = {
    "getitem",
    *(
        f"aten::{name}"
        for name in "slice narrow select chunk split split_with_sizes tensor_split unbind".split()
    ),
}
# Of those, what gives memory of its own.
COPYING = {"aten::clone", "aten::contiguous", "aten::lift_fresh_copy"}


def row(*names: str, shape_only: bool = False) -> Callable[[Row], Row]:
    def register(function: Row) -> Row:
        for name in names:
            TABLE[name] = function
            if shape_only:
                SHAPE_OPERATORS.add(name)
        return function

    return register
