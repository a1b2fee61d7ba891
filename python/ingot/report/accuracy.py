"""The error beside eager's, for every family of inputs."""

from __future__ import annotations

import math

from . import text
from .scales import LogScale

_SMALLEST = 1e-9  # errors below it are drawn there
_ZERO_AT = 2.0
_FIRST_AT = 14.0


def accuracy_view(rows: list) -> dict | None:
    """rows: `accuracy` of a verification."""
    if not rows:
        return None
    outputs = [r for r in rows if r["tensor"].startswith("output")] or rows
    several = len({r["tensor"] for r in outputs}) > 1
    values = [max(v, _SMALLEST) for r in outputs for v in _errors(r) if v]
    scale = LogScale.over(values, _FIRST_AT, 98.0)
    modes = list(dict.fromkeys(r["mode"] for r in outputs))
    return {
        "ticks": scale.ticks(5),
        "modes": [
            {
                "mode": mode,
                "rows": [_drawn(r, scale, several) for r in outputs if r["mode"] == mode],
            }
            for mode in modes
        ],
        "table": [_listed(r) for r in telling_rows(rows)],
        "statistics": len(rows) - len(outputs),
        "clipped": any(0 < v < _SMALLEST for r in outputs for v in _errors(r)),
    }


def telling_rows(rows: list) -> list:
    """Of each family and mode all outputs, and of the statistics and of the gradients the one
    nearest to its limit."""
    shown, worst = [], {}
    for row in rows:
        if row["tensor"].startswith("output"):
            shown.append(row)
            continue
        size = row["candidate"]["relative_error"] / row["allowed_relative_error"]
        if size <= 1 and _zero_but_for_rounding(row):
            continue
        key = (row["family"], row["mode"], row.get("kind", "buffer"))
        if not size <= worst.get(key, (0.0,))[0]:  # NaN is the worst of all
            if key in worst:
                shown.remove(worst[key][1])
            worst[key] = (size, row)
            shown.append(row)
    return shown


def _zero_but_for_rounding(row: dict) -> bool:
    """Of a gradient such as a bias's before a batch norm, whose error no figure describes."""
    eager = (row["eager"] or {}).get("relative_error") or 0.0
    return row.get("kind") == "gradient" and eager > 1


def headline(rows: list) -> dict | None:
    """The model's own inputs, first output: what one figure of the error stands for."""
    own = [r for r in rows if r["family"] == "own inputs" and r["tensor"].startswith("output")]
    return own[0] if own else None


def _errors(row: dict) -> list[float]:
    eager = (row["eager"] or {}).get("relative_error")
    found = (row["candidate"]["relative_error"], eager, row["allowed_relative_error"])
    return [float(v) for v in found if v is not None and math.isfinite(float(v))]


def _drawn(row: dict, scale: LogScale, several: bool) -> dict:
    ours = float(row["candidate"]["relative_error"])
    eager = (row["eager"] or {}).get("relative_error")
    allowed = row["allowed_relative_error"]
    return {
        "family": row["family"] + (f", {row['tensor']}" if several else ""),
        "ours": text.scientific(ours),
        "eager": text.scientific(eager),
        "ours_at": _place(ours, scale),
        "eager_at": None if eager is None else _place(float(eager), scale),
        "allowed_at": _place(allowed, scale),
        "beyond": not ours <= allowed,
        "nonfinite": row["candidate"]["nonfinite_mismatches"],
    }


def _place(value: float, scale: LogScale) -> float:
    if value == 0:
        return _ZERO_AT
    return 100.0 if math.isnan(value) else scale.at(max(value, _SMALLEST))


def _listed(row: dict) -> dict:
    found, eager = row["candidate"], row["eager"] or {}
    return {
        "family": row["family"],
        "mode": row["mode"],
        "tensor": row["tensor"],
        "ours": text.scientific(found["relative_error"]),
        "eager": text.scientific(eager.get("relative_error")),
        "allowed": text.scientific(row["allowed_relative_error"]),
        "worst": text.scientific(found["worst_row_error"]),
        "eager_worst": text.scientific(eager.get("worst_row_error")),
        "mismatches": found["mismatches"],
        "nonfinite": found["nonfinite_mismatches"],
    }
