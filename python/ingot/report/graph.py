"""A graph as a picture: operators are boxes, small operands are named inside them.

Parameters, buffers and constants stand in the label of the operator that reads them; operators that
only serve to update buffers share one box. What is left is short enough to be drawn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .layout import Drawing, lay_out
from .text import extents, plural

_LEAVES = ("parameter", "buffer", "constant")
_SYMBOLS = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}
_MOST_TITLE = 28


@dataclass
class Node:
    """kind: "input", "operator", "result" or "update". change: "" or, between the two graphs,
    "gone" or "new". sweeps: numbers of the passes that compute it."""

    key: str
    kind: str
    title: str
    detail: str = ""
    hint: str = ""
    change: str = ""
    sweeps: list = field(default_factory=list)
    above: list = field(default_factory=list)

    @property
    def width(self) -> float:
        badge = 16 * len(self.sweeps) + (14 if self.change else 0)
        return max(64.0, 6.9 * len(self.title) + 18 + badge, 5.7 * len(self.detail) + 18)


@dataclass
class GraphPicture:
    drawing: Drawing
    nodes: list
    described: str


def pictures(explanation: dict) -> dict[str, GraphPicture]:
    """The graphs of an explanation, "before" and "after", drawn; empty where there is none."""
    stages = {
        stage: explanation["graph"][stage]["json"]
        for stage in ("before", "after")
        if explanation.get("graph", {}).get(stage, {}).get("json")
    }
    sweeps = _sweeps_of_values(explanation)
    marks = _changes(stages)
    made = {}
    for stage, graph in stages.items():
        nodes = _nodes(graph, marks[stage], sweeps if stage == "after" else {})
        drawing = lay_out(
            {n.key: n.width for n in nodes}, [(a, n.key) for n in nodes for a in n.above]
        )
        operators = sum(v["op"] not in (*_LEAVES, "input") for v in graph["values"])
        made[stage] = GraphPicture(drawing, nodes, plural(operators, "operator"))
    return made


def _sweeps_of_values(explanation: dict) -> dict[int, list]:
    found: dict[int, list] = {}
    for number, sweep in enumerate(explanation.get("sweeps", ()), 1):
        made = [*sweep.get("body", ()), *sweep.get("statistics", ()), *sweep.get("tail", ())]
        for node in [*made, *([sweep["product"]] if sweep.get("product") else [])]:
            found.setdefault(node["value"], []).append(number)
    return found


def _changes(stages: dict) -> dict[str, dict[int, str]]:
    """Which values of one graph have no counterpart in the other. Values are renumbered by
    rewriting, so they are matched by what they compute and where it came from."""

    def signature(value: dict) -> str:
        keys = ("op", "attributes", "origin", "source", "shape", "name", "value")
        return repr([value.get(key) for key in keys])

    marks: dict[str, dict[int, str]] = {stage: {} for stage in stages}
    if len(stages) < 2:
        return marks
    for stage, other, word in (("before", "after", "gone"), ("after", "before", "new")):
        available = Counter(signature(v) for v in stages[other]["values"])
        for index, value in enumerate(stages[stage]["values"]):
            key = signature(value)
            if available[key]:
                available[key] -= 1
            else:
                marks[stage][index] = word
    return marks


def _nodes(graph: dict, marks: dict[int, str], sweeps: dict[int, list]) -> list[Node]:
    values = graph["values"]
    results: dict[int, list] = {}
    for result in graph["results"]:
        results.setdefault(result["value"], []).append(result["name"])
    serving = _ancestors(values, list(results))
    nodes, update_only = [], []
    for index, value in enumerate(values):
        if value["op"] in _LEAVES:
            continue
        if index not in serving:
            update_only.append(index)
            continue
        kind = "input" if value["op"] == "input" else "operator"
        title = value["name"] if kind == "input" else _title(values, value)
        shape = extents(value["shape"])
        origin = value.get("origin", "")
        nodes.append(
            Node(
                str(index),
                kind,
                _cut(title),
                shape if not origin else f"{origin} · {shape}",
                f"%{index} {title}, {value['dtype']} {shape}, {value.get('source', '')}".rstrip(
                    ", "
                ),
                marks.get(index, ""),
                sweeps.get(index, []),
                _above(values, value),
            )
        )
    nodes += [
        Node(f"r{index}", "result", f"result {', '.join(names)}", above=[str(index)])
        for index, names in results.items()
    ]
    drawn = {node.key for node in nodes}
    return nodes + _update_node(graph, update_only, marks, sweeps, drawn)


def _update_node(
    graph: dict, members: list, marks: dict[int, str], sweeps: dict[int, list], drawn: set
) -> list[Node]:
    """One box for all operators that end in a buffer only."""
    if not graph["updates"]:
        return []
    values = graph["values"]
    operators = [i for i in members if values[i]["op"] != "input"]
    names = [values[update["buffer"]]["name"] for update in graph["updates"]]
    above = [a for i in operators for a in _above(values, values[i])]
    above += [str(update["value"]) for update in graph["updates"]]
    changed = {marks[i] for i in operators if i in marks}
    return [
        Node(
            "updates",
            "update",
            f"updates {plural(len(names), 'buffer')}",
            plural(len(operators), "operator") if operators else "",
            "updates " + ", ".join(names),
            changed.pop() if len(changed) == 1 else "",
            sorted({s for i in operators for s in sweeps.get(i, ())}),
            [key for key in dict.fromkeys(above) if key in drawn],
        )
    ]


def _ancestors(values: list, wanted: list) -> set:
    found, waiting = set(), list(wanted)
    while waiting:
        index = waiting.pop()
        if index not in found and index >= 0:
            found.add(index)
            waiting += values[index].get("args", ())
    return found


def _above(values: list, value: dict) -> list[str]:
    args = dict.fromkeys(a for a in value.get("args", ()) if a >= 0)
    return [str(a) for a in args if values[a]["op"] not in _LEAVES]


def _title(values: list, value: dict) -> str:
    attributes = value.get("attributes") or {}
    name = value["op"]
    if name == "reduce":
        return f"{attributes['finish'].replace('_', ' ')} over {', '.join(attributes['axes'])}"
    if name == "cast":
        return f"cast to {attributes.get('dtype', '')}"
    args = [a for a in value.get("args", ()) if a >= 0]
    small = [values[a] for a in args if values[a]["op"] in _LEAVES]
    named = [str(v.get("name", v.get("value", ""))) for v in small]
    if name in _SYMBOLS and len(args) == 2:
        sign = _SYMBOLS[name]
        if not named:
            return {"+": "add", "−": "subtract", "×": "multiply", "÷": "divide"}[sign]
        first_is_small = values[args[0]]["op"] in _LEAVES
        return (
            f"{named[0]} {sign}"
            if first_is_small and name in ("sub", "div")
            else (f"{sign} {named[0]}")
        )
    return " ".join([name.replace("_", " "), *named])


def _cut(title: str) -> str:
    return title if len(title) <= _MOST_TITLE else title[: _MOST_TITLE - 1] + "…"
