"""How PyTorch tensors lie on the axes of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.runtime import library as _library
from ingot.runtime.library import AXES, IngotError
from ingot.runtime.signature import DTYPE_CODES


def concrete(sizes: Sequence[int], batch: int) -> list[int]:
    """Sizes with the batch size put in."""
    return [-size * batch if size < 0 else size for size in sizes]


@dataclass(frozen=True)
class LeafLayout:
    """How a leaf's tensor dimensions lie on the graph's axes.

    axes: for each of [batch, rows, groups, features] the tensor dimension that runs along it
    (several, outermost first, that lie in memory as one), or None where the extent is 1; splits:
    for an axis that is one factor of a dimension, (the factor's extent, `BATCH` for the one that is
    left; how many elements of the dimension one step along the axis spans). part: of the tensor
    only this is the leaf: along a dimension, from an element on, so many.
    """

    axes: tuple[int | tuple[int, ...] | None, ...]
    splits: tuple[tuple[int, int] | None, ...] = (None, None, None, None)
    part: tuple[int, int, int] | None = None

    def offset(self, tensor: torch.Tensor) -> int:
        """Bytes from the tensor's first element to the leaf's."""
        if self.part is None:
            return 0
        dimension, start, _ = self.part
        return start * tensor.stride(dimension) * tensor.element_size()

    def sizes_and_strides(self, tensor: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.part is not None:
            tensor = tensor.narrow(*self.part)
        sizes, strides = [1] * AXES, [0] * AXES
        for axis, dimension in enumerate(self.axes):
            if dimension is None:
                continue
            split = self.splits[axis]
            size, stride = _along(tensor, dimension)
            extent, step = split if split else (size, 1)
            if extent < 0:
                extent = size // step
            sizes[axis], strides[axis] = extent, stride * step
        return sizes, strides


def _along(tensor: torch.Tensor, dimension: int | tuple[int, ...]) -> tuple[int, int]:
    """Size and stride of a dimension, or of several as one."""
    if isinstance(dimension, int):
        return tensor.size(dimension), tensor.stride(dimension)
    size, stride = 1, 0
    for each in reversed(dimension):
        if tensor.size(each) == 1:
            continue
        if size == 1:
            stride = tensor.stride(each)
        elif tensor.stride(each) != size * stride:
            raise IngotError(
                f"dimensions {dimension} of a tensor with strides {tensor.stride()} do not lie in "
                "memory as one",
                _library.STATUS_INVALID_ARGUMENT,
            )
        size *= tensor.size(each)
    return size, stride


@dataclass(frozen=True)
class ResultLayout:
    """The tensor that a result is handed back as.

    shape: logical sizes; axes: for each dimension the graph axes (in
    order) that it runs along; memory follows the order of the axes. written: the extents of the
    graph's own value where the tensor is a view of it, the same elements in the same order. single:
    strides of the dimensions of extent 1, which matter to nothing but what asks for them; None: as
    in a contiguous tensor.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    extents: tuple[int, ...]
    dtype: torch.dtype
    written: tuple[int, ...] | None = None
    single: tuple[int | None, ...] = ()

    def allocation(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the tensor."""
        axis_strides = _dense_strides(concrete(self.extents, batch))
        sizes = tuple(concrete(self.shape, batch))
        # Dimensions without an axis have extent 1; like PyTorch, they take the stride of a
        # contiguous tensor.
        strides, step = [0] * len(sizes), 1
        for dimension in reversed(range(len(sizes))):
            axes = self.axes[dimension]
            strides[dimension] = axis_strides[axes[-1]] if axes else step
            step = strides[dimension] * max(sizes[dimension], 1)
        return sizes, _with_single(strides, sizes, self.single)

    def in_graph(self, batch: int) -> list[tuple[list[int], list[int], int]]:
        """Extents and strides of the graph's value, and where its first element lies: in bytes."""
        extents = concrete(self.written or self.extents, batch)
        return [(extents, _dense_strides(extents), 0)]


@dataclass(frozen=True)
class JoinedLayout:
    """Results that are handed back as one tensor: its parts along a dimension, one behind another.

    shape: of the whole; order: its dimensions in memory, outermost first; parts: of each result;
    single: as ResultLayout's.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dimension: int
    parts: tuple[ResultLayout, ...]
    single: tuple[int | None, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def allocation(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the tensor."""
        sizes = tuple(concrete(self.shape, batch))
        strides, step = [0] * len(sizes), 1
        for dimension in reversed(self.order):
            strides[dimension] = step
            step *= max(sizes[dimension], 1)
        return sizes, _with_single(strides, sizes, self.single)

    def in_graph(self, batch: int) -> list[tuple[list[int], list[int], int]]:
        """As ResultLayout's, for each of the graph's values."""
        _, strides = self.allocation(batch)
        places, before = [], 0
        for part in self.parts:
            extents, along = concrete(part.extents, batch), [0] * AXES
            for stride, axes in zip(strides, part.axes):
                for axis in reversed(axes):
                    along[axis] = stride
                    stride *= extents[axis]
            offset = before * strides[self.dimension] * self.dtype.itemsize
            places.append((extents, along, offset))
            before += part.shape[self.dimension]
        return places


TensorLayout = ResultLayout | JoinedLayout


def memory_holds(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are those in its memory: a negated view's have the other sign
    there, and autograd's zeros (`torch._efficientzerotensor`) have no memory."""
    return not (tensor.is_neg() or tensor._is_zerotensor())


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory of their own where it does not hold them."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def _with_single(
    strides: list[int], sizes: Sequence[int], single: Sequence[int | None]
) -> tuple[int, ...]:
    for dimension, stride in enumerate(single):
        if stride is not None and sizes[dimension] == 1:
            strides[dimension] = stride
    return tuple(strides)


def _dense_strides(extents: Sequence[int]) -> list[int]:
    strides, step = [0] * AXES, 1
    for axis in reversed(range(AXES)):
        strides[axis] = step
        step *= extents[axis]
    return strides


def fill(entry: _library.Tensor, sizes, strides, dtype: torch.dtype, device: int) -> None:
    """Of an ingot_tensor all but its address. device: -1 for the host."""
    entry.sizes[:] = sizes
    entry.strides[:] = strides
    entry.dtype = DTYPE_CODES[dtype]
    entry.device = device
