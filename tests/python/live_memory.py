"""Bytes of tensors that live at once, on the CPU, where PyTorch counts none."""

from __future__ import annotations

import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts what operators allocate while it is on: `now`, and the most at once, `peak`. What an
    operator takes for itself and lets go of is not seen."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            t.untyped_storage()._cdata
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), given)
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in given or key in self._known:
            return
        size = storage.nbytes()
        self.now += size
        self._known[key] = weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.now -= size
        self._known.pop(key, None)


def bytes_kept(module: torch.nn.Module, x: torch.Tensor, autocast: bool) -> int:
    """What a second call keeps for backward, parameters and other matrices apart."""
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if tensor.dim() > 2:
            storages[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module(x)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = module(x)
    del result
    return sum(storages.values())
