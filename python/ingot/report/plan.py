"""The plan as a picture: each pass over memory with what it reads, computes and writes."""

from __future__ import annotations

from itertools import groupby

from . import text
from .launches import launch_rows
from .scales import LinearScale

_KINDS = {
    "product": "matrix product",
    "columns": "statistics of each feature over the whole batch",
    "rows": "each row owned whole, so that its reductions need no second pass",
    "map": "element by element",
    "scan": "running sums along each row, which one team of threads goes through in order",
}
_PLACES = {
    "leaf": "input or parameter",
    "workspace": "scratch memory",
    "result": "the result",
    "update": "updates a buffer",
}
_OPERATORS = {"sub": "subtract", "mul": "multiply", "div": "divide", "rsqrt": "1/√"}
# Tensors below this part of the plan's largest are summed up in one line.
_SMALL = 0.02
_SEGMENT = 4.0


def plan_view(program: dict) -> dict:
    """program: {name, mode, explain}, as `ingot explain --json` prints them."""
    explanation = program["explain"]
    if "error" in explanation:
        return {"name": program["name"], "error": explanation["error"], "sweeps": []}
    sweeps = explanation.get("sweeps", [])
    runners = explanation.get("executable", {}).get("sweeps", [])
    largest = max((t["bytes"] for s in sweeps for t in [*s["loads"], *s["stores"]]), default=0)
    scale = LinearScale(largest)
    launched = explanation.get("executable", {}).get("program")
    total = sum(s["predicted_ms"] for s in sweeps) or 1.0
    views = [
        _sweep_view(
            number, sweep, runners[number - 1] if number <= len(runners) else {}, scale, total
        )
        for number, sweep in enumerate(sweeps, 1)
    ]
    return {
        "name": program["name"],
        "error": "",
        "batch": explanation.get("batch"),
        "target": explanation.get("target", {}).get("name", ""),
        "sweeps": views,
        "predicted": text.duration(explanation.get("predicted_ms")),
        "limit": text.duration(explanation.get("limit_ms")),
        "bytes": text.data_size(sum(s["bytes_read"] + s["bytes_written"] for s in sweeps)),
        "flops": text.operations(sum(s["flops"] for s in sweeps)),
        "workspace": text.data_size(explanation.get("workspace_bytes")),
        "launches": launch_rows(launched) if launched else [],
        "hash": launched["hash"] if launched else "",
    }


def _sweep_view(number: int, sweep: dict, runner: dict, scale: LinearScale, total: float) -> dict:
    return {
        "number": number,
        "name": sweep["name"],
        "kind": _KINDS.get(sweep["kind"], sweep["kind"]) + _followed(sweep),
        "space": text.extents(sweep["space"]),
        "provider": runner.get("provider") or runner.get("product") or "",
        "reads": _tensors(sweep["loads"], scale),
        "writes": _tensors(sweep["stores"], scale),
        "read": text.data_size(sweep["bytes_read"]),
        "written": text.data_size(sweep["bytes_written"]),
        "flops": text.operations(sweep["flops"]),
        "predicted": text.duration(sweep["predicted_ms"]),
        "limit": text.duration(sweep["limit_ms"]),
        "grow": max(_SEGMENT, 100.0 * sweep["predicted_ms"] / total),
        "share": 100.0 * sweep["predicted_ms"] / total,
        "steps": _steps(sweep),
        "reasons": sweep.get("reasons", []),
    }


def _followed(sweep: dict) -> str:
    follows = sweep.get("product") and (sweep.get("body") or sweep.get("statistics"))
    return ", and what follows while its results are in registers" if follows else ""


def _tensors(tensors: list, scale: LinearScale) -> list[dict]:
    """Large ones singly, the largest first; the small ones of a kind in one line."""
    small = [t for t in tensors if t["bytes"] < _SMALL * scale.top]
    if len(small) == 1:
        small = []
    large = [t for t in tensors if t not in small]
    rows = [
        {
            "name": t["name"],
            "shape": text.extents(t["shape"]),
            "place": _PLACES.get(t["in"], t["in"]),
            "kind": t["in"],
            "size": text.data_size(t["bytes"]),
            "width": max(1.0, scale.at(t["bytes"])),
        }
        for t in sorted(large, key=lambda t: -t["bytes"])
    ]
    if small:
        names = dict.fromkeys(t["name"] for t in small)
        rows.append(
            {
                "name": ", ".join(names),
                "shape": "",
                "place": text.plural(len(small), "small tensor"),
                "kind": "small",
                "size": text.data_size(sum(t["bytes"] for t in small)),
                "width": 1.0,
            }
        )
    return rows


def _steps(sweep: dict) -> list[dict]:
    """What is computed, in order: {when, parts: [{origin, operators}]}."""
    steps = []
    if sweep.get("product"):
        steps.append({"when": "multiplies matrices", "parts": _parts([sweep["product"]])})
    if sweep.get("body"):
        when = "then, on the results in registers" if steps else "for each element"
        steps.append({"when": when, "parts": _parts(sweep["body"])})
    if sweep.get("statistics"):
        steps.append({"when": "over all rows of the batch", "parts": _parts(sweep["statistics"])})
    if sweep.get("tail"):
        when = "once per feature, when the statistics are complete"
        steps.append({"when": when, "parts": _parts(sweep["tail"])})
    return steps


def _parts(nodes: list) -> list[dict]:
    parts = []
    for origin, group in groupby(nodes, key=lambda node: node.get("origin", "")):
        names = [_OPERATORS.get(node["op"], node["op"].replace("_", " ")) for node in group]
        parts.append({"origin": origin, "operators": ", ".join(dict.fromkeys(names))})
    return parts
