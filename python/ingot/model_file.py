"""Model files: programs that define `Model`, `get_inputs` and `get_init_inputs`.

A model file is executed, with everything that it does. Constants at its top level can be overridden
before that, in its text, so that whatever the file computes from them follows.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelFileError(ValueError):
    """A model file that cannot be used; the message names the file, the line and the problem."""


@dataclass(frozen=True)
class ModelFile:
    """A loaded model file.

    Model: the class named `class_name`; source: the text that was executed, overrides included;
    constants: the literals assigned at its top level.
    """

    path: Path
    Model: type
    get_inputs: Callable[[], list]
    get_init_inputs: Callable[[], list]
    source: str
    constants: dict[str, Any]
    class_name: str = "Model"

    def make_module(self) -> Any:
        """Model(*get_init_inputs()). Raises ModelFileError with the line that raised."""
        arguments = self._listed("get_init_inputs", self.get_init_inputs)
        module = _guarded(self.path, f"{self.class_name}(...)", lambda: self.Model(*arguments))
        import torch

        if not isinstance(module, torch.nn.Module):
            raise ModelFileError(f"{self.path}: {self.class_name} is not an nn.Module")
        return module

    def make_inputs(self) -> list:
        """get_inputs(), checked to be a list with a tensor in it."""
        inputs = self._listed("get_inputs", self.get_inputs)
        import torch

        if not any(isinstance(item, torch.Tensor) for item in inputs):
            raise ModelFileError(f"{self.path}: get_inputs() gives no tensor")
        return inputs

    def _listed(self, name: str, function: Callable[[], Any]) -> list:
        result = _guarded(self.path, f"{name}()", function)
        if not isinstance(result, (list, tuple)):
            raise ModelFileError(
                f"{self.path}: {name}() gives a {type(result).__name__}; it must give a list"
            )
        return list(result)


_serial = itertools.count()


def load_model_file(
    path: os.PathLike | str,
    overrides: Mapping[str, Any] | None = None,
    class_name: str = "Model",
) -> ModelFile:
    """Executes a model file. overrides: constants by name, as values or as the text of a literal
    ("256"). Raises ModelFileError."""
    path = Path(path)
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 text: {error}") from error
    source = override_constants(source, overrides or {}, str(path))
    namespace = _execute(path, source)
    for name in (class_name, "get_inputs", "get_init_inputs"):
        if name not in namespace:
            kind = "class" if name == class_name else "function"
            raise ModelFileError(f"{path} defines no {kind} '{name}'")
        if not callable(namespace[name]):
            raise ModelFileError(f"{path}: '{name}' is a {type(namespace[name]).__name__}")
    if not isinstance(namespace[class_name], type):
        raise ModelFileError(f"{path}: '{class_name}' is not a class")
    return ModelFile(
        path=path,
        Model=namespace[class_name],
        get_inputs=namespace["get_inputs"],
        get_init_inputs=namespace["get_init_inputs"],
        source=source,
        constants=constants_of(source, str(path)),
        class_name=class_name,
    )


def _execute(path: Path, source: str) -> dict:
    name = f"ingot_model_{path.stem}_{next(_serial)}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    code = _compile(source, str(path))
    # Pickling and dataclasses look a class's module up by name.
    sys.modules[name] = module
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        _guarded(path, "the file", lambda: exec(code, module.__dict__))
    except ModelFileError:
        del sys.modules[name]
        raise
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module.__dict__


def _compile(source: str, name: str) -> types.CodeType:
    try:
        return compile(source, name, "exec")
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if getattr(error, "lineno", None) else ""
        raise ModelFileError(f"{name}{line}: {getattr(error, 'msg', error)}") from error


def _guarded(path: Path, what: str, action: Callable[[], Any]) -> Any:
    """Runs code of the file; what it raises becomes one message with the file's line."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        line = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                line = f":{frame.lineno}"
        text = str(error).strip()
        detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise ModelFileError(f"{path}{line}: {what} raised {detail}") from error


# Constants --------------------------------------------------------------------------------------


def _assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """(name, expression) of each plain assignment at the top level, in order."""
    found = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                found += _pairs(target, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found += _pairs(statement.target, statement.value)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    if both and len(target.elts) == len(value.elts):
        return [p for t, v in zip(target.elts, value.elts) for p in _pairs(t, v)]
    return []


def constants_of(source: str, name: str = "model") -> dict[str, Any]:
    """The literals assigned at the top level of a file."""
    constants = {}
    for key, expression in _assignments(_parse(source, name)):
        try:
            constants[key] = ast.literal_eval(expression)
        except ValueError:
            continue
    return constants


def _parse(source: str, name: str) -> ast.Module:
    _compile(source, name)  # its messages carry the line
    return ast.parse(source)


def override_constants(source: str, overrides: Mapping[str, Any], name: str = "model") -> str:
    """The file's text with other values for some of its constants; lines keep their numbers."""
    if not overrides:
        return source
    places: dict[str, list[ast.expr]] = {}
    for key, expression in _assignments(_parse(source, name)):
        places.setdefault(key, []).append(expression)
    edits = []
    for key, value in overrides.items():
        if key not in places:
            known = ", ".join(sorted(places)) or "none"
            raise ModelFileError(
                f"{name} has no constant '{key}' at its top level (it has {known})"
            )
        edits += [(place, _literal(key, value, place)) for place in places[key]]
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line) for line in lines)]
    text = source.encode()
    for expression, value in sorted(edits, key=lambda e: _span(e[0], starts), reverse=True):
        start, end = _span(expression, starts)
        height = expression.end_lineno - expression.lineno
        new = f"({value}{chr(10) * height})" if height else value
        text = text[:start] + new.encode() + text[end:]
    return text.decode()


def _span(expression: ast.expr, starts: list[int]) -> tuple[int, int]:
    return (
        starts[expression.lineno - 1] + expression.col_offset,
        starts[expression.end_lineno - 1] + expression.end_col_offset,
    )


def _literal(key: str, value: Any, old: ast.expr) -> str:
    """The value's text; a text that is no literal stands for itself where a text stood."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            if isinstance(old, ast.Constant) and isinstance(old.value, str):
                return repr(value)
            raise ModelFileError(
                f"the value of '{key}' is {value!r}; it must be a Python literal such as 256, "
                "1e-5, True or 'text'"
            ) from error
    return repr(value)


# Writing ----------------------------------------------------------------------------------------


def write_whole(path: os.PathLike | str, text: str) -> None:
    """Writes a file so that it appears whole or not at all. Raises ModelFileError."""
    path = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise ModelFileError(f"cannot write {path}: {error.strerror}") from error
