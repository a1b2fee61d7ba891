"""What a module keeps beside parameters and buffers: attributes, which a forward may change."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .execution import same_bits

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_VALUES = (torch.Tensor, int, float, complex, str, bytes, type(None))


class Hidden:
    """The attributes of a module and its parts as they are now, as far as they are tensors, plain
    values, and lists and dicts of such. Those that hold parameters or buffers (an LSTM's list of
    its weights) are the state by another name, and nobody's to put back here."""

    def __init__(self, module: torch.nn.Module) -> None:
        state = {id(each) for each in (*module.parameters(), *module.buffers())}
        self._parts = [(part, _kept(part, state)) for part in module.modules()]
        self._state = state

    def restore(self) -> None:
        """Puts them back, each where it was, and takes away what has come since."""
        for part, kept in self._parts:
            for name in [n for n in _kept_names(part, self._state) if n not in kept]:
                del vars(part)[name]
            for name, (own, value) in kept.items():
                if isinstance(own, torch.Tensor):
                    vars(part)[name] = own
                    _write(own, value)
                else:
                    vars(part)[name] = _copied(value)

    def tensors_changed(self) -> bool:
        """Whether a tensor among them has changed since."""
        for part, kept in self._parts:
            for name, (_, value) in kept.items():
                now, then = _tensors(vars(part).get(name)), _tensors(value)
                if len(now) != len(then) or not all(map(same_bits, now, then)):
                    return True
        return False


def _tensors(value: Any) -> list:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@torch.no_grad()
def _write(own: torch.Tensor, value: torch.Tensor) -> None:
    """In place where that is possible: it may be a view of something."""
    if same_bits(own, value):
        return
    if own.shape == value.shape and own.dtype == value.dtype:
        own.copy_(value)
    else:
        own.data = value.clone()


def _kept_names(part: torch.nn.Module, state: set) -> list:
    def is_kept(leaf: Any) -> bool:
        if isinstance(leaf, torch.nn.Parameter) or id(leaf) in state:
            return False
        return isinstance(leaf, _VALUES)

    return [
        name
        for name, value in vars(part).items()
        if name not in _OF_EVERY_MODULE and all(map(is_kept, pytree.tree_leaves(value)))
    ]


def _kept(part: torch.nn.Module, state: set) -> dict:
    names = _kept_names(part, state)
    return {name: (vars(part)[name], _copied(vars(part)[name])) for name in names}


def _copied(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value
    )
