"""Stages that build a CUDA program for the GPU that is here, and run it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gpu_stages.steps import ROOT, Outcome, Settings, outcome, run_script

PROGRAMS = ROOT / "build" / "bench"
SWEEP_PROGRAM = PROGRAMS / "sweep"


def nvcc_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "it is for GPUs"
    return "" if shutil.which("nvcc") else "nvcc is not here"


def build(source: Path, program: Path, settings: Settings) -> Outcome:
    """A CUDA program for the GPU that is here."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    target = f"{major}{minor}" + ("a" if major == 9 else "")
    program.parent.mkdir(parents=True, exist_ok=True)
    command = ["nvcc", f"-gencode=arch=compute_{target},code=sm_{target}", "-O3", "-std=c++20"]
    command += [f"-I{ROOT / 'kernels'}", source, "-ldl", "-o", program]
    code, lines = run_script(command, settings)
    return code == 0, "built" if code == 0 else "\n".join(lines[-25:])


def arithmetic(name: str, settings: Settings) -> Outcome:
    program = PROGRAMS / name
    built, message = build(ROOT / "tests" / "cuda" / f"{name}.cu", program, settings)
    return outcome(*run_script([program], settings)) if built else (built, message)


def sweep_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "it is for Hopper"
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        return "it is for Hopper"
    return nvcc_missing(settings)


def sweep(part: str, settings: Settings) -> Outcome:
    if part == "build":
        return build(ROOT / "bench" / "hopper" / "sweep.cu", SWEEP_PROGRAM, settings)
    import torch
    from ingot.bench.records import write_whole

    # The cuBLAS that PyTorch's wheels bring.
    packages = Path(torch.__file__).resolve().parent.parent / "nvidia"
    folders = [str(path) for path in sorted(packages.glob("*/lib"))]
    folders += [p for p in (os.environ.get("LD_LIBRARY_PATH"),) if p]
    answer = subprocess.run(
        [str(SWEEP_PROGRAM), str(max(10.0, min(45.0, settings.seconds - 20)))],
        capture_output=True,
        text=True,
        timeout=settings.seconds,
        env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)},
        check=False,
    )
    lines = answer.stderr.strip().splitlines() or ["no output"]
    if answer.returncode == 0:
        write_whole(settings.file("config-sweep"), answer.stdout)
    return outcome(answer.returncode, lines)
