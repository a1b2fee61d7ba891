"""Where output goes: tables and text on stdout, progress and complaints on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ingot import log

if TYPE_CHECKING:  # it takes longer than the rest of what a completion in a shell needs
    from rich.console import Console
    from rich.table import Table

# Raised whenever a key goes or changes its meaning; new keys may come at any time.
JSON_FORMAT = 1
_WIDTH_OF_FILES = 160


def output(as_json: bool = False) -> Console:
    """The console for results; silent under --json, where one object is printed instead."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(quiet=as_json, width=width, highlight=False, markup=False)


def complaints() -> Console:
    """The console for what must not mix with a program's own output."""
    from rich.console import Console

    width = None if sys.stderr.isatty() else _WIDTH_OF_FILES
    return Console(stderr=True, width=width, highlight=False, markup=False)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that says what is being done: a spinner on a terminal, else lines."""
    from rich.console import Console
    from rich.text import Text

    if not log.logger.isEnabledFor(logging.WARNING):
        yield lambda message: None
        return
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda message: print(f"… {message}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda message: status.update(Text(message))


def print_json(command: str, value: dict) -> None:
    """One object, as docs/json-format.md and schemas/output.schema.json describe it."""
    whole = {"ingot_json": JSON_FORMAT, "command": command, **value}
    stream = _alone[-1] if _alone else sys.stdout
    ascii_only = not (stream.encoding or "").lower().startswith("utf")
    text = json.dumps(_plain(whole), indent=1, ensure_ascii=ascii_only, allow_nan=False)
    print(text, file=stream, flush=True)


_alone: list = []  # where `print_json` writes, while all else goes elsewhere


@contextlib.contextmanager
def nothing_but_json() -> Iterator[None]:
    """While this lasts, what is printed otherwise goes to stderr: a model's code prints too, and so
    do programs that it starts."""
    ours, saved = sys.stdout, -1
    with contextlib.suppress(OSError, ValueError):
        if ours.fileno() == 1:
            ours.flush()
            saved = os.dup(1)
            os.dup2(2, 1)
    with contextlib.ExitStack() as scope:
        if saved >= 0:
            copy = open(saved, "w", encoding=ours.encoding, errors=ours.errors, closefd=False)
            scope.callback(os.close, saved)
            scope.callback(os.dup2, saved, 1)
            scope.enter_context(copy)
        _alone.append(copy if saved >= 0 else ours)
        scope.callback(_alone.pop)
        scope.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def writable_streams() -> Iterator[None]:
    """Results can be written whatever the terminal's letters are and whether anybody reads them;
    where they cannot, one message says so."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))
        if isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        if error.errno != errno.EPIPE:  # who reads no further has seen enough
            print(f"Error: cannot write the results: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left goes nowhere
        sys.exit(1)


def table(title: str, *columns: str, right: tuple = ()) -> Table:
    """A table whose columns named in `right` hold numbers."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinities: they become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
