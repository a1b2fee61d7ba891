"""A look at what a timed call returns, within its time: at the type, the structure and the memory
of each tensor, so that what was not computed does not pass for a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .execution import opened, storage_of, without_numbers
from .tricks import ALIASED, LAZY, REUSED, WRONG_WHEN_TIMED

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Look:
    """form: as `form_of` describes what is expected. taken: tensors whose memory no result may lie
    in. note(trick, what): told once. It costs a few microseconds a call."""

    def __init__(
        self,
        form: dict,
        device: torch.device,
        taken: Iterable[torch.Tensor],
        note: Callable | None,
    ) -> None:
        self._leaves = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in form["leaves"]]
        self._device = device.type
        taken = () if form["aliases"] else tuple(taken)
        # A module that puts another tensor in a buffer's place would free the memory, and its next
        # result might lie there.
        self._held = [tensor.untyped_storage() for tensor in taken if storage_of(tensor)]
        self._taken = {storage.data_ptr() for storage in self._held}
        self._aliases = form["aliases"]
        self._note = note
        self._told = False
        self._previous: set = set()

    def __call__(self, result: Any, keeps: bool = False) -> None:
        """keeps: the caller keeps each result until the next is there."""
        leaves = (result,) if type(result) is torch.Tensor else _tensors(result)
        problem = None
        if len(leaves) != len(self._leaves):
            problem = WRONG_WHEN_TIMED, f"returns {len(leaves)} tensors, not {len(self._leaves)}"
        pointers = [storage_of(leaf) for leaf in leaves]
        for leaf, pointer, (dtype, shape) in zip(leaves, pointers, self._leaves):
            problem = self._look_at(leaf, pointer, dtype, shape) or problem
        if keeps and not self._aliases and not self._previous.isdisjoint(pointers):
            problem = REUSED, "returns the memory of a result that is still in use"
        self._previous = {p for p in pointers if p}
        if problem is not None and self._note is not None and not self._told:
            self._told = True
            self._note(problem[0], f"in a timed call {problem[1]}")

    def _look_at(
        self, leaf: torch.Tensor, pointer: int | None, dtype: torch.dtype, shape: tuple
    ) -> tuple | None:
        if type(leaf) not in _PLAIN:
            return LAZY, f"returns a {type(leaf).__name__}, not a plain tensor"
        if leaf.dtype is not dtype or leaf.shape != shape or leaf.device.type != self._device:
            return WRONG_WHEN_TIMED, f"returns {leaf.dtype} {list(leaf.shape)} on {leaf.device}"
        if not pointer and leaf.numel():
            return LAZY, "returns a tensor without memory"
        if pointer in self._taken:
            return ALIASED, "returns memory of an input or of the state"
        return None


def form_of(structure: str, outputs: list, aliases: bool) -> dict:
    """What is expected of a result. aliases: whether it may lie in inputs or state."""
    leaves = [[str(o.dtype).replace("torch.", ""), list(o.shape)] for o in outputs]
    return {"structure": without_numbers(structure), "leaves": leaves, "aliases": aliases}


def _tensors(result: Any) -> list:
    leaves = pytree.tree_leaves(result)
    if any(is_dataclass(leaf) for leaf in leaves):
        leaves = pytree.tree_leaves(opened(result))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
