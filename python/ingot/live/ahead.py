"""Compiles the kernels of a network's regions side by side, before its first call comes to them one
by one."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from ingot.log import logger
from ingot.runtime.library import IngotError
from ingot.runtime.program import Program

_MOST_THREADS = 8


def compile_ahead(programs: Sequence[Program], batch: int | None) -> None:
    """For calls of this batch size, if it is known; returns at once. A call that comes before a
    program's kernels are there waits for them."""
    todo = deque(p for p in programs if p.on_cuda and batch is not None)
    for _ in range(min(len(todo), _MOST_THREADS, os.cpu_count() or 1)):
        threading.Thread(target=_work, args=(todo, batch), name="ingot-compile").start()


def _work(todo: deque[Program], batch: int) -> None:
    main = threading.main_thread()
    while main.is_alive():  # a process that ends waits for what is under way alone
        try:
            program = todo.popleft()
        except IndexError:
            return
        try:
            program.compile(batch)
        except IngotError as error:  # the call that needs it says so
            logger.debug("compiling %s ahead failed: %s", program.graph["name"], error)
