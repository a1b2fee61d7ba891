"""Tables of what was done, how accurate it is and how fast."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .console import table

_NEVER_SLOWER = {True: "yes", False: "not shown", None: "too few rounds"}


def show_replacements(console: Console, report: dict) -> None:
    """operators_replaced, optimisations and what stays PyTorch's, as the module reports them."""
    replaced = table("Operators replaced", "operator", "where", "by")
    for item in report.get("operators_replaced", ()):
        replaced.add_row(*_cells(item, "what", "where", "by"))
    console.print(replaced if replaced.row_count else "No operator was replaced.")
    made = table("Optimisations made", "what", "identity or reason", "where")
    for item in report.get("optimisations", ()):
        made.add_row(*_cells(item, "what", "identity_or_reason", "where"))
    console.print(made if made.row_count else "No optimisation was made.")
    left = table("Left to PyTorch", "what", "where", "why")
    for item in report.get("unsupported", ()):
        left.add_row(*_cells(item, "what", "where", "why"))
    if left.row_count:
        console.print(left)


def _runner(runner: dict) -> str:
    """Who computes a sweep; of a product also the configuration, and what chose it."""
    provider, tuning = str(runner.get("provider", "")), runner.get("tuning")
    return f"{provider}, {tuning['choice']} ({tuning['by']})" if tuning else provider


def show_plan(console: Console, program: dict, measured_ms: float | None = None) -> None:
    """The sweeps of one compiled region: bytes, flops, predicted time, limit, reasons."""
    explanation = program["explain"]
    title = f"Plan of {program.get('name', '')}, {program.get('mode', '')} mode"
    if "error" in explanation:
        console.print(f"{title}: cannot be shown: {str(explanation['error'])}")
        return
    numbers = ("read MB", "written MB", "Gflop", "predicted ms", "limit ms")
    made = table(
        f"{title}, batch {explanation.get('batch', '?')}",
        "sweep",
        "kind",
        "over",
        "by",
        *numbers,
        "why",
        right=numbers,
    )
    runners = explanation.get("executable", {}).get("sweeps", ())
    providers = [_runner(runner) for runner in runners]
    for position, sweep in enumerate(explanation.get("sweeps", ())):
        made.add_row(
            *_cells(sweep, "name", "kind", "space"),
            providers[position] if position < len(providers) else "",
            _number(sweep.get("bytes_read"), ".1f", 1e-6),
            _number(sweep.get("bytes_written"), ".1f", 1e-6),
            _number(sweep.get("flops"), ".2f", 1e-9),
            _number(sweep.get("predicted_ms"), ".4f"),
            _number(sweep.get("limit_ms"), ".4f"),
            "; ".join(sweep.get("reasons", ())),
        )
    console.print(made)
    target = explanation.get("target", {}).get("name", "this target")
    line = f"For {target}: predicted {_number(explanation.get('predicted_ms'), '.4f')} ms"
    line += f", limit {_number(explanation.get('limit_ms'), '.4f')} ms"
    if measured_ms is not None:
        line += f", measured {measured_ms:.4f} ms"
    console.print(line)


def show_accuracy(console: Console, result: dict) -> None:
    """Candidate and eager against fp64, side by side, from VerifyResult.to_dict()."""
    from ingot.report.accuracy import telling_rows

    columns = ("error", "eager's", "allowed", "worst row", "eager's ", "scaled", "mismatches")
    made = table("Accuracy against fp64", "inputs", "mode", "tensor", *columns, right=columns)
    for row in telling_rows(result["accuracy"]):
        found, eager = row["candidate"], row["eager"] or {}
        made.add_row(
            row["family"],
            row["mode"],
            row["tensor"],
            _error(found["relative_error"]),
            _error(eager.get("relative_error")),
            _error(row["allowed_relative_error"]),
            _error(found["worst_row_error"]),
            _error(eager.get("worst_row_error")),
            _error(found["scaled_error"]),
            str(found["mismatches"]),
        )
    if made.row_count:
        console.print(made)


def show_checks(console: Console, result: dict) -> None:
    """What failed or was declined, and the verdict."""
    for check in result["checks"]:
        if check["outcome"] == "passed":
            continue
        where = f"{check['name']} ({check['mode']})" if check["mode"] else check["name"]
        named = f" [{check['trick']}]" if check["trick"] else ""
        style = "yellow" if check["outcome"] == "declined" else "red"
        console.print(Text(f"{check['outcome']}: {where}{named}: {check['message']}", style))
    for note in result["notes"]:
        console.print(Text(f"Note: {note}"))
    passed = sum(c["outcome"] == "passed" for c in result["checks"])
    verdict = "Verified" if result["verified"] else "NOT verified"
    style = "bold green" if result["verified"] else "bold red"
    console.print(Text(f"{verdict}: {passed} of {len(result['checks'])} checks passed.", style))


def show_timing(console: Console, timing: dict | None) -> None:
    """Medians, spreads and ratios with their intervals, from VerifyResult.timing."""
    if not timing:
        return
    numbers = ("median ms", "quartiles ms", "warm L2 ms", "sustained ms", "candidate / this")
    made = table("Speed", "what", *numbers, "never slower", right=numbers)
    for name, entry in timing["subjects"].items():
        ratio = entry.get("ratio")
        made.add_row(
            name,
            f"{entry['median_ms']:.4f}",
            f"{entry['lower_quartile_ms']:.4f}–{entry['upper_quartile_ms']:.4f}",
            _number(entry.get("warm_ms"), ".4f"),
            _number(entry.get("sustained_ms"), ".4f"),
            f"{ratio[1]:.3f} ({ratio[0]:.3f}–{ratio[2]:.3f})" if ratio else "",
            _NEVER_SLOWER[entry["never_slower"]] if ratio else "",
        )
    console.print(made)
    console.print(
        f"{timing['note']}. Ratio: median over rounds, with its 95 % interval. By the parent's "
        f"clock the candidate takes {timing['parent_clock_ms']:.4f} ms a call, called back to back."
    )


_RECORD_TIMES = {
    "eager": "eager_ms",
    "TF32": "eager_tf32_ms",
    "compile": "compile_ms",
    "Ingot": "ingot_ms",
    "sustained": "sustained_ms",
    "limit": "limit_ms",
}


def show_records(console: Console, records: list) -> None:
    """The table of the targets, from records of bench/results."""
    numbers = (*_RECORD_TIMES, "× eager", "× compile", "error", "eager's error")
    made = table(
        "Medians in ms of the whole model",
        "model",
        "shape",
        "type",
        "mode",
        *numbers,
        right=numbers,
    )
    for r in records:
        same = r["dtype"] == r["precision"]
        made.add_row(
            r["model"],
            r["shape"],
            r["dtype"] if same else f"{r['dtype']}/{r['precision']}",
            r["mode"],
            *(_number(r[key], ".4f") for key in _RECORD_TIMES.values()),
            _quotient(r["eager_ms"], r["ingot_ms"]),
            _quotient(r["compile_ms"], r["ingot_ms"]),
            _error(r["error"]),
            _error(r["eager_error"]),
        )
    console.print(made)


def show_ladder(console: Console, record: dict) -> None:
    """Every policy of one case: what it takes, and what it is off."""
    numbers = ("median ms", "sustained ms", "limit ms", "× eager fp32", "error", "worst row")
    title = f"{record['model']} {record['shape']}, {record['mode']} mode"
    made = table(title, "by", "policy", *numbers, right=numbers)
    for rung in record["rungs"]:
        made.add_row(
            rung["by"],
            rung["policy"],
            *(_number(rung[key], ".4f") for key in ("ms", "sustained_ms", "limit_ms")),
            f"{1 / rung['ratio']:.2f}",
            _error(rung["error"]),
            _error(rung["worst_row_error"]),
        )
    console.print(made)


def _cells(item: dict, *keys: str) -> list:
    return [str(item.get(key, "")) for key in keys]


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "–" if value is None else format(value * factor, form)


def _quotient(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "–"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
