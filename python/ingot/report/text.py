"""Numbers as people read them."""

from __future__ import annotations

import math

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MISSING = "–"


def digits(value: float, significant: int = 3) -> str:
    """A number with so many significant digits and no exponent: 0.588, 11.4, 1024."""
    if value == 0:
        return "0"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def duration(ms: float | None) -> str:
    if ms is None:
        return MISSING
    if ms < 0.1:
        return f"{digits(ms * 1e3)} µs"
    return f"{digits(ms)} ms" if ms < 10_000 else f"{digits(ms * 1e-3)} s"


def duration_range(low_ms: float, high_ms: float) -> str:
    """23.9 to 30.2 ms: the unit once, where it is the same."""
    low, high = duration(low_ms), duration(high_ms)
    unit = high[high.rfind(" ") :]
    return f"{low.removesuffix(unit)} to {high}"


def _scaled(value: float | None, unit: str, steps: tuple) -> str:
    if value is None:
        return MISSING
    size, prefix = 1.0, ""
    for factor, name in steps:
        if value >= factor:
            size, prefix = factor, name
    return f"{digits(value / size)} {prefix}{unit}"


def data_size(size: float | None) -> str:
    return _scaled(size, "B", ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")))


def operations(count: float | None) -> str:
    return _scaled(count, "flop", ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")))


def rate(per_second: float | None, unit: str) -> str:
    steps = ((1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"))
    return _scaled(per_second, f"{unit}/s", steps)


def scientific(value: float | None) -> str:
    """An error: 4.7×10⁻⁷."""
    if value is None:
        return MISSING
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def power_of_ten(exponent: int) -> str:
    """1000, 0.01, 10⁻⁷."""
    if -2 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def times(factor: float) -> str:
    """A ratio of times: 4.72, 12.3."""
    return f"{factor:.2f}" if factor < 10 else digits(factor)


def faster_or_slower(factor: float) -> str:
    """ "4.72 times faster", "1.30 times slower", "as fast"; factor: baseline's time over ours."""
    if abs(factor - 1) < 0.02:
        return "as fast"
    if factor > 1:
        return f"{times(factor)} times faster"
    return f"{times(1 / factor)} times slower"


def plural(count: int, singular: str, many: str | None = None) -> str:
    return f"{count} {singular if count == 1 else many or singular + 's'}"


def extents(shape: list | tuple | str) -> str:
    """["B", 1, 1, 8192] as B×8192; all ones as "scalar"."""
    if isinstance(shape, str):
        shape = [part.strip() for part in shape.strip("[]").split(",")]
    kept = [str(extent) for extent in shape if str(extent) != "1"]
    return "×".join(kept) or "scalar"
