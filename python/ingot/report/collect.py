"""Gathers what a command found into the values that the templates show."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from . import summary, text
from .accuracy import accuracy_view
from .code import coloured
from .graph import pictures
from .plan import plan_view
from .provenance import provenance
from .roofline import roofline_view
from .speed import LIMIT_MEASURED, key_of, speed_view

CANDIDATE = "candidate"
NOTHING_REPORTED: dict = {
    "operators_replaced": [],
    "optimisations": [],
    "unsupported": [],
    "programs": [],
}


def run_view(
    *,
    title: str,
    what: str,
    command: str,
    device: str,
    report: dict,
    verification: dict | None = None,
    ours: str = "Ingot",
    not_verified: str = "",
    not_timed: str = "",
    no_plan: str = "",
    files: Iterable[os.PathLike | str] = (),
    sources: Iterable[tuple[str, str]] = (),
    notes: Iterable[str] = (),
) -> dict:
    """The report of one model.

    report: as `ingot_report()` gives it. verification: VerifyResult.to_dict(). ours: what the
    candidate is called. not_verified, not_timed, no_plan: said where that part is missing. files:
    whose hashes are given. sources: (name, text) of Python files to show.
    """
    timing = (verification or {}).get("timing")
    subjects = _named(timing["subjects"], ours) if timing else None
    modes = _modes(report, subjects, ours)
    mode = modes[0]["mode"] if modes else "training"
    target = next(
        (
            p["target"].replace(" (none here)", "")
            for m in modes
            for p in m["plans"]
            if p.get("target")
        ),
        device,
    )
    words = [summary.done(report, mode, target)] if not no_plan else []
    if verification:
        words.append(summary.rightness(verification))
    words.append(summary.speed(subjects, ours, not_timed))
    # One sentence may explain why several parts are missing: it is said once.
    words = list(dict.fromkeys(w for w in words if w))
    return {
        "title": title,
        "what": what,
        "verdict": summary.verdict(verification),
        "summary": words,
        "tiles": summary.tiles(verification, subjects, ours, report, mode),
        "ours": ours,
        "speed": speed_view(subjects, ours, timing["note"], _limit(report)) if subjects else None,
        "parent_clock": text.duration(timing["parent_clock_ms"]) if timing else "",
        "not_timed": not_timed,
        "accuracy": accuracy_view(verification["accuracy"]) if verification else None,
        "checks": verification["checks"] if verification else [],
        "not_verified": not_verified,
        "report": report,
        "modes": modes,
        "no_plan": no_plan,
        "kernels": _kernels(report),
        "sources": [{"name": n, "html": coloured(s, "python")} for n, s in sources],
        "notes": [*notes, *((verification or {}).get("notes") or ())],
        "provenance": provenance(command, device, files),
    }


def bench_view(results: Iterable, command: str, device: str) -> dict:
    """The report of `ingot bench`; results: CaseResults."""
    from ingot.bench.suite import INGOT

    cases = []
    for result in results:
        record, report = result.record, result.report or NOTHING_REPORTED
        subjects = result.comparison.table(INGOT)
        limit_ms = result.limit_s * 1e3
        modes = _modes(report, subjects, INGOT, record["mode"])
        speed = speed_view(subjects, INGOT, result.comparison.note, limit_ms, LIMIT_MEASURED)
        cases.append(
            {
                "id": f"case-{len(cases) + 1}",
                "name": f"{record['model']} {record['shape']}",
                "model": record["model"],
                "shape": record["shape"],
                "type": record["dtype"]
                if record["dtype"] == record["precision"]
                else f"{record['dtype']}, {record['precision']}",
                "mode": record["mode"],
                "speed": speed,
                "clocks": result.clocks,
                "times": {
                    name: text.duration(record[key])
                    for name, key in (
                        ("eager", "eager_ms"),
                        ("compiled", "compile_ms"),
                        ("ours", "ingot_ms"),
                        ("sustained", "sustained_ms"),
                        ("limit", "limit_ms"),
                    )
                },
                "factor": text.times(record["eager_ms"] / record["ingot_ms"]) + "×",
                "compile_factor": text.times(record["compile_ms"] / record["ingot_ms"]) + "×"
                if record["compile_ms"]
                else text.MISSING,
                "error": text.scientific(record["error"]),
                "eager_error": text.scientific(record["eager_error"]),
                "report": report,
                "modes": modes,
                "kernels": _kernels(report),
            }
        )
    return {
        "title": "Ingot beside PyTorch",
        "what": f"the table of {text.plural(len(cases), 'measurement')}",
        "summary": _bench_words(cases, results),
        "tiles": _bench_tiles(results),
        "cases": cases,
        "ours": INGOT,
        "provenance": provenance(command, device),
    }


def _bench_words(cases: list, results: Iterable) -> list[str]:
    factors = [r.record["eager_ms"] / r.record["ingot_ms"] for r in results]
    words = [
        f"{text.plural(len(cases), 'combination')} of model, size and mode, each run by PyTorch as "
        "it is (“eager”), by torch.compile and by Ingot, in turns on the same machine, with "
        "weights that change before every call."
    ]
    low, high = text.times(min(factors)), text.times(max(factors))
    span = low if low == high else f"between {low} and {high}"
    words.append(f"Ingot is {span} times as fast as eager.")
    worse = [r for r in results if r.record["error"] > r.record["eager_error"]]
    words.append(
        "Its error against double precision is "
        + ("nowhere" if not worse else f"in {len(worse)} of {len(cases)}")
        + " larger than eager's."
    )
    return words


def _bench_tiles(results: Iterable) -> list[dict]:
    made = []
    for result in results:
        record = result.record
        made.append(
            {
                "label": f"{record['model']}, {record['mode']}",
                "value": text.times(record["eager_ms"] / record["ingot_ms"]) + "×",
                "note": f"as fast as eager at {record['shape']}, {record['dtype']}",
                "state": "good" if record["ingot_ms"] <= record["eager_ms"] else "bad",
            }
        )
    return made


def _named(subjects: dict, ours: str) -> dict:
    return {ours if name == CANDIDATE else name: entry for name, entry in subjects.items()}


def _modes(report: dict, subjects: dict | None, ours: str, timed: str = "training") -> list[dict]:
    """The compiled regions by mode, the timed mode first."""
    programs = report.get("programs", ())
    names = sorted(dict.fromkeys(p["mode"] for p in programs), key=lambda mode: mode != timed)
    made = []
    for mode in names:
        mine = [p for p in programs if p["mode"] == mode]
        measured = []
        if subjects and mode == timed:
            measured = [(key_of(n, ours), n, s["median_ms"]) for n, s in subjects.items()]
        made.append(
            {
                "mode": mode,
                "plans": [
                    {**plan_view(p), "pictures": pictures(p["explain"]), "program": p} for p in mine
                ],
                "roofline": roofline_view(mine, measured),
            }
        )
    return made


def _limit(report: dict, mode: str = "training") -> float | None:
    limits = [
        p["explain"]["limit_ms"]
        for p in report.get("programs", ())
        if p["mode"] == mode and "limit_ms" in p["explain"]
    ]
    return sum(limits) or None


def _kernels(report: dict) -> list[dict]:
    """Each distinct kernel text once, with the modes that use it."""
    found: dict[tuple, dict] = {}
    for program in report.get("programs", ()):
        for sweep in program["explain"].get("executable", {}).get("sweeps", ()):
            for kernel in sweep.get("kernels", ()):
                source = kernel.get("text", "")
                if not source:
                    continue
                entry = found.setdefault(
                    (kernel["name"], source),
                    {
                        "name": kernel["name"],
                        "modes": [],
                        "lines": source.rstrip().count("\n") + 1,
                        "html": coloured(source, "cuda"),
                    },
                )
                if program["mode"] not in entry["modes"]:
                    entry["modes"].append(program["mode"])
    return list(found.values())


def file_text(path: os.PathLike | str) -> tuple[str, str]:
    """(name, text) for `sources`; a file that cannot be read says so."""
    try:
        return Path(path).name, Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return Path(path).name, f"# cannot be read: {error}"
