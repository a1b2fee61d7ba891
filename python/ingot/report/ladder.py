"""The ladder of policies as a picture: error against time, one mark a rung."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from ingot.bench.suite import INGOT

# Mid tones: contrast of at least 3 to 1 on white and on a dark ground alike.
_NEUTRAL = "#7d858c"
_OURS = "#d4651f"
_PEER = "#b5569c"
_NEAR = (0.06, 0.4)  # in the logarithms of time and error


def draw_ladder(record: dict, machine: str, path: Path, products: Iterable[dict] = ()) -> None:
    """record: of bench.ladder. products: by others, of the matrix product alone ("name", "ms",
    "error"); they are drawn hollow, for a model takes longer."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {
        "svg.hashsalt": "ingot",  # the same picture from the same data
        "svg.fonttype": "none",
        "font.size": 10,
        "text.color": _NEUTRAL,
        "axes.labelcolor": _NEUTRAL,
        "axes.edgecolor": _NEUTRAL,
        "xtick.color": _NEUTRAL,
        "ytick.color": _NEUTRAL,
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7.5, 4.4))
        _draw_rungs(axes, record["rungs"])
        for product in products:
            _mark(axes, product["ms"], product["error"], product["name"], _PEER, hollow=True)
        _label_axes(axes, record, machine, bool(products))
        figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def _draw_rungs(axes, rungs: list[dict]) -> None:
    for ours in (False, True):
        colour, left = (_OURS, True) if ours else (_NEUTRAL, False)
        for name, rung in _told_apart([r for r in rungs if (r["by"] == INGOT) == ours]):
            _mark(axes, rung["ms"], rung["error"], name, colour, left=left)
            if rung["limit_ms"]:
                axes.plot(rung["limit_ms"], rung["error"], color=colour, marker="|", markersize=11)


def _told_apart(rungs: list[dict]) -> list[tuple[str, dict]]:
    """Of rungs that would lie on each other the first, with the names of all."""
    found: list[tuple[str, dict]] = []
    for rung in rungs:
        name = f"{rung['by']} {rung['policy']}"
        for number, (names, other) in enumerate(found):
            near = abs(math.log(rung["ms"] / other["ms"])) < _NEAR[0]
            if near and abs(math.log(rung["error"] / other["error"])) < _NEAR[1]:
                found[number] = f"{names}, {name}", other
                break
        else:
            found.append((name, rung))
    return found


def _mark(
    axes, ms: float, error: float, name: str, colour: str, left: bool = False, hollow: bool = False
) -> None:
    face = "none" if hollow else colour
    axes.plot(ms, error, "o", markersize=5, markeredgecolor=colour, markerfacecolor=face)
    place = {"xytext": (-8, -10), "ha": "right"} if left else {"xytext": (7, 4), "ha": "left"}
    axes.annotate(name, (ms, error), textcoords="offset points", fontsize=8, color=colour, **place)


def _label_axes(axes, record: dict, machine: str, peers: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log")
    axes.set_title(f"{record['model']} {record['shape']}, {record['mode']} mode, {machine}")
    below = "milliseconds; | is the limit of a rung"
    axes.set_xlabel(below + ("; hollow: the matrix product alone" if peers else ""))
    axes.set_ylabel("relative error against fp64")
    axes.margins(x=0.28, y=0.1)
    axes.grid(True, color=_NEUTRAL, alpha=0.2, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
