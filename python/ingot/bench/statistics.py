"""Medians, spreads and the interval of a ratio, from interleaved rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NEVER_SLOWER = 1.02
ROUNDS_FOR_A_VERDICT = 20
_RESAMPLES = 2000
_BOOTSTRAP_SEED = 7


@dataclass(frozen=True)
class Summary:
    """median and quartiles of a sample, in its own unit."""

    median: float
    lower_quartile: float
    upper_quartile: float
    count: int

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.upper_quartile - self.lower_quartile) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """The median of a round's ratio numerator/denominator, with its 95 % interval."""

    median: float
    lower: float
    upper: float
    count: int


def summarize(values: Sequence[float]) -> Summary:
    if not values:
        raise ValueError("no samples to summarize")
    ordered = sorted(values)
    return Summary(
        median(ordered), _quantile(ordered, 0.25), _quantile(ordered, 0.75), len(ordered)
    )


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """The median over rounds of numerator[i]/denominator[i], and its 95 % percentile-bootstrap
    interval. Pairs stay together: what disturbs a round disturbs both."""
    if len(numerator) != len(denominator) or not numerator:
        raise ValueError("a ratio needs the same rounds of both")
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    generator = random.Random(_BOOTSTRAP_SEED)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(median(ratios), _quantile(medians, 0.025), _quantile(medians, 0.975), len(ratios))


def never_slower(candidate: Sequence[float], baseline: Sequence[float]) -> bool | None:
    """At least 20 interleaved rounds, upper end of the 95 % interval of the
    median ratio at most 1.02. None: too few rounds to say."""
    if len(candidate) < ROUNDS_FOR_A_VERDICT:
        return None
    return median_ratio(candidate, baseline).upper <= NEVER_SLOWER


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
