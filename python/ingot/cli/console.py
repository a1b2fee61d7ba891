"""Where output goes: tables and text on stdout, progress and complaints on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from ingot import log

# Raised whenever a key goes or changes its meaning; new keys may come at any time.
JSON_FORMAT = 1
_WIDTH_OF_FILES = 160


def output(as_json: bool = False) -> Console:
    """The console for results; silent under --json, where one object is printed instead."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(quiet=as_json, width=width, highlight=False)


def complaints() -> Console:
    """The console for what must not mix with a program's own output."""
    width = None if sys.stderr.isatty() else _WIDTH_OF_FILES
    return Console(stderr=True, width=width, highlight=False)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that says what is being done: a spinner on a terminal, else lines."""
    if not log.logger.isEnabledFor(logging.WARNING):
        yield lambda message: None
        return
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda message: print(f"… {message}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


def print_json(command: str, value: dict) -> None:
    """One object, as docs/json-format.md and schemas/output.schema.json describe it."""
    whole = {"ingot_json": JSON_FORMAT, "command": command, **value}
    print(json.dumps(_plain(whole), indent=1, ensure_ascii=False, allow_nan=False))


def table(title: str, *columns: str, right: tuple = ()) -> Table:
    """A table whose columns named in `right` hold numbers."""
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
