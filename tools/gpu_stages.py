"""What `tools/gpu-suite` runs: stages, each a list of steps, each of which passes or fails.

A new stage is an entry of STAGES: its steps, and how one is done. A step says whether it must have
the machine for itself because times are measured; the others run beside each other, each in a
process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_golden

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
CHECKS = ROOT / "tools" / "gpu_checks"
PROGRAMS = ROOT / "build" / "bench"
SWEEP_PROGRAM = PROGRAMS / "sweep"

MODEL_PARTS = 8
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Odd sizes, none a multiple of anything; and one that fills tiles.
CHECK_SIZES = (
    {
        "batch_size": 67,
        "in_features": 133,
        "hidden_features": 91,
        "out_features": 63,
        "num_groups": 7,
    },
    {
        "batch_size": 512,
        "in_features": 2048,
        "hidden_features": 1536,
        "out_features": 1024,
        "num_groups": 16,
    },
)


@dataclass(frozen=True)
class Settings:
    """machine: the name of its files under `results`. library: path of libingot.so. seconds: what
    a step may take."""

    device: str
    machine: str
    results: Path
    library: str
    rounds: int = 20
    compiled: bool = True
    half: bool = False
    programs: bool = True
    seconds: float = 600.0

    def file(self, folder: str = "") -> Path:
        return self.results / folder / f"{self.machine}.json"


Outcome = tuple[bool, str]


@dataclass(frozen=True)
class Step:
    name: str
    subject: Any = None
    alone: bool = False


@dataclass(frozen=True)
class Stage:
    """do(subject, settings) gives whether it passed, and a line about it. own_process: false where
    a step gains from what the one before left in memory. seconds: of a step, as long as nothing
    better is known. missing: what this machine lacks for it, or ""."""

    steps: Callable[[Settings], list[Step]]
    do: Callable[[Any, Settings], Outcome]
    about: str
    seconds: float
    own_process: bool = True
    missing: Callable[[Settings], str] = lambda settings: ""


class Phases:
    """Says where a step's time went, from the messages of its progress."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open, self._since = "", 0.0

    def __call__(self, message: str) -> None:
        now = time.monotonic()
        if self._open:
            self.seconds[self._open] = self.seconds.get(self._open, 0.0) + now - self._since
        self._open, self._since = re.sub(r",? ?round \d+ of \d+", " rounds", message).strip(), now

    def text(self) -> str:
        self("")
        return ", ".join(f"{phase} {taken:.1f} s" for phase, taken in self.seconds.items())


def run_script(command: list, settings: Settings, **environment: str) -> tuple[int, list]:
    """Exit status, and the lines that the command printed."""
    answer = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=settings.seconds,
        env={**os.environ, **environment},
        check=False,
    )
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    return answer.returncode, lines or [f"exit status {answer.returncode}, no output"]


def outcome(code: int, lines: list, about: int = 1) -> Outcome:
    """The last lines: `about` of them where all is well, enough to see what was wrong elsewhere."""
    return code == 0, "; ".join(lines[-about:]) if code == 0 else "\n".join(lines[-25:])


# correctness -------------------------------------------------------------------------------------


def settings_for(path: Path, number: int | None) -> dict:
    """Of the sizes those that the model's file has as constants."""
    from ingot.model_file import constants_of

    if number is None:
        return {}
    known = constants_of(path.read_text(encoding="utf-8"), str(path))
    sizes = {k: v for k, v in CHECK_SIZES[number].items() if k in known}
    if "residual" in path.stem:
        sizes["out_features"] = sizes["in_features"]
    return sizes


def correctness_steps(settings: Settings) -> list[Step]:
    own = [Step(f"{m} own size", (m, None)) for m in ("gemm_scale_bn", "gemm_bn_scale_softmax")]
    models = sorted(p.stem for p in EXAMPLES.glob("*.py"))
    # The longest first: they then run beside the others.
    return own + [
        Step(f"{model} size {number}", (model, number))
        for number in reversed(range(len(CHECK_SIZES)))
        for model in models
    ]


def verify_example(subject: tuple, settings: Settings) -> Outcome:
    """The optimised model against its original, through the file that `ingot optimize` would
    write."""
    import ingot
    import torch
    from ingot.model_file import load_model_file
    from ingot.model_writer import render_model
    from ingot.verify import VerifyOptions, verify_pair

    model, number = subject
    device = settings.device
    path = EXAMPLES / f"{model}.py"
    overrides = settings_for(path, number)
    loaded = load_model_file(path, overrides)
    inputs = [v.to(device) if isinstance(v, torch.Tensor) else v for v in loaded.make_inputs()]
    optimized = ingot.optimize(loaded.make_module(), inputs, precision="fp32", device=device)
    report = optimized.ingot_report()
    if not report["programs"]:
        return False, f"nothing was taken over: {report['unsupported']}"
    del optimized, inputs
    with tempfile.TemporaryDirectory() as folder:
        candidate = Path(folder) / f"{model}_new.py"
        candidate.write_text(render_model(loaded, report, "fp32"), encoding="utf-8")
        result = verify_pair(
            str(path), str(candidate), VerifyOptions(device=device, overrides=overrides)
        )
    failures = "; ".join(f"{c.name} ({c.mode}): {c.message}" for c in result.failures[:4])
    worst = max(
        (a.candidate.relative_error for a in result.accuracy if a.family == "own inputs"),
        default=0.0,
    )
    return result.verified, failures or f"{len(result.checks)} checks, own error {worst:.1e}"


# adversaries -------------------------------------------------------------------------------------


def adversaries(which: str, settings: Settings) -> Outcome:
    script = CHECKS / "check_verify.py"
    options = [f"--which={which}", f"--device={settings.device}", f"--seconds={settings.seconds}"]
    return outcome(*run_script([sys.executable, script, *options], settings))


# models ------------------------------------------------------------------------------------------


def models(part: str, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "check_models.py", "--part", part]
    command += ["--device", settings.device, "--seconds", max(20.0, settings.seconds - 10)]
    return outcome(*run_script(command, settings))


# sanitizer ---------------------------------------------------------------------------------------


def call_small(device: str) -> None:
    """One call of every example at a small size and in both modes: what the sanitizer watches."""
    import ingot
    import torch
    from ingot.model_file import load_model_file

    for path in sorted(EXAMPLES.glob("*.py")):
        loaded = load_model_file(path, settings_for(path, 0))
        inputs = [v.to(device) if isinstance(v, torch.Tensor) else v for v in loaded.make_inputs()]
        optimized = ingot.optimize(loaded.make_module(), inputs, precision="fp32", device=device)
        with torch.no_grad():
            for training in (True, False):
                optimized.train(training)
                optimized(*inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"called {path.stem}", flush=True)


def sanitizer_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "compute-sanitizer watches GPUs"
    return "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not here"


def sanitize(tool: str, settings: Settings) -> Outcome:
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", "--print-limit=20"]
    command += [sys.executable, ROOT / "tools" / "gpu-suite", "--call-small"]
    return outcome(*run_script(command, settings, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))


# stress, errors, latency, devices, products ------------------------------------------------------


def stress(calls: int, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "stress.py", settings.library, "--calls", calls]
    seconds = min(90.0, max(10.0, settings.seconds - 15))
    command += ["--device", settings.device, "--seconds", seconds]
    return outcome(*run_script(command, settings))


def error_curves(_: Any, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "error_curves.py", settings.library]
    command += ["--device", settings.device, "--out", settings.file("error-curves")]
    return outcome(*run_script(command, settings))


def chains(_: Any, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "time_chains.py", "--device", settings.device]
    command += ["--out", settings.file("chains"), "--seconds", max(20.0, settings.seconds - 10)]
    return outcome(*run_script(command, settings))


def network_steps(settings: Settings) -> list[Step]:
    sys.path.insert(0, str(CHECKS))
    from networks import NETWORKS

    return [Step(n.name, n.name, alone=True) for n in NETWORKS if not n.missing()]


def networks(name: str, settings: Settings) -> Outcome:
    """Rows that were right with these sources are not measured again."""
    command = [sys.executable, CHECKS / "time_networks.py", "--networks", name]
    command += ["--device", settings.device, "--out", settings.file("networks")]
    command += ["--rounds", settings.rounds, "--seconds", max(20.0, settings.seconds - 25)]
    command += ["--compile"] * settings.compiled + ["--small"] * (settings.device == "cpu")
    return outcome(*run_script(command, settings), about=2)


def latency(_: Any, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "check_latency.py", "--device", settings.device]
    command += ["--seconds", max(10.0, settings.seconds - 5)]
    return outcome(*run_script(command, settings))


def devices(_: Any, settings: Settings) -> Outcome:
    return outcome(*run_script([sys.executable, CHECKS / "check_devices.py"], settings))


def conv_chains(_: Any, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "time_conv_chains.py", "--device", settings.device]
    command += ["--out", settings.file("conv-chains")]
    command += ["--seconds", max(20.0, settings.seconds - 20)]
    command += ["--small"] * (settings.device == "cpu")
    return outcome(*run_script(command, settings), about=2)


def operators(_: Any, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "time_operators.py", "--device", settings.device]
    command += ["--out", settings.file("operators")]
    command += ["--seconds", max(20.0, settings.seconds - 10)]
    command += ["--small"] * (settings.device == "cpu")
    return outcome(*run_script(command, settings), about=3)


def blas_missing(settings: Settings) -> str:
    beside = Path(settings.library).resolve().with_name("libingot_blas.so")
    return "" if beside.is_file() else f"{beside} is not built"


def blas_steps(settings: Settings) -> list[Step]:
    programs = [Step("programs", "blas_programs.py", alone=True)] if settings.programs else []
    return [Step("60 shapes", "check_blas.py", alone=True), *programs]


def blas(script: str, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / script, settings.library]
    results = settings.file("blas" if script == "check_blas.py" else "blas-programs")
    command += ["--device", settings.device, "--out", results]
    most = settings.seconds - 30 if script == "check_blas.py" else min(settings.seconds - 5, 120)
    command += ["--seconds", max(20.0, most)]
    return outcome(*run_script(command, settings))


def products_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "its figures are for GPUs"
    return "" if importlib.util.find_spec("jax") else "JAX is not here"


def xla_product(algorithm: str, settings: Settings) -> Outcome:
    command = [sys.executable, CHECKS / "xla_products.py", "--algorithms", algorithm]
    command += ["--out", settings.file("products"), "--limit", max(10.0, settings.seconds - 5)]
    return outcome(*run_script(command, settings), about=3)


# standalone --------------------------------------------------------------------------------------


def standalone_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "its kernels are CUDA"
    absent = [tool for tool in ("nvcc", "ninja") if not shutil.which(tool)]
    return f"{absent[0]} is not here" if absent else ""


def standalone_steps(settings: Settings) -> list[Step]:
    timed = ("gemm_bn_scale_softmax", "gemm_scale_bn")
    others = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem not in timed)
    steps = [Step(model, [model, "--no-timing"]) for model in others]
    steps.append(Step("portable", ["gemm_scale_bn", "--portable", "--small", "--no-timing"]))
    return steps + [Step(f"{model} timed", [model], alone=True) for model in timed]


def standalone(options: list, settings: Settings) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, CHECKS / "check_standalone.py", *options]
        code, lines = run_script(command, settings, TORCH_EXTENSIONS_DIR=folder)
    return outcome(code, lines, about=5)


# arithmetic --------------------------------------------------------------------------------------


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


def arithmetic(_: Any, settings: Settings) -> Outcome:
    program = PROGRAMS / "arithmetic_check"
    built, message = build(ROOT / "tests" / "cuda" / "arithmetic_check.cu", program, settings)
    return outcome(*run_script([program], settings)) if built else (built, message)


# sweep -------------------------------------------------------------------------------------------


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


# user --------------------------------------------------------------------------------------------


def user_missing(settings: Settings) -> str:
    from gpu_checks import user_commands

    return user_commands.missing()


def user_steps(settings: Settings) -> list[Step]:
    from gpu_checks import user_scenarios

    found = user_scenarios.scenarios(settings)
    return [Step(name, scenario, alone=scenario.alone) for name, scenario in found.items()]


# bench -------------------------------------------------------------------------------------------


def bench_steps(settings: Settings) -> list[Step]:
    from ingot.bench.cases import bundled_cases

    return [Step(" ".join(c.key), c, alone=True) for c in bundled_cases(settings.half)]


def bench(case: Any, settings: Settings) -> Outcome:
    import torch
    from ingot.bench import RoundOptions, records, suite
    from ingot.bench.subjects import COMPILE, EAGER

    chosen, phases = torch.device(settings.device), Phases()
    options = RoundOptions(rounds=settings.rounds, budget_s=120.0, progress=phases)
    result = suite.measure_case(
        case, EXAMPLES, chosen, suite.ingot_optimize(chosen), options, settings.compiled
    )
    records.merge(settings.file(), [result.record])
    r, parts = result.record, []
    for name in (EAGER, COMPILE):
        if name in result.comparison.cold:
            ratio = result.comparison.ratio(suite.INGOT, name)
            verdict = result.comparison.never_slower(suite.INGOT, name)
            parts.append(f"/{name} {ratio.median:.3f} ({ratio.upper:.3f}) never slower: {verdict}")
    detail = (
        f"Ingot {r['ingot_ms']:.4f} ms, sustained {r['sustained_ms'] or 0:.4f}, eager "
        f"{r['eager_ms']:.4f}, TF32 {r['eager_tf32_ms'] or 0:.4f}, compile "
        f"{r['compile_ms'] or 0:.4f}, limit {r['limit_ms']:.4f}; {'; '.join(parts)}; error "
        f"{r['error']:.1e}, eager's {r['eager_error']:.1e}; {result.clocks}"
    )
    print(f"     {phases.text()}", flush=True)
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return True, detail


STAGES = {
    "user": Stage(
        user_steps,
        lambda scenario, settings: scenario(settings),
        "what users type, with an installed wheel: every command, page, setting; seed models",
        seconds=60.0,
        missing=user_missing,
    ),
    "correctness": Stage(
        correctness_steps,
        verify_example,
        "each example verified against fp64, in both modes, on hostile inputs too",
        seconds=30.0,
    ),
    "models": Stage(
        lambda settings: [
            Step(f"{i}/{MODEL_PARTS}", f"{i}/{MODEL_PARTS}") for i in range(MODEL_PARTS)
        ],
        models,
        "every model of tests/models against fp64, in fp32 and bf16, replayed calls too",
        seconds=120.0,
    ),
    "adversaries": Stage(
        lambda settings: [Step("checked", "checked"), Step("timed", "timed", alone=True)],
        adversaries,
        "verify itself, against honest and dishonest CUDA candidates",
        seconds=60.0,
    ),
    "sanitizer": Stage(
        lambda settings: [Step(tool, tool) for tool in SANITIZER_TOOLS],
        sanitize,
        "compute-sanitizer over small calls",
        seconds=30.0,
        missing=sanitizer_missing,
    ),
    "arithmetic": Stage(
        lambda settings: [Step("against IEEE 754")],
        arithmetic,
        "the kernels' own division, maximum and minimum against IEEE 754",
        seconds=15.0,
        missing=nvcc_missing,
    ),
    "errors": Stage(
        lambda settings: [Step("curves")],
        error_curves,
        "errors against K and dynamic range, beside cuBLAS, TF32 and the naive split",
        seconds=40.0,
    ),
    "stress": Stage(
        lambda settings: [Step("10000 calls", 10_000, alone=True)],
        stress,
        "calls from many threads and streams, CUDA graphs among them, every bit compared",
        seconds=75.0,
    ),
    "devices": Stage(
        lambda settings: [Step("two GPUs")],
        devices,
        "the same bits on each of several GPUs, in one process",
        seconds=40.0,
    ),
    "golden": Stage(
        gpu_golden.steps,
        gpu_golden.do,
        "the bits and the times of an older build of the library",
        seconds=240.0,
        missing=gpu_golden.missing,
    ),
    "latency": Stage(
        lambda settings: [Step("first calls", alone=True)],
        latency,
        "the first call with an empty cache, from the cache, and the host's time of a call",
        seconds=60.0,
    ),
    "standalone": Stage(
        standalone_steps,
        standalone,
        "standalone files compiled there: the library's bits, and its time",
        seconds=60.0,
        missing=standalone_missing,
    ),
    "bench": Stage(
        bench_steps,
        bench,
        "the bundled models against eager, eager with TF32 and torch.compile max-autotune",
        seconds=70.0,
        own_process=False,
    ),
    "chains": Stage(
        lambda settings: [Step("models of tests/models", alone=True)],
        chains,
        "twenty other chains at real sizes, against eager and the limit",
        seconds=110.0,
    ),
    "conv_chains": Stage(
        lambda settings: [Step("behind convolutions", alone=True)],
        conv_chains,
        "forty chains behind convolutions, against eager",
        seconds=190.0,
    ),
    "operators": Stage(
        lambda settings: [Step("operators alone", alone=True)],
        operators,
        "operators alone and losses, against eager and a copy of their bytes",
        seconds=100.0,
    ),
    "networks": Stage(
        network_steps,
        networks,
        "whole networks of torchvision, timm, transformers: right, and how fast, in six settings",
        seconds=120.0,
    ),
    "blas": Stage(
        blas_steps,
        blas,
        "products with libingot_blas.so in front of cuBLAS, of PyTorch and in programs of several "
        "frameworks, against fp64 and cuBLAS",
        seconds=300.0,
        missing=blas_missing,
    ),
    "products": Stage(
        lambda settings: [
            Step(name, name, alone=True)
            for name in ("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "TF32_TF32_F32_X3")
        ],
        xla_product,
        "the matrix product alone, by XLA's emulations of fp32",
        seconds=40.0,
        missing=products_missing,
    ),
    "sweep": Stage(
        lambda settings: [Step("build", "build"), Step("36 shapes", "run", alone=True)],
        sweep,
        "every configuration of the Hopper product on 36 shapes",
        seconds=60.0,
        missing=sweep_missing,
    ),
}
