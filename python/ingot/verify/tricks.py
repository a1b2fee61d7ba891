"""Naming what a wrong result looks like: the known tricks of docs/verify.md.

Naming is help for the reader; a result that no trick explains is as wrong as one that is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .measures import measure
from .reference import rows_of
from .result import VerifyResult

_CALLS_KEPT = 4
# A lower precision shows as a small, regular error (fp16 1e-4, tf32 3e-4, bf16 3e-3, fp8 4e-2).
_LOWER_PRECISION = 0.06


class History:
    """Earlier calls, against which a wrong result is held."""

    def __init__(self, result: VerifyResult, error_in_fresh_process: Callable[..., float]) -> None:
        self._result = result
        self._error_in_fresh_process = error_in_fresh_process
        self._calls: list = []
        self._named: set = set()

    def remember(self, trial: Any, before: dict, outputs: list) -> None:
        self._calls = ([*self._calls, (trial, before, outputs)])[-_CALLS_KEPT:]

    def name_trick(
        self,
        trial: Any,
        before: dict,
        seed: int,
        index: int,
        output: torch.Tensor,
        truth: torch.Tensor,
    ) -> str:
        """The trick that this wrong output looks like, or ""."""
        if not bool(torch.isfinite(output).all()) and bool(torch.isfinite(truth).all()):
            return "unwritten output"
        if trial.own:
            trick = self._name_own(trial, before, seed, index, output, truth)
            if trick:
                return trick
        wrong_in_training = any(
            c.mode == "training" and c.outcome == "failed" for c in self._result.checks
        )
        return "" if trial.training or wrong_in_training else "wrong in eval mode only"

    def _name_own(
        self,
        trial: Any,
        before: dict,
        seed: int,
        index: int,
        output: torch.Tensor,
        truth: torch.Tensor,
    ) -> str:
        for earlier, _, outputs in self._calls:
            other_inputs = earlier.values is not trial.values and index < len(outputs)
            if other_inputs and _equal(outputs[index], output):
                return "cached result"
        error = measure(truth, output.to(truth.device), rows_of(truth)).relative_error
        if 0 < error < _LOWER_PRECISION and not self._calls:
            return "lower precision"
        if self._calls and trial.training not in self._named:
            # Only a candidate that keeps something from call to call is right in a fresh process.
            fresh = self._error_in_fresh_process(trial, before, seed, index, truth)
            self._named.add(trial.training)
            if fresh < 0.1 * error:
                unchanged = all(_equal(before[k], self._calls[-1][1][k]) for k in before)
                return "cached result" if unchanged else "stale weights"
        return "lower precision" if 0 < error < _LOWER_PRECISION else ""


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
