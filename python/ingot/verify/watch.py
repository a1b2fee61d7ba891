"""What the worker notices of a candidate that reaches beyond its own affairs.

Two means, both within the process that the candidate shares: an audit hook, which Python gives no
way to remove, and a comparison of what torch, the clock, CUDA's events and this harness were before
the candidate was loaded with what they are now. They name what is done openly; a candidate that
goes through C escapes both, and is left to what the parent checks (docs/verify.md).
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import threading
import time
import types
from typing import Any

import torch

CALLS_ORIGINAL = "calls the original"
REACHES_OUT = "reaches for the checker"
INSPECTS = "inspects the checker"
PATCHED_HARNESS = "patched checker"
PATCHED_TORCH = "patched torch"
PATCHED_CLOCK = "patched clock"
PATCHED_EVENTS = "patched CUDA events"
TAMPERED_FILES = "tampered files"

_MOST_ACTS = 20
_PACKAGE = __name__.split(".")[0]
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_WRITING = os.O_WRONLY | os.O_RDWR
_LOOKS = frozenset(
    {
        "gc.get_objects",
        "gc.get_referrers",
        "sys._getframe",
        "sys._current_frames",
        "sys.settrace",
        "sys.setprofile",
        "sys.addaudithook",
    }
)
_DEBUGGING = frozenset({"ptrace", "process_vm_readv", "process_vm_writev"})
_STANDARD = ("base64", "gc", "json", "os", "pickle", "random", "socket", "struct", "traceback")
_EVENT_NAMES = frozenset(
    {"Event", "Stream", "synchronize", "current_stream", "default_stream", "set_stream", "stream"}
)


class Watch:
    """Made before the candidate is loaded; `acts()` gives what was noticed since the last time, as
    pairs of the trick's name and what was done."""

    def __init__(self) -> None:
        self._acts: list = []
        self._candidate = ""
        self._original_files: frozenset = frozenset()
        self._original_names: frozenset = frozenset()
        self._own_work = threading.local()
        self._parent = os.getppid()
        self._entries = _inventory()
        self._modules = {n: m for n, m in sys.modules.items() if _is_ours(n)}

    def start(self, candidate: str, original: str) -> None:
        """From now on the hook listens. The same file may be both: then it may be read."""
        self._candidate = candidate
        if os.path.realpath(candidate) != os.path.realpath(original):
            files = {os.path.realpath(original)}
            files.add(os.path.realpath(importlib.util.cache_from_source(original)))
            self._original_files = frozenset(files)
            self._original_names = frozenset(os.path.basename(f) for f in files)
        self._sealed = {os.path.realpath(candidate), os.path.realpath(original)}
        sys.addaudithook(self._hear)

    def original_allowed(self) -> _Allowed:
        """While the harness itself loads the original."""
        return _Allowed(self._own_work)

    def acts(self) -> list:
        found, self._acts = self._acts, []
        return found + self._changes()

    # What is no longer what it was -------------------------------------------------------------

    def _changes(self) -> list:
        found = []
        for trick, label, namespace, name, value, code in self._entries:
            now = namespace.get(name, None)
            same = now is value and getattr(now, "__code__", None) is code
            if not same and not (trick == PATCHED_TORCH and _is_of_torch(now)):
                found.append([trick, f"replaces {label}"])
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                found.append([PATCHED_HARNESS, f"replaces the module {name}"])
        return found[:_MOST_ACTS]

    # What is done ------------------------------------------------------------------------------

    def _hear(self, event: str, arguments: tuple) -> None:
        if event == "open":
            self._opened(arguments)
        elif event in _LOOKS:
            self._looked(event)
        elif event == "os.kill" or event == "os.killpg":
            if arguments[0] in (self._parent, -self._parent, -1) and arguments[1]:
                self._refuse(REACHES_OUT, f"sends signal {arguments[1]} to its parent")
        elif event == "ctypes.dlsym" and arguments[1] in _DEBUGGING:
            self._refuse(REACHES_OUT, f"looks up {arguments[1]}")

    def _opened(self, arguments: tuple) -> None:
        path, mode, flags = (*arguments, None, None)[:3]
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or getattr(self._own_work, "active", False):
            return
        if os.path.basename(path) in self._original_names:
            if os.path.realpath(path) in self._original_files:
                self._refuse(CALLS_ORIGINAL, f"opens the original's file {path}")
        elif path.startswith(f"/proc/{self._parent}/"):
            self._refuse(REACHES_OUT, f"opens {path}, which is the parent's")
        writes = bool((flags or 0) & _WRITING) or any(c in str(mode or "") for c in "wax+")
        if writes and "__pycache__" not in path:
            real = os.path.realpath(path)
            if real in self._sealed or real.startswith(_PACKAGE_FOLDER + os.sep):
                self._refuse(TAMPERED_FILES, f"writes to {path}")

    def _looked(self, event: str) -> None:
        if getattr(self._own_work, "looking", False):
            return
        self._own_work.looking = True
        try:
            frame: Any = sys._getframe(2)
            if frame is not None and frame.f_globals.get("__name__") == "inspect":
                frame = frame.f_back
            if frame is not None and frame.f_code.co_filename == self._candidate:
                self.note(INSPECTS, f"calls {event} at line {frame.f_lineno}")
        finally:
            self._own_work.looking = False

    def note(self, trick: str, what: str) -> None:
        if len(self._acts) < _MOST_ACTS:
            self._acts.append([trick, what])

    def _refuse(self, trick: str, what: str) -> None:
        self.note(trick, what)
        raise PermissionError(f"ingot verify: the candidate {what}")


class _Allowed:
    def __init__(self, state: threading.local) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.active = True

    def __exit__(self, *unused: Any) -> None:
        self._state.active = False


def _is_ours(name: str) -> bool:
    return name.startswith((f"{_PACKAGE}.verify", f"{_PACKAGE}.bench", f"{_PACKAGE}.model_file"))


def _inventory() -> list:
    """(trick, label, namespace, name, value, its code) of everything that must stay as it is."""
    entries: list = []

    def add(trick: str, prefix: str, owner: Any) -> None:
        namespace = vars(owner)
        for name, value in list(namespace.items()):
            known = name[:2] == "__" and name not in ("__call__", "__new__", "__init__")
            if known or isinstance(value, types.ModuleType) or not _callable(value):
                continue
            chosen = PATCHED_EVENTS if owner is torch.cuda and name in _EVENT_NAMES else trick
            code = getattr(value, "__code__", None)
            entries.append((chosen, f"{prefix}.{name}", namespace, name, value, code))

    add(PATCHED_CLOCK, "time", time)
    add(PATCHED_TORCH, "builtins", builtins)
    for name in _STANDARD:
        add(PATCHED_HARNESS, name, sys.modules[name])
    for name, module in list(sys.modules.items()):
        if _is_ours(name):
            add(PATCHED_HARNESS, name, module)
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    add(PATCHED_HARNESS, f"{name}.{attribute}", value)
    for name, owner in {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.Tensor": torch.Tensor,
        "torch.cuda": torch.cuda,
        "torch.random": torch.random,
        "torch.nn.Module": torch.nn.Module,
        "torch.no_grad": torch.no_grad,
    }.items():
        add(PATCHED_TORCH, name, owner)
    for name, value in vars(torch.nn).items():
        if isinstance(value, type) and "forward" in vars(value):
            add(PATCHED_TORCH, f"torch.nn.{name}", value)
    add(PATCHED_EVENTS, "torch.cuda.Event", torch.cuda.Event)
    add(PATCHED_EVENTS, "torch.cuda.Stream", torch.cuda.Stream)
    tensor = vars(torch.Tensor)
    for name in set(dir(torch._C.TensorBase)) - set(tensor):  # what Tensor inherits, and has not
        entries.append((PATCHED_TORCH, f"torch.Tensor.{name}", tensor, name, None, None))
    return [(PATCHED_CLOCK if e[3] == "_clock" else e[0], *e[1:]) for e in entries]


def _is_of_torch(value: Any) -> bool:
    """torch.compile, when first used, puts functions of its own around a few of torch's."""
    return getattr(getattr(value, "__code__", None), "co_filename", "").startswith(_TORCH_FOLDER)


def _callable(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))
