"""Naming what a wrong result looks like: the known tricks of docs/verify.md.

Naming is help for the reader; a result that no trick explains is as wrong as one that is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .execution import decoys, same_bits
from .measures import measure
from .reference import rows_of
from .result import VerifyResult

ALIASED = "aliased output"
CACHED = "cached result"
DETACHED = "detached output"
EARLY = "work begun before its inputs"
KEPT_GRADIENT = "kept gradient"
LATE = "work finished later"
LAZY = "lazy output"
LOWER_PRECISION = "lower precision"
MISSING_STATISTICS = "missing statistics update"
MISSING_WRITE = "input not written"
REUSED = "reused output memory"
SKIPPED = "skipped work after the first calls"
STALE_INPUTS = "stale inputs"
STALE_STATISTICS = "stale statistics"
STALE_WEIGHTS = "stale weights"
UNWRITTEN = "unwritten output"
EVAL_ONLY = "wrong in eval mode only"
WRONG_WHEN_TIMED = "wrong in timed calls"
WRONG_GRADIENT = "wrong gradient"
KNOWN_SHAPES = "fitted to the checker's sizes"

_CALLS_KEPT = 6
# Wrong results that are looked at a moment later; the others are taken for as the last of them was.
_LOOKS_AGAIN = 3
# A lower precision shows as a small, regular error (fp16 1e-4, tf32 3e-4, bf16 3e-3, fp8 4e-2).
_LOWER_PRECISION = 0.06
# An explanation holds where it leaves this part of the error.
_EXPLAINED = 0.1
# An element is right that is this near, relative to the largest; part of them must be wrong.
_RIGHT = 1e-4
_PART = (0.05, 0.95)


@dataclass(frozen=True)
class Evidence:
    """What can be asked about a wrong result.

    read_again(): the outputs of this call as they are by now, or None.
    error_in_fresh_process(trial, before, seed, index, truth): the error of a candidate that has
    made no call yet. truth(state, values, training): the fp64 outputs.
    """

    read_again: Callable[[Any], list | None]
    error_in_fresh_process: Callable[..., float]
    truth: Callable[[dict, list, bool], list]


@dataclass(frozen=True)
class Wrong:
    """A wrong output `index` of a call, which the worker counts as number `call`."""

    trial: Any
    before: dict
    seed: int
    call: Any
    index: int
    output: torch.Tensor
    truth: torch.Tensor


class History:
    """Earlier calls, against which a wrong result is held."""

    def __init__(self, result: VerifyResult, evidence: Evidence) -> None:
        self._result = result
        self._evidence = evidence
        self._calls: list = []
        self._named: dict = {}  # by mode: finding a name is dear
        self._looks_again, self._was_late = _LOOKS_AGAIN, False

    def remember(self, trial: Any, before: dict, outputs: list) -> None:
        self._calls = ([*self._calls, (trial, before, outputs)])[-_CALLS_KEPT:]

    def name_trick(self, wrong: Wrong) -> str:
        """The trick that this wrong output looks like, or ""."""
        if self._comes_late(wrong):
            return LATE
        finite = bool(torch.isfinite(wrong.truth).all())
        if finite and not bool(torch.isfinite(wrong.output).all()):
            return UNWRITTEN
        if wrong.trial.own:
            mode = wrong.trial.training
            if mode not in self._named:
                self._named[mode] = self._name_own(wrong)
            if self._named[mode]:
                return self._named[mode]
        elif wrong.trial.unannounced and not self._failed_before():
            return KNOWN_SHAPES
        wrong_in_training = any(
            c.mode == "training" and c.outcome == "failed" for c in self._result.checks
        )
        return "" if wrong.trial.training or wrong_in_training else EVAL_ONLY

    def _comes_late(self, wrong: Wrong) -> bool:
        if self._looks_again:
            self._looks_again -= 1
            later = self._evidence.read_again(wrong.call)
            self._was_late = later is not None and not same_bits(later[wrong.index], wrong.output)
        return self._was_late

    def _failed_before(self) -> bool:
        return any(c.outcome == "failed" for c in self._result.checks)

    def _name_own(self, wrong: Wrong) -> str:
        for earlier, _, outputs in self._calls:
            other_inputs = earlier.values is not wrong.trial.values and wrong.index < len(outputs)
            if other_inputs and same_bits(outputs[wrong.index], wrong.output):
                return CACHED
        error = _error(wrong.truth, wrong.output)
        if wrong.truth.is_cuda and self._explains(
            wrong, wrong.before, decoys(wrong.trial.values), error
        ):
            return EARLY
        stale = self._name_stale(wrong, error)
        if stale:
            return stale
        if self._calls:
            # Only a candidate that keeps something from call to call is right in a fresh process.
            fresh = self._evidence.error_in_fresh_process(
                wrong.trial, wrong.before, wrong.seed, wrong.index, wrong.truth
            )
            if fresh < _EXPLAINED * error:
                return STALE_WEIGHTS if self._parameters_changed(wrong.before) else SKIPPED
        if 0 < error < _LOWER_PRECISION:
            return LOWER_PRECISION
        return UNWRITTEN if _partly_right(wrong.truth, wrong.output) else ""

    def _parameters_changed(self, now: dict) -> bool:
        return any(
            not same_bits(before[k], now[k])
            for _, before, _ in self._calls
            for k in now
            if k[0] == "p"
        )

    def _name_stale(self, wrong: Wrong, error: float) -> str:
        """Whether an earlier call's inputs, parameters or statistics explain the output."""
        seen: list = []
        for earlier, before, _ in reversed(self._calls):
            fresh = wrong.before
            guesses = {
                STALE_INPUTS: (fresh, earlier.values),
                STALE_WEIGHTS: (_mixed(fresh, before, "p:"), wrong.trial.values),
                STALE_STATISTICS: (_mixed(fresh, before, "b:"), wrong.trial.values),
            }
            for trick, (state, values) in guesses.items():
                same = all(same_bits(state[k], fresh[k]) for k in state)
                if (values is wrong.trial.values and same) or any(
                    values is v and _alike(state, s) for s, v in seen
                ):
                    continue
                seen.append((state, values))
                if self._explains(wrong, state, values, error):
                    return trick
        return ""

    def _explains(self, wrong: Wrong, state: dict, values: list, error: float) -> bool:
        """Whether the output is what these would give, rather than what it was called with."""
        outputs = self._evidence.truth(state, values, wrong.trial.training)
        if wrong.index >= len(outputs) or outputs[wrong.index].shape != wrong.output.shape:
            return False
        return _error(outputs[wrong.index], wrong.output) < _EXPLAINED * error


def _mixed(fresh: dict, old: dict, kind: str) -> dict:
    return {k: old[k] if k[:2] == kind else v for k, v in fresh.items()}


def _alike(a: dict, b: dict) -> bool:
    return all(same_bits(a[k], b[k]) for k in a)


def _error(truth: torch.Tensor, output: torch.Tensor) -> float:
    return measure(truth, output.to(truth.device), rows_of(truth)).relative_error


def _partly_right(truth: torch.Tensor, output: torch.Tensor) -> bool:
    difference = (output.to(truth) - truth).abs()
    right = float((difference <= _RIGHT * truth.abs().max()).double().mean())
    return _PART[0] < right < _PART[1]
