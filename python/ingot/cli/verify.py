"""`ingot verify`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import options as shared
from . import reports
from .console import output, print_json, progress
from .errors import NOT_VERIFIED, bad_input_from
from .render import show_accuracy, show_checks, show_timing


@click.command("verify")
@shared.model_argument("original")
@shared.model_argument("candidate")
@shared.precision_option
@shared.device_option
@shared.set_option
@click.option("--no-timing", is_flag=True, help="Check only; do not time.")
@click.option("--no-compile", is_flag=True, help="Time without torch.compile as a baseline.")
@click.option(
    "--lenient",
    is_flag=True,
    help="Accept a candidate that refuses aloud inputs other than the model's own.",
)
@click.option("--seed", type=int, help="Seed of inputs and parameters. [default: a fresh one]")
@click.option(
    "--time-limit",
    type=shared.Seconds(),
    default=600.0,
    show_default=True,
    help="Seconds that one call of the candidate may take.",
)
@click.option(
    "--memory-limit",
    type=shared.Count(),
    help="MiB that the candidate's process may take. [default: 80 % of what is free]",
)
@shared.budget_option
@shared.report_option
@shared.json_option
@shared.log_options
def command(
    original: Path,
    candidate: Path,
    precision: str,
    device: str | None,
    settings: tuple,
    no_timing: bool,
    no_compile: bool,
    lenient: bool,
    seed: int | None,
    time_limit: float,
    memory_limit: int | None,
    budget: float | None,
    report_file: Path | None,
    as_json: bool,
) -> None:
    """Is ModelNew of CANDIDATE the same function as Model of ORIGINAL, and how fast is it?

    Where CANDIDATE has no ModelNew, its Model is compared, which a note says.

    Truth is the original in fp64, for outputs, running statistics and gradients. The candidate runs
    in a process of its own, on its own inputs and on hostile ones, in training and eval mode, with
    parameters changed between calls.
    docs/verify.md says what is checked and what is not. Exit status 0: verified; 1: not verified,
    as a candidate is that cannot be read; 2: bad input.
    """
    from ingot.model_file import ModelFileError
    from ingot.verify import PairError, VerifyOptions, verify_pair

    chosen = shared.chosen_device(device)
    given = {"the original": original, "the candidate": candidate}
    shared.check_writable("--report", report_file, given)
    with progress() as say, bad_input_from(PairError, ModelFileError):
        result = verify_pair(
            str(original),
            str(candidate),
            VerifyOptions(
                device=chosen,
                precision=precision,
                overrides=dict(settings),
                seed=seed,
                strict=not lenient,
                timing=not no_timing,
                compile_baseline=not no_compile,
                timing_budget_s=budget,
                time_limit_s=time_limit,
                memory_limit=None if memory_limit is None else memory_limit << 20,
                progress=say,
            ),
        ).to_dict()
        if report_file is not None:
            reports.of_verify(report_file, original, candidate, result, not no_timing)
    if as_json:
        print_json("verify", result)
    console = output(as_json)
    show_accuracy(console, result)
    show_timing(console, result["timing"])
    show_checks(console, result)
    if report_file is not None:
        console.print(f"Report: {report_file}")
    sys.exit(0 if result["verified"] else NOT_VERIFIED)
