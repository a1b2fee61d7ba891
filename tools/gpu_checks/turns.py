"""Processes that share a GPU: many check at once, one at a time measures, alone."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Of processes that name the same file; of a process that names none there are no others."""

    def __init__(self, path: Path | None):
        self.path = path

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[None]:
        if self.path is None:
            yield
            return
        with self.path.open("a") as file:
            fcntl.flock(file, how)
            yield

    def beside_others(self) -> contextlib.AbstractContextManager[None]:
        return self._held(fcntl.LOCK_SH)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._held(fcntl.LOCK_EX)
