"""Measuring a bundled case whole: times of all subjects, limit, errors; one record of results."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..model_file import load_model_file
from ..verify.execution import construct, set_state
from ..verify.measures import Measures, measure
from ..verify.reference import Reference, rows_of
from . import limits, subjects
from .cases import DTYPES, Case
from .clocks import describe, read_clocks
from .records import processor, source_hash
from .rounds import Comparison, RoundOptions, compare

INGOT = "Ingot"
_INPUT_SETS = 3
_SEED = 20


@dataclass
class CaseResult:
    """record: as bench/results keeps it. comparison: all samples. limit_s: see limits.py. report:
    what the candidate says of itself (`ingot_report()`), None where it has nothing to say."""

    case: Case
    record: dict
    comparison: Comparison
    limit_s: float
    clocks: str
    report: dict | None = None


@dataclass
class Loaded:
    """A case's model, built; as little as possible is held twice, for the models are large."""

    module: torch.nn.Module
    input_sets: list
    reference: Reference


def measure_case(
    case: Case,
    examples: Path,
    device: torch.device,
    optimize: Callable,
    options: RoundOptions,
    compiled: bool = True,
) -> CaseResult:
    """optimize(module, inputs, precision) gives the candidate, which shares the module's
    parameters. The errors are measured on the module whose times are taken."""
    loaded = load_case(case, examples, device)
    inputs = loaded.input_sets[0]
    options.progress(f"optimising {case.model}")
    candidate = optimize(loaded.module, inputs, case.precision)
    options.progress("measuring the errors against fp64")
    found, eager = _errors(loaded, candidate, case)
    loaded.reference.release()
    options.progress("measuring the rates of products and copies")
    limit = limits.model_limit(loaded.module, inputs, measure_rates(case, device), case.precision)
    named = subjects.baselines(loaded.module, loaded.input_sets, device, compiled, True)
    named[INGOT] = subjects.calls(candidate, loaded.input_sets)
    options.prepare = subjects.WeightChanger(loaded.module)
    comparison = compare(named, device, options)
    clocks = describe(read_clocks(device.index or 0)) if device.type == "cuda" else ""
    record = _record(case, comparison, limit, found, eager)
    tells = getattr(candidate, "ingot_report", None)
    report = tells(case.rows) if tells else None
    return CaseResult(case, record, comparison, limit, clocks, report)


def check_case(case: Case, examples: Path, device: torch.device, optimize: Callable) -> tuple:
    """(errors of the candidate, of eager) in the case's mode, with no timing."""
    loaded = load_case(case, examples, device)
    candidate = optimize(loaded.module, loaded.input_sets[0], case.precision)
    return _errors(loaded, candidate, case)


def measure_rates(case: Case, device: torch.device) -> limits.Rates:
    return limits.Rates(
        limits.measure_product_rate(case.rows, case.inner, case.columns, device),
        limits.measure_copy_rate(device),
    )


def load_case(case: Case, examples: Path, device: torch.device) -> Loaded:
    loaded = load_model_file(examples / f"{case.model}.py", case.settings)
    dtype = getattr(torch, DTYPES[case.dtype])
    reference = Reference(loaded.Model, loaded.get_init_inputs(), _SEED, device, dtype)
    module = construct(loaded.Model, loaded.get_init_inputs(), _SEED)
    module = module.to(device=device, dtype=dtype).train(case.mode == "training")
    input_sets = [
        [
            v.to(device=device, dtype=dtype if v.is_floating_point() else None)
            if isinstance(v, torch.Tensor)
            else v
            for v in loaded.make_inputs()
        ]
        for _ in range(_INPUT_SETS if device.type == "cuda" else 2)
    ]
    return Loaded(module, input_sets, reference)


def _errors(loaded: Loaded, candidate: Callable, case: Case) -> tuple[Measures, Measures]:
    """Of the first output, from the state after construction."""
    training = case.mode == "training"
    inputs = loaded.input_sets[0]
    state = loaded.reference.initial_state
    eager = loaded.reference.eager(state, inputs, training, "contiguous", _SEED)
    exact = exact_output(loaded, case)
    with torch.no_grad():
        result = candidate(*inputs)
    found = error_of(result, exact), error_of(eager.outputs[0], exact)
    set_state(loaded.module, state, through_data=False)
    return found


def exact_output(loaded: Loaded, case: Case) -> torch.Tensor:
    """The first output in fp64, from the state after construction."""
    state, inputs = loaded.reference.initial_state, loaded.input_sets[0]
    return loaded.reference.truth(state, inputs, case.mode == "training", _SEED).outputs[0]


def error_of(result: object, exact: torch.Tensor) -> Measures:
    """Of the first of a call's results."""
    output = result if isinstance(result, torch.Tensor) else result[0]
    return measure(exact, output, rows_of(exact))


def _record(
    case: Case, comparison: Comparison, limit: float, found: Measures, eager: Measures
) -> dict:
    def milliseconds(name: str, samples: dict) -> float | None:
        from .statistics import summarize

        return round(summarize(samples[name]).median * 1e3, 5) if name in samples else None

    ratio = comparison.ratio(INGOT, subjects.EAGER)
    return {
        "model": case.model,
        "shape": case.shape,
        "dtype": case.dtype,
        "precision": case.precision,
        "mode": case.mode,
        "eager_ms": milliseconds(subjects.EAGER, comparison.cold),
        "eager_tf32_ms": milliseconds(subjects.EAGER_TF32, comparison.cold),
        "compile_ms": milliseconds(subjects.COMPILE, comparison.cold),
        "ingot_ms": milliseconds(INGOT, comparison.cold),
        "sustained_ms": milliseconds(INGOT, comparison.sustained),
        "limit_ms": round(limit * 1e3, 5),
        "ratio": round(ratio.median, 4),
        "ratio_lower": round(ratio.lower, 4),
        "ratio_upper": round(ratio.upper, 4),
        "rounds": comparison.rounds,
        "error": found.relative_error,
        "eager_error": eager.relative_error,
        "worst_row_error": found.worst_row_error,
        "eager_worst_row_error": eager.worst_row_error,
        "source_hash": source_hash(Path(__file__).resolve().parents[3]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def ingot_optimize(device: torch.device) -> Callable:
    """optimize() of measure_case, through the library."""

    def optimize(module: torch.nn.Module, inputs: list, precision: str) -> torch.nn.Module:
        import ingot

        return ingot.optimize(module, inputs, precision=precision, device=str(device))

    return optimize


def machine_name(device: torch.device) -> str:
    """What bench/results/<name>.json is called: "nvidia-h200", or "cpu-<model>"."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = "cpu " + processor().split("@")[0]
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "-".join(w for w in words if w not in ("r", "tm", "processor", "core"))


__all__ = [
    "CaseResult",
    "check_case",
    "error_of",
    "exact_output",
    "ingot_optimize",
    "load_case",
    "machine_name",
    "measure_case",
    "measure_rates",
]
