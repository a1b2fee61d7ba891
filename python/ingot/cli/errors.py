"""Bad input: one clear message, exit status 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

NOT_VERIFIED = 1
BAD_INPUT = 2


class BadInputError(click.ClickException):
    exit_code = BAD_INPUT


@contextlib.contextmanager
def bad_input_from(*types: type) -> Iterator[None]:
    """Turns exceptions of these types into BadInputError with their message."""
    try:
        yield
    except types as error:
        raise BadInputError(str(error) or type(error).__name__) from error
