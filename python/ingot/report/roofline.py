"""The roofline: how fast work of some intensity can go, and how fast it was planned and measured.

(Williams, Waterman, Patterson 2009.) x: operations per byte moved; y: operations per second. No
point can lie above the lower of bandwidth · x and the machine's rate of products.
"""

from __future__ import annotations

from . import text
from .scales import LogScale, short

WIDTH, HEIGHT = 360.0, 290.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 42.0, 342.0, 12.0, 246.0
_LETTER = 6.5  # width of one, at most
_LABEL_STEP = 13.0
_LABEL_WIDTH = 112.0
_BADGE = 15.0
_REACH = 8


def roofline_view(programs: list, measured: list) -> dict | None:
    """programs: explanations of one mode, that run one after the other. measured: (key, label,
    milliseconds) of the whole model. None where there is nothing to draw."""
    explanations = [p["explain"] for p in programs if "sweeps" in p["explain"]]
    sweeps = [s for e in explanations for s in e["sweeps"]]
    target = next((e["target"] for e in explanations if e.get("target")), None)
    flops = sum(s["flops"] for s in sweeps)
    moved = sum(s["bytes_read"] + s["bytes_written"] for s in sweeps)
    if not target or not flops or not moved:
        return None
    predicted = sum(e["predicted_ms"] for e in explanations)
    limit = sum(e["limit_ms"] for e in explanations)
    wholes = [("limit", "limit", limit), ("predicted", "predicted", predicted), *measured]
    wholes = [w for w in wholes if w[2]]
    singles = [
        (number, s["flops"] / (s["bytes_read"] + s["bytes_written"]), s)
        for number, s in enumerate(sweeps, 1)
        if s["flops"] and s["predicted_ms"] and s["bytes_read"] + s["bytes_written"]
    ]
    peak, bandwidth = target["product_flops"], target["bandwidth"]
    x = LogScale.over([*(i for _, i, _ in singles), flops / moved, peak / bandwidth], _LEFT, _RIGHT)
    rates = [flops / (ms * 1e-3) for _, _, ms in wholes]
    rates += [s["flops"] / (s["predicted_ms"] * 1e-3) for _, _, s in singles]
    y = LogScale.over([*rates, peak], _BOTTOM, _TOP, margin=0.1)
    at_x = x.at(flops / moved)
    labelled = _labelled(at_x, [(k, lab, y.at(flops / (ms * 1e-3))) for k, lab, ms in wholes])
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "frame": {"left": _LEFT, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM},
        "roof": _roof(x, y, peak, bandwidth),
        "xticks": x.ticks(5),
        "yticks": [_with_unit(t, y) for t in y.ticks(6)],
        "wholes": labelled,
        "sweeps": _badges(singles, x, y, [_label_box(w) for w in labelled]),
        "column": at_x,
        "rows": [
            {
                "key": key,
                "label": label,
                "time": text.duration(ms),
                "rate": text.rate(flops / (ms * 1e-3), "flop"),
                "part": f"{limit / ms:.0%}" if limit else text.MISSING,
            }
            for key, label, ms in wholes
        ],
        "peak": text.rate(peak, "flop"),
        "bandwidth": text.rate(bandwidth, "B"),
        "intensity": text.digits(flops / moved),
        "flops": text.operations(flops),
        "bytes": text.data_size(moved),
        "target": target.get("name", ""),
        "above": any(limit > ms for key, _, ms in wholes if key not in ("limit", "predicted")),
    }


def _roof(x: LogScale, y: LogScale, peak: float, bandwidth: float) -> str:
    """The slope from where it enters the frame, then the plateau."""
    lowest = max(10.0**x.first, 10.0**y.first / bandwidth)
    ridge = min(max(peak / bandwidth, lowest), 10.0**x.last)
    points = [(lowest, bandwidth * lowest), (ridge, bandwidth * ridge), (10.0**x.last, peak)]
    return " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)


def _with_unit(tick: dict, y: LogScale) -> dict:
    span = y.last - y.first
    exponent = y.first + round(span * (_BOTTOM - tick["at"]) / (_BOTTOM - _TOP))
    return {"at": tick["at"], "label": _short_rate(10.0**exponent)}


def _short_rate(value: float) -> str:
    """10 G, 1 T."""
    steps = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, prefix = next((step for step in steps if value >= step[0]), (1.0, ""))
    return f"{short(value / size)} {prefix}".strip()


def _labelled(at_x: float, points: list) -> list[dict]:
    """Labels beside the points, moved apart where points are close, joined by a line."""
    side = 1 if at_x + _LABEL_WIDTH < WIDTH else -1
    ordered = sorted(points, key=lambda p: p[2])
    places = [p[2] for p in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + _LABEL_STEP)
    overflow = max(0.0, places[-1] - (_BOTTOM - 6)) if places else 0.0
    centre = sum(p[2] for p in ordered) / max(1, len(ordered))
    shift = min(max(0.0, sum(places) / max(1, len(places)) - centre), places[0] - _TOP - 6)
    shift = max(shift, overflow)
    return [
        {
            "key": key,
            "label": label,
            "x": at_x,
            "y": at_y,
            "label_x": at_x + side * 22,
            "label_y": place - shift,
            "anchor": "start" if side > 0 else "end",
            "elbow": at_x + side * 18,
        }
        for (key, label, at_y), place in zip(ordered, places)
    ]


def _label_box(label: dict) -> tuple[float, float, float, float]:
    """left, right, top, bottom"""
    reach = _LETTER * len(label["label"]) + 4
    left = label["label_x"] - (0 if label["anchor"] == "start" else reach)
    middle, half = label["label_y"], _LABEL_STEP / 2
    return left, left + reach, middle - half, middle + half


def _badges(singles: list, x: LogScale, y: LogScale, labels: list) -> list[dict]:
    """A numbered circle for each sweep, at its predicted rate; those that would cover each other
    or a label are moved to the nearest free place."""
    placed: list[dict] = []
    for number, intensity, sweep in singles:
        at = {
            "number": number,
            "name": sweep["name"],
            "x": x.at(intensity),
            "y": y.at(sweep["flops"] / (sweep["predicted_ms"] * 1e-3)),
        }
        at["x"], at["y"] = _free_place(at["x"], at["y"], placed, labels)
        placed.append(at)
    return placed


def _free_place(x: float, y: float, placed: list, labels: list) -> tuple[float, float]:
    """The nearest place around (x, y) that nothing covers; (x, y) itself where there is none."""
    steps = range(-_REACH, _REACH + 1)
    places = sorted(
        ((x + i * _BADGE, y + j * _BADGE) for i in steps for j in steps),
        key=lambda at: (at[0] - x) ** 2 + (at[1] - y) ** 2,
    )
    half = _BADGE / 2

    def free(a: float, b: float) -> bool:
        inside = _LEFT + half <= a <= _RIGHT and _TOP + half <= b <= _BOTTOM - half
        apart = all(max(abs(a - p["x"]), abs(b - p["y"])) >= _BADGE - 1e-6 for p in placed)
        return (
            inside
            and apart
            and not any(
                left < a + half and a - half < right and top < b + half and b - half < bottom
                for left, right, top, bottom in labels
            )
        )

    return next((at for at in places if free(*at)), (x, y))
