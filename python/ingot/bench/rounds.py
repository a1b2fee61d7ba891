"""Interleaved rounds: in each, every subject is timed once, in an order that rotates.

What drifts (clocks, temperature, other processes) then falls on all alike, and a ratio of two
subjects is taken within rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from ingot.runtime.ahead import settle

from .statistics import ROUNDS_FOR_A_VERDICT, Ratio, Summary, median_ratio, never_slower, summarize
from .timers import run_for, sleep, timer_for

_clock = perf_counter
_SHORT_ROUND_S = 1.0


@dataclass
class RoundOptions:
    """rounds: wanted; budget_s bounds them, at least `fewest` are made whatever it says. warmups
    and calls: of one subject in one round (a round's figure is the median of its calls).
    rest_s: idle time before a subject's burst on a GPU. extra_rounds: those of the figures beside
    it on a GPU, with warm L2 and sustained, which follow the others. sustained_load_s: load before
    the sustained figure. prepare(i): run before call i, outside the timed region (changes weights,
    say). apart: on a GPU every subject on a stream of its own, and with that in memory of its own,
    as in a process of its own: what one gives back to PyTorch's allocator no other one gets, whose
    calls would find their tensors elsewhere each round."""

    rounds: int = 20
    fewest: int = 7
    budget_s: float = 60.0
    warmups: int = 5
    calls: int = 20
    rest_s: float = 0.1
    extra_rounds: int = 5
    sustained_load_s: float = 0.35
    sustained: bool = True
    warm: bool = True
    apart: bool = False
    prepare: Callable[[int], None] | None = None
    progress: Callable[[str], None] = lambda message: None


@dataclass
class Comparison:
    """Seconds by subject, one figure per round: burst with cold L2 (the figure that counts; on a
    CPU there is only this one), burst with warm L2, sustained with cold L2."""

    device: str
    cold: dict = field(default_factory=dict)
    warm: dict = field(default_factory=dict)
    sustained: dict = field(default_factory=dict)
    rounds: int = 0
    note: str = ""

    def summary(self, subject: str) -> Summary:
        return summarize(self.cold[subject])

    def ratio(self, subject: str, baseline: str) -> Ratio:
        """Median of subject/baseline within rounds: below 1 the subject is faster."""
        return median_ratio(self.cold[subject], self.cold[baseline])

    def never_slower(self, subject: str, baseline: str) -> bool | None:
        return never_slower(self.cold[subject], self.cold[baseline])

    def table(self, ours: str) -> dict[str, dict]:
        """By subject median_ms, lower_quartile_ms, upper_quartile_ms, samples_ms; warm_ms and
        sustained_ms, where measured; of all but `ours` what `ours` takes of its time, ratio (lower,
        median, upper), and never_slower."""
        found = {}
        for name, seconds in self.cold.items():
            summary = self.summary(name)
            entry: dict = {
                "median_ms": summary.median * 1e3,
                "lower_quartile_ms": summary.lower_quartile * 1e3,
                "upper_quartile_ms": summary.upper_quartile * 1e3,
                "samples_ms": [value * 1e3 for value in seconds],
            }
            for key, samples in (("warm_ms", self.warm), ("sustained_ms", self.sustained)):
                if samples.get(name):
                    entry[key] = summarize(samples[name]).median * 1e3
            if name != ours:
                ratio = self.ratio(ours, name)
                entry["ratio"] = [ratio.lower, ratio.median, ratio.upper]
                entry["never_slower"] = self.never_slower(ours, name)
            found[name] = entry
        return found

    def to_dict(self) -> dict:
        return {
            "device": self.device,
            "rounds": self.rounds,
            "cold_s": self.cold,
            "warm_s": self.warm,
            "sustained_s": self.sustained,
            "note": self.note,
        }


def compare(
    subjects: dict[str, Callable[[int], object]],
    device: torch.device,
    options: RoundOptions | None = None,
) -> Comparison:
    """Times the subjects. Each is called as subject(i) with a running number, so that it can rotate
    its inputs. The first calls (compilation) are made before anything is timed."""
    options = options or RoundOptions()
    if options.apart and device.type == "cuda":
        subjects = {name: _on_stream(subject, device) for name, subject in subjects.items()}
    timer = timer_for(device)
    result = Comparison(str(device))
    first_call: dict[str, float] = {}
    for name, subject in subjects.items():
        options.progress(f"first call of {name}")
        start = _clock()
        subject(0)
        timer.synchronize()
        first_call[name] = _clock() - start
    settle()
    settled = {name: _one(timer, subject, options, 1) for name, subject in subjects.items()}
    plan = _RoundPlan.fit(settled, device, options)
    names = list(subjects)
    started = _clock()
    while result.rounds < options.rounds:
        over = _clock() - started > options.budget_s
        if over and result.rounds >= plan.fewest:
            break
        options.progress(f"round {result.rounds + 1} of {options.rounds}")
        for name in _in_turn(names, result.rounds):
            if device.type == "cuda":
                sleep(options.rest_s)
            seconds = _figure(timer, subjects[name], device, options, plan, True, plan.warmups)
            result.cold.setdefault(name, []).append(seconds)
        result.rounds += 1
    if device.type == "cuda":
        _time_extras(timer, subjects, device, options, plan, result)
    result.note = (
        f"{result.rounds} rounds, each of {plan.calls} call{'s' * (plan.calls > 1)} after "
        f"{plan.warmups} warm-up{'s' * (plan.warmups != 1)}"
        + ("" if result.rounds >= options.rounds else " (as many as the time allowed)")
    )
    return result


def _on_stream(subject: Callable[[int], object], device: torch.device) -> Callable[[int], object]:
    stream = torch.cuda.Stream(device)

    def call(number: int) -> object:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = subject(number)
        current.wait_stream(stream)
        return result

    return call


@dataclass(frozen=True)
class _RoundPlan:
    warmups: int
    calls: int
    fewest: int

    @classmethod
    def fit(cls, settled: dict[str, float], device: torch.device, options: RoundOptions):
        """On a GPU as asked. On a CPU, where calls take from microseconds to seconds: as many as
        the budget allows, a slow call being its own warm-up; enough rounds for a verdict where a
        round is short, whatever the budget says."""
        if device.type == "cuda":
            return cls(options.warmups, options.calls, options.fewest)
        one_round = sum(settled.values())
        affordable = options.budget_s / (options.rounds * max(one_round, 1e-7))
        calls = max(1, min(options.calls, int(affordable * 0.5)))
        warmups = 1 if calls > 2 else 0
        short = one_round < _SHORT_ROUND_S
        fewest = min(options.rounds, ROUNDS_FOR_A_VERDICT) if short else options.fewest
        return cls(warmups, max(1, calls - warmups), fewest)


def _one(timer, subject, options: RoundOptions, number: int) -> float:
    if options.prepare:
        options.prepare(number)
    start = _clock()
    subject(number)
    timer.synchronize()
    return _clock() - start


def _in_turn(names: list, number: int) -> list:
    turn = number % len(names)
    return names[turn:] + names[:turn]


def _figure(timer, subject, device, options, plan, cold: bool, warmups: int) -> float:
    for i in range(warmups):
        _one(timer, subject, options, i)
    return median(timer.time_calls(subject, plan.calls, cold, options.prepare))


def _time_extras(timer, subjects, device, options, plan, result) -> None:
    """With warm L2, and under sustained load: after the bursts, which should find the GPU cool."""
    for number in range(min(options.extra_rounds, result.rounds)):
        options.progress(f"warm and sustained, round {number + 1} of {options.extra_rounds}")
        for name in _in_turn(list(subjects), number):
            subject = subjects[name]
            if options.warm:
                seconds = _figure(timer, subject, device, options, plan, False, 1)
                result.warm.setdefault(name, []).append(seconds)
            if options.sustained:
                run_for(subject, options.sustained_load_s, timer.synchronize)
                seconds = _figure(timer, subject, device, options, plan, True, 0)
                result.sustained.setdefault(name, []).append(seconds)
