"""Times with their spread, each against the baselines."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.bench.statistics import NEVER_SLOWER, ROUNDS_FOR_A_VERDICT
from ingot.bench.subjects import COMPILE, EAGER, EAGER_TF32

from . import text
from .scales import LinearScale

_TF32 = "not of the same accuracy: TF32 products keep 10 bits after the point"
LIMIT_OF_PLAN = "products or memory traffic alone, at the rates that the plan assumes"
LIMIT_MEASURED = "products or memory traffic alone, at the best rates of the same run"
_VERDICTS = {
    True: f"never slower: the interval's slow end is at most {NEVER_SLOWER}",
    False: f"not shown to be never slower: the interval's slow end exceeds {NEVER_SLOWER}",
    None: f"no verdict: that takes {ROUNDS_FOR_A_VERDICT} rounds",
}


def speed_view(
    subjects: Mapping[str, dict],
    ours: str,
    note: str,
    limit_ms: float | None,
    limit_words: str = LIMIT_OF_PLAN,
) -> dict:
    """subjects: as Comparison.table gives them.
    ours: the name of the one that the others are compared with."""
    highest = [max([s["upper_quartile_ms"], *s.get("samples_ms", ())]) for s in subjects.values()]
    # One disturbed round must not press all else against the left border.
    calm = max(s["upper_quartile_ms"] for s in subjects.values()) * 1.25
    scale = LinearScale(min(max(highest), calm) * 1.02)
    rows = [_row(name, s, scale, ours) for name, s in subjects.items()]
    rows.sort(key=lambda row: row["ours"])
    return {
        "ours": ours,
        "rows": rows,
        "ticks": scale.ticks(5),
        "limit_at": scale.at(limit_ms) if limit_ms and limit_ms <= scale.top else None,
        "limit": text.duration(limit_ms),
        "limit_words": limit_words,
        "ratios": [_ratio(name, s) for name, s in subjects.items() if s.get("ratio")],
        "note": note,
        "others": any(row["warm"] or row["sustained"] for row in rows),
    }


def _row(name: str, subject: dict, scale: LinearScale, ours: str) -> dict:
    low, high = subject["lower_quartile_ms"], subject["upper_quartile_ms"]
    return {
        "name": name,
        "key": key_of(name, ours),
        "ours": name == ours,
        "median": text.duration(subject["median_ms"]),
        "spread": text.duration_range(low, high),
        "width": scale.at(subject["median_ms"]),
        "low": scale.at(low),
        "high": scale.at(high),
        "dots": [scale.at(v) for v in subject.get("samples_ms", ()) if v <= scale.top],
        "beyond": sum(v > scale.top for v in subject.get("samples_ms", ())),
        "warm": text.duration(subject["warm_ms"]) if "warm_ms" in subject else "",
        "sustained": text.duration(subject["sustained_ms"]) if "sustained_ms" in subject else "",
    }


def key_of(name: str, ours: str) -> str:
    """The name that styles use."""
    if name == ours:
        return "ours"
    return {EAGER: "eager", EAGER_TF32: "tf32", COMPILE: "compiled"}.get(name, "other")


def _ratio(name: str, subject: dict) -> dict:
    lower, median, upper = subject["ratio"]
    return {
        "name": name,
        "median": f"{median:.3f}",
        "interval": f"{lower:.3f} to {upper:.3f}",
        "verdict": _TF32 if name == EAGER_TF32 else _VERDICTS[subject["never_slower"]],
    }
