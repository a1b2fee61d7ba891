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
    from ingot.report import file_text, run_view, write_report

    device = result["device"] if result else "cpu"
    written = Path(result["candidate"]).name if result else ""
    sources = [file_text(model), *([(written, text)] if written else [])]
    view = run_view(
        title=model.name,
        what=f"Report of ingot optimize, {_device(device)}",
        command=command_line(),
        device=device,
        report=report,
        verification=result,
        not_verified=_LEFT_ALONE,
        not_timed=_why_not_timed(result, timed) if result else _LEFT_ALONE,
        files=[model],
        sources=sources,
    )
    write_report(target, "run.html.j2", view)


def of_unverified(target: Path, model: Path, report: dict, written: str, text: str) -> None:
    """Of a standalone file that was written where there is no GPU."""
    from ingot.report import file_text, run_view, write_report

    view = run_view(
        title=model.name,
        what="Report of ingot optimize --standalone: a plan and its file, of which nothing was run",
        command=command_line(),
        device="none",
        report=report,
        not_verified=_NO_GPU,
        not_timed=_NO_GPU,
        files=[model],
        sources=[file_text(model), (written, text)],
    )
    write_report(target, "run.html.j2", view)


def of_verify(target: Path, original: Path, candidate: Path, result: dict, timed: bool) -> None:
    from ingot.report import NOTHING_REPORTED, file_text, run_view, write_report

    view = run_view(
        title=f"{original.name} and {candidate.name}",
        what=f"Report of ingot verify, {_device(result['device'])}",
        command=command_line(),
        device=result["device"],
        report=NOTHING_REPORTED,
        verification=result,
        ours="candidate",
        not_timed=_why_not_timed(result, timed),
        no_plan=_UNKNOWN,
        files=[original, candidate],
        sources=[file_text(original), file_text(candidate)],
    )
    write_report(target, "run.html.j2", view)


def of_explain(target: Path, model: Path, report: dict) -> None:
    from ingot.report import file_text, run_view, write_report

    view = run_view(
        title=model.name,
        what="Report of ingot explain: a plan, of which nothing was run",
        command=command_line(),
        device="none",
        report=report,
        not_verified=_EXPLAINED,
        not_timed=_EXPLAINED,
        files=[model],
        sources=[file_text(model)],
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


def _why_not_timed(result: dict, timed: bool) -> str:
    return _NO_SPEED if timed else _NO_TIMING
