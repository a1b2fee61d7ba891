"""Timers of one call: CUDA events on a GPU, the wall clock on a CPU, seconds throughout.

The clock is bound when this module is loaded, before any candidate is: replacing
`time.perf_counter` later does not reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep

import torch

_clock = perf_counter
_FLUSH_FACTOR = 2
_FALLBACK_L2_BYTES = 64 << 20

__all__ = ["CpuTimer", "CudaTimer", "sleep", "timer_for"]


class CpuTimer:
    """Wall clock. The caches are as the other subjects of a round left them."""

    def __init__(self) -> None:
        self.synchronize = lambda: None

    def time_calls(
        self,
        call: Callable[[int], object],
        count: int,
        cold: bool,
        prepare: Callable[[int], None] | None = None,
    ) -> list:
        """Seconds of each of `count` calls of call(i); prepare(i) before each is not timed."""
        del cold
        seconds = []
        for i in range(count):
            if prepare:
                prepare(i)
            start = _clock()
            result = call(i)
            seconds.append(_clock() - start)
            del result  # freeing it belongs to the caller's time, not to the call's
        return seconds


class CudaTimer:
    """CUDA events around each call, on the current stream; `cold` first evicts L2."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        l2_bytes = getattr(properties, "L2_cache_size", 0) or _FALLBACK_L2_BYTES
        self._flush = torch.empty(_FLUSH_FACTOR * l2_bytes, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def time_calls(
        self,
        call: Callable[[int], object],
        count: int,
        cold: bool,
        prepare: Callable[[int], None] | None = None,
    ) -> list:
        """Seconds of each of `count` calls of call(i); prepare(i) before each is not timed.
        Evicting L2 also gives the host its head start."""
        events = []
        for i in range(count):
            if prepare:
                prepare(i)
            if cold:
                self._flush.fill_(i & 1)
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            result = call(i)
            end.record()
            del result
            events.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in events]


def timer_for(device: torch.device) -> CpuTimer | CudaTimer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def run_for(call: Callable[[int], object], seconds: float, synchronize: Callable) -> int:
    """Calls back to back for at least that long; returns how often."""
    count = 0
    end = _clock() + seconds
    while _clock() < end:
        for _ in range(4):
            call(count)
            count += 1
        synchronize()
    return count
