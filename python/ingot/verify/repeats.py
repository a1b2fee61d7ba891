"""Failed trials that are asked for again, with other inputs: those that chance may explain. What is
wrong is wrong again."""

from __future__ import annotations

from collections.abc import Callable

from . import tricks
from .judging import MODES
from .result import AccuracyRow, Check, VerifyResult

_ATTEMPTS = 3
_SLIGHTLY = 1.5  # times what is allowed
_BEYOND = 4  # elements of an output that are finite or not
_KINKS = 1e-2  # relative: of a gradient that lacks a few elements of thousands, and no more
# Of hostile inputs nearly all values may lie beyond a clamp's bounds: few have a gradient.
_KINKS_OF_FEW = 0.3


class Repeats:
    """Asks for the trials of one verification, whose result keeps the last attempt of each."""

    def __init__(self, result: VerifyResult) -> None:
        self._result = result

    def ask(self, name: str, training: bool, ask: Callable, excuse: Callable) -> None:
        """ask(attempt) runs a trial. excuse(failed, judged): why its failed checks may be chance,
        or ""; judged: its rows, up to the tensor that failed. Asked again, a trial has failed only
        if the last of its attempts did."""
        for attempt in range(_ATTEMPTS):
            checks, rows = len(self._result.checks), len(self._result.accuracy)
            ask(attempt)
            failed = [check for check in self._result.checks[checks:] if not check.passed]
            if not failed or attempt + 1 == _ATTEMPTS:
                return
            why = excuse(failed, self._result.accuracy[rows:])
            if not why:
                return
            del self._result.checks[checks:], self._result.accuracy[rows:]
            self._result.notes.append(
                f"{name} ({MODES[training]}) asked for again with other inputs, since {why}: "
                f"{failed[0].message}"
            )


# Excuses: of a trial's failed checks, and of its rows up to the tensor that failed; or "" ---------


def excuse_of_gradients(failed: list[Check], judged: list[AccuracyRow]) -> str:
    return _kink(failed, judged, _KINKS)


def excuse_of_hostile(failed: list[Check], judged: list[AccuracyRow]) -> str:
    """Disturbed runs know an error's size only so well: one may exceed it by a little. And what
    overflows, or is an infinite multiple of what is nearly zero, may be so by the last bit."""
    beyond = [row.candidate.nonfinite_mismatches for row in judged]
    over = [_over(row) for row in judged if _over(row) > 1]
    if any(beyond) and max(beyond) <= _BEYOND and not over:
        return "a value may be finite or not by rounding alone"
    return "its error is hardly more than allowed" if over and max(over) <= _SLIGHTLY else ""


def excuse_of_hostile_gradients(failed: list[Check], judged: list[AccuracyRow]) -> str:
    return excuse_of_hostile(failed, judged) or _kink(failed, judged, _KINKS_OF_FEW)


def _kink(failed: list[Check], judged: list[AccuracyRow], most: float) -> str:
    """A value within rounding of a kink (a bound of a clamp, zero of a ReLU) may lie on either side
    of it, and its element of the gradient be there or not. Among millions of values that happens
    now and then, to the original as well. most: the relative error of a gradient that lacks, or
    has, a few elements of those that it should."""
    wrong = any(check.trick != tricks.WRONG_GRADIENT for check in failed)
    if wrong or not judged or judged[-1].candidate.relative_error > most:
        return ""
    return "a value near a kink may have changed sides"


def _over(row: AccuracyRow) -> float:
    """An error over what is allowed."""
    norm = row.candidate.relative_error / row.allowed_relative_error
    return max(norm, row.candidate.worst_row_error / row.allowed_worst_row_error)
