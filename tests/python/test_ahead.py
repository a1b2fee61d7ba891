"""What is compiled ahead of a first call, in which order, and when it is left alone. The programs
are stand-ins: what the library compiles is seen in test_cuda_calls.py."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest
import selection
from ingot.runtime import ahead
from ingot.runtime.library import IngotError


class Stand:
    on_cuda = True

    def __init__(self, others: int = 3, seconds: float = 0.0, fails: bool = False):
        self.said: list = []
        self.left, self.seconds, self.fails = others, seconds, fails

    def compile(self, batch: int) -> None:
        time.sleep(self.seconds)
        self.said.append(("needed", batch))
        if self.fails:
            raise IngotError("no kernel", 1)

    def compile_another(self, batch: int) -> bool:
        if not self.left:
            return False
        self.left -= 1
        time.sleep(self.seconds)
        self.said.append(("another", threading.current_thread()))
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(ahead, "_PAUSE_S", 0.0)
    monkeypatch.setattr(ahead, "_others_are_off", threading.Event())


def finished() -> None:
    for thread in list(ahead._under_way):
        thread.join()


def test_what_is_needed_comes_before_what_others_need():
    programs, asked = [Stand(), Stand(fails=True), Stand()], []
    ahead.compile_ahead([(p, 7) for p in programs], [lambda: asked.append("product")])
    finished()
    assert asked == ["product"]
    assert all(p.said[0] == ("needed", 7) and len(p.said) == 4 for p in programs)
    assert len({thread for p in programs for _, thread in p.said[1:]}) == 1


def test_what_is_needed_is_compiled_side_by_side():
    programs = [Stand(seconds=0.2) for _ in range(4)]
    begun = time.monotonic()
    ahead.compile_ahead([(p, 1) for p in programs])
    assert time.monotonic() - begun < 0.1
    ahead.settle()
    assert time.monotonic() - begun < 0.7


def test_times_are_taken_with_nothing_beside_them():
    program = Stand(others=500, seconds=0.01)
    ahead.compile_ahead([(program, 1)])
    while not program.said[1:]:
        time.sleep(0.01)
    ahead.settle()
    count = len(program.said)
    assert count < 500
    ahead.compile_ahead([(program, 1)])
    finished()
    assert len(program.said) == count + 1  # what a call needs, still


def test_nothing_is_compiled_for_models_that_are_gone(monkeypatch):
    monkeypatch.setattr(ahead, "_PAUSE_S", 0.3)
    program = Stand()
    said, gone = program.said, weakref.ref(program)
    ahead.compile_ahead([(program, 1)])
    del program
    finished()
    assert gone() is None and said == [("needed", 1)]


def test_what_fails_stops_nothing_else():
    program, asked = Stand(), []
    ahead.compile_ahead([(program, 1)], [lambda: 1 / 0, lambda: asked.append("product")])
    finished()
    assert asked == ["product"] and program.said[0] == ("needed", 1)


def test_nothing_is_compiled_for_the_host():
    program = Stand()
    program.on_cuda = False
    ahead.compile_ahead([(program, 3)])
    finished()
    assert not program.said


ENDS = """
import time
from ingot.runtime import ahead

class Endless:
    on_cuda = True
    def compile(self, batch): pass
    def compile_another(self, batch): return not time.sleep(0.05)

ahead._PAUSE_S = {pause}
ahead.compile_ahead([(Endless(), 1)])
time.sleep(0.3)
print("end", time.monotonic())
"""


@pytest.mark.parametrize("pause", selection.quick([60.0], [0.0, 60.0]))
def test_a_process_that_ends_waits_for_nobody_elses_kernels(pause):
    answer = subprocess.run(
        [sys.executable, "-c", ENDS.format(pause=pause)], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - float(answer.stdout.split()[1]) < 10
