"""`ingot bench`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from . import options as shared
from . import reports
from .console import output, print_json, progress
from .errors import BadInputError, bad_input_from
from .render import show_ladder, show_records

_EVERY = "all"
_SIZES = {"batch_size": "rows", "in_features": "inner", "out_features": "columns"}


class Shape(click.ParamType):
    """ROWSxINNERxCOLUMNS."""

    name = "MxKxN"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple:
        if isinstance(value, tuple):
            return value
        sizes = value.lower().replace("×", "x").split("x")
        if len(sizes) != 3 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            self.fail(f"{value!r} is not of the form 128x4096x4096", param, ctx)
        return tuple(int(s) for s in sizes)


@click.command("bench")
@shared.device_option
@click.option("--model", "models", multiple=True, help="Only this bundled model. May be repeated.")
@click.option("--rows", type=shared.Count(), help="Only the cases with this batch size.")
@click.option("--mode", type=click.Choice(["training", "eval"]), help="Only this mode.")
@click.option(
    "--products",
    is_flag=True,
    help="A linear layer alone at over 40 sizes from 1×1→1 up, instead of the bundled models.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=Shape(),
    help="Only products of this size, e.g. 128x4096x4096 (rows, inner, columns). May be repeated.",
)
@click.option(
    "--precision",
    type=click.Choice([*shared.PRECISIONS, _EVERY]),
    help="Ingot's policy for the products; all: each policy, and PyTorch's own, in the same "
    "rounds, with the errors of each.  [default: fp32]",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --precision all, of one case (--model, --rows, --mode): draw error against time "
    "into this SVG file.",
)
@click.option("--half", is_flag=True, help="bf16 and fp16 models as well.")
@click.option("--no-compile", is_flag=True, help="Without torch.compile as a baseline.")
@click.option("--rounds", type=shared.Count(), default=20, show_default=True, help="Rounds wanted.")
@click.option(
    "--budget",
    type=shared.Seconds(),
    default=120.0,
    show_default=True,
    help="Seconds for a case's rounds.",
)
@click.option(
    "--examples", help="Folder of the bundled models. [default: examples/ of the source tree]"
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    help="Merge the records into DIR/<machine>.json, as bench/results keeps them.",
)
@shared.set_option
@shared.report_option
@shared.json_option
@shared.log_options
def command(
    device: str | None,
    models: tuple,
    rows: int | None,
    mode: str | None,
    products: bool,
    shapes: tuple,
    precision: str | None,
    picture: Path | None,
    half: bool,
    no_compile: bool,
    rounds: int,
    budget: float,
    examples: str | None,
    results: Path | None,
    settings: tuple,
    report_file: Path | None,
    as_json: bool,
) -> None:
    """Times the bundled models: eager, eager with TF32, torch.compile, Ingot, and the limit. With
    --products or --shape a linear layer alone instead, against eager.

    Rounds are interleaved, weights change before every call, L2 is cold on a GPU. The limit is
    what the products or the memory traffic alone would take at the best rates of the same run.
    """
    import torch

    from ingot.bench import records

    chosen = torch.device(shared.chosen_device(device))
    shared.check_writable("--report", report_file, {})
    shared.check_writable("--picture", picture, {})
    if results is not None:
        shared.make_folder("--results", results)
    products = products or bool(shapes)
    cases = (
        _products(shapes, rows, half) if products else _cases(models, rows, mode, half, settings)
    )
    _check_together(cases, precision, picture, products, half, report_file)
    run = _Run(chosen, products, examples, rounds, budget, compiled=not (no_compile or products))
    if precision == _EVERY:
        _bench_ladders(run, cases, results, picture, as_json)
        return
    if precision is not None:
        cases = [_under(precision, case) for case in cases]
    made = []
    for result in run.measure(cases):
        made.append(result)
        if results is not None:
            records.merge(results / f"{run.machine}.json", [result.record])
    if report_file is not None:
        reports.of_bench(report_file, made, chosen)
    if as_json:
        cases = [{**r.record, "samples": r.comparison.to_dict(), "clocks": r.clocks} for r in made]
        print_json("bench", {"cases": cases})
    console = output(as_json)
    show_records(console, [r.record for r in made])
    for result in made:
        console.print(_verdict_line(result))
    if report_file is not None:
        console.print(f"Report: {report_file}")


@dataclasses.dataclass
class _Run:
    """How the cases are measured."""

    device: Any
    products: bool
    examples: str | None
    rounds: int
    budget: float
    compiled: bool

    @property
    def machine(self) -> str:
        from ingot.bench import suite

        return suite.machine_name(self.device)

    def measure(self, cases: list, ladders: bool = False) -> Iterator[Any]:
        from ingot import IngotError
        from ingot.bench import RoundOptions, suite
        from ingot.bench.cases import examples_folder, products_folder
        from ingot.bench.ladder import measure_ladder
        from ingot.model_file import ModelFileError

        measure = measure_ladder if ladders else suite.measure_case
        with progress() as say, bad_input_from(FileNotFoundError, IngotError, ModelFileError):
            folder = products_folder() if self.products else examples_folder(self.examples)
            for number, case in enumerate(cases, 1):
                prefix = f"{case.model} {case.shape} {case.mode} ({number} of {len(cases)}): "
                options = RoundOptions(
                    rounds=self.rounds,
                    budget_s=self.budget,
                    progress=lambda message, prefix=prefix: say(prefix + message),
                )
                optimize = suite.ingot_optimize(self.device)
                with _too_large(prefix, self.device):
                    result = measure(case, folder, self.device, optimize, options, self.compiled)
                yield result


@contextlib.contextmanager
def _too_large(prefix: str, device: Any) -> Iterator[None]:
    import torch

    try:
        yield
    except RuntimeError as error:
        out = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out:
            raise
        raise BadInputError(f"{prefix}too large for {device}: {error}") from error


def _bench_ladders(
    run: _Run, cases: list, results: Path | None, picture: Path | None, as_json: bool
) -> None:
    from ingot.bench import ladder

    made = []
    for result in run.measure(cases, ladders=True):
        made.append(result)
        if results is not None:
            ladder.merge(results / "ladder" / f"{run.machine}.json", result.record)
    if as_json:
        cases = [{**r.record, "samples": r.comparison.to_dict(), "clocks": r.clocks} for r in made]
        print_json("bench", {"ladders": cases})
    console = output(as_json)
    for result in made:
        show_ladder(console, result.record)
        clocks = f"; {result.clocks}" if result.clocks else ""
        console.print(f"{result.comparison.note}{clocks}")
    if picture is not None:
        from ingot.report.ladder import draw_ladder

        draw_ladder(made[0].record, run.machine, picture)
        console.print(f"Picture: {picture}")


def _check_together(
    cases: list,
    precision: str | None,
    picture: Path | None,
    products: bool,
    half: bool,
    report_file: Path | None,
) -> None:
    if half and precision is not None:
        raise BadInputError("--half and --precision exclude each other: each names the types")
    if precision == _EVERY and report_file is not None:
        raise BadInputError("--report has no page for --precision all: give --picture or --json")
    if picture is None:
        return
    if precision != _EVERY:
        raise BadInputError("--picture draws what --precision all measures: give both")
    if len(cases) > 1:
        one = "--shape" if products else "--model, --rows and --mode"
        raise BadInputError(f"--picture draws one case, not {len(cases)}: choose by {one}")


def _under(precision: str, case: Any) -> Any:
    from ingot.bench.cases import DTYPES

    dtype = precision if precision in DTYPES else "fp32"
    return dataclasses.replace(case, dtype=dtype, precision=precision)


def _products(shapes: tuple, rows: int | None, half: bool) -> list:
    from ingot.bench.cases import PRODUCTS, product_cases

    cases = [c for c in product_cases(half, shapes or PRODUCTS) if rows in (None, c.rows)]
    if not cases:
        raise BadInputError("no product has so many rows: give --shape")
    return cases


def _cases(models: tuple, rows: int | None, mode: str | None, half: bool, given: tuple) -> list:
    from ingot.bench.cases import bundled_cases

    settings = dict(given)
    changes = {_SIZES[k]: v for k, v in settings.items() if k in _SIZES}
    others = {k: v for k, v in settings.items() if k not in _SIZES}
    cases = [
        dataclasses.replace(case, **changes, overrides=others)
        for case in bundled_cases(half)
        if (not models or case.model in models)
        and rows in (None, case.rows)
        and mode in (None, case.mode)
    ]
    if not cases:
        raise BadInputError("no bundled case is of that kind: see 'ingot bench --help'")
    return list(dict.fromkeys(cases))


def _verdict_line(result: Any) -> str:
    from ingot.bench import suite
    from ingot.bench.subjects import COMPILE, EAGER

    comparison, parts = result.comparison, []
    words = {True: "never slower", False: "not shown to be never slower"}
    for baseline in (EAGER, COMPILE):
        if baseline not in comparison.cold:
            continue
        ratio = comparison.ratio(suite.INGOT, baseline)
        verdict = comparison.never_slower(suite.INGOT, baseline)
        parts.append(
            f"Ingot / {baseline} {ratio.median:.3f} ({ratio.lower:.3f}–{ratio.upper:.3f}), "
            f"{words.get(verdict, 'too few rounds for a verdict')}"
        )
    case = result.case
    clocks = f"; {result.clocks}" if result.clocks else ""
    return f"{case.model} {case.shape} {case.mode}: {'; '.join(parts)}; {comparison.note}{clocks}"
