"""Inputs as the model's file gives them: tensors, anywhere in lists, dicts and objects.

They travel as one pickle with the tensors beside it. Pickle is also how their tensors are found and
changed: it reaches into whatever can be sent at all.
"""

from __future__ import annotations

import base64
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

from .loading import CANDIDATE_MODULE

_MODEL_MODULES = "ingot_model_"  # as model_file.py names them
_PLAIN = (torch.Tensor, int, float, bool, str, bytes, type(None))


class InputClassError(Exception):
    """An input is of a class that the original's file defines and the candidate's does not."""


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.tensors: list = []
        self._numbers: dict = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, tensor_of: Callable, own_module: str) -> None:
        super().__init__(io.BytesIO(data))
        self.persistent_load = tensor_of
        self._own_module = own_module

    def find_class(self, module: str, name: str) -> Any:
        if not (self._own_module and module.startswith(_MODEL_MODULES)):
            return super().find_class(module, name)
        found: Any = sys.modules[self._own_module]
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise InputClassError(name)
        return found


def tensors_of(values: Any) -> list:
    """All tensors, each once, in the order in which they are numbered."""
    if _is_plain(values):
        return list({id(v): v for v in values if isinstance(v, torch.Tensor)}.values())
    return _taken_apart(values)[1]


def map_tensors(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same values with other tensors: change(t) for each, in `tensors_of`'s order."""
    changed = [change(t) for t in tensors_of(values)]
    if _is_plain(values):
        new = {id(old): c for old, c in zip(tensors_of(values), changed, strict=True)}
        return [new.get(id(v), v) for v in values]
    return _Unpacker(_taken_apart(values)[0], changed.__getitem__, "").load()


def packed(values: Any, prefix: str) -> tuple:
    """(text for a header, tensors by name: prefix and number)."""
    data, tensors = _taken_apart(values)
    named = {f"{prefix}{i}": t for i, t in enumerate(tensors)}
    return [prefix, base64.b64encode(data).decode()], named


def packed_whole(values: Any) -> list:
    """As `packed`, with the tensors inside."""
    return ["", base64.b64encode(pickle.dumps(values)).decode()]


def unpacked(text: list, tensors: dict, own_module: str = CANDIDATE_MODULE) -> Any:
    """own_module: where classes of the original's file are looked for by their names."""
    prefix, data = text
    return _Unpacker(
        base64.b64decode(data), lambda number: tensors[f"{prefix}{number}"], own_module
    ).load()


def _taken_apart(values: Any) -> tuple:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(values)
    return file.getvalue(), packer.tensors


def _is_plain(values: Any) -> bool:
    return type(values) is list and all(isinstance(v, _PLAIN) for v in values)
