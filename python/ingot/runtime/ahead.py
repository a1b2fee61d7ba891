"""Compiles kernels ahead: a network's side by side, before its first call comes to them one by one,
and after these, out of the way, those that calls of other batch sizes need."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ingot.log import logger
from ingot.runtime.program import Program

_MOST_THREADS = 8
_LEAST_PRIORITY = 19  # of Linux
# A process that ends soon, or whose time is taken, has no use for other batch sizes.
_PAUSE_S, _LOOK_S = 5.0, 0.1
_others_are_off = threading.Event()
_under_way: set[threading.Thread] = set()
# One thread for what nothing waits for, however many regions a network has.
_in_turn = threading.Lock()


def compile_ahead(
    programs: Sequence[tuple[Program, int]], besides: Sequence[Callable[[], None]] = ()
) -> None:
    """Of each program for calls of its batch size; returns at once. A call that comes before a
    program's kernels are there waits for them. besides: what else to do before the first call."""
    programs = [(program, batch) for program, batch in programs if program.on_cuda]
    todo = deque([*(partial(program.compile, batch) for program, batch in programs), *besides])
    if todo:
        others = [(weakref.ref(program), batch) for program, batch in programs]
        thread = threading.Thread(target=_run, args=(todo, others), name="ingot-ahead")
        thread.start()
        _under_way.difference_update([t for t in _under_way if not t.is_alive()])
        _under_way.add(thread)


def settle() -> None:
    """Before times are taken: waits for what calls need; for other batch sizes nothing is compiled
    any more."""
    _others_are_off.set()
    while _under_way:
        _under_way.pop().join()


def _run(todo: deque[Callable], programs: Sequence[tuple[Callable, int]]) -> None:
    """programs: weak references, since other batch sizes are of no use to a model that is gone."""
    helpers = min(len(todo), _MOST_THREADS, os.cpu_count() or 1) - 1
    threads = [threading.Thread(target=_work, args=(todo,)) for _ in range(helpers)]
    for thread in threads:
        thread.start()
    _work(todo)
    for thread in threads:
        thread.join()
    _pause()
    with _in_turn:
        _step_back()
        _work(deque(partial(_compile_others, program, batch) for program, batch in programs))


def _work(todo: deque[Callable]) -> None:
    while _is_running():
        try:
            job = todo.popleft()
        except IndexError:
            return
        try:
            job()
        except Exception as error:  # the call that needs it says so
            logger.debug("compiling ahead failed: %s", error)


def _is_running() -> bool:
    """A process that ends waits for what is under way alone."""
    return threading.main_thread().is_alive()


def _pause() -> None:
    end = time.monotonic() + _PAUSE_S
    while time.monotonic() < end and _is_running() and not _others_are_off.is_set():
        time.sleep(_LOOK_S)


def _compile_others(reference: Callable[[], Program | None], batch: int) -> None:
    def compiled() -> bool:
        program = reference()
        return program is not None and program.compile_another(batch)

    while _is_running() and not _others_are_off.is_set() and compiled():
        pass


def _step_back() -> None:
    """Gives this thread's time to all others."""
    if sys.platform == "linux":  # where a priority is a thread's own
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        except OSError:
            logger.debug("compiling ahead keeps its priority")
