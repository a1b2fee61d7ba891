"""Stages that are scripts of tools/gpu_checks, told the device, the time and where results go."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from gpu_stages.steps import CHECKS, ROOT, Outcome, Settings, Step, check, outcome, run_script

VERIFIED = str(ROOT / "tools" / "count_false_alarms.py")
MODEL_SIZES = ("batch_size=200", "in_features=512", "out_features=768", "num_groups=12")
MODEL_PARTS, ROW_PARTS, TORCH_PARTS = 8, 6, 13
# Of the stage "rows".
WIDE_PARTS = (
    *("attention", "extrema", "handed", "heads", "packing", "parts", "planes", "projections"),
)
HALVES_JOBS = 8  # models that are compiled at once; what is timed runs alone


def _parts(count: int) -> list[Step]:
    return [Step(f"{part}/{count}", f"{part}/{count}") for part in range(count)]


def adversaries(which: str, settings: Settings) -> Outcome:
    return check("check_verify.py", settings, f"--which={which}", spare=0.0)


def model_steps(settings: Settings) -> list[Step]:
    parts = _parts(MODEL_PARTS)
    return [*parts, *(Step(f"verified {p.name}", ("verified", p.subject)) for p in parts)]


def models(part: str | tuple, settings: Settings) -> Outcome:
    if isinstance(part, str):
        return check("check_models.py", settings, "--part", part)
    sizes = [word for size in MODEL_SIZES for word in ("--set", size)]
    return check(VERIFIED, settings, "--part", part[1], "--seeds", 1, 1, *sizes)


def stress(calls: int, settings: Settings) -> Outcome:
    seconds = min(90.0, max(10.0, settings.seconds - 15))
    options = [settings.library, "--calls", calls, "--seconds", seconds]
    return check("stress.py", settings, *options, spare=None)


def row_steps(settings: Settings) -> list[Step]:
    return [*_parts(ROW_PARTS), *(Step(part, part) for part in WIDE_PARTS)]


def rows(part: str, settings: Settings) -> Outcome:
    if part in WIDE_PARTS:
        return check(f"check_{part}.py", settings)
    return check("check_rows.py", settings, "--part", part)


def torch_steps(settings: Settings) -> list[Step]:
    return _parts(TORCH_PARTS)


def torch_suites(part: str, settings: Settings) -> Outcome:
    return check("check_torch_suites.py", settings, "--part", part)


def rows_missing(settings: Settings) -> str:
    return "" if settings.device == "cuda" else "its kernels are CUDA"


def error_curves(_: Any, settings: Settings) -> Outcome:
    return check("error_curves.py", settings, settings.library, spare=None, results="error-curves")


def chains(_: Any, settings: Settings) -> Outcome:
    return check("time_chains.py", settings, results="chains")


def halves(kind: str, settings: Settings) -> Outcome:
    """Rows that were right with these sources are not measured again."""
    jobs = HALVES_JOBS if settings.device == "cuda" else 1
    options = ["--types", kind, "--jobs", jobs, "--rounds", settings.rounds]
    return check("time_halves.py", settings, *options, spare=15.0, results="halves", about=2)


def conv_chains(_: Any, settings: Settings) -> Outcome:
    options = _small_on_a_cpu(settings)
    return check(
        "time_conv_chains.py", settings, *options, spare=20.0, results="conv-chains", about=2
    )


def operators(_: Any, settings: Settings) -> Outcome:
    options = _small_on_a_cpu(settings)
    return check("time_operators.py", settings, *options, results="operators", about=3)


def network_steps(settings: Settings) -> list[Step]:
    sys.path.insert(0, str(CHECKS))
    from networks import NETWORKS

    return [Step(n.name, n.name, alone=True) for n in NETWORKS if not n.missing()]


def networks(name: str, settings: Settings) -> Outcome:
    """Rows that were right with these sources are not measured again."""
    options = ["--networks", name, "--rounds", settings.rounds]
    options += ["--compile"] * settings.compiled + _small_on_a_cpu(settings)
    return check("time_networks.py", settings, *options, spare=25.0, results="networks", about=2)


def _small_on_a_cpu(settings: Settings) -> list[str]:
    return ["--small"] if settings.device == "cpu" else []


def latency(_: Any, settings: Settings) -> Outcome:
    return check("check_latency.py", settings, spare=5.0)


def devices(script: str, settings: Settings) -> Outcome:
    return outcome(*run_script([sys.executable, CHECKS / script], settings), about=16)


def blas_missing(settings: Settings) -> str:
    beside = Path(settings.library).resolve().with_name("libingot_blas.so")
    return "" if beside.is_file() else f"{beside} is not built"


def blas_steps(settings: Settings) -> list[Step]:
    programs = [Step("programs", "blas_programs.py", alone=True)] if settings.programs else []
    return [Step("shapes", "check_blas.py", alone=True), *programs]


def blas(script: str, settings: Settings) -> Outcome:
    if script == "check_blas.py":
        return check(script, settings, settings.library, spare=30.0, results="blas")
    seconds = max(20.0, min(settings.seconds - 5, 120.0))
    options = [settings.library, "--seconds", seconds]
    return check(script, settings, *options, spare=None, results="blas-programs")


def products_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "its figures are for GPUs"
    return "" if importlib.util.find_spec("jax") else "JAX is not here"


def xla_product(algorithm: str, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "xla_products.py", "--algorithms", algorithm]
    command += ["--out", settings.file("products"), "--limit", max(10.0, settings.seconds - 5)]
    return outcome(*run_script(command, settings), about=3)


def user_missing(settings: Settings) -> str:
    from gpu_checks import user_commands

    return user_commands.missing()


def user_steps(settings: Settings) -> list[Step]:
    from gpu_checks import user_scenarios

    found = user_scenarios.scenarios(settings)
    return [Step(name, scenario, alone=scenario.alone) for name, scenario in found.items()]


def golden_missing(settings: Settings) -> str:
    """The older build of libingot that this one is compared with."""
    old = os.environ.get("INGOT_OLD_LIBRARY", "")
    if not Path(old).is_file():
        return "INGOT_OLD_LIBRARY names no build to compare with"
    return ""


def golden(subject: str, settings: Settings) -> Outcome:
    old = os.environ["INGOT_OLD_LIBRARY"]
    command = [sys.executable, ROOT / "tools" / "golden.py", old, settings.library]
    command += ["--device", settings.device]
    if subject == "times":
        command += ["--time", "--only", "gemm"]
    return outcome(*run_script(command, settings))
