"""Errors against fp64, and times with cold L2, for the scripts beside this."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
from ingot.bench.rounds import RoundOptions

FACTOR, ROUNDING = 4.0, 2e-6  # an error may be this many times eager's, or this


def relative_error(found: list, truth: list) -> float:
    """Of the worst tensor. What is zero but for rounding (the gradient of a bias in front of a
    batch normalisation) has none."""
    size = [t.norm() / t.numel() ** 0.5 for t in truth]
    return max(
        ((a.double() - b).norm() / b.norm()).item()
        for a, b, rms in zip(found, truth, size, strict=True)
        if rms > 1e-9 * max(size)
    )


def kernels_of(call) -> list[tuple[str, float, float]]:
    """Of each kernel of a call its name, and in the median of seven calls the microseconds that it
    takes, and by which it ends after the one before, or its own start. (They overlap.)"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(7):
            call()
            torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    count, found = len(events) // 7, []
    for first in range(count):
        took, added = [], []
        for at in range(first, len(events), count):
            span = events[at].time_range
            took.append(span.elapsed_us())
            added.append(span.end - (events[at - 1].time_range.end if first else span.start))
        found.append((events[first].name, statistics.median(took), statistics.median(added)))
    return found


def too_large(error: float, eager_error: float) -> str:
    """What is wrong with an error, if anything is."""
    if error <= max(FACTOR * eager_error, ROUNDING):
        return ""
    return f"its error is {error:.1e}, eager's {eager_error:.1e}"


def unlike_eagers(names, found, expected, truth, factor_of, floor: float) -> str:
    """What is wrong with the first of several tensors that is laid out otherwise than eager's, or
    whose error is beyond factor_of(name) times eager's, and a floor."""
    for name, own, eager, exactly in zip(names, found, expected, truth, strict=True):
        if (own.dtype, own.shape, own.stride()) != (eager.dtype, eager.shape, eager.stride()):
            return f"{name} is {own.dtype} {tuple(own.shape)} {own.stride()}"
        error = relative_error([own], [exactly])
        limit = factor_of(name) * relative_error([eager], [exactly]) + floor
        if not error <= limit:
            return f"{name}: {error:.1e}, may be {limit:.1e}"
    return ""


def tell(cases: Iterable[tuple[str, Callable[[], str]]], seconds: float) -> int:
    """Runs checks, each of which says what is wrong; prints a line for each. The exit status: 1
    something was wrong, 3 time ran out, else 0."""
    deadline, failed = time.monotonic() + seconds, 0
    for name, check in cases:
        if time.monotonic() > deadline:
            print("time ran out")
            return 3
        wrong = check()
        failed += bool(wrong)
        print(f"{name}: {'WRONG ' + wrong if wrong else 'ok'}", flush=True)
    return 1 if failed else 0


def short_rounds(rounds: int, budget_s: float, **others) -> RoundOptions:
    """Interleaved, with cold L2, and nothing beside."""
    settled = {"warmups": 1, "extra_rounds": 0, "sustained": False, "warm": False}
    return RoundOptions(rounds=rounds, budget_s=budget_s, **{**settled, **others})


class Timer:
    """On a CPU without the cold L2."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        self.flush = torch.empty(1 << 28, dtype=torch.uint8, device=device) if self.cuda else None

    def once(self, call) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def medians(self, calls: list, rounds: int) -> list[float]:
        times = [[] for _ in calls]
        for call in calls * 2:
            self.once(call)
        for number in range(rounds):
            for i in range(len(calls)):
                index = (i + number) % len(calls)
                times[index].append(self.once(calls[index]))
        return [statistics.median(each) for each in times]
