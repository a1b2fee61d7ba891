"""Notices, at every call, that a live module is no longer the one that was captured.

A module may change between calls in every way that Python allows. What a graph reads at each call
(parameters, buffers) needs no guard; what it has burnt in does: the modules themselves, their plain
attributes (`bn.momentum`), their training flags, hooks, tied and absent parameters.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as _module

# What every module has. Parameters and buffers are read at the call; children and hooks are
# checked apart.
_CONTAINERS = frozenset(nn.Module().__dict__)
_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
)


def training_flags(module: nn.Module) -> list[bool]:
    return [m.training for m in module.modules()]


def hooked(module: nn.Module) -> str | None:
    """A description of the first hook below the root, which a captured graph would not call."""
    if any(_GLOBAL_HOOKS):
        return "a global module hook is registered"
    for name, child in module.named_modules():
        if name and any(child.__dict__.get(kind) for kind in _OWN_HOOKS):
            return f"{name} has a forward hook"
    return None


def opaque_attribute(module: nn.Module) -> str | None:
    """A description of the first attribute that holds modules or tensors out of sight."""
    for name, child in module.named_modules():
        for attribute, value in child.__dict__.items():
            if attribute in _CONTAINERS or not isinstance(value, (list, tuple, dict, set)):
                continue
            items = value.values() if isinstance(value, dict) else value
            if any(isinstance(item, (nn.Module, torch.Tensor)) for item in items):
                where = f"{name}.{attribute}" if name else attribute
                return f"{where} is a plain {type(value).__name__} that holds modules or tensors"
    return None


def _frozen(value):
    """A copy of a mutable container, so that a later change in place shows."""
    if type(value) in (list, dict, set):
        return value.copy()
    return value


class Guards:
    """A snapshot of a module tree; `hold()` tells whether it still describes the module."""

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self._dicts = [m.__dict__ for m in modules]
        self.flags = [m.training for m in modules]
        # Not the root itself, only its attributes: the snapshot must not keep it alive.
        self._modules = modules[1:]
        self._classes = [m.__class__ for m in self._modules]
        self._attributes = []
        self._tensors = []
        for m in modules:
            names = [name for name in m.__dict__ if name not in _CONTAINERS]
            held = [name for name in names if isinstance(m.__dict__[name], torch.Tensor)]
            self._tensors += [(m.__dict__, name, m.__dict__[name]) for name in held]
            names = [name for name in names if name not in held]
            values = [_frozen(m.__dict__[name]) for name in names]
            self._attributes.append((m.__dict__, len(m.__dict__), names, values))
        self._children = [(m._modules, list(m._modules.values())) for m in modules if m._modules]
        self._hooks = [
            m.__dict__[kind] for m in modules[1:] for kind in _OWN_HOOKS if kind in m.__dict__
        ]
        self._hooks += _GLOBAL_HOOKS
        self._members = []
        self._absent = []
        owners: dict[int, tuple[dict, str]] = {}
        self._ties = []
        for m in modules:
            for members in (m._parameters, m._buffers):
                if members:
                    self._members.append((members, len(members)))
                for name, tensor in members.items():
                    if tensor is None:
                        self._absent.append((members, name))
                    elif id(tensor) in owners:
                        self._ties.append((*owners[id(tensor)], members, name))
                    else:
                        owners[id(tensor)] = (members, name)

    def hold(self) -> bool:
        """Without the training flags, which select among graphs rather than invalidate them."""
        if any(self._hooks):
            return False
        for children, expected in self._children:
            # Modules compare by identity.
            if list(children.values()) != expected:
                return False
        if [m.__class__ for m in self._modules] != self._classes:
            return False
        try:
            for attributes, count, names, values in self._attributes:
                if len(attributes) != count or [attributes[n] for n in names] != values:
                    return False
            for attributes, name, tensor in self._tensors:
                if attributes[name] is not tensor:
                    return False
            for members, count in self._members:
                if len(members) != count:
                    return False
            for members, name in self._absent:
                if members[name] is not None:
                    return False
            for members, name, others, other in self._ties:
                if members[name] is not others[other]:
                    return False
        except Exception:  # a missing key, or a comparison that an attribute's type refuses
            return False
        return True

    def same_flags(self) -> bool:
        return [d["training"] for d in self._dicts] == self.flags
