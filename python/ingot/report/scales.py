"""Axes: where a value lies on a drawing, and the ticks beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .text import digits, power_of_ten


@dataclass(frozen=True)
class LogScale:
    """Whole decades from 10^first to 10^last, laid over [start, end]."""

    first: int
    last: int
    start: float = 0.0
    end: float = 100.0

    @classmethod
    def over(
        cls, values: Iterable[float], start: float = 0.0, end: float = 100.0, margin: float = 0.0
    ) -> LogScale:
        """margin: decades kept free beyond the smallest and the largest value."""
        logs = [math.log10(v) for v in values if v > 0 and math.isfinite(v)]
        if not logs:
            return cls(0, 1, start, end)
        first = math.floor(min(logs) - margin + 1e-9)
        last = math.ceil(max(logs) + margin - 1e-9)
        return cls(first, max(last, first + 1), start, end)

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is put on the border."""
        if value <= 0 or math.isnan(value):
            return self.start
        log = math.log10(value) if math.isfinite(value) else self.last
        part = (min(max(log, self.first), self.last) - self.first) / (self.last - self.first)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[dict]:
        """At most so many decades, evenly chosen."""
        step = max(1, math.ceil((self.last - self.first) / (most - 1)))
        return [
            {"at": self.at(10.0**e), "label": power_of_ten(e)}
            for e in range(self.first, self.last + 1, step)
        ]


@dataclass(frozen=True)
class LinearScale:
    """From 0 to `top` over [0, 100]."""

    top: float

    def at(self, value: float) -> float:
        return max(0.0, min(100.0, 100.0 * value / self.top)) if self.top else 0.0

    def ticks(self, most: int = 5) -> list[dict]:
        if self.top <= 0:
            return []
        step = nice_step(self.top / most)
        count = int(self.top / step + 1e-9)
        return [{"at": self.at(i * step), "label": short(i * step)} for i in range(count + 1)]


def nice_step(raw: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(raw))
    return next(f * size for f in (1, 2, 5, 10) if f * size >= raw * (1 - 1e-9))


def short(value: float) -> str:
    text = digits(value, 3)
    return text.rstrip("0").rstrip(".") if "." in text else text
