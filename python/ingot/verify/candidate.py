"""The parent's handle to the process in which a candidate runs."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from .answers import problem_of
from .confinement import TOKEN, end_marked, marked
from .passing import InputClassError
from .transport import ClosedError, Line, TooLargeError, TransportError

_POLL_S = 0.05
_START_LIMIT_S = 300.0  # until Python and PyTorch are loaded, which is not the candidate's time
_TAIL_CHARACTERS = 1500
_END_LIMIT_S = 15.0  # for a process that has closed its line
_REST_LIMIT_S = 30.0  # for the rest of an answer that has begun to arrive
_ANSWER_FACTOR = 4  # an answer may hold this many times what is expected, and a little
_ANSWER_ROOM = 64 << 20


class CandidateFailedError(Exception):
    """The candidate's process ended, hung, took too much memory or broke the line.

    kind: "crash", "hang", "memory" or "forged answer"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CandidateError(Exception):
    """The candidate raised an exception. acts: what the worker noticed of it before, as pairs of a
    trick and what was done."""

    def __init__(self, description: dict, acts: list | None = None) -> None:
        self.acts = acts or []
        self.type = str(description.get("type", "Exception"))
        self.message = str(description.get("message", ""))
        self.where = str(description.get("where", ""))
        place = f" ({self.where})" if self.where else ""
        super().__init__(f"{self.type}: {self.message}{place}")


def environment() -> dict[str, str]:
    """For a process of this package, wherever that lies."""
    package_root = Path(__file__).resolve().parents[2]
    paths = [str(package_root), os.environ.get("PYTHONPATH", "")]
    # No module from the folder that we were started in.
    own = {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONSAFEPATH": "1"}
    return {**os.environ, **own}


class CandidateProcess:
    """A spawned worker with a limit on its memory and, per request, on its time. preload: modules
    that the candidate will want, to be imported while the parent is busy."""

    def __init__(self, memory_limit: int, preload: tuple = ()) -> None:
        self._memory_limit = memory_limit
        ours, theirs = socket.socketpair()
        self._token = secrets.token_hex(16)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ingot.verify.worker",
                str(theirs.fileno()),
                *preload,
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment(), TOKEN: self._token},
        )
        theirs.close()
        self._socket = ours
        self._line = Line(ours, _ANSWER_ROOM)
        self._ready = False
        self._asked: tuple = ()
        self._taken: int | None = None
        self._closed = threading.Event()
        self._output: deque = deque(maxlen=64)
        self._drain = threading.Thread(target=self._keep_tail, daemon=True)
        self._drain.start()
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def expect(self, message_bytes: int) -> CandidateProcess:
        """message_bytes: of tensors in the largest answer that can be right."""
        self._line.largest = _ANSWER_FACTOR * message_bytes + _ANSWER_ROOM
        return self

    def wait_until_ready(self) -> None:
        """Until Python and PyTorch are loaded in it."""
        if not self._ready:
            self._ready = True
            self.request({"op": "hello"}, None, _START_LIMIT_S)

    def __enter__(self) -> CandidateProcess:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()

    def request(self, header: dict, tensors: dict | None, time_limit: float) -> tuple:
        """Sends a request and waits for its answer: (reply, tensors, seconds by our clock).

        Raises CandidateError where the candidate raised, CandidateFailedError where it did worse.
        """
        self.ask(header, tensors, time_limit)
        return self.answer()

    def ask(self, header: dict, tensors: dict | None, time_limit: float) -> None:
        """The first half of a request: there is time for other work until its answer."""
        self.wait_until_ready()
        number = secrets.token_hex(8)  # an answer that was written ahead cannot carry it
        try:
            self._socket.settimeout(time_limit)
            self._line.send({**header, "id": number}, tensors or {})
        except TimeoutError as error:
            raise self._failure("hang", "the candidate's process does not listen") from error
        except (TransportError, OSError) as error:
            raise self._ended(str(error)) from error
        self._asked = (header["op"], number, time.perf_counter(), time_limit)

    def answer(self) -> tuple:
        operation, number, started, time_limit = self._asked
        try:
            self._wait(operation, started, time_limit)
            seconds = time.perf_counter() - started
            reply, received = self._line.receive(number, _REST_LIMIT_S)
        except TimeoutError as error:
            raise self._failure("hang", "the candidate's process stopped in mid-message") from error
        except TooLargeError as error:
            raise self._failure("memory", f"the candidate's process sent {error}") from error
        except (ClosedError, OSError) as error:
            raise self._ended(str(error)) from error
        except TransportError as error:
            raise self._failure("forged answer", f"what came is no answer: {error}") from error
        problem = problem_of(operation, reply, received)
        if problem:
            raise self._failure("forged answer", f"what came is no answer: {problem}")
        if not reply["ok"]:
            if reply["error"]["type"] == InputClassError.__name__:
                raise InputClassError(reply["error"]["message"])
            raise CandidateError(reply["error"], acts_of(reply))
        return reply, received, seconds

    def processor_seconds(self) -> float:
        """Processor time that the worker and all that it has started have used, ended or not."""
        own = self._process.pid
        try:
            seconds = _process_clock(own) + _reaped_seconds(own)
        except OSError as error:
            raise self._ended(str(error)) from error
        others = set(_descendants(own)) | set(marked(self._token)) - {own}
        for pid in others:
            with contextlib.suppress(OSError):
                seconds += _process_clock(pid) + _reaped_seconds(pid)
        return seconds

    def close(self) -> None:
        """Ends the worker and whatever it started in its session, and removes its files."""
        self._closed.set()
        self._line.close()
        self._kill()  # leaving by itself takes a process with PyTorch half a second
        end_marked(self._token)

    def _wait(self, what: str, started: float, time_limit: float) -> None:
        remaining = time_limit - (time.perf_counter() - started)
        if not select.select([self._socket], [], [], max(0.0, remaining))[0]:
            raise self._failure(
                "hang", f"the candidate did not finish '{what}' within {time_limit:g} s"
            )

    def _watch_memory(self) -> None:
        """Also while the parent works on something else: it would take all that there is."""
        while not self._closed.wait(_POLL_S):
            used = _resident_bytes(self._process.pid)
            if used > self._memory_limit:
                self._taken = used
                self._kill()
                return

    def _ended(self, detail: str) -> CandidateFailedError:
        try:
            status = self._process.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return self._failure("forged answer", f"the line to the candidate broke: {detail}")
        if self._taken is not None:
            return self._failure(
                "memory",
                f"the candidate took {self._taken >> 20} MiB of memory; the limit is "
                f"{self._memory_limit >> 20} MiB",
            )
        if status < 0:
            try:
                how = f"was ended by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was ended by signal {-status}"
        else:
            how = f"ended with status {status}"
        return self._failure("crash", f"the candidate's process {how}")

    def _failure(self, kind: str, message: str) -> CandidateFailedError:
        self._kill()
        self._drain.join(timeout=1)
        tail = "".join(self._output)[-_TAIL_CHARACTERS:].strip()
        return CandidateFailedError(kind, message + (f"; its last words:\n{tail}" if tail else ""))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _keep_tail(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while True:
            chunk = os.read(stream.fileno(), 4096)
            if not chunk:
                return
            self._output.append(chunk.decode("utf-8", "replace"))


def acts_of(reply: dict) -> list:
    """(trick, what was done) of what the worker noticed."""
    return [(trick, what) for trick, what in reply.get("acts", [])]


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants."""
    total = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for current in [pid, *_descendants(pid)]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{current}/statm").read_text().split()[1]) * page
    return total


def _descendants(pid: int) -> list:
    found: list = []
    pending = [pid]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{current}/task"):
                text = Path(f"/proc/{current}/task/{task}/children").read_text()
                pending += (children := [int(n) for n in text.split()])
                found += children
    return found


def _process_clock(pid: int) -> float:
    """The clock of another process (clock_getcpuclockid): its id in the upper bits, kind 2."""
    return time.clock_gettime((~pid << 3) | 2)


def _reaped_seconds(pid: int) -> float:
    """Processor time of its children that have ended and been waited for (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
