"""A file of rows, each measured once for given sources."""

from __future__ import annotations

import gc
import json
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from ingot.bench.records import read, source_hash, write_whole
from ingot.bench.rounds import Comparison

ROOT = Path(__file__).resolve().parents[2]
EAGER, COMPILE, INGOT = "eager", "torch.compile", "Ingot"
ENOUGH = 1.0 / 0.98  # a row slower than this is listed


def times_of(comparison: Comparison, names: Iterable[str]) -> dict:
    """What a row tells of the times of these, eager's and Ingot's among them."""
    ratio = comparison.ratio(INGOT, EAGER)
    ms = {name: round(1e3 * comparison.summary(name).median, 5) for name in names}
    return {
        "eager_ms": ms[EAGER],
        "compile_ms": ms.get(COMPILE),
        "ingot_ms": ms[INGOT],
        "ratio": round(ratio.median, 4),
        "ratio_lower": round(ratio.lower, 4),
        "ratio_upper": round(ratio.upper, 4),
        "never_slower": comparison.never_slower(INGOT, EAGER),
        "rounds": comparison.rounds,
    }


class RowTable:
    """The rows in a file, those of this call among them. key: what tells a row from others."""

    def __init__(self, path: Path | None, key: Callable[[dict], tuple]):
        self.path, self.key, self.hash = path, key, source_hash(ROOT)
        self.rows = {key(row): row for row in (read(path) if path else [])}
        self._one = threading.Lock()

    def done(self, key: tuple, timed: bool) -> bool:
        """Whether it was right with the present sources, and timed where that is asked for."""
        row = self.rows.get(key)
        right = row is not None and row["source_hash"] == self.hash and not row["wrong"]
        return right and ("ratio" in row or not timed)

    def add(self, row: dict) -> None:
        row["source_hash"] = self.hash
        with self._one:
            self.rows[self.key(row)] = row
            if not self.path:
                return
            rows = [self.rows[key] for key in sorted(self.rows)]
            write_whole(self.path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def rows_told(lines: Iterable[str], marker: str, others: list[str]) -> Iterator[dict]:
    """The rows among the lines that a child prints, each behind the marker; the other lines go to
    `others`."""
    for text in lines:
        if text.startswith(marker):
            yield json.loads(text.removeprefix(marker))
        else:
            others.append(text.rstrip())


def measure_rows(
    table: RowTable, wanted: list, line: Callable, arguments, longest: float, least: float
) -> tuple[list[dict], int]:
    """The rows of `wanted`, measured now if the table has them not, and how many time left out.
    wanted: what tells a row from others, with the call that measures it; an exception makes the row
    wrong. longest, least: seconds that the first row, and any row, is thought to take."""
    started, rows, missed = time.monotonic(), [], 0
    for known, measure in wanted:
        key = table.key(known)
        if not arguments.again and table.done(key, bool(arguments.rounds)):
            rows.append(table.rows[key])
            continue
        begin = time.monotonic()
        if begin - started + longest > arguments.seconds:
            missed += 1
            continue
        torch._dynamo.reset()
        try:
            row = measure()
        except Exception as failure:  # the next one may do better
            print(traceback.format_exc(limit=-6))
            row = {**known, "wrong": f"{type(failure).__name__}: {failure}"[:600]}
        table.add(row)
        rows.append(row)
        print(line(row), flush=True)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        longest = max(least, time.monotonic() - begin)
    ratios = [1 / row["ratio"] for row in rows if "ratio" in row]
    mean = f"{statistics.geometric_mean(ratios):.3f} × eager" if ratios else "not timed"
    print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s, {missed} not reached, {mean}")
    return rows, missed


def print_slower(rows: list[dict], name: Callable[[dict], str]) -> None:
    slower = [
        f"{name(row)} {row['ratio']:.3f}"
        for row in rows
        if row.get("ratio", 0) > ENOUGH and row["ratio_lower"] > 1
    ]
    print("slower than eager: " + (", ".join(slower) or "none"))


def status_of(rows: list[dict], missed: int) -> int:
    return 1 if any(row["wrong"] for row in rows) else 3 if missed else 0
