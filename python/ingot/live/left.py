"""Calls that hold nothing for Ingot: the original's forward runs them, with nothing around it.

What Dynamo captured of them would be PyTorch's own operators, but not always those of the forward:
one that asks whether it is being captured may take another way (transformers then make masks that
their attention does without else).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ingot.live import policy, releases, shortcut
from ingot.runtime.program import tensor_guards

_grad = torch.is_grad_enabled
_PLAIN = (bool, int, float, str, type(None))
# Of calls that are alike, one in so many is asked of Dynamo's guards.
_ASKED = 16
# Calls of a kind, after the guards were asked, at which it is worth a quicker way to be told.
_SEEN = 2
# The same of all calls in a mode, and how many are left then before the guards are asked again.
_SEEN_IN_MODE = 2
_LEFT_IN_MODE = 64
_MOST_KINDS = 64


class LeftCalls:
    """True where there are any. The original's forward is right whatever has changed, so that
    guards need not be asked at each call: of a network of two hundred modules they take a
    millisecond, where the caches hold none of what they read."""

    def __init__(self, function: Callable):
        self._function = function
        self._frame = shortcut.Frame(function)
        self._known: tuple[shortcut.Guards, ...] = ()
        # By the module's training flag: calls that Dynamo cuts into several graphs.
        self._cut: tuple[tuple[bool, shortcut.Guards], ...] = ()
        self._times: dict[tuple, int] = {}
        self._last: _LastKind | None = None
        # Whether a call was left since one was taken.
        self._one_left = False
        # By mode, how often the guards said that a call is left; -1 where one was taken.
        self._modes: dict[tuple[bool, bool], int] = {}

    def __bool__(self) -> bool:
        return bool(self._known or self._cut)

    def forget(self) -> None:
        self._known = self._cut = ()
        self._times.clear()
        self._modes.clear()
        self._last = None

    def add(self) -> bool:
        """Calls like the one that Dynamo saw last. Whether they are one graph."""
        found = shortcut.latest_guards(self._function)
        if found is not None:
            self._known = (found, *(known for known in self._known if known.is_alive))
        return found is not None

    def add_cut(self, training: bool) -> None:
        """The same where Dynamo cut the call into several graphs. Only the first one's guards are
        known here, so one call in a few goes Dynamo's way."""
        found = shortcut.latest_guards(self._function, whole=False)
        if found is not None:
            alive = (entry for entry in self._cut if entry[1].is_alive)
            self._cut = ((training, found), *alive)

    def forget_cut(self) -> None:
        self._cut = ()

    def hold_again(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> bool:
        """hold_kind() of a call that is of the same kind as the last ones, in a quarter of the
        time."""
        last = self._last
        if last is None or last.times >= _ASKED or not last.fits(module, args, kwargs):
            return False
        last.times += 1
        self._one_left = True
        return True

    def kind(self, args: tuple, kwargs: dict) -> tuple:
        """What is cheap to say of a call; args: the module, then those of the call."""
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            policy.tf32_allowed(),
            *releases.autocast_dtypes().items(),
            *map(_likeness, args[1:]),
            *((name, _likeness(value)) for name, value in kwargs.items()),
            *(value for value in vars(args[0]).values() if type(value) in _PLAIN),
        )

    def hold_kind(self, kind: tuple, args: tuple, kwargs: dict) -> bool:
        """Whether calls of the kind were left before; one in a few is not said to be."""
        times, last = self._times.get(kind, 0), self._last
        if times <= 0 or (last is not None and last.times >= _ASKED and last.kind == kind):
            return False
        self._note(kind, times + 1)
        self._one_left = True
        if times == _SEEN and (last is None or last.kind != kind):
            self._last = _LastKind.of(kind, args[0], args[1:], kwargs)
        return times % _ASKED != 0

    def hold(self, kind: tuple, args: tuple, kwargs: dict) -> bool:
        """Whether Dynamo's guards say that a call is to be left."""
        frame_locals = self._frame.locals(args, kwargs)
        found = any(known.matches(frame_locals) for known in self._known)
        if found and (seen := self._modes.get(mode := _mode(args[0]), 0)) >= 0:
            self._modes[mode] = seen + 1
        if not found and self._times.get(kind, 0) == 0:
            training = args[0].training
            found = any(cut.matches(frame_locals) for flag, cut in self._cut if flag == training)
        self._one_left |= found
        if found and self._times.get(kind, 0) >= 0:
            self._note(kind, 1)
            if self._last is not None and self._last.kind == kind:
                self._last.times = 1
        return found

    def mode_held(self, module: torch.nn.Module, kind: tuple) -> tuple | None:
        """Where all calls in the module's mode were left so far: the mode, and a countdown of those
        that may be left with no other look at them. The one behind it is asked of the guards. kind:
        of a call that hold() just held."""
        mode = _mode(module)
        if self._modes.get(mode, 0) < _SEEN_IN_MODE:
            return None
        self.drop(kind)
        return *mode, iter(range(_LEFT_IN_MODE, 0, -1))

    def drop(self, kind: tuple | None) -> None:
        """What the guards did not hold to be left is to be seen anew."""
        if self._times.get(kind, 0) > 0:
            self._times.pop(kind, None)
        self._last = None

    def not_all(self, module: torch.nn.Module) -> None:
        """A call in the module's mode was taken."""
        self._modes[_mode(module)] = -1

    def taken(self, args: tuple, kwargs: dict) -> None:
        """A call was: of others of its kind that are left the kind says too little."""
        if not self._one_left:
            return
        self._one_left = False
        self.not_all(args[0])
        kind = self.kind(args, kwargs)
        self._note(kind, -1)
        if self._last is not None and self._last.kind == kind:
            self._last = None

    def _note(self, kind: tuple, times: int) -> None:
        if len(self._times) >= _MOST_KINDS and kind not in self._times:
            self._times.clear()  # a module that counts its calls makes each a kind of its own
        self._times[kind] = times


class _LastKind:
    """The kind of calls that came again last, and what tells the next one's at once: guards of
    tensors, which see inference mode and autocast too."""

    __slots__ = ("_attributes", "_count", "_guards", "_mode", "_read", "_values", "kind", "times")

    @staticmethod
    def of(kind: tuple, module: torch.nn.Module, args: tuple, kwargs: dict) -> _LastKind | None:
        """None where it takes more to tell."""
        names = [name for name, value in vars(module).items() if type(value) in _PLAIN]
        if kwargs or not args or len(names) < 2:
            return None
        if not all(isinstance(tensor, torch.Tensor) for tensor in args):
            return None
        guards = tensor_guards(args)
        return guards and _LastKind(kind, module, names, len(args), guards)

    def __init__(self, kind: tuple, module: torch.nn.Module, names: list[str], count: int, guards):
        own = vars(module)
        self.kind, self.times = kind, 1
        self._count, self._guards = count, guards
        self._mode = _grad(), policy.tf32_allowed()
        self._attributes, self._read = len(own), operator.itemgetter(*names)
        self._values = self._read(own)

    def fits(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> bool:
        own = vars(module)
        if kwargs or len(args) != self._count or len(own) != self._attributes:
            return False
        try:
            values = self._read(own)
        except KeyError:
            return False
        return (
            (_grad(), policy.tf32_allowed()) == self._mode
            and all(map(operator.is_, values, self._values))
            and self._guards.check(*args)
        )


def _mode(module: torch.nn.Module) -> tuple[bool, bool]:
    return module.training, _grad()


def _likeness(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    return value if type(value) in _PLAIN else type(value)
