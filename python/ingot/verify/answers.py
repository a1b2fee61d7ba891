"""The form of the worker's answers. They are the candidate's word: whatever does not have it is no
answer, and is found out here, before anybody works with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _seconds(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value > 0


def _list_of(kind: Callable) -> Callable:
    return lambda value: isinstance(value, list) and all(kind(v) for v in value)


def _dict_of(kind: Callable) -> Callable:
    return lambda value: isinstance(value, dict) and all(kind(v) for v in value.values())


def _act(value: Any) -> bool:
    return _list_of(_text)(value) and len(value) == 2


_ACTS = {"acts": _list_of(_act)}
_SAMPLES = _dict_of(_list_of(_seconds))
_ERROR = {"type": _text, "message": _text, "where": _text}
_FORMS: dict = {
    "hello": {},
    "finish": {},
    "forget": {},
    "recheck": {},
    "load": {
        "class": _text,
        "state_dict": _list_of(_text),
        "requires_grad": _dict_of(_flag),
        "settings_changed": _list_of(_text),
        "reseeded": _flag,
    },
    "call": {
        "call": _count,
        "outputs": _count,
        "structure": _text,
        "complaints": _list_of(_text),
        "aliases": _list_of(_text),
        "overlaps": _list_of(_text),
        "training": _flag,
        "mode_gives_module": _flag,
        "state_dict": _dict_of(_flag),
        "settings_changed": _list_of(_text),
        "reseeded": _flag,
        "requires_grad": _list_of(_flag),
        "drew": _flag,
    },
    "compare": {
        "cold_s": _SAMPLES,
        "warm_s": _SAMPLES,
        "sustained_s": _SAMPLES,
        "note": _text,
    },
    "repeat": {
        "calls": _list_of(_count),
        "positions": _list_of(_list_of(_count)),
        "marked": _list_of(_count),
    },
}


def problem_of(operation: str, reply: dict, tensors: dict) -> str:
    """What is wrong with the form of an answer, or ""."""
    wrong = _first_wrong(_ACTS, reply)
    if wrong:
        return wrong
    if reply.get("ok") is not True:
        error = reply.get("error")
        return _first_wrong(_ERROR, error) if isinstance(error, dict) else "it gives no reason"
    wrong = _first_wrong(_FORMS[operation], reply)
    if not wrong and operation == "call":
        sent = sum(name[:1] == "o" for name in tensors)
        if any(f"o{i}" not in tensors for i in range(min(sent, reply["outputs"]))):
            return "its outputs are not numbered"
        if sent != reply["outputs"]:
            return f"it announces {reply['outputs']} outputs and holds {sent}"
    return wrong


def _first_wrong(form: dict, reply: dict) -> str:
    for name, fits in form.items():
        if name not in reply or not fits(reply[name]):
            return f"'{name}' is missing or of another kind"
    return ""
