"""Notices, at every call, that a live module is no longer the one that was captured.

A module may change between calls in every way that Python allows. What a graph reads at each call
(parameters, buffers) needs no guard; what it has burnt in does: the modules themselves, their plain
attributes (`bn.momentum`), their training flags, hooks, tied and absent parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

_LITERALS = (str, int, bool, type(None))


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


class _Condition:
    """A conjunction over objects, compiled once: a loop over descriptions costs several times as
    much, and this is evaluated at every call."""

    def __init__(self):
        self._terms: list[str] = []
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}

    def require(self, term: str, *objects: Any) -> None:
        """`term` is an expression with a {} in the place of each object."""
        self._terms.append(term.format(*map(self._name, objects)))

    def _name(self, value: Any) -> str:
        if type(value) in _LITERALS:
            return repr(value)
        name = self._names.setdefault(id(value), f"o{len(self._names)}")
        self._objects[name] = value
        return name

    def compiled(self) -> Callable[[], bool]:
        # An error is a missing key, or a comparison that an attribute's type refuses.
        text = (
            "def holds():\n try:\n"
            f"  if {' and '.join(self._terms) or 'True'}: return True\n"
            " except Exception: pass\n return False\n"
        )
        exec(compile(text, "<guards of a module>", "exec"), self._objects)
        # A function in its own globals would keep all of them from being freed at once.
        return self._objects.pop("holds")


class Guards:
    """A snapshot of a module tree.

    `hold()` tells whether it still describes the module, without the training flags, which select
    among graphs rather than invalidate them; `same_flags()` tells about those.
    """

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self.flags = [m.training for m in modules]
        flags, rest = _Condition(), _Condition()
        for m in modules:
            flags.require("{}['training'] is {}", m.__dict__, m.training)
        # Not the root itself, only its attributes: the snapshot must not keep it alive.
        for kind in (*(d for m in modules[1:] for d in _own_hooks(m)), *_GLOBAL_HOOKS):
            rest.require("not {}", kind)
        for m in modules:
            if m._modules:
                # Modules compare by identity.
                rest.require("[*{}.values()] == {}", m._modules, list(m._modules.values()))
        for m in modules[1:]:
            rest.require("{}.__class__ is {}", m, m.__class__)
        for m in modules:
            _require_attributes(rest, m)
        _require_members(rest, modules)
        self.same_flags, self.hold = flags.compiled(), rest.compiled()


def _own_hooks(module: nn.Module) -> list[dict]:
    return [module.__dict__[kind] for kind in _OWN_HOOKS if kind in module.__dict__]


def _require_attributes(condition: _Condition, module: nn.Module) -> None:
    attributes = module.__dict__
    condition.require("len({}) == {}", attributes, len(attributes))
    for name, value in attributes.items():
        if name in _CONTAINERS:
            continue
        if isinstance(value, torch.Tensor):
            condition.require("{}[{}] is {}", attributes, name, value)
        elif type(value) in _LITERALS:
            condition.require("{}[{}] == {}", attributes, name, value)
        else:
            kept = _frozen(value)
            condition.require("({}[{}] is {} or {}[{}] == {})", *(attributes, name, kept) * 2)


def _require_members(condition: _Condition, modules: list[nn.Module]) -> None:
    """Which parameters and buffers there are, and which are one tensor."""
    owners: dict[int, tuple[dict, str]] = {}
    for module in modules:
        for members in (module._parameters, module._buffers):
            if members:
                condition.require("len({}) == {}", members, len(members))
            for name, tensor in members.items():
                if tensor is None:
                    condition.require("{}[{}] is None", members, name)
                elif id(tensor) in owners:
                    condition.require("{}[{}] is {}[{}]", *owners[id(tensor)], members, name)
                else:
                    owners[id(tensor)] = (members, name)
