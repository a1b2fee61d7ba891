"""What a verification needs and takes seconds to start, started while there is other work."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import torch

from .candidate import CandidateProcess, environment

_MEMORY_SHARE = 0.8
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")


class Ahead:
    """Processes for a candidate, one for what is checked and one for what is timed, and on a GPU
    one that compiles the original's kernels by torch.compile, so that they are found in Triton's
    cache where that baseline is timed.

    candidate_modules: what the candidate will import. timed: whether there will be a second process
    for a candidate. compiled: whether torch.compile is timed too.
    """

    def __init__(
        self,
        memory_limit: int | None,
        candidate_modules: tuple = (),
        timed: bool = False,
        compiled: bool = False,
    ) -> None:
        self._limit = memory_limit
        self._modules = candidate_modules
        self._timed = timed
        self._compiled = compiled
        self._second: CandidateProcess | None = None
        self._kernels: Kernels | None = None
        self._first: CandidateProcess | None = self.process()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *unused: Any) -> None:
        started = (self._first, self._second, self._kernels)
        self._first = self._second = self._kernels = None
        for process in started:
            if process is not None:
                process.close()

    def process(self, more: tuple = ()) -> CandidateProcess:
        """A fresh one."""
        limit = int(_MEMORY_SHARE * _available_memory()) if self._limit is None else self._limit
        return CandidateProcess(limit, tuple(dict.fromkeys((*self._modules, *more))))

    def first(self) -> CandidateProcess:
        """For what is checked."""
        process, self._first = self._first or self.process(), None
        return process

    def begin_second(self) -> CandidateProcess | None:
        """Of the process that `second` will give, where something will be timed."""
        if self._timed and self._second is None:
            self._second = self.process(_COMPILER if self._compiled else ())
        return self._second

    def second(self) -> CandidateProcess:
        """For what is timed: nothing else runs from here on."""
        kernels, self._kernels = self._kernels, None
        if kernels is not None:
            kernels.close()
        process, self._second = self._second or self.process(), None
        return process

    def begin_kernels(self, original: str, overrides: dict, device: str) -> None:
        if self._timed and self._compiled and device == "cuda" and self._kernels is None:
            self._kernels = Kernels(original, overrides)


class Kernels:
    """A process that compiles the original once and for nothing but Triton's cache. What it has
    measured on a GPU with other work goes with its folder."""

    def __init__(self, original: str, overrides: dict) -> None:
        self._folder = tempfile.mkdtemp(prefix="ingot-kernels-")
        request = {"original": original, "overrides": overrides, "folder": self._folder}
        self._process = _beside("ingot.verify.compile_ahead", repr(request))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Extensions:
    """A process that builds what a standalone file compiles only where gradients are asked for,
    into PyTorch's cache: the candidate's own process builds the rest meanwhile."""

    def __init__(self, file: str) -> None:
        self._process = _beside("ingot.verify.build_ahead", file)

    def __enter__(self) -> Extensions:
        return self

    def __exit__(self, *unused: Any) -> None:
        """Not killed: PyTorch's lock on that part of its cache would stay for ever."""
        self._process.wait()


def _beside(module: str, argument: str) -> subprocess.Popen:
    """Runs a module of this package, which says nothing and may fail."""
    return subprocess.Popen(
        [sys.executable, "-m", module, argument],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment(),
    )


def candidate_modules(source: bytes) -> tuple:
    """What takes seconds to import and a candidate of Ingot's will need."""
    return ("torch._dynamo",) if b"import ingot" in source else ()


def _available_memory() -> int:
    """Bytes that programs can still have, the page cache given back."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def room_beside(needed: int, device: torch.device) -> bool:
    """Whether a model that needs so many bytes finds room on the GPU many times."""
    return device.type == "cuda" and 16 * needed < torch.cuda.mem_get_info(device)[0]
