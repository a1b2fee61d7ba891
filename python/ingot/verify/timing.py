"""The parent's part of timing: the rounds are the worker's word; this holds a clock beside it."""

from __future__ import annotations

import math
from typing import Any

from ..bench.statistics import median_ratio, never_slower, summarize
from . import criteria
from .candidate import CandidateProcess, encode_args
from .measures import measure
from .reference import rows_of
from .timing_worker import CANDIDATE

_REPEAT_S = 0.15
_MOST_CALLS = 10000
_CHECKS = 4
_TIMED_ERROR = (
    10.0  # times what the accuracy checks found: a cached or skipped result is far beyond
)


class ClaimRefusedError(Exception):
    """The worker's times or the results of its timed calls do not hold."""


def time_pair(
    process: CandidateProcess,
    load_request: dict,
    header: dict,
    state: dict,
    input_sets: list,
    time_limit: float,
    truth_of: Any,
    allowed_error: float,
    device: str,
) -> dict:
    """Times the pair in `process`, a fresh one, and returns VerifyResult.timing.

    truth_of(state, values) gives the fp64 outputs. Raises ClaimRefusedError, CandidateError or
    CandidateFailedError.
    """
    process.request(load_request, None, time_limit)
    tensors = dict(state)
    encoded = []
    for i, values in enumerate(input_sets):
        args, own = encode_args(values)
        encoded.append([{"tensor": f"s{i}{a['tensor']}"} if "tensor" in a else a for a in args])
        tensors.update({f"s{i}{name}": value for name, value in own.items()})
    request = {**header, "op": "compare", "input_sets": encoded}
    reply, _, _ = process.request(request, tensors, time_limit + 4 * header["budget_s"])
    samples = _checked_samples(reply)
    claimed = summarize(samples[CANDIDATE]).median
    if reply.get("warm_s"):
        claimed = min(claimed, summarize(reply["warm_s"][CANDIDATE]).median)
    measured = _measure_by_own_clock(
        process, claimed, device == "cuda", time_limit, state, input_sets, truth_of, allowed_error
    )
    if measured > criteria.TIMER_RATIO * claimed + criteria.TIMER_SLACK_S[device]:
        raise ClaimRefusedError(
            f"the candidate's process claims {claimed * 1e3:.4f} ms a call, but by the parent's "
            f"clock calls take {measured * 1e3:.4f} ms"
        )
    return _table(reply, samples, measured)


def _checked_samples(reply: dict) -> dict:
    samples = reply.get("cold_s")
    if not isinstance(samples, dict) or CANDIDATE not in samples:
        raise ClaimRefusedError("the candidate's process gave no times")
    for values in samples.values():
        good = isinstance(values, list) and all(
            isinstance(v, float) and math.isfinite(v) and v > 0 for v in values
        )
        if not good or len(values) != len(samples[CANDIDATE]):
            raise ClaimRefusedError("the candidate's process gave times that are none")
    return samples


def _measure_by_own_clock(
    process: CandidateProcess,
    claimed: float,
    on_gpu: bool,
    time_limit: float,
    state: dict,
    input_sets: list,
    truth_of: Any,
    allowed_error: float,
) -> float:
    """Seconds a call: what 2n more calls add, the least of several tries, so that disturbances and
    the cost of the request fall away. Without a GPU to wait for, on a machine with other work, the
    processor time of the candidate's process is the smaller figure, and as far from its reach. The
    last call's outputs must be right."""

    def repeat(calls: int) -> tuple:
        busy = process.processor_seconds()
        reply, received, seconds = process.request(
            {"op": "repeat", "calls": calls}, None, time_limit
        )
        return reply, received, seconds, process.processor_seconds() - busy

    n = 1
    while n < _MOST_CALLS and repeat(n)[2] < _REPEAT_S:
        n *= 3
    best = math.inf
    for _ in range(_CHECKS):
        _, _, short, short_busy = repeat(n)
        reply, received, long, long_busy = repeat(3 * n)
        added = long - short if on_gpu else min(long - short, long_busy - short_busy)
        best = min(best, max(0.0, added) / (2 * n))
        _check_timed_result(reply, received, state, input_sets, truth_of, allowed_error)
        if best <= claimed * criteria.TIMER_RATIO:
            break
    return best


def _check_timed_result(
    reply: dict, received: dict, state: dict, input_sets: list, truth_of: Any, allowed_error: float
) -> None:
    values = input_sets[int(reply["last"]) % len(input_sets)]
    before = dict(state)
    before.update({k: v for k, v in received.items() if k[:2] == "b:"})
    for i, exact in enumerate(truth_of(before, values)):
        output = received.get(f"o{i}")
        if output is None or output.shape != exact.shape:
            raise ClaimRefusedError("a timed call gave another number or shape of outputs")
        if not exact.is_floating_point():
            continue
        error = measure(exact, output, rows_of(exact)).relative_error
        if not error <= allowed_error * _TIMED_ERROR:
            raise ClaimRefusedError(
                f"the result of a timed call is wrong: relative error {error:.1e}"
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
