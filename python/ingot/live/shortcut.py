"""What TorchDynamo compiled for a frame, called without its evaluator of frames around it.

Dynamo's guards are asked (the tree in C++ of a cache entry), and the bytecode that Dynamo wrote is
called as a plain function: a fifth of the host time of the way through the evaluator. On any doubt
a call goes Dynamo's way.
"""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

_PLAIN = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE

# Names that Dynamo gives: of a graph's function, in its frame's globals, and of what it wraps.
_COMPILED, _WRAPPED = "__compiled_fn", "_torchdynamo_orig_callable"

_counter = itertools.count()


class Guards:
    """Those that Dynamo made of a frame: matches(locals) says whether all hold."""

    __slots__ = ("_check", "_wrapper")

    def __init__(self, wrapper: Any):
        self._wrapper, self._check = wrapper, wrapper.root.check

    def matches(self, frame_locals: dict) -> bool:
        # An entry that Dynamo has given up, because something that it guards by address was freed,
        # has no cache entry any more.
        return self._wrapper.cache_entry is not None and self._check(frame_locals)

    @property
    def is_alive(self) -> bool:
        return self._wrapper.cache_entry is not None


class Shortcut(Guards):
    """run(*arguments): the frame, compiled."""

    __slots__ = ("run",)

    def __init__(self, wrapper: Any, run: Callable):
        super().__init__(wrapper)
        self.run = run


class Parameters:
    """Those of a function that has no others than positional ones."""

    __slots__ = ("_defaults", "_named_from", "_required", "names")

    def __init__(self, function: Callable):
        code = function.__code__
        self.names = code.co_varnames[: code.co_argcount]
        self._defaults = function.__defaults__ or ()
        self._required = len(self.names) - len(self._defaults)
        self._named_from = code.co_posonlyargcount

    def of(self, args: tuple, kwargs: dict) -> tuple | None:
        """What a call gives for each, in order; None where it does not fit, which is PyTorch's to
        say."""
        given = len(args)
        if not kwargs:
            if given == len(self.names):
                return args
            fits = self._required <= given < len(self.names)
            return args + self._defaults[given - self._required :] if fits else None
        found, named = list(args), 0
        for at in range(given, len(self.names)):
            if at >= self._named_from and self.names[at] in kwargs:
                found.append(kwargs[self.names[at]])
                named += 1
            elif at >= self._required:
                found.append(self._defaults[at - self._required])
            else:
                return None
        return tuple(found) if named == len(kwargs) else None


def parameters_of(function: Callable) -> Parameters | None:
    """Where calls of it are simple enough for a shortcut."""
    code = function.__code__
    if code.co_flags & _PLAIN or code.co_kwonlyargcount or function.__closure__:
        return None
    return Parameters(function)


def latest(function: Callable) -> Shortcut | None:
    """For the cache entry that Dynamo used last for this function; None where there is none, or
    where its graph ends before its frame does (what comes then must be Dynamo's again)."""
    entry = _latest_entry(function)
    try:
        return entry and Shortcut(entry.guard_manager, _plain_function(function, entry.code))
    except (AttributeError, TypeError):  # other releases of PyTorch: Dynamo's own way
        return None


def latest_guards(function: Callable, whole: bool = True) -> Guards | None:
    """The guards of that entry. whole: False takes a frame that goes on behind its graph, whose
    guards tell nothing of what comes then."""
    entry = _latest_entry(function, whole)
    try:
        return entry and Guards(entry.guard_manager)
    except (AttributeError, TypeError):
        return None


class Frame:
    """What Dynamo's guards would find in the frame of a call, whose arguments must fit."""

    __slots__ = ("_cells", "_defaults", "_named", "_others", "_positional", "_rest")

    def __init__(self, function: Callable):
        code, defaults = function.__code__, function.__defaults__ or ()
        names, behind = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
        self._positional = names[: code.co_argcount]
        self._named = frozenset(names[code.co_posonlyargcount : behind])
        self._defaults = dict(zip(self._positional[code.co_argcount - len(defaults) :], defaults))
        self._defaults.update(function.__kwdefaults__ or {})
        self._cells = tuple(zip(code.co_freevars, function.__closure__ or ()))
        self._rest = names[behind] if code.co_flags & inspect.CO_VARARGS else None
        behind += self._rest is not None
        self._others = names[behind] if code.co_flags & inspect.CO_VARKEYWORDS else None

    def locals(self, args: tuple, kwargs: dict) -> dict:
        found = {**self._defaults, **dict(zip(self._positional, args))}
        for name, cell in self._cells:
            found[name] = cell.cell_contents
        if self._rest is not None:
            found[self._rest] = args[len(self._positional) :]
        if self._others is None:
            found.update(kwargs)
        else:
            others = {}
            for name, value in kwargs.items():
                (found if name in self._named else others)[name] = value
            found[self._others] = others
        return found


def _latest_entry(function: Callable, whole: bool = True) -> Any:
    try:
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        if not entries:
            return None
        if entries[0].guard_manager.cache_entry is None:
            return None
        return entries[0] if _is_whole(function, entries[0].code) or not whole else None
    except (AttributeError, TypeError):
        return None


def _is_whole(function: Callable, code: types.CodeType) -> bool:
    """Whether compiled code is one graph, which ends where the frame does."""
    names = [name for name in code.co_names if name.startswith(_COMPILED)]
    graphs = [_behind(function.__globals__.get(name)) for name in names]
    return len(graphs) == 1 and getattr(graphs[0], "holds_whole_frame", False)


def mark(run: Callable, gm: torch.fx.GraphModule) -> Callable:
    """run: what a backend gives Dynamo for a graph. Whether the graph ends where its frame does."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    run.holds_whole_frame = reason is not None and not reason.graph_break
    return run


def _behind(made: Any) -> Any:
    """What a backend gave, which Dynamo wraps to switch itself off around it."""
    while hasattr(made, _WRAPPED):
        made = getattr(made, _WRAPPED)
    return made


def _plain_function(function: Callable, code: types.CodeType) -> Callable:
    """The compiled frame. The graph's function that it calls is wrapped, to switch Dynamo off
    around it: here it is off already, so the bytecode gets another name, for what is inside."""
    names, made_here = [], []
    for name in code.co_names:
        made = function.__globals__.get(name)
        if name.startswith(_COMPILED) and hasattr(made, _WRAPPED):
            name = f"__ingot_{next(_counter)}{name}"
            function.__globals__[name] = _behind(made)
            made_here.append(name)
        names.append(name)
    code = code.replace(co_names=tuple(names))
    plain = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    # The user's module must not keep what its models were compiled to.
    weakref.finalize(plain, _forget, function.__globals__, made_here).atexit = False
    return plain


def _forget(namespace: dict, names: list[str]) -> None:
    for name in names:
        namespace.pop(name, None)
