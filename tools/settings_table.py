"""Writes the table of docs/settings.md: how many operators of each model in tests/models are taken
under settings that users put around a call.

    tools/settings_table.py [MODEL...]           measures these models (default: all) anew
    tools/settings_table.py --check [MODEL...]   fails if their rows are not what is measured

On the CPU, in eval mode: the report of an optimised module says what was taken. A row says why a
setting takes less than the plain call. All models take some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import ingot
import torch
from ingot.capture import host_time
from ingot.model_file import load_model_file

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "settings.md"
MODELS = ROOT / "tests" / "models"
BEGIN = "<!-- settings: written by tools/settings_table.py -->"
END = "<!-- end of settings -->"
NO_PRODUCT = "a chain without a product gains too little to be worth a backward pass of its own"


@contextlib.contextmanager
def _set(setter: Callable, value: object, after: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(after)


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    before = os.environ.get("INGOT")
    os.environ["INGOT"] = "off"
    try:
        yield
    finally:
        del os.environ["INGOT"]
        if before is not None:
            os.environ["INGOT"] = before


def _called(module: torch.nn.Module, inputs: list) -> None:
    module(*inputs)


def _under_vmap(module: torch.nn.Module, inputs: list) -> None:
    torch.vmap(module)(*(torch.stack([t, t]) for t in inputs))


def _under_compile(module: torch.nn.Module, inputs: list) -> None:
    torch.compile(module, backend="eager")(*inputs)


# Heading: what stands around the call, and the call.
SETTINGS: dict[str, tuple[Callable, Callable]] = {
    "plain": (contextlib.nullcontext, _called),
    "gradients on": (torch.enable_grad, _called),
    "`set_default_device`": (lambda: _set(torch.set_default_device, "cpu", None), _called),
    "`with torch.device`": (lambda: torch.device("cpu"), _called),
    "autocast bf16": (lambda: torch.autocast("cpu", torch.bfloat16), _called),
    "`inference_mode`": (torch.inference_mode, _called),
    'precision "high"': (
        lambda: _set(torch.set_float32_matmul_precision, "high", "highest"),
        _called,
    ),
    "deterministic": (lambda: _set(torch.use_deterministic_algorithms, True, False), _called),
    "default dtype float64": (
        lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
        _called,
    ),
    "`INGOT=off`": (_switched_off, _called),
    "`vmap`": (contextlib.nullcontext, _under_vmap),
    "own `torch.compile`": (contextlib.nullcontext, _under_compile),
}
# Of these the page says why once for all models.
STEPS_ASIDE = ("`INGOT=off`", "`vmap`", "own `torch.compile`")


def report_of(model: str, setting: str) -> dict:
    around, call = SETTINGS[setting]
    torch.manual_seed(1)
    torch._dynamo.reset()
    loaded = load_model_file(MODELS / f"{model}.py")
    module, inputs = loaded.make_module().eval(), loaded.make_inputs()
    with torch.no_grad(), around(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimised = ingot.optimize(module)
        with contextlib.suppress(RuntimeError) if call is _under_vmap else contextlib.nullcontext():
            call(optimised, inputs)
        return optimised.ingot_report()


def taken(report: dict) -> set:
    return {(item["what"], item["where"]) for item in report["operators_replaced"]}


def why(plain: dict, other: dict) -> str:
    """What is taken in a plain call alone, and the reason."""
    missing = sorted({what for what, _ in taken(plain) - taken(other)})
    if not missing:
        return ""
    known = plain["unsupported"]
    reasons = [
        f"`{item['what']}`: {item['why']}" if item["what"] != "the module" else item["why"]
        for item in other["unsupported"]
        if item not in known
    ]
    if not reasons:
        names = ", ".join(f"`{name}`" for name in missing)
        reasons = [f"{names}: {NO_PRODUCT}"]
    return "; ".join(dict.fromkeys(reasons))


def row(model: str) -> str:
    reports = {setting: report_of(model, setting) for setting in SETTINGS}
    plain = reports["plain"]
    notes: dict[str, list[str]] = {}
    for setting, report in reports.items():
        note = why(plain, report) if setting not in STEPS_ASIDE else ""
        if note:
            notes.setdefault(note, []).append(setting)
    counts = [str(len(taken(report))) for report in reports.values()]
    said = "; ".join(f"{', '.join(settings)}: {note}" for note, settings in notes.items())
    return f"| {' | '.join([f'`{model}`', *counts, said])} |"


def table(rows: dict[str, str]) -> str:
    headings = ["model", *SETTINGS, "what a setting leaves to PyTorch, and why"]
    rule = "| --- |" + " ---: |" * len(SETTINGS) + " --- |"
    return "\n".join([f"| {' | '.join(headings)} |", rule, *(rows[name] for name in sorted(rows))])


def committed(text: str) -> dict[str, str]:
    part = text.partition(BEGIN)[2].partition(END)[0]
    rows = (line for line in part.splitlines() if line.startswith("| `"))
    return {line.split("`")[1]: line for line in rows}


def with_rows(text: str, rows: dict[str, str]) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT.name} lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n{table(rows)}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    host_time.takes_small_steps = True
    known = sorted(path.stem for path in MODELS.glob("*.py"))
    unknown = sorted(set(arguments.models) - set(known))
    if unknown:
        parser.error(f"tests/models has no {', '.join(unknown)}")
    text = DOCUMENT.read_text(encoding="utf-8")
    before = committed(text)
    measured = {model: row(model) for model in arguments.models or known}
    if not arguments.check:
        kept = {model: line for model, line in before.items() if model in known}
        DOCUMENT.write_text(with_rows(text, {**kept, **measured}), encoding="utf-8")
        return 0
    stale = [model for model, line in measured.items() if before.get(model) != line]
    for model in stale:
        print(
            f"{DOCUMENT.name}: the row of {model} is not what is measured; run {__file__} {model}"
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
