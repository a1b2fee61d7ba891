"""`ingot optimize`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from . import options as shared
from . import reports
from .console import output, print_json, progress
from .errors import NOT_VERIFIED, bad_input_from
from .render import show_accuracy, show_checks, show_plan, show_replacements, show_timing


@click.command("optimize")
@shared.model_argument("model")
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. [default: MODEL with _new before .py]",
)
@shared.precision_option
@shared.device_option
@shared.set_option
@click.option("--no-timing", is_flag=True, help="Verify, but do not time.")
@click.option("--no-compile", is_flag=True, help="Time without torch.compile as a baseline.")
@shared.budget_option
@click.option(
    "--standalone",
    is_flag=True,
    help="Write a file that needs PyTorch alone, its CUDA inlined; verified where there is a GPU.",
)
@shared.report_option
@shared.json_option
@shared.log_options
def command(
    model: Path,
    target: Path | None,
    precision: str,
    device: str | None,
    settings: tuple,
    no_timing: bool,
    no_compile: bool,
    budget: float | None,
    report_file: Path | None,
    standalone: bool,
    as_json: bool,
) -> None:
    """Writes a file with a verified, faster ModelNew for MODEL.

    Prints operators replaced, optimisations made, the plan, accuracy against fp64 beside eager's,
    and speed beside eager's and torch.compile's. The file appears only if it was verified (with
    --standalone also where there is no GPU to verify it on, which is said). Exit status 0: written;
    1: not verified, or nothing to take over; 2: bad input.
    """
    from ingot.verify import Extensions, PairError, VerifyOptions, begin, verify_pair

    chosen = shared.chosen_device(device)
    target = target or model.with_name(f"{model.stem}_new.py")
    shared.check_writable("-o", target, {"the model itself": model})
    written = {"the model itself": model, "what -o names": target}
    shared.check_writable("--report", report_file, written)
    console = output(as_json)
    with contextlib.ExitStack() as scope, progress() as say:
        options = VerifyOptions(
            device=chosen,
            precision=precision,
            overrides=dict(settings),
            candidate_place=os.path.abspath(target),
            timing=not no_timing,
            compile_baseline=not no_compile,
            timing_budget_s=budget,
            progress=say,
        )
        ahead = None
        if not standalone or chosen == "cuda":
            imports = b"" if standalone else b"import ingot"
            ahead = scope.enter_context(begin(str(model), imports, options))
        # These take seconds too.
        from ingot import IngotError
        from ingot.model_file import ModelFileError, load_model_file, write_whole
        from ingot.standalone_writer import StandaloneError

        scope.enter_context(bad_input_from(ModelFileError, PairError, IngotError, StandaloneError))
        say(f"capturing and planning {model}")
        loaded = load_model_file(model, dict(settings))
        report, render = _rendering(loaded, precision, chosen, standalone)
        if not report["programs"]:
            if report_file is not None:
                reports.of_optimize(report_file, model, report, None, "", not no_timing)
            _give_up(console, report, as_json)
        text = render(None)
        if not as_json:
            show_replacements(console, report)
        if standalone and chosen != "cuda":
            write_whole(target, text)
            if report_file is not None:
                reports.of_unverified(report_file, model, report, target.name, text)
            _end_unverified(console, report, target, as_json)
        with tempfile.TemporaryDirectory(prefix="ingot-optimize-") as folder:
            written = Path(folder) / target.name
            written.write_text(text, encoding="utf-8")
            if standalone:
                scope.enter_context(Extensions(str(written)))
            result = verify_pair(str(model), str(written), options, ahead).to_dict()
        if result["verified"]:
            text = render(result)
            write_whole(target, text)
        result["candidate"] = str(target)
        if report_file is not None:
            reports.of_optimize(report_file, model, report, result, text, not no_timing)
    if as_json:
        print_json(
            "optimize", {"report": report, "verification": result, "written": result["verified"]}
        )
    _show(console, report, result)
    console.print(f"Wrote {target}." if result["verified"] else f"{target} was not written.")
    if report_file is not None:
        console.print(f"Report: {report_file}")
    sys.exit(0 if result["verified"] else NOT_VERIFIED)


def _show(console: Any, report: dict, result: dict) -> None:
    measured = _measured_ms(result)
    for program in report["programs"]:
        show_plan(console, program, measured if program["mode"] == "training" else None)
    show_accuracy(console, result)
    show_timing(console, result["timing"])
    show_checks(console, result)


def _rendering(loaded: Any, precision: str, chosen: str, standalone: bool) -> tuple:
    """(report, text for a verification's result)."""
    if standalone:
        from ingot.standalone_writer import Standalone

        prepared = Standalone(loaded, precision)
        return prepared.report, prepared.render
    from ingot.model_writer import render_model

    report = _optimized_report(loaded, precision, chosen)
    return report, lambda verification: render_model(loaded, report, precision)


def _end_unverified(console: Any, report: dict, target: Path, as_json: bool) -> None:
    """A standalone file holds CUDA alone: without a GPU there is nothing to run."""
    if as_json:
        print_json("optimize", {"report": report, "verification": None, "written": True})
    console.print(
        f"Wrote {target}. Its kernels were not run: there is no GPU here, or --device cpu was "
        f"given. On a machine with one, `ingot verify MODEL {target.name}` checks and times it."
    )
    click.get_current_context().exit(0)


def _give_up(console: Any, report: dict, as_json: bool) -> None:
    """There is nothing in the model that Ingot could take over."""
    if as_json:
        print_json("optimize", {"report": report, "verification": None, "written": False})
    show_replacements(console, report)
    from ingot.live.backend import switched_off

    why = " (INGOT=off is set in the environment)" if switched_off() else ""
    console.print(f"Nothing was written: PyTorch would run all of the model{why}.")
    click.get_current_context().exit(NOT_VERIFIED)


def _optimized_report(loaded: Any, precision: str, device: str) -> dict:
    """ingot_report() of the optimised module, planned in training and in eval mode."""
    import torch

    import ingot
    from ingot.model_file import ModelFileError, batch_of

    module = loaded.make_module()
    inputs: list = []
    try:
        inputs = loaded.make_inputs(device)
        optimized = ingot.optimize(module, inputs, precision=precision, device=device)
        with torch.no_grad():
            for training in (True, False):
                optimized.train(training)
                # What PyTorch must run whole is in the report as well.
                with contextlib.suppress(ingot.IngotError):
                    optimized.ingot_prepare(*inputs)
    except torch.OutOfMemoryError as error:
        raise ModelFileError(f"{loaded.path}: too large for {device}: {error}") from error
    except (ingot.IngotError, ModelFileError):
        raise
    except Exception:
        loaded.check_runs(module, inputs)  # most often it is the model that raises
        raise
    return optimized.ingot_report(batch_of(inputs))


def _measured_ms(result: dict) -> float | None:
    timing = result["timing"]
    return timing["subjects"]["candidate"]["median_ms"] if timing else None
