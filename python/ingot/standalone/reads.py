"""What a module's forward reads of its attributes, seen by running it on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

_CONTAINERS = frozenset(nn.Module().__dict__) | {"forward"}  # the flags are read apart
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Reads:
    """attributes: for each submodule's path the plain attributes that a forward reads, with their
    values; flags: paths of the submodules whose `training` it reads, in the modules' order."""

    def __init__(self, module: nn.Module, inputs: list):
        modules = dict(module.named_modules())
        read = _read_by(module, inputs, modules)
        self.attributes: dict[str, dict[str, Any]] = {}
        for path, part in modules.items():
            own = self.attributes[path] = {}
            for name, value in part.__dict__.items():
                value = comparable(value)
                if name not in _CONTAINERS and (read is None or (path, name) in read):
                    if _is_plain(value):
                        own[name] = value
        self.flags = [path for path in modules if read is None or (path, "training") in read]


def comparable(value: Any) -> Any:
    """What stands for an attribute: of functions and classes their name, of objects their
    attributes. A standalone file holds the same function."""
    return getattr(value, "__qualname__", None) or getattr(value, "__dict__", value)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, set, torch.Size):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN)


def _read_by(module: nn.Module, inputs: list, modules: dict) -> set | None:
    """(path, name) of every read; None where the module does not run without data."""
    found: set[tuple[str, str]] = set()
    twin = _watched_copy(module, {id(part): path for path, part in modules.items()}, found)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.no_grad(), mode:
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, inputs)
            found.clear()
            for training in (True, False):
                for part in twin.modules():
                    part.__dict__["training"] = training
                twin(*fakes)
    except Exception:  # whatever a forward does without data
        return None
    return found


def _watched_copy(module: nn.Module, paths: dict, found: set) -> nn.Module:
    copies: dict[int, nn.Module] = {}

    def copied(original: nn.Module) -> nn.Module:
        if id(original) not in copies:
            cls = type(original)
            twin = copies[id(original)] = cls.__new__(cls)
            twin.__dict__.update(original.__dict__)
            # Copies: an update in place must not reach the module's own.
            twin._buffers = {
                name: None if buffer is None else buffer.clone()
                for name, buffer in original._buffers.items()
            }
            twin._modules = {
                name: None if child is None else copied(child)
                for name, child in original._modules.items()
            }
            twin.__class__ = _watched_class(cls, paths[id(original)], found)
        return copies[id(original)]

    return copied(module)


def _watched_class(cls: type, path: str, found: set) -> type:
    def read(self, name: str) -> Any:
        found.add((path, name))
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__getattribute__": read})
