"""Writes the README's table of measured results from bench/results/*.json.

    tools/results_table.py            rewrites the part of README.md between the two markers
    tools/results_table.py --check    fails if that part is not what the records give

Each file is named for its GPU and holds a list of records; times are milliseconds, errors are
relative Frobenius errors against fp64.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN = "<!-- results: written by tools/results_table.py from bench/results -->"
END = "<!-- end of results -->"
HEADINGS = (
    "model",
    "shape",
    "dtype",
    "precision",
    "mode",
    "eager ms",
    "torch.compile ms",
    "Ingot ms",
    "× eager",
    "limit ms",
    "error",
    "eager's error",
)


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def row(record: dict) -> str:
    eager, ingot = record.get("eager_ms"), record.get("ingot_ms")
    cells = (
        f"`{record['model']}`",
        str(record["shape"]),
        record["dtype"],
        record["precision"],
        record["mode"],
        number(eager, ".3f"),
        number(record.get("compile_ms"), ".3f"),
        number(ingot, ".3f"),
        number(eager / ingot if eager and ingot else None, ".2f"),
        number(record.get("limit_ms"), ".3f"),
        number(record.get("error"), ".1e"),
        number(record.get("eager_error"), ".1e"),
    )
    return f"| {' | '.join(cells)} |"


def tables(folder: Path) -> str:
    parts = []
    for file in sorted(folder.glob("*.json")):
        records = json.loads(file.read_text(encoding="utf-8"))
        dates = sorted({str(record["date"])[:10] for record in records})
        period = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        header = f"| {' | '.join(HEADINGS)} |"
        rule = "|" + " --- |" * 5 + " ---: |" * (len(HEADINGS) - 5)
        parts.append(
            "\n".join([f"**{file.stem}**, {period}", "", header, rule, *map(row, records)])
        )
    return "\n\n".join(parts) or "No results have been recorded yet."


def expected(text: str, folder: Path) -> str:
    """The README's text with the part between the markers made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{tables(folder)}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    wanted = expected(text, ROOT / "bench" / "results")
    if text == wanted:
        return 0
    if arguments.check:
        print(
            "README.md: the results table is not what bench/results gives; run "
            "tools/results_table.py",
            file=sys.stderr,
        )
        return 1
    temporary = README.with_suffix(".md.new")
    temporary.write_text(wanted, encoding="utf-8")
    os.replace(temporary, README)
    return 0


if __name__ == "__main__":
    sys.exit(main())
