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
# Part of a row's largest element below which a split product may lose an element altogether.
RANGE_FLOOR = {"fp32": 2.0**-36, "high": 2.0**-30}
C1 = 1.0
C2 = 1.0

# How far beyond the disturbed runs' root mean square an error may go. The noise is uniform, so
# its root mean square is 0.58 of its largest value; 4 is thus 2.3 times the stated rounding.
SPREAD_FACTOR = 4.0
# How far beyond eager's own error.
EAGER_FACTOR_NORM = 1.25
EAGER_FACTOR_ROW = 2.0
EAGER_FACTOR_ELEMENT = 4.0
# Storing a result rounds it, whatever came before: multiples of the type's unit roundoff.
STORAGE_FACTOR = 4.0
# Seconds by which the worker's timer and the parent's clock may disagree, and the ratio.
TIMER_RATIO = 1.6
BASELINE_RATIO = 2.5  # claimed for eager over what it takes in the parent
TIMER_SLACK_S = {"cpu": 20e-6, "cuda": 200e-6}  # a short call on a GPU costs its host more


class ErrorModel(enum.Enum):
    INDEPENDENT = "independent rounding"
    STATED_BOUND = "stated bound"


@dataclass(frozen=True)
class Spread:
    """Root mean square over the disturbed runs of the error, by the same measures."""

    relative_error: float
    worst_row_error: float
    scaled_error: float


@dataclass(frozen=True)
class Judgement:
    passed: bool
    reason: str = ""
    allowed_relative_error: float = math.nan
    allowed_worst_row_error: float = math.nan


def judge(
    candidate: Measures,
    eager: Measures | None,
    spread: Spread,
    unit_roundoff: float,
) -> Judgement:
    """Whether a candidate's error is within what the error model allows. unit_roundoff: of the
    type in which the result is stored."""
    if candidate.nonfinite_mismatches:
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
        norm = max(norm, EAGER_FACTOR_NORM * eager.relative_error)
        row = max(row, EAGER_FACTOR_ROW * eager.worst_row_error)
        element = max(element, EAGER_FACTOR_ELEMENT * eager.scaled_error)
    for value, allowed, name in (
        (candidate.relative_error, norm, "relative Frobenius error"),
        (candidate.worst_row_error, row, "worst row's relative error"),
        (candidate.scaled_error, element, "largest error over the output's scale"),
    ):
        if not value <= allowed:
            return Judgement(False, f"{name} {value:.2e} exceeds {allowed:.2e}", norm, row)
    return Judgement(True, "", norm, row)
