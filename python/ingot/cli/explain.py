"""`ingot explain`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from ingot.report.launches import launch_rows

from . import options as shared
from . import reports
from .console import output, print_json, table
from .errors import bad_input_from
from .render import show_plan


@click.command("explain")
@shared.model_argument("model")
@shared.precision_option
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="What to plan for; no such device is needed here.",
)
@click.option(
    "--sm", type=int, default=90, show_default=True, help="Compute capability to plan for."
)
@click.option(
    "--mode",
    type=click.Choice(["training", "eval", "both"]),
    default="training",
    show_default=True,
    help="Mode of the module that is shown.",
)
@click.option("--kernels/--no-kernels", default=True, help="Print the kernels' text.")
@click.option(
    "--kernels-out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each kernel's source into this folder; it includes the headers of kernels/.",
)
@shared.set_option
@shared.report_option
@shared.json_option
@shared.log_options
def command(
    model: Path,
    precision: str,
    device: str,
    sm: int,
    mode: str,
    kernels: bool,
    kernels_out: Path | None,
    settings: tuple,
    report_file: Path | None,
    as_json: bool,
) -> None:
    """Shows what Ingot makes of MODEL at every stage; nothing is run on a device.

    The graph before and after, each rewrite with the identity that it rests on, the plan with
    bytes, flops and predicted time, what a call launches, and the kernels' text. Where a forward is
    several graphs to TorchDynamo, PyTorch runs it once on the host to find them.
    """
    from ingot import IngotError
    from ingot.model_file import ModelFileError, load_model_file, write_whole

    shared.check_writable("--report", report_file, {"the model itself": model})
    with bad_input_from(ModelFileError, IngotError):
        loaded = load_model_file(model, dict(settings))
        modes = ["training", "eval"] if mode == "both" else [mode]
        report = _explained(loaded, modes, precision, device, sm)
        programs, unsupported = report["programs"], report["unsupported"]
        sources = _kernel_sources(programs)
        if report_file is not None:
            reports.of_explain(report_file, model, report)
        if kernels_out is not None:
            shared.make_folder("--kernels-out", kernels_out)
            for name, source in sources.items():
                write_whole(kernels_out / f"{name}.cu", source)
    if as_json:
        print_json("explain", report)
        return
    console = output()
    for program in programs:
        _show_program(console, program)
    left = table("Left to PyTorch", "what", "where", "why")
    for item in unsupported:
        left.add_row(item["what"], item["where"], item["why"])
    if left.row_count:
        console.print(left)
    if kernels:
        for name, source in sources.items():
            console.rule(f"kernel {name}", align="left")
            sys.stdout.write(source.rstrip() + "\n")
    if kernels_out is not None:
        console.print(f"Wrote {len(sources)} kernels to {kernels_out}.")
    if report_file is not None:
        console.print(f"Report: {report_file}")


def _explained(loaded: Any, modes: list, precision: str, device: str, sm: int) -> dict:
    """A report as an optimised module gives it, of programs that never run."""
    from ingot import IngotError
    from ingot.live.reporting import HOLDS_NOTHING, add_program, empty_report
    from ingot.model_file import batch_of
    from ingot.runtime.program import Program

    module, inputs = loaded.make_module(), loaded.make_inputs()
    batch = batch_of(inputs) or 1
    report = empty_report()
    unsupported = report["unsupported"]
    for mode in modes:
        module.train(mode == "training")
        graphs, left = _graphs(loaded, module, inputs, device)
        for graph in graphs:
            left += [dataclasses.asdict(item) for item in graph.unsupported]
        unsupported += [item for item in left if item not in unsupported]
        regions = [region for graph in graphs for region in graph.regions]
        if not regions and not unsupported:
            nothing = {"what": "the module", "where": str(loaded.path), "why": HOLDS_NOTHING}
            unsupported.append(nothing)
        for region in regions:
            program = Program(
                region.graph,
                device=device,
                precision=precision,
                leaf_layouts=region.leaf_layouts,
                result_layouts=region.result_layouts,
                options={"sm": sm} if device == "cuda" else None,
            )
            add_program(report, region, program, mode, batch)
            explanation = report["programs"][-1]["explain"]
            if "error" in explanation:
                raise IngotError(explanation["error"])
    return report


def _graphs(loaded: Any, module: Any, inputs: list, device: str) -> tuple[list, list[dict]]:
    """What is captured of a forward, and what is to be said where that is not all of it."""
    from ingot.capture import CaptureError
    from ingot.live.dynamo import NotWholeError
    from ingot.model_capture import capture, capture_in_pieces

    try:
        return [capture(module, inputs, device_type=device)], []
    except CaptureError as error:
        left = [{"what": "the module", "where": str(loaded.path), "why": str(error)}]
        if not isinstance(error, NotWholeError):
            return [], left
    with contextlib.suppress(CaptureError):
        if graphs := capture_in_pieces(module, inputs, device):
            return graphs, [{**left[0], "what": "what stands between its graphs"}]
    loaded.check_runs(module, inputs)  # TorchDynamo's words for a model that raises tell nobody
    return [], left


def _show_program(console: Any, program: dict) -> None:
    explanation = program["explain"]
    console.rule(f"{program['name']}, {program['mode']} mode", align="left")
    for stage in ("before", "after"):
        graph = explanation.get("graph", {}).get(stage, {})
        console.print(f"Graph {stage} rewriting")
        sys.stdout.write(str(graph.get("text", graph)).rstrip() + "\n\n")
        if stage == "before":
            made = table("Rewrites", "rule", "identity", "where")
            for rewrite in explanation.get("rewrites", ()):
                made.add_row(rewrite["rule"], rewrite["identity"], rewrite["where"])
            console.print(made if made.row_count else "No rewrite applied.\n")
    show_plan(console, program)
    _show_launches(console, explanation)


def _show_launches(console: Any, explanation: dict) -> None:
    program = explanation.get("executable", {}).get("program")
    if program is None:
        return
    on_cuda = explanation["executable"]["backend"] == "cuda"
    title, grid = ("Launches", "blocks × threads") if on_cuda else ("Steps", "tasks")
    made = table(title, "step", "of sweep", "what", grid, "memory")
    for row in launch_rows(program):
        made.add_row(*row.values())
    console.print(made)
    console.print(f"Launch program {program['hash']}")


def _kernel_sources(programs: list) -> dict[str, str]:
    """Kernel texts by name; where two modes have unlike kernels of one name, the later one's name
    ends in its mode."""
    found: dict[str, str] = {}
    for program in programs:
        for sweep in program["explain"].get("executable", {}).get("sweeps", ()):
            for kernel in sweep.get("kernels", ()):
                name, text = kernel["name"], kernel.get("text", "")
                if found.get(name, text) != text:
                    name += f"_{program['mode']}"
                if text:
                    found[name] = text
    return found
