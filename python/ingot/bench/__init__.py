"""Timing and limits: interleaved rounds, medians with intervals, rooflines, records."""

from .rounds import Comparison, RoundOptions, compare
from .statistics import Summary, median_ratio, never_slower, summarize

__all__ = [
    "Comparison",
    "RoundOptions",
    "Summary",
    "compare",
    "median_ratio",
    "never_slower",
    "summarize",
]
