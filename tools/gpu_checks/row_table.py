"""A file of rows, each measured once for given sources."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ingot.bench.records import read, source_hash, write_whole
from ingot.bench.rounds import Comparison

ROOT = Path(__file__).resolve().parents[2]
EAGER, COMPILE, INGOT = "eager", "torch.compile", "Ingot"


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
