"""The ladder: one model under every policy for its matrix products, timed in the same rounds.

What accuracy costs: each rung is PyTorch or Ingot under one policy, with its error against fp64 and
its time. The 16-bit rungs run the module converted to that type, as its users do, so that their
error holds what the conversion of parameters and inputs loses.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ..verify.execution import set_state
from ..verify.measures import Measures
from . import limits, records, subjects
from .cases import DTYPES, Case
from .clocks import describe, read_clocks
from .rounds import Comparison, RoundOptions, compare
from .suite import INGOT, Loaded, error_of, exact_output, load_case, measure_rates

PYTORCH = "eager"
_HALF = {"bf16", "fp16"}


@dataclass(frozen=True)
class Rung:
    """by: who runs the model. policy: of its products; "tf32" of eager is PyTorch's own switch."""

    by: str
    policy: str

    @property
    def name(self) -> str:
        return f"{self.by} {self.policy}"


@dataclass
class Ladder:
    """record: as bench/results/ladder keeps it. comparison: all samples."""

    case: Case
    record: dict
    comparison: Comparison
    clocks: str


def rungs_of(device: torch.device, compiled: bool) -> list[Rung]:
    """On a CPU there is neither TF32 nor a product for `high` or fp16: `fp32` is what runs."""
    gpu = device.type == "cuda"
    theirs = ["fp32", "tf32", "bf16", "fp16"] if gpu else ["fp32", "bf16"]
    ours = ["ieee", "fp32", "high", "tf32", "bf16", "fp16"] if gpu else ["ieee", "fp32", "bf16"]
    rungs = [Rung(PYTORCH, policy) for policy in theirs]
    rungs += [Rung(subjects.COMPILE, "fp32")] if compiled else []
    return rungs + [Rung(INGOT, policy) for policy in ours]


def measure_ladder(
    case: Case,
    examples: Path,
    device: torch.device,
    optimize: Callable,
    options: RoundOptions,
    compiled: bool = True,
) -> Ladder:
    """case: in fp32. optimize(module, inputs, precision) gives Ingot's module, which shares the
    parameters of the one that it is given."""
    loaded = load_case(case, examples, device)
    versions = {"fp32": (loaded.module, loaded.input_sets)}
    rungs = rungs_of(device, compiled)
    for policy in sorted({r.policy for r in rungs} & _HALF):
        versions[policy] = _converted(loaded, getattr(torch, DTYPES[policy]))
    calls: dict[Rung, Callable] = {}
    for rung in rungs:
        options.progress(f"preparing {rung.name}")
        module, input_sets = versions.get(rung.policy, versions["fp32"])
        calls[rung] = _subject(rung, module, input_sets, device, optimize)
    options.progress("measuring the errors against fp64")
    errors = _errors(loaded, case, calls, [module for module, _ in versions.values()])
    loaded.reference.release()
    options.progress("measuring the rates of products and copies")
    rates = measure_rates(case, device)
    bounds = {r: _limit(r, *versions.get(r.policy, versions["fp32"]), rates) for r in calls}
    options.prepare = subjects.WeightChanger(*(module for module, _ in versions.values()))
    comparison = compare({r.name: call for r, call in calls.items()}, device, options)
    clocks = describe(read_clocks(device.index or 0)) if device.type == "cuda" else ""
    record = _record(case, comparison, errors, bounds)
    return Ladder(case, record, comparison, clocks)


def _converted(loaded: Loaded, dtype: torch.dtype) -> tuple[torch.nn.Module, list]:
    def convert(value: object) -> object:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    module = copy.deepcopy(loaded.module).to(dtype)
    return module, [[convert(v) for v in inputs] for inputs in loaded.input_sets]


def _subject(
    rung: Rung, module: torch.nn.Module, input_sets: list, device: torch.device, optimize: Callable
) -> subjects.Subject:
    if rung.by == INGOT:
        return subjects.calls(optimize(module, input_sets[0], rung.policy), input_sets)
    if rung.by == subjects.COMPILE:
        return subjects.compiled_by_torch(module, input_sets, device)
    call = subjects.calls(module, input_sets)
    return subjects.with_tf32(call) if rung.policy == "tf32" else call


def _errors(
    loaded: Loaded, case: Case, calls: dict[Rung, Callable], modules: list
) -> dict[Rung, Measures]:
    """Of the first output, each from the state after construction."""
    exact, found = exact_output(loaded, case), {}
    for rung, call in calls.items():
        found[rung] = error_of(call(0), exact)
        for module in modules:
            set_state(module, loaded.reference.initial_state, through_data=False)
    return found


def _limit(
    rung: Rung, module: torch.nn.Module, input_sets: list, rates: limits.Rates
) -> float | None:
    """Seconds; None for PyTorch's rungs, and for `ieee`, whose products are the library's."""
    if rung.by != INGOT or rung.policy == "ieee":
        return None
    return limits.model_limit(module, input_sets[0], rates, rung.policy)


def _record(
    case: Case,
    comparison: Comparison,
    errors: dict[Rung, Measures],
    bounds: dict[Rung, float | None],
) -> dict:
    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 5)

    def row(rung: Rung) -> dict:
        sustained = comparison.sustained.get(rung.name)
        ratio = comparison.ratio(rung.name, f"{PYTORCH} fp32")
        return {
            "by": rung.by,
            "policy": rung.policy,
            "ms": milliseconds(comparison.summary(rung.name).median),
            "sustained_ms": milliseconds(median(sustained)) if sustained else None,
            "limit_ms": milliseconds(bounds[rung]),
            "ratio": round(ratio.median, 4),
            "ratio_lower": round(ratio.lower, 4),
            "ratio_upper": round(ratio.upper, 4),
            "error": errors[rung].relative_error,
            "worst_row_error": errors[rung].worst_row_error,
        }

    return {
        "model": case.model,
        "shape": case.shape,
        "mode": case.mode,
        "rungs": [row(rung) for rung in errors],
        "rounds": comparison.rounds,
        "source_hash": records.source_hash(Path(__file__).resolve().parents[3]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def merge(path: Path, new: dict) -> None:
    """Replaces the record of the same model, shape and mode in the file, and keeps the others."""
    known = {_key(record): record for record in records.read(path)} | {_key(new): new}
    text = json.dumps([known[key] for key in sorted(known)], indent=1, ensure_ascii=False)
    records.write_whole(path, text + "\n")


def _key(record: dict) -> tuple:
    return record["model"], record["shape"], record["mode"]
