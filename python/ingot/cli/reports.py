"""`--report`: what a command found, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .options import command_line

_NO_TIMING = "Speed was not measured: `--no-timing` was given."
_NO_SPEED = "No speed is stated: the candidate did not pass the checks."
_EXPLAINED = (
    "Nothing was run, so accuracy and speed are not known here: `ingot explain` only plans. "
    "`ingot optimize` verifies and measures."
)
_UNKNOWN = (
    "`ingot verify` takes any pair of files and does not look inside the candidate. What Ingot "
    "itself makes of a model is in the report of `ingot optimize` or `ingot explain`."
)
_LEFT_ALONE = "There was nothing to verify: PyTorch would run all of the model."

_NO_GPU = (
    "Nothing was run: there was no GPU, and a standalone file holds CUDA alone. `ingot verify` "
    "checks and times it on a machine with one."
)


def of_optimize(
    target: Path, model: Path, report: dict, result: dict | None, text: str, timed: bool
) -> None:
    """result: the verification, None where there was nothing to verify."""
    device = result["device"] if result else "cpu"
    _write(
        target,
        [model],
        f"Report of ingot optimize, {_device(device)}",
        report,
        device=device,
        written=(Path(result["candidate"]).name, text) if result else None,
        verification=result,
        not_verified=_LEFT_ALONE,
        not_timed=_why_not_timed(timed) if result else _LEFT_ALONE,
    )


def of_unverified(target: Path, model: Path, report: dict, written: str, text: str) -> None:
    """Of a standalone file that was written where there is no GPU."""
    what = "Report of ingot optimize --standalone: a plan and its file, of which nothing was run"
    _write_plan(target, model, what, report, _NO_GPU, written=(written, text))


def of_explain(target: Path, model: Path, report: dict) -> None:
    what = "Report of ingot explain: a plan, of which nothing was run"
    _write_plan(target, model, what, report, _EXPLAINED)


def of_verify(target: Path, original: Path, candidate: Path, result: dict, timed: bool) -> None:
    from ingot.report import NOTHING_REPORTED

    _write(
        target,
        [original, candidate],
        f"Report of ingot verify, {_device(result['device'])}",
        NOTHING_REPORTED,
        device=result["device"],
        verification=result,
        ours="candidate",
        not_timed=_why_not_timed(timed),
        no_plan=_UNKNOWN,
    )


def _write_plan(
    target: Path, model: Path, what: str, report: dict, why: str, written: tuple | None = None
) -> None:
    """Of a plan that was not run, and why not."""
    _write(
        target,
        [model],
        what,
        report,
        device="none",
        written=written,
        not_verified=why,
        not_timed=why,
    )


def _write(
    target: Path,
    files: list[Path],
    what: str,
    report: dict,
    *,
    device: str,
    written: tuple[str, str] | None = None,
    **found: Any,
) -> None:
    """files: what the command was given; written: name and text of the file that it wrote; found:
    the rest of `run_view`'s arguments."""
    from ingot.report import file_text, run_view, write_report

    view = run_view(
        title=" and ".join(file.name for file in files),
        what=what,
        command=command_line(),
        device=device,
        report=report,
        files=files,
        sources=[*map(file_text, files), *([written] if written else [])],
        **found,
    )
    write_report(target, "run.html.j2", view)


def of_bench(target: Path, results: list, device: Any) -> None:
    from ingot.report import bench_view, write_report

    write_report(target, "bench.html.j2", bench_view(results, command_line(), str(device)))


def _device(device: str) -> str:
    if device != "cuda":
        return "on the CPU"
    import torch

    return f"on {torch.cuda.get_device_name(0)}"


def _why_not_timed(timed: bool) -> str:
    return _NO_SPEED if timed else _NO_TIMING
