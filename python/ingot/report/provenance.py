"""Where a report's figures come from: command, versions, machine, sources."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import ingot
from ingot.bench import records


def provenance(command: str, device: str, files: Iterable[os.PathLike | str] = ()) -> list[tuple]:
    """(what, found) rows, in the order in which they are shown."""
    processor = records.processor() or platform.processor() or platform.machine()
    rows = [
        ("Command", command),
        ("Run on", datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        ("Ingot", _ingot_version()),
        ("Source hash", _source_hash()),
        ("Python", platform.python_version()),
        *_torch_rows(device),
        ("Processor", f"{processor}, {len(os.sched_getaffinity(0))} cores usable"),
        ("System", platform.platform()),
    ]
    for path in files:
        if Path(path).is_file():
            rows.append((f"SHA-256 of {Path(path).name}", _digest(Path(path))))
    return rows


def _ingot_version() -> str:
    from ingot.runtime.library import library

    return f"{ingot.__version__}, libingot {library().version}"


def _source_hash() -> str:
    """Of the source tree, or of an installed package, which has only its library and front."""
    package = Path(ingot.__file__).resolve().parent
    root = package.parents[1]
    if (root / "kernels").is_dir():
        return f"{records.source_hash(root)} (kernels/, src/, python/ingot)"
    from ingot.runtime.library import find_library

    return f"{_digest(find_library())[:16]} (libingot.so)"


def _torch_rows(device: str) -> list[tuple]:
    import torch

    rows = [("PyTorch", torch.__version__)]
    if device == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        rows.append(
            (
                "GPU",
                f"{found.name}, compute capability {found.major}.{found.minor}, "
                f"{found.total_memory >> 20} MiB",
            )
        )
        rows.append(("CUDA", torch.version.cuda or "none"))
    elif device == "cpu":
        rows.append(("Device", f"CPU, {torch.get_num_threads()} threads"))
    return rows


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
