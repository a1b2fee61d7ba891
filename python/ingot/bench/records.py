"""The records of bench/results/<machine>.json: a list of objects with the keys FIELDS.

Times are milliseconds, errors relative Frobenius and worst-row errors against fp64. ratio: median
over the rounds of Ingot's time over eager's, with its 95 % interval.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

FIELDS = (
    "model",
    "shape",
    "dtype",
    "precision",
    "mode",
    "eager_ms",
    "eager_tf32_ms",
    "compile_ms",
    "ingot_ms",
    "sustained_ms",
    "limit_ms",
    "ratio",
    "ratio_lower",
    "ratio_upper",
    "rounds",
    "error",
    "eager_error",
    "worst_row_error",
    "eager_worst_row_error",
    "source_hash",
    "date",
)
KEY = FIELDS[:5]
_HASHED = ("kernels", "src", "python/ingot")
_SOURCE_SUFFIXES = {".py", ".h", ".hpp", ".cpp", ".cu", ".cuh"}


def source_hash(root: Path) -> str:
    """A hash of the sources under kernels/, src/ and python/ingot: which code was measured."""
    digest = hashlib.sha256()
    for folder in _HASHED:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SOURCE_SUFFIXES and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def processor() -> str:
    """The CPU's model; "" where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return ""


def key_of(record: dict) -> tuple:
    return tuple(str(record[field]) for field in KEY)


def merge(path: Path, new: Iterable[dict]) -> list:
    """Replaces the records of the same key in the file by `new`, keeps the others, and returns the
    whole. The file appears whole or not at all."""
    known = {key_of(r): r for r in read(path)}
    for record in new:
        missing = set(FIELDS) - set(record)
        if missing:
            raise ValueError(f"a record lacks {', '.join(sorted(missing))}")
        known[key_of(record)] = record
    records = [known[key] for key in sorted(known)]
    write_whole(path, json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    return records


def read(path: Path) -> list:
    """The records of a file, none where it does not exist."""
    if not path.exists():
        return []
    records = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(records, list):
        raise ValueError(f"{path}: a list of records was expected")
    return records


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new, and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
