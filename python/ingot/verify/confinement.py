"""Walls between parent and worker that the operating system builds, and what seals the files.

None of them is a sandbox: they take from a candidate what an ordinary process has by default and no
model needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 3, 4, 24
_PR_SET_CHILD_SUBREAPER = 36
_CAP_SYS_PTRACE = 19
_CAPABILITY_VERSION_3 = 0x20080522
TOKEN = "INGOT_VERIFY_WORKER"  # marks a worker and what it starts, in their environments


def _prctl(option: int, argument: int = 0) -> int:
    try:
        return int(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0))
    except (OSError, AttributeError):
        return -1


@contextlib.contextmanager
def unreadable() -> Iterator[None]:
    """Within it, other processes of the same user may not read or write this one's memory
    (/proc/PID/mem, process_vm_writev, ptrace), unless they hold a debugger's capability."""
    before = _prctl(_PR_GET_DUMPABLE)
    if before == 1:
        _prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        if before == 1:
            _prctl(_PR_SET_DUMPABLE, 1)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint32) for n in ("effective", "permitted", "inheritable"))


def confine_worker() -> None:
    """Ends this process with its parent, keeps whatever it starts among its descendants, and gives
    up the capability to debug others, which root has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE)
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    data = (_CapabilityData * 2)()
    libc = ctypes.CDLL(None)
    if libc.capget(ctypes.byref(header), data) == 0:
        for name in ("effective", "permitted", "inheritable"):
            setattr(data[0], name, getattr(data[0], name) & ~(1 << _CAP_SYS_PTRACE))
        libc.capset(ctypes.byref(header), data)


def marked(token: str) -> list:
    """The processes that a worker started, also those that left its session, as long as they kept
    its environment. The worker is one of them."""
    mark = f"{TOKEN}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def end_marked(token: str) -> None:
    """Ends what a worker started and let go."""
    for pid in marked(token):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class Seal:
    """Digests of the two files and of this package, which later processes load again."""

    def __init__(self, *paths: str) -> None:
        package = Path(__file__).resolve().parents[1]
        self._files = [Path(p) for p in paths]
        # Compiled files count where they were there before: the worker's imports may add others.
        self._files += [p for s in ("*.py", "*.pyc", "*.so") for p in package.rglob(s)]
        self._digests = {p: _digest(p) for p in self._files}

    def broken(self) -> list:
        """The files that have changed."""
        return [str(p) for p, digest in self._digests.items() if _digest(p) != digest]


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""
