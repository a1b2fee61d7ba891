"""Which elements of a call's outputs lie at one place: whoever writes one of them writes both."""

from __future__ import annotations

import torch

from .execution import storage_of

_WORTH_COUNTING = 1 << 22  # elements


def overlaps_of(tensors: list) -> list:
    """E.g. ["output 1 and output 0", "elements of output 2"]."""
    groups: dict = {}
    for number, tensor in enumerate(tensors):
        storage = storage_of(tensor)
        if storage is not None and tensor.numel():
            groups.setdefault(storage, []).append(number)
    found = []
    for numbers in groups.values():
        found += [f"elements of output {n}" for n in numbers if _meets_itself(tensors[n])]
        if len(numbers) > 1:
            found += _pairs(tensors, numbers)
    return found


def _pairs(tensors: list, numbers: list) -> list:
    """Of tensors in one storage: each marks where it lies, and looks who was there before."""
    unit = min(tensors[n].element_size() for n in numbers)
    owners = torch.zeros(
        tensors[numbers[0]].untyped_storage().nbytes() // unit,
        dtype=torch.int32,
        device=tensors[numbers[0]].device,
    )
    found = []
    for n in numbers:
        before: set = set()
        places = _places(tensors[n], owners, unit)
        for place in places:
            before |= set(place.unique().tolist()) - {0}
        for place in places:
            place.fill_(n + 1)
        found += [f"output {n} and output {m - 1}" for m in sorted(before)]
    return found


def _places(tensor: torch.Tensor, marks: torch.Tensor, unit: int) -> list:
    """Views of `marks`, one for each element of the storage, for each part of an element."""
    parts = tensor.element_size() // unit
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride())]
    strides = [stride * parts for stride in tensor.stride()]
    start = tensor.storage_offset() * parts
    return [marks.as_strided(shape, strides, start + part) for part in range(parts)]


def _meets_itself(tensor: torch.Tensor) -> bool:
    """Whether two of its elements lie at one place. Of a large one it is taken to be so wherever a
    stride does not step over all that the smaller ones reach."""
    reach, apart = 0, True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            apart = apart and stride > reach
            reach += stride * (size - 1)
    if apart or tensor.numel() > _WORTH_COUNTING:
        return not apart
    numbers = torch.arange(tensor.storage_offset() + reach + 1)
    seen = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return len(seen.unique()) < tensor.numel()
