"""What an optimised module did, as one dictionary for tables, documents and tests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ingot.capture.captured import TorchStep, Unsupported
from ingot.live.products import product
from ingot.runtime.library import IngotError

# Of a graph, or a model, of which nothing is taken.
HOLDS_NOTHING = "PyTorch runs it: it holds nothing that Ingot takes over"


def empty_report() -> dict[str, Any]:
    return {"operators_replaced": [], "optimisations": [], "unsupported": [], "programs": []}


def report(graphs, breaks: list[Unsupported], batch: int | None) -> dict:
    result = empty_report()
    for item in breaks:
        _add(result["unsupported"], asdict(item))
    for graph in list(graphs):
        if graph.replayed is not None and graph.replayed.replays:
            _add(result["optimisations"], _replays(graph))
        if graph.compiled is None:
            _add(result["unsupported"], {"what": "the module", "where": "", "why": graph.problem})
            continue
        captured = graph.compiled.captured
        for item in captured.unsupported:
            _add(result["unsupported"], asdict(item))
        for step in captured.steps:
            if isinstance(step, TorchStep) and step.target is product:
                _add_replaced(
                    result["operators_replaced"], step.what, step.where, [product.__name__]
                )
        for region, program in zip(captured.regions, graph.compiled.programs):
            add_program(result, region, program, graph.mode, batch)
    return result


def _replays(graph) -> dict:
    calls = "calls and their backward passes" if graph.mode == "training" else "calls"
    return {
        "what": f"{calls} replayed by CUDA graphs ({graph.mode})",
        "identity_or_reason": f"mode reduce-overhead: {graph.replayed.replays} replays",
        "where": "",
    }


def _add(items: list, item: dict) -> None:
    if item not in items:
        items.append(item)


def add_program(result: dict, region, program, mode: str, batch: int | None) -> None:
    """Adds a compiled region to a report."""
    size = batch * region.per_sample if batch else program.last_batch or 1
    try:
        explanation = program.explain(size)
    except IngotError as error:
        explanation = {"error": str(error)}
    result["programs"].append(
        {
            "name": region.graph["name"],
            "mode": mode,
            "batch": size,
            "device": program.device,
            "precision": program.precision,
            "frozen_bytes": program.frozen_bytes,
            "explain": explanation,
        }
    )
    for operator in region.operators:
        _add_replaced(
            result["operators_replaced"],
            operator["what"],
            operator["where"],
            _makers(operator, explanation) or [region.graph["name"]],
        )
    for item in _optimisations(explanation):
        _add(result["optimisations"], item)


def _optimisations(explanation: dict) -> list[dict]:
    """Rewrites with the identity behind each, then what the plan fused, stored or recomputed."""
    items = [
        {
            "what": rewrite["rule"],
            "identity_or_reason": rewrite["identity"],
            "where": rewrite["where"],
        }
        for rewrite in explanation.get("rewrites", ())
    ]
    # The library lists each rewrite a second time among these.
    items += [
        item
        for item in explanation.get("optimisations", ())
        if not item["what"].startswith("rewrite: ")
    ]
    if not explanation.get("optimisations"):
        for sweep in explanation.get("sweeps", ()):
            where = ", ".join(dict.fromkeys(n["source"] for n in _nodes(sweep) if n["source"]))
            items += [
                {"what": sweep["name"], "identity_or_reason": reason, "where": where}
                for reason in sweep.get("reasons", ())
            ]
    return items


def _nodes(sweep: dict) -> list[dict]:
    nodes = [*sweep.get("body", ()), *sweep.get("statistics", ()), *sweep.get("tail", ())]
    return [*nodes, sweep["product"]] if "product" in sweep else nodes


def _add_replaced(items: list, what: str, where: str, makers: list[str]) -> None:
    """One row an operator, whichever modes it was compiled for."""
    for item in items:
        if (item["what"], item["where"]) == (what, where):
            makers = [*item["by"].split(", "), *makers]
            item["by"] = ", ".join(dict.fromkeys(makers))
            return
    items.append({"what": what, "where": where, "by": ", ".join(makers)})


def _makers(operator: dict, explanation: dict) -> list[str]:
    """Names of the sweeps that compute something of the operator's."""
    wanted = (operator["module"], operator["where"])
    names = [
        sweep["name"]
        for sweep in explanation.get("sweeps", ())
        if any((node["origin"], node["source"]) == wanted for node in _nodes(sweep))
    ]
    return list(dict.fromkeys(names))
