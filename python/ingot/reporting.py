"""What an optimised module did, as one dictionary for tables, documents and tests."""

from __future__ import annotations

from typing import Any

from ingot.runtime.library import IngotError


def report(entries, batch: int | None) -> dict:
    result: dict[str, Any] = {
        "operators_replaced": [],
        "optimisations": [],
        "unsupported": [],
        "programs": [],
    }
    for entry in list(entries):
        if entry.compiled is None:
            _add(result["unsupported"], {"what": "the module", "where": "", "why": entry.problem})
            continue
        captured = entry.compiled.captured
        for item in captured.unsupported:
            _add(result["unsupported"], {"what": item.what, "where": item.where, "why": item.why})
        mode = "training" if any(entry.flags) else "eval"
        for region, program in zip(captured.regions, entry.compiled.programs):
            _add_program(result, region, program, mode, batch)
    return result


def _add(items: list, item: dict) -> None:
    if item not in items:
        items.append(item)


def _add_program(result: dict, region, program, mode: str, batch: int | None) -> None:
    size = batch or program.last_batch or 1
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
            "explain": explanation,
        }
    )
    for operator in region.operators:
        _add(
            result["operators_replaced"],
            {
                "what": operator["what"],
                "where": operator["where"],
                "by": _maker(operator, explanation, region.graph["name"]),
            },
        )
    for rewrite in explanation.get("rewrites", ()):
        _add(
            result["optimisations"],
            {
                "what": rewrite.get("rule", ""),
                "identity_or_reason": rewrite.get("identity", ""),
                "where": rewrite.get("where", ""),
            },
        )
    for sweep in explanation.get("sweeps", ()):
        for reason in sweep.get("reasons", ()):
            _add(
                result["optimisations"],
                {
                    "what": sweep.get("name", ""),
                    "identity_or_reason": reason,
                    "where": sweep.get("source", ""),
                },
            )


def _maker(operator: dict, explanation: dict, fallback: str) -> str:
    """Names of the sweeps that compute something of the operator's."""
    names = []
    for sweep in explanation.get("sweeps", ()):
        sources = sweep.get("operators", ()) or ()
        if any(operator["where"] and operator["where"] in str(source) for source in sources):
            names.append(sweep.get("name", ""))
    return ", ".join(dict.fromkeys(name for name in names if name)) or fallback
