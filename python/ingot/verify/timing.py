"""The parent's part of timing: the rounds are the worker's word; this holds a clock beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ..bench.statistics import median_ratio, never_slower, summarize
from ..bench.subjects import EAGER
from . import criteria, execution
from .candidate import CandidateProcess, acts_of, encode_args
from .measures import measure
from .reference import rows_of
from .timing_worker import CANDIDATE

_REPEAT_S = 0.15
_MOST_CALLS = 10000
_CHECKS = 4
_BASELINE_TRIES = 4
_BASELINE_CALLS = 3
_TIMED_ERROR = (
    10.0  # times what the accuracy checks found: a cached or skipped result is far beyond
)


CLAIMED_TIME = "claims a false time"
SLOWED_BASELINE = "slows the baseline"
WRONG_WHEN_TIMED = "wrong in timed calls"


class ClaimRefusedError(Exception):
    """The worker's times or the results of its timed calls do not hold. trick: its name."""

    def __init__(self, trick: str, message: str) -> None:
        super().__init__(message)
        self.trick = trick


def time_pair(
    process: CandidateProcess,
    load_request: dict,
    header: dict,
    state: dict,
    input_sets: list,
    time_limit: float,
    truth_of: Callable[[dict, list], list],
    call_eager: Callable[[], None],
    allowed_error: float,
    device: str,
) -> dict:
    """Times the pair in `process`, a fresh one, and returns VerifyResult.timing.

    truth_of(state, values) gives the fp64 outputs; call_eager() runs the parent's original, to the
    end. Raises ClaimRefusedError, CandidateError or CandidateFailedError.
    """
    _refuse_acts(process.request(load_request, None, time_limit)[0])
    tensors = dict(state)
    encoded = []
    for i, values in enumerate(input_sets):
        args, own = encode_args(values)
        encoded.append([{"tensor": f"s{i}{a['tensor']}"} if "tensor" in a else a for a in args])
        tensors.update({f"s{i}{name}": value for name, value in own.items()})
    request = {**header, "op": "compare", "input_sets": encoded}
    reply, _, _ = process.request(request, tensors, time_limit + 4 * header["budget_s"])
    _refuse_acts(reply)
    samples = _checked_samples(reply)
    warm = reply.get("warm_s") or {}
    _refuse_slow_baseline(samples, call_eager, device)
    claimed = summarize(samples[CANDIDATE]).median
    if CANDIDATE in warm:
        claimed = min(claimed, summarize(warm[CANDIDATE]).median)
    clock = _ParentClock(
        process, time_limit, state, input_sets, truth_of, allowed_error, header["seed"]
    )
    measured = clock.measure(claimed, device == "cuda")
    if measured > criteria.TIMER_RATIO * claimed + criteria.TIMER_SLACK_S[device]:
        raise ClaimRefusedError(
            CLAIMED_TIME,
            f"the candidate's process claims {claimed * 1e3:.4f} ms a call, but by the parent's "
            f"clock calls take {measured * 1e3:.4f} ms",
        )
    return _table(reply, samples, measured)


def _refuse_acts(reply: dict) -> None:
    for trick, what in acts_of(reply):
        raise ClaimRefusedError(trick, f"the candidate {what}")


def _checked_samples(reply: dict) -> dict:
    samples = reply.get("cold_s")
    if not isinstance(samples, dict) or CANDIDATE not in samples:
        raise ClaimRefusedError(CLAIMED_TIME, "the candidate's process gave no times")
    for values in samples.values():
        good = isinstance(values, list) and all(
            isinstance(v, float) and math.isfinite(v) and v > 0 for v in values
        )
        if not good or len(values) != len(samples[CANDIDATE]):
            raise ClaimRefusedError(
                CLAIMED_TIME, "the candidate's process gave times that are none"
            )
    return samples


def _refuse_slow_baseline(samples: dict, call_eager: Callable[[], None], device: str) -> None:
    """The original runs beside the candidate when they are timed, and could be held up."""
    if EAGER not in samples:
        raise ClaimRefusedError(CLAIMED_TIME, "the candidate's process gave no times of eager")
    # On a CPU other programs' work slows single rounds: only what slows all of them is a trick.
    claimed = summarize(samples[EAGER]).lower_quartile if device == "cuda" else min(samples[EAGER])
    allowed = criteria.BASELINE_RATIO
    slowest = 0.0
    for _ in range(_BASELINE_TRIES):
        call_eager()
        started = time.perf_counter()
        for _ in range(_BASELINE_CALLS):
            call_eager()
        slowest = max(slowest, (time.perf_counter() - started) / _BASELINE_CALLS)
        if claimed <= allowed * slowest + criteria.TIMER_SLACK_S[device]:
            return
    raise ClaimRefusedError(
        SLOWED_BASELINE,
        f"the candidate's process claims {claimed * 1e3:.4f} ms for eager, which takes "
        f"{slowest * 1e3:.4f} ms in the parent",
    )


class _ParentClock:
    """Seconds a call: what 2n more calls add, the least of several tries, so that disturbances and
    the cost of the request fall away. Without a GPU to wait for, on a machine with other work, the
    processor time of the candidate's process is the smaller figure, and as far from its reach.
    The last call's outputs, and those of some others, must be right."""

    def __init__(
        self,
        process: CandidateProcess,
        time_limit: float,
        state: dict,
        input_sets: list,
        truth_of: Callable[[dict, list], list],
        allowed_error: float,
        seed: int,
    ) -> None:
        self._process = process
        self._time_limit = time_limit
        self._state = state
        self._input_sets = input_sets
        self._truth_of = truth_of
        self._allowed_error = allowed_error
        self._seed = seed

    def measure(self, claimed: float, on_gpu: bool) -> float:
        n = 1
        while n < _MOST_CALLS and self._repeat(n)[2] < _REPEAT_S:
            n *= 3
        best = math.inf
        for _ in range(_CHECKS):
            _, _, short, short_busy = self._repeat(n)
            reply, received, long, long_busy = self._repeat(3 * n)
            added = long - short if on_gpu else min(long - short, long_busy - short_busy)
            best = min(best, max(0.0, added) / (2 * n))
            self._check(reply, received)
            if best <= claimed * criteria.TIMER_RATIO:
                break
        return best

    def _repeat(self, calls: int) -> tuple:
        self._seed += 1
        request = {"op": "repeat", "calls": calls, "seed": self._seed}
        busy = self._process.processor_seconds()
        reply, received, seconds = self._process.request(request, None, self._time_limit)
        _refuse_acts(reply)
        return reply, received, seconds, self._process.processor_seconds() - busy

    def _check(self, reply: dict, received: dict) -> None:
        before = dict(self._state)
        before.update({k: v for k, v in received.items() if k[:2] == "b:"})
        wanted = {int(call): number for number, call in enumerate(reply["calls"])}
        sets = [
            [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            for values in self._input_sets
        ]
        change = execution.InputChanger(sets, self._seed)
        for call in range(max(wanted) + 1):
            change(call)
            if call in wanted:
                outputs = {k: v for k, v in received.items() if k[0] == "r"}
                self._check_call(sets[call % len(sets)], before, outputs, wanted[call])

    def _check_call(self, values: list, before: dict, received: dict, number: int) -> None:
        for i, exact in enumerate(self._truth_of(before, values)):
            output = received.get(f"r{number}.o{i}")
            if output is None or output.shape != exact.shape:
                raise ClaimRefusedError(
                    WRONG_WHEN_TIMED, "a timed call gave another number or shape of outputs"
                )
            if not exact.is_floating_point():
                continue
            error = measure(exact, output, rows_of(exact)).worst_row_error
            if not error <= self._allowed_error * _TIMED_ERROR:
                raise ClaimRefusedError(
                    WRONG_WHEN_TIMED,
                    f"the result of a timed call is wrong: error of the worst row {error:.1e}",
                )


def _table(reply: dict, samples: dict, measured: float) -> dict:
    candidate = samples[CANDIDATE]
    subjects = {}
    for name, values in samples.items():
        summary = summarize(values)
        entry: dict[str, Any] = {
            "median_ms": summary.median * 1e3,
            "lower_quartile_ms": summary.lower_quartile * 1e3,
            "upper_quartile_ms": summary.upper_quartile * 1e3,
            "samples_ms": [value * 1e3 for value in values],
        }
        for key in ("warm_s", "sustained_s"):
            extra = (reply.get(key) or {}).get(name)
            if extra:
                entry[key.replace("_s", "_ms")] = summarize(extra).median * 1e3
        if name != CANDIDATE:
            ratio = median_ratio(candidate, values)
            entry["ratio"] = [ratio.lower, ratio.median, ratio.upper]
            entry["never_slower"] = never_slower(candidate, values)
        subjects[name] = entry
    return {
        "subjects": subjects,
        "rounds": len(candidate),
        "note": reply.get("note", ""),
        "parent_clock_ms": measured * 1e3,
    }
