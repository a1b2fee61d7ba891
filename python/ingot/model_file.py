"""Model files: programs that define `Model`, `get_inputs` and `get_init_inputs`.

Both functions give arguments: a list of positional ones, a dict of keyword ones, or a list of both,
`[[x, y], {"scale": 2.0}]`.

A model file is executed, with everything that it does. Constants at its top level can be overridden
before that, in its text, so that whatever the file computes from them follows.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import inspect
import itertools
import linecache
import os
import re
import stat
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
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
        args, kwargs = arguments_of(self._given("get_init_inputs", self.get_init_inputs))
        module = _guarded(self.path, f"{self.class_name}(...)", lambda: self.Model(*args, **kwargs))
        import torch

        if not isinstance(module, torch.nn.Module):
            raise ModelFileError(f"{self.path}: {self.class_name} is not an nn.Module")
        return module

    def make_inputs(self, device: Any = None) -> list:
        """get_inputs() as a call's positional arguments, checked to hold a tensor; on `device`
        where one is given. Keyword arguments take their places among forward's parameters."""
        given = self._given("get_inputs", self.get_inputs)
        inputs = self._in_order(given)
        import torch
        from torch.utils import _pytree as pytree

        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(inputs)):
            raise ModelFileError(f"{self.path}: get_inputs() gives no tensor")
        if device is None:
            return inputs

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

        return pytree.tree_map_only(torch.Tensor, moved, inputs)

    def at_home(self) -> contextlib.AbstractContextManager:
        """For code of the file's that is called otherwise than by this object's methods."""
        return _at_home(self.path)

    def check_runs(self, module: Any, inputs: list) -> None:
        """Calls the module as PyTorch does. Raises ModelFileError with the line that raised."""
        import torch

        what = f"{self.class_name}, called as get_inputs() says,"
        with torch.no_grad():
            _guarded(self.path, what, lambda: module(*inputs))

    def _given(self, name: str, function: Callable[[], Any]) -> Any:
        result = _guarded(self.path, f"{name}()", function)
        if not isinstance(result, (list, tuple, dict)):
            raise ModelFileError(
                f"{self.path}: {name}() gives a {type(result).__name__}; it must give a list of "
                "arguments, or a dict of keyword arguments"
            )
        return result

    def _in_order(self, given: Any) -> list:
        """A call's arguments, all positional."""
        args, kwargs = arguments_of(given)
        if not kwargs:
            return list(given) if not isinstance(given, dict) else []
        parameters = _parameters(self.Model.forward)
        # A list and a dict may as well be two arguments of forward's own.
        if not isinstance(given, dict) and not set(kwargs) <= set(parameters[len(args) :]):
            return list(given)
        try:
            bound = inspect.signature(self.Model.forward).bind(None, *args, **kwargs)
        except TypeError as error:
            raise ModelFileError(
                f"{self.path}: get_inputs() does not fit {self.class_name}.forward: {error}"
            ) from error
        for name in kwargs:
            if name not in parameters:
                raise ModelFileError(
                    f"{self.path}: {self.class_name}.forward takes '{name}' by keyword alone; give "
                    "it a place among the positional parameters"
                )
        last = max(parameters.index(name) for name in kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in parameters[: last + 1]]


def arguments_of(given: Any) -> tuple[list, dict]:
    """(positional, keyword) arguments from what get_init_inputs() or get_inputs() gives."""
    if isinstance(given, dict):
        return [], dict(given)
    if len(given) == 2 and isinstance(given[0], (list, tuple)) and isinstance(given[1], dict):
        return list(given[0]), dict(given[1])
    return list(given), {}


def batch_of(inputs: list) -> int | None:
    """The first extent of the first tensor that has one."""
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(inputs)
    return next((int(leaf.shape[0]) for leaf in leaves if getattr(leaf, "ndim", 0)), None)


def _parameters(forward: Callable) -> list[str]:
    """Names of those that can be given by place, without self."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in kinds][1:]


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
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ModelFileError(f"{path}: its path is not UTF-8 text; give it another") from error
    try:
        source = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
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
    # TorchDynamo makes names and texts to be formatted of it.
    name = f"ingot_model_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{next(_serial)}"
    module = types.ModuleType(name)
    module.__file__ = os.path.abspath(path)
    code = _compile(source, str(path))
    # Pickling and dataclasses look a class's module up by name.
    sys.modules[name] = module
    for file in {str(path), module.__file__}:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        _guarded(path, "the file", lambda: exec(code, module.__dict__))
    except ModelFileError:
        del sys.modules[name]
        raise
    return module.__dict__


_chosen: dict[str, str] = {}


@contextlib.contextmanager
def _at_home(path: Path) -> Iterator[None]:
    """While code of the file runs: modules are looked for in its folder first, as `python FILE`
    does, and the working directory is the one that it has chosen, which our paths are not from."""
    file = os.path.abspath(path)
    folder, ours = os.path.dirname(os.path.realpath(file)), os.open(".", os.O_RDONLY)
    sys.path.insert(0, folder)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.chdir(_chosen.get(file, "."))
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            _chosen[file] = os.getcwd()
        os.fchdir(ours)
        os.close(ours)
        if folder in sys.path:
            sys.path.remove(folder)
        if folder not in sys.path:
            # What its forward imports is found; last, where nothing stands in for anybody else's.
            sys.path.append(folder)


def _compile(source: str, name: str) -> types.CodeType:
    try:
        return compile(source, name, "exec")
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if getattr(error, "lineno", None) else ""
        raise ModelFileError(f"{name}{line}: {getattr(error, 'msg', error)}") from error


def _guarded(path: Path, what: str, action: Callable[[], Any]) -> Any:
    """Runs code of the file; what it raises becomes one message with the file's line."""
    try:
        with _at_home(path):
            return action()
    except (Exception, SystemExit) as error:
        # What follows are frames of PyTorch's C++.
        text = str(error).partition("\nException raised from ")[0].strip()
        detail = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise ModelFileError(f"{place_of(error, path)}: {what} raised {detail}") from error


def place_of(error: BaseException, path: os.PathLike | str) -> str:
    """The file, with the line of it in which an exception arose, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


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
    """Writes a file so that it appears whole or not at all; a link to it stays a link. Raises
    ModelFileError."""
    with _temporary(path) as (name, place):
        # A path that is no UTF-8 may be named in a text.
        with open(name, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, place)


def check_place(path: os.PathLike | str) -> None:
    """Raises ModelFileError where `write_whole` could not write: it is tried, short of the file."""
    with _temporary(path):
        pass


@contextlib.contextmanager
def _temporary(path: os.PathLike | str) -> Iterator[tuple[str, str]]:
    """(a new file beside the one that `path` means, that one). What replaces a device, a pipe or a
    socket would take it away from everybody."""
    name = ""
    try:
        folder = Path(path).parent
        if not folder.is_dir():
            raise ModelFileError(f"cannot write {path}: {folder} is no folder")
        place = os.path.realpath(path)
        if _exists(place):
            if not stat.S_ISREG(os.stat(place).st_mode):
                raise ModelFileError(f"cannot write {path}: it is there, and is no plain file")
            if not os.access(place, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        handle, name = tempfile.mkstemp(prefix=".ingot-", dir=os.path.dirname(place))
        os.close(handle)
        yield name, place
    except OSError as error:
        raise ModelFileError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if name and os.path.exists(name):
            os.unlink(name)


def _exists(place: str) -> bool:
    """As os.path.exists, which says no of a name that is too long."""
    try:
        os.stat(place)
    except FileNotFoundError:
        return False
    return True
