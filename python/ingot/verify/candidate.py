"""The parent's handle to the process in which a candidate runs."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from .confinement import TOKEN, end_marked
from .transport import Line, TransportError

_POLL_S = 0.05
_START_LIMIT_S = 300.0  # until Python and PyTorch are loaded, which is not the candidate's time
_TAIL_CHARACTERS = 1500
_END_LIMIT_S = 15.0  # for a process that has closed its line


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


class CandidateProcess:
    """A spawned worker with a limit on its memory and, per request, on its time."""

    def __init__(self, memory_limit: int, blob_bytes: int = 0) -> None:
        self._memory_limit = memory_limit
        self._folder = Path(tempfile.mkdtemp(prefix="ingot-verify-", dir=_roomy_folder(blob_bytes)))
        ours, theirs = socket.socketpair()
        package_root = Path(__file__).resolve().parents[2]
        paths = [str(package_root), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in paths if p))
        self._token = environment[TOKEN] = secrets.token_hex(16)
        environment["PYTHONSAFEPATH"] = "1"  # no module from the folder that we were started in
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ingot.verify.worker",
                str(theirs.fileno()),
                str(self._folder),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        self._socket = ours
        self._line = Line(ours, self._folder, "parent")
        self._output: deque = deque(maxlen=64)
        self._drain = threading.Thread(target=self._keep_tail, daemon=True)
        self._drain.start()

    def __enter__(self) -> CandidateProcess:
        try:
            self.request({"op": "hello"}, None, _START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()

    def request(self, header: dict, tensors: dict | None, time_limit: float) -> tuple:
        """Sends a request and waits for its answer: (reply, tensors, seconds by our clock).

        Raises CandidateError where the candidate raised, CandidateFailedError where it did worse.
        """
        try:
            self._socket.settimeout(time_limit)
            number = secrets.token_hex(8)  # an answer that was written ahead cannot carry it
            self._line.send({**header, "id": number}, tensors or {})
            started = time.perf_counter()
            self._wait(header["op"], started, time_limit)
            seconds = time.perf_counter() - started
            # The answer has begun to arrive; the rest follows at once or not at all.
            self._socket.settimeout(max(10.0, time_limit))
            reply, received = self._line.receive()
        except TimeoutError as error:
            raise self._failure("hang", "the candidate's process stopped in mid-message") from error
        except (TransportError, OSError) as error:
            raise self._ended(str(error)) from error
        if reply.get("id") != number:
            raise self._failure("forged answer", "an answer came that no request had asked for")
        if not reply.get("ok"):
            raise CandidateError(reply.get("error") or {}, acts_of(reply))
        return reply, received, seconds

    def processor_seconds(self) -> float:
        """Processor time that the worker has used, as the kernel counts it."""
        try:
            # The clock of another process (clock_getcpuclockid): its id in the upper bits, kind 2.
            return time.clock_gettime((~self._process.pid << 3) | 2)
        except OSError as error:
            raise self._ended(str(error)) from error

    def close(self) -> None:
        """Ends the worker and whatever it started in its session, and removes its files."""
        self._line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)
        self._kill()
        end_marked(self._token)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, what: str, started: float, time_limit: float) -> None:
        while True:
            ready, _, _ = select.select([self._socket], [], [], _POLL_S)
            if ready:
                return
            used = _resident_bytes(self._process.pid)
            if used > self._memory_limit:
                raise self._failure(
                    "memory",
                    f"the candidate took {used >> 20} MiB of memory; the limit is "
                    f"{self._memory_limit >> 20} MiB",
                )
            if time.perf_counter() - started > time_limit:
                raise self._failure(
                    "hang", f"the candidate did not finish '{what}' within {time_limit:g} s"
                )

    def _ended(self, detail: str) -> CandidateFailedError:
        try:
            status = self._process.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return self._failure("forged answer", f"the line to the candidate broke: {detail}")
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
    acts = reply.get("acts")
    pairs = acts if isinstance(acts, list) else []
    return [(str(a[0]), str(a[1])) for a in pairs if isinstance(a, list) and len(a) == 2]


def encode_args(values: list) -> tuple:
    """(args for the header, tensors to send)."""
    args, tensors = [], {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensors[f"a{i}"] = value
            args.append({"tensor": f"a{i}"})
        else:
            args.append({"pickle": pickled(value)})
    return args, tensors


def pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _roomy_folder(blob_bytes: int) -> str | None:
    """Shared memory where it has room for the messages, else the usual temporary folder."""
    try:
        if shutil.disk_usage("/dev/shm").free > 4 * blob_bytes + (64 << 20):
            return "/dev/shm"
    except OSError:
        pass
    return None


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants."""
    total = 0
    pending = [pid]
    page = os.sysconf("SC_PAGE_SIZE")
    while pending:
        current = pending.pop()
        try:
            with open(f"/proc/{current}/statm") as file:
                total += int(file.read().split()[1]) * page
            with open(f"/proc/{current}/task/{current}/children") as file:
                pending += [int(n) for n in file.read().split()]
        except (OSError, ValueError, IndexError):
            continue
    return total
