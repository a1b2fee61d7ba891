"""The parent's part of timing: the rounds are the worker's word; this holds a clock beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..bench.rounds import Comparison
from ..bench.statistics import summarize
from ..bench.subjects import EAGER
from . import criteria, execution, passing
from .candidate import CandidateProcess, acts_of
from .execution import same_bits
from .measures import measure
from .reference import Results, rows_of
from .timing_worker import CANDIDATE
from .tricks import LATE, MISSING_STATISTICS, MISSING_WRITE, WRONG_WHEN_TIMED

_REPEAT_S = 0.15
_MOST_CALLS = 10000
_CHECKS = 4
_BASELINE_TRIES = 4
_BASELINE_CALLS = 3
_BASELINE_LONG_S = 0.3  # of which one call is enough
_TIMED_ERROR = (
    10.0  # times what the accuracy checks found: a cached or skipped result is far beyond
)


# A CPU that other programs slow for some seconds makes one half of a comparison slow: a claim that
# the parent's clock contradicts is made anew. What slows the original is refused at once, since it
# might leave off then.
_TRIES = {"cpu": 3, "cuda": 1}

CLAIMED_TIME = "claims a false time"
SLOWED_BASELINE = "slows the baseline"


@dataclass(frozen=True)
class Truth:
    """What the parent knows of timed calls. results(state, values): of the fp64 original, or None
    where it is random, so that values say nothing. output_error, buffer_errors: what the accuracy
    checks found, for outputs and for each buffer. eager(): one call of the parent's original, to
    its end. eager_results(state, values): of the original as it is. restoring_s: what it takes to
    put back, before a call, what the original changes."""

    results: Callable[[dict, list], Results] | None
    output_error: float
    buffer_errors: dict
    eager: Callable[[], None]
    eager_results: Callable[[dict, list], Results] | None = None
    restoring_s: float = 0.0


class ClaimRefusedError(Exception):
    """The worker's times or the results of its timed calls do not hold. trick: its name."""

    def __init__(self, trick: str, message: str) -> None:
        super().__init__(message)
        self.trick = trick


def time_pair(
    process: CandidateProcess,
    header: dict,
    state: dict,
    input_sets: list,
    time_limit: float,
    truth: Truth,
    device: str,
) -> dict:
    """Times the pair in `process`, a fresh one that was asked to load the candidate, and returns
    VerifyResult.timing.

    Raises ClaimRefusedError, CandidateError or CandidateFailedError.
    """
    _refuse_acts(process.answer()[0])
    tensors = dict(state)
    packed = []
    for i, values in enumerate(input_sets):
        text, own = passing.packed(values, f"s{i}a")
        packed.append(text)
        tensors.update(own)
    request = {**header, "op": "compare", "input_sets": packed}
    limit = time_limit + 4 * header["budget_s"]
    clock = _ParentClock(process, time_limit, state, input_sets, truth, header["seed"], device)
    for left in reversed(range(_TRIES[device])):
        reply, _, _ = process.request(request, tensors, limit)
        _refuse_acts(reply)
        samples = _checked_samples(reply)
        _refuse_slow_baseline(samples, truth.eager, device)
        try:
            return _table(reply, samples, _measured(clock, reply, samples, device))
        except ClaimRefusedError as refused:
            if not left or refused.trick != CLAIMED_TIME:
                raise
    raise AssertionError("the last try returns or raises")


def _measured(clock: _ParentClock, reply: dict, samples: dict, device: str) -> float:
    """Seconds a call by the parent's clock, which must not be far above the claim."""
    claimed = summarize(samples[CANDIDATE]).median
    if reply["warm_s"].get(CANDIDATE):
        claimed = min(claimed, summarize(reply["warm_s"][CANDIDATE]).median)
    measured = max(0.0, clock.measure(claimed) - clock.restoring_s)
    if measured > criteria.TIMER_RATIO * claimed + criteria.TIMER_SLACK_S[device]:
        raise ClaimRefusedError(
            CLAIMED_TIME,
            f"the candidate's process claims {claimed * 1e3:.4f} ms a call, but by the parent's "
            f"clock calls take {measured * 1e3:.4f} ms",
        )
    return measured


def _refuse_acts(reply: dict) -> None:
    for trick, what in acts_of(reply):
        raise ClaimRefusedError(trick, f"the candidate {what}")


def _checked_samples(reply: dict) -> dict:
    samples = reply["cold_s"]
    if not samples.get(CANDIDATE):
        raise ClaimRefusedError(CLAIMED_TIME, "the candidate's process gave no times")
    if any(len(values) != len(samples[CANDIDATE]) for values in samples.values()):
        raise ClaimRefusedError(CLAIMED_TIME, "the candidate's process gave times that are none")
    return samples


def _fastest(call: Callable[[], None]) -> float:
    """Seconds of the fastest of a few calls: what stops the parent for a moment (a collection of
    garbage, another program) must not make its original slow."""
    began, fastest = time.perf_counter(), math.inf
    for _ in range(_BASELINE_CALLS):
        started = time.perf_counter()
        call()
        ended = time.perf_counter()
        fastest = min(fastest, ended - started)
        if ended - began > _BASELINE_LONG_S:
            break
    return fastest


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
        slowest = max(slowest, _fastest(call_eager))
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
    processor time of the candidate's process, and of all that it started, is the smaller figure,
    and as far from its reach. The last call's outputs, and those of some others, must be right,
    and so must the statistics of some."""

    def __init__(
        self,
        process: CandidateProcess,
        time_limit: float,
        state: dict,
        input_sets: list,
        truth: Truth,
        seed: int,
        device: str,
    ) -> None:
        self._process = process
        self._on_gpu = device == "cuda"
        self._time_limit = time_limit
        self._state = state
        self._input_sets = input_sets
        self._truth = truth
        self._seed = seed
        self.restoring_s = truth.restoring_s
        self._moving: bool | None = None

    def measure(self, claimed: float) -> float:
        n = 1
        while n < _MOST_CALLS and self._is_short(*self._repeat(n)[2:]):
            n *= 3
        best = math.inf
        for _ in range(_CHECKS):
            _, _, short, short_busy = self._repeat(n)
            reply, received, long, long_busy = self._repeat(3 * n)
            added = min(long - short, long_busy - short_busy)
            best = min(best, max(0.0, added) / (2 * n))
            self._check(reply, received)
            if best <= claimed * criteria.TIMER_RATIO + self.restoring_s:
                break
        return best

    def _is_short(self, seconds: float, busy: float) -> bool:
        """Too short to tell calls from the rest of a request, but for the waiting of a machine that
        has other work."""
        return busy < _REPEAT_S and seconds < 10 * _REPEAT_S

    def _repeat(self, calls: int) -> tuple:
        """(reply, tensors, seconds, seconds of processors; on a GPU the same)."""
        self._seed += 1
        request = {"op": "repeat", "calls": calls, "seed": self._seed}
        busy = 0.0 if self._on_gpu else self._process.processor_seconds()
        reply, received, seconds = self._process.request(request, None, self._time_limit)
        _refuse_acts(reply)
        busy = seconds if self._on_gpu else self._process.processor_seconds() - busy
        return reply, received, seconds, busy

    def _check(self, reply: dict, received: dict) -> None:
        """The calls that the worker kept, in the order in which they were made."""
        for number, positions in enumerate(reply["positions"]):
            _refuse_changed_later(received, number, positions)
        if self._truth.results is not None:
            sampled = {call: number for number, call in enumerate(reply["calls"])}
            marked, truths = reply["marked"], {}
            for call, given in self._given({*sampled, *marked}, marked, received):
                exact = self._truth.results(*given)
                if call in sampled and (
                    call in marked or not self._depends_on_buffers(given, marked, received)
                ):
                    self._check_outputs(exact, given, received, sampled[call])
                if call in marked:
                    truths[call] = exact
            # Behind all outputs: a result that was kept is named as such.
            for call in marked:
                self._check_buffers(truths[call], received, call)
                self._check_inputs(truths[call], received, call)
        _refuse_missing_counts(received, reply["marked"])

    def _given(self, calls: set, marked: list, received: dict) -> Iterator[tuple]:
        """(call, (state, inputs) as they were then), buffers where they were kept. The next call
        changes the inputs."""
        sets = [passing.map_tensors(v, torch.clone) for v in self._input_sets]
        change = execution.InputChanger(sets, self._seed)
        for call in range(max(calls, default=-1) + 1):
            change(call)
            if call in calls:
                start = f"m{call if call in marked else max(marked, default=0)}<"
                before = {k[len(start) :]: v for k, v in received.items() if k.startswith(start)}
                yield call, ({**self._state, **before}, sets[call % len(sets)])

    def _depends_on_buffers(self, given: tuple, marked: list, received: dict) -> bool:
        """Whether outputs are other ones after other calls, with the same inputs: then those of a
        call of which the buffers are not known say nothing. (A norm's in training do not.)"""
        if self._moving is None:
            self._moving = False
            first, last = (
                {k[len(f"m{c}<") :]: v for k, v in received.items() if k.startswith(f"m{c}<")}
                for c in (min(marked, default=0), max(marked, default=0))
            )
            if any(not same_bits(value, last.get(key)) for key, value in first.items()):
                assert self._truth.results is not None
                pair = [
                    self._truth.results({**given[0], **found}, given[1]).outputs
                    for found in (first, last)
                ]
                self._moving = not all(map(same_bits, *pair))
        return self._moving

    def _check_outputs(self, exact: Results, given: tuple, received: dict, number: int) -> None:
        for i, wanted in enumerate(exact.outputs):
            output = received.get(f"r{number}.o{i}")
            if output is None or output.shape != wanted.shape:
                raise ClaimRefusedError(
                    WRONG_WHEN_TIMED, "a timed call gave another number or shape of outputs"
                )
            if not wanted.is_floating_point() and not wanted.is_complex():
                continue
            error = measure(wanted, output, rows_of(wanted)).worst_row_error
            allowed = self._truth.output_error * _TIMED_ERROR
            if not error <= allowed and not error <= self._eager_error(given, wanted, i):
                raise ClaimRefusedError(
                    WRONG_WHEN_TIMED,
                    f"the result of a timed call is wrong: error of the worst row {error:.1e}",
                )

    def _eager_error(self, given: tuple, wanted: torch.Tensor, index: int) -> float:
        """Of a worst row: on inputs that were changed rounding may count for more. (Softmaxes by
        scales as random came to 0.3 to 1.04 of what is allowed, with the bits of calls that were
        not timed; eager's error was six times as large.)"""
        if self._truth.eager_results is None:
            return 0.0
        found = self._truth.eager_results(*given).outputs[index]
        return measure(wanted, found, rows_of(wanted)).worst_row_error

    def _check_buffers(self, exact: Results, received: dict, call: int) -> None:
        for key, wanted in exact.state.items():
            if key[0] == "p":
                continue
            name, found = key[2:], received.get(f"m{call}>{key}")
            good = found is not None and found.shape == wanted.shape
            if found is not None and good and wanted.is_floating_point():
                error = measure(wanted, found, 1).relative_error
                good = error <= self._truth.buffer_errors.get(name, 1e-6) * _TIMED_ERROR
            elif found is not None and good:
                good = torch.equal(found.to(wanted.device), wanted)
            if not good:
                raise ClaimRefusedError(
                    MISSING_STATISTICS,
                    f"after a timed call buffer {name} is not what the original's becomes",
                )

    def _check_inputs(self, exact: Results, received: dict, call: int) -> None:
        """Those that the original changes."""
        for i in exact.changed_inputs:
            found, wanted = received.get(f"m{call}>i{i}"), exact.inputs[i]
            good = found is not None and found.shape == wanted.shape
            if found is not None and good:
                error = measure(wanted, found, rows_of(wanted)).worst_row_error
                good = error <= self._truth.output_error * _TIMED_ERROR
            if not good:
                raise ClaimRefusedError(
                    MISSING_WRITE,
                    f"after a timed call input {i} is not what the original's becomes",
                )


def _refuse_changed_later(received: dict, number: int, positions: list) -> None:
    """Of a result, what lay there when the call returned, and what lies there now."""
    index = 0
    while (whole := received.get(f"r{number}.o{index}")) is not None:
        seen = received.get(f"g{number}.o{index}")
        if not same_bits(execution.at_places(whole, torch.tensor(positions)), seen):
            raise ClaimRefusedError(LATE, "a timed call's result was written after it returned")
        index += 1


def _refuse_missing_counts(received: dict, marked: list) -> None:
    """Between two calls, num_batches_tracked counts those between."""
    if not marked:
        return
    first, last = marked[0], marked[-1]
    for name, before in received.items():
        if not (name.startswith(f"m{first}<") and name.endswith("num_batches_tracked")):
            continue
        step = received.get(f"m{first}>{name.partition('<')[2]}")
        late = received.get(f"m{last}<{name.partition('<')[2]}")
        if step is None or late is None:
            counted = False
        else:
            counted = int(late - before) == int(step - before) * (last - first)
        if not counted:
            raise ClaimRefusedError(
                MISSING_STATISTICS, f"timed calls leave out updates of {name.partition(':')[2]}"
            )


def _table(reply: dict, samples: dict, measured: float) -> dict:
    warm, sustained = (reply.get(key) or {} for key in ("warm_s", "sustained_s"))
    return {
        "subjects": Comparison("", samples, warm, sustained).table(CANDIDATE),
        "rounds": len(samples[CANDIDATE]),
        "note": reply.get("note", ""),
        "parent_clock_ms": measured * 1e3,
    }
