"""The pass criteria of `ingot verify`, all of them, in one place (explained in docs/verify.md).

Two error models decide. Both take the original module in fp64 as the truth, and run it again with
every operator's result disturbed as an implementation of the stated precision may disturb it
(`bounds.py`); the spread of those runs is the error that is allowed. A candidate that is about as
accurate as eager itself always passes.

* `INDEPENDENT` (ordinary inputs): every term of a product is rounded independently.
* `STATED_BOUND` (inputs whose magnitudes range over 2^±60): the worst-case bound that Ingot
  promises, c1·2^-22·(|x|·|w|) + c2·2^-36·(largest of a row · 1-norm of the other's row, and the
  same with the roles exchanged), which may be more than eager's error.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from .measures import Measures

# Relative rounding of one term of a matrix product, by precision policy.
PRODUCT_ROUNDOFF = {
    "ieee": 2.0**-23,
    "fp32": 2.0**-22,
    "high": 2.0**-16,
    "tf32": 2.0**-10,
    "fp16": 2.0**-10,
    "bf16": 2.0**-8,
}
# Part of a row's largest element below which a product of scaled fp16 may lose one altogether.
RANGE_FLOOR = {"fp32": 2.0**-36, "high": 2.0**-30, "tf32": 2.0**-36}
C1 = 1.0
C2 = 1.0

# How far beyond the disturbed runs' root mean square an error may go. The noise is uniform, so
# its root mean square is 0.58 of its largest value; 4 is thus 2.3 times the stated rounding.
SPREAD_FACTOR = 4.0
# How much further where that is more than there is value: a few terms make up most of it then.
NOISE_FACTOR = 16.0
# How far beyond eager's own error.
EAGER_FACTOR_NORM = 1.25
EAGER_FACTOR_ROW = 2.0
EAGER_FACTOR_ELEMENT = 4.0
# Gradients of parameters are sums of terms of both signs, which may cancel: how far a few roundings
# carry then depends on their order, eager's too.
GRADIENT_FACTOR = 2.0
# Storing a result rounds it, whatever came before: multiples of the type's unit roundoff.
STORAGE_FACTOR = 4.0
# Seconds by which the worker's timer and the parent's clock may disagree, and the ratio. Between
# two calls of the parent's the inputs change and a result is freed: 30 and 12 µs on a CPU.
TIMER_RATIO = 1.6
BASELINE_RATIO = 2.5  # claimed for eager over what it takes in the parent
TIMER_SLACK_S = {"cpu": 50e-6, "cuda": 200e-6}  # a short call on a GPU costs its host more


class ErrorModel(enum.Enum):
    INDEPENDENT = "independent rounding"
    STATED_BOUND = "stated bound"


@dataclass(frozen=True)
class Spread:
    """Root mean square over the disturbed runs of the error, by the same measures; and the most
    elements of a run that are NaN or Inf where the truth's are not, or the reverse."""

    relative_error: float
    worst_row_error: float
    scaled_error: float
    nonfinite_mismatches: int = 0


@dataclass(frozen=True)
class Judgement:
    passed: bool
    reason: str = ""
    allowed_relative_error: float = math.nan
    allowed_worst_row_error: float = math.nan


def _with_noise(allowed: float) -> float:
    """Where more error is allowed than there is value (a gradient that cancels but for rounding),
    one draw of rounding is held against another: they differ by more than their mean size."""
    return NOISE_FACTOR * allowed if allowed > 1 else allowed


def judge(
    candidate: Measures,
    eager: Measures | None,
    spread: Spread,
    unit_roundoff: float,
    eager_factor: float = 1.0,
) -> Judgement:
    """Whether a candidate's error is within what the error model allows. unit_roundoff: of the
    type in which the result is stored. eager_factor: how much more of eager's error is allowed than
    for outputs."""
    # An infinite multiple of what is nearly zero has the sign that rounding gives it.
    if candidate.nonfinite_mismatches > SPREAD_FACTOR * spread.nonfinite_mismatches:
        return Judgement(
            False,
            f"{candidate.nonfinite_mismatches} elements are NaN or Inf where the original's are "
            "not, or the reverse",
        )
    stored = STORAGE_FACTOR * unit_roundoff
    norm = max(stored, SPREAD_FACTOR * spread.relative_error)
    row = max(stored, SPREAD_FACTOR * spread.worst_row_error)
    element = max(stored, 2 * SPREAD_FACTOR * spread.scaled_error)
    if eager is not None:
        norm = max(norm, eager_factor * EAGER_FACTOR_NORM * eager.relative_error)
        row = max(row, eager_factor * EAGER_FACTOR_ROW * eager.worst_row_error)
        element = max(element, eager_factor * EAGER_FACTOR_ELEMENT * eager.scaled_error)
    if norm > 1:  # nothing is known of the rows that have the least value
        row = max(row, candidate.worst_row_error)
    norm, row, element = map(_with_noise, (norm, row, element))
    for value, allowed, name in (
        (candidate.relative_error, norm, "relative Frobenius error"),
        (candidate.worst_row_error, row, "worst row's relative error"),
        (candidate.scaled_error, element, "largest error over the output's scale"),
    ):
        if not value <= allowed:
            return Judgement(False, f"{name} {value:.2e} exceeds {allowed:.2e}", norm, row)
    return Judgement(True, "", norm, row)
