"""`ingot run`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from . import options as shared
from .console import complaints, table
from .errors import BadInputError, bad_input_from

_LIBRARY = "libingot_blas.so"
_ROWS_SHOWN = 40


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@shared.log_options
def command(program: tuple) -> None:
    """Runs PROGRAM with its arguments; the large fp32 products that it, or any process that it
    starts, gives to cuBLAS run on Ingot. Says on stderr at the end which were taken, and why others
    were not. Experimental.

    The exit status is PROGRAM's. INGOT_BLAS=off in the environment takes nothing.
    """
    library = _library()
    with tempfile.TemporaryDirectory(prefix="ingot-run-") as folder:
        reports = Path(folder) / "reports"
        before = os.environ.get("LD_PRELOAD")
        environment = {
            **os.environ,
            "LD_PRELOAD": f"{library}:{before}" if before else str(library),
            "INGOT_BLAS_REPORT": str(reports),
        }
        status = _status_of(program, environment)
        processes = _read(reports)
    _show(processes)
    sys.exit(status)


def _library() -> Path:
    from ingot import IngotError
    from ingot.runtime.library import find_library

    with bad_input_from(IngotError):
        library = find_library().resolve().with_name(_LIBRARY)
    if not library.is_file():
        raise BadInputError(
            f"{library} is not there; it is built and installed beside libingot.so "
            "(cmake --build build/release --target ingot_blas)"
        )
    if any(sign in str(library) for sign in ": "):
        raise BadInputError(f"LD_PRELOAD cannot name {library}: no colons or spaces in its path")
    return library


def _status_of(program: tuple, environment: dict) -> int:
    """As a shell gives it: 128 and the signal's number for a program that one ended."""
    # Ctrl-C reaches the program by itself, and what it does then is its own affair; the report
    # follows all the same.
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(
            program,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, kept or signal.SIG_DFL),
        )
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        status = child.wait()
    except OSError as error:
        raise BadInputError(f"cannot run {program[0]}: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGINT, kept or signal.SIG_DFL)
    return status if status >= 0 else 128 - status


def _read(reports: Path) -> list:
    """One object a process that multiplied. A line that is none, of a process that was killed while
    it wrote, is left out: the program's exit status comes first."""
    if not reports.is_file():
        return []
    found = []
    for line in reports.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [process for process in found if isinstance(process, dict) and "products" in process]


def _show(processes: list) -> None:
    console = complaints()
    if not processes:
        console.print("ingot run: no product reached cuBLAS.")
        return
    for process in processes:
        rows = process["products"]
        taken = sum(row["count"] for row in rows if row["taken"])
        every = sum(row["count"] for row in rows) + process["dropped"]
        console.print(
            f"ingot run: {process['command']} (process {process['process']}): {taken} of {every} "
            f"fp32 products taken; {process['other']} products were not fp32."
        )
        shown = table("", "function", "op", "m×n×k", "batch", "count", "what became of it")
        for row in rows[:_ROWS_SHOWN]:
            operations = "".join("T" if row[f"transpose_{x}"] else "N" for x in "ab")
            extents = f"{row['m']}×{row['n']}×{row['k']}"
            shown.add_row(
                row["function"],
                operations,
                extents,
                str(row["batches"]),
                str(row["count"]),
                row["outcome"],
            )
        if rows:
            console.print(shown)
        if len(rows) > _ROWS_SHOWN:
            console.print(f"and {len(rows) - _ROWS_SHOWN} other kinds of products")
