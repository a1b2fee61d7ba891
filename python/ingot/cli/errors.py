"""Bad input: one clear message, exit status 2."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import click

NOT_VERIFIED = 1
BAD_INPUT = 2
_PACKAGE = Path(__file__).resolve().parents[1]


class BadInputError(click.ClickException):
    exit_code = BAD_INPUT


@contextlib.contextmanager
def bad_input_from(*types: type) -> Iterator[None]:
    """Turns exceptions of these types, and a sys.exit() in a model's code, into BadInputError with
    their message. One of this package's own passes."""
    try:
        yield
    except types as error:
        raise BadInputError(str(error) or type(error).__name__) from error
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if Path(place.filename).resolve().is_relative_to(_PACKAGE):
            raise
        raise BadInputError(
            f"{place.filename}:{place.lineno}: the model ended the program (sys.exit, in "
            f"{place.name}): {_exit_text(error.code)}; it must return or raise an exception"
        ) from error


def _exit_text(code: object) -> str:
    return f"exit status {code or 0}" if code is None or isinstance(code, int) else str(code)
