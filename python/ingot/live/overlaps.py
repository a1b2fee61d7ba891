"""Inputs of a graph that share memory, one of which it writes into: two arguments that are parts of
one tensor, buffers that are views of another. What reads the other one then would read what it held
before. PyTorch runs such calls, which TorchDynamo does not tell from others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.captured import CaptureError
from ingot.capture.feed import Feed, Placeholder
from ingot.capture.nodes import written_by

_SHARED = "its forward writes into a tensor that shares memory with another one that it is given"


def watched(feed: Feed, parameters: bool) -> dict[int, bool]:
    """Places of inputs that are read, returned or written, and whether they are written; none where
    nothing can go wrong. parameters: whether they are among them."""
    written = {each for node in feed.graph.nodes for each in written_by(node)}
    written -= {node for node, known in feed.placeholders.items() if _is_counter(node, known)}
    found = {
        place: node in written
        for place, (node, known) in enumerate(feed.placeholders.items())
        if node.users and _is_strided(node.meta.get("val"))
        if parameters or known.source.kind != "parameter"
    }
    return found if any(found.values()) and len(found) > 1 else {}


def refuse(places: dict[int, bool], given: Sequence[torch.Tensor | None]) -> None:
    """given: what a call brought when the graph was captured, where that is known. Raises
    CaptureError where some of it shares memory."""
    known = {at: given[at] for at in places if _is_strided(given[at])}
    if _collide(list(known.values()), [places[at] for at in known]):
        raise CaptureError(_SHARED)


def while_apart(
    run: Callable, otherwise: Callable, places: dict[int, bool], warn: Callable[[str], None]
) -> Callable:
    """run(*arguments) where none that is written, at these places among them, shares memory with
    another."""
    written = list(places.values())
    known: tuple[list, bool] = [], False

    def collide(tensors: list[torch.Tensor]) -> bool:
        nonlocal known
        lie, (before, found) = [(t.data_ptr(), t.shape, t.stride()) for t in tensors], known
        if lie != before:
            found = _collide(tensors, written)
            known = lie, found
        return found

    def call(*args: Any) -> Any:
        memories = {args[place].untyped_storage().data_ptr() for place in places}
        if len(memories) < len(places) and collide([args[place] for place in places]):
            warn(f"PyTorch runs such a call: {_SHARED}")
            return otherwise(*args)
        return run(*args)

    return call


def _collide(tensors: Sequence[torch.Tensor], written: Sequence[bool]) -> bool:
    """Whether one that is written shares memory with another."""
    order = sorted(zip((tensor.data_ptr() for tensor in tensors), range(len(tensors))))
    reaching: list[int] = []  # those before that end behind the start of the next one
    for start, at in order:
        reaching = [b for b in reaching if tensors[b].data_ptr() + _extent(tensors[b]) > start]
        for before in reaching:
            one_is_written = written[at] or written[before]
            if one_is_written and _overlap(tensors[before], tensors[at]):
                return True
        reaching.append(at)
    return False


def _is_counter(node: torch.fx.Node, known: Placeholder) -> bool:
    """A batch norm's, which every call writes: no other tensor is part of it."""
    value, name = node.meta.get("val"), known.source.path.rpartition(".")[2]
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype == torch.int64
    return is_number and name == "num_batches_tracked"


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """False only where they have no byte in common."""
    if not a.numel() or not b.numel():
        return False
    delta = b.data_ptr() - a.data_ptr()
    if delta >= _extent(a) or -delta >= _extent(b):
        return False
    # Parts side by side, as columns of one tensor are: each in its own part of a step that all the
    # larger steps are multiples of.
    steps = {stride for tensor in (a, b) for _, stride in _steps(tensor)}
    for step in steps:
        if all(other % step == 0 for other in steps if other > step):
            offset = delta % step
            if _extent(a, step) <= offset and offset + _extent(b, step) <= step:
                return False
    return True


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Extents above one, and bytes from one element to the next."""
    width = tensor.element_size()
    found = zip(tensor.shape, tensor.stride())
    return [(size, stride * width) for size, stride in found if size > 1 and stride > 0]


def _extent(tensor: torch.Tensor, below: int | None = None) -> int:
    """Bytes from the first element to the end of the last one: along steps below one."""
    steps = _steps(tensor)
    inner = (((n - 1) * step) for n, step in steps if below is None or step < below)
    return sum(inner) + tensor.element_size()
