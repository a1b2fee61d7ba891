"""Stages over the bundled models: verified, under the sanitizer, as standalone files, timed."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_stages.steps import CHECKS, EXAMPLES, ROOT, Outcome, Settings, Step, outcome, run_script

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
    if device == "cuda":
        call_long_rows()
        call_uneven_product()
        call_handed_halves()
        call_packed_rows()


def call_long_rows() -> None:
    """Rows that a cluster of blocks keeps, or a part of, some that no vector divides, rows that all
    multiprocessors keep, and rows that are done in waves; small ones, which are not taken alone
    otherwise."""
    import ingot
    import torch
    from ingot.capture import gains

    gains.takes_everything = True
    images = torch.rand(8, 16, 256, 256, device="cuda")
    for module, x in (
        (torch.nn.Softmax(dim=1), images.reshape(32, -1)),
        (torch.nn.Softmax(dim=1), images.reshape(-1)[: 166 * 50257].view(166, 50257)),
        (torch.nn.Softmax(dim=1), images.to(torch.bfloat16).repeat(2, 1, 1, 1).view(256, -1)),
        (torch.nn.GroupNorm(1, 16), images),
        (torch.nn.LayerNorm((16, 256, 256)), images),
        (torch.nn.Softmax(dim=1), images.reshape(1, -1)),
    ):
        optimized = ingot.optimize(module.cuda(), [x])
        with torch.no_grad():
            optimized(x)
        torch.cuda.synchronize()
        taken = optimized.ingot_report()["operators_replaced"]
        assert taken, f"{module} was left to PyTorch"
        print(f"called {module} of {tuple(x.shape)}", flush=True)


def call_uneven_product() -> None:
    """Of 16 bits, with a result whose rows start anywhere."""
    import ingot
    import torch

    head = torch.nn.Sequential(torch.nn.Linear(1024, 1001), torch.nn.Tanh())
    x = torch.rand(333, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        optimized = ingot.optimize(head.to("cuda", torch.bfloat16), [x])
        optimized(x)
    torch.cuda.synchronize()
    taken = optimized.ingot_report()["operators_replaced"]
    assert taken, "the product was left to PyTorch"
    print("called a product of uneven rows", flush=True)


def call_handed_halves() -> None:
    """Rows that a sweep packs for a product alone, whose result goes to the next as halves."""
    import json
    from collections import OrderedDict

    import ingot
    import torch
    from torch import nn

    layers = {"norm": nn.LayerNorm(256), "hands_on": nn.Linear(256, 1024), "act": nn.GELU()}
    block = nn.Sequential(OrderedDict(layers, takes_halves=nn.Linear(1024, 256))).cuda()
    x = torch.rand(4101, 256, device="cuda")
    with torch.no_grad():
        optimized = ingot.optimize(block, [x])
        optimized(x)
    torch.cuda.synchronize()
    told = json.dumps(optimized.ingot_report(len(x))["programs"])
    assert "'s factors\"" in told, "nothing was handed on"
    print("called a block of two products", flush=True)


def call_packed_rows() -> None:
    """That a sweep packs for a product, in either form, of lengths that leave lanes idle."""
    import json

    import ingot
    import torch
    from torch import nn

    for precision, features, outputs in (("fp32", 352, 1024), ("tf32", 1088, 4096)):
        module = nn.Sequential(nn.Softmax(-1), nn.Linear(features, outputs)).cuda()
        x = torch.rand(4101, features, device="cuda")
        with torch.no_grad():
            optimized = ingot.optimize(module, [x], precision=precision)
            optimized(x)
        torch.cuda.synchronize()
        told = json.dumps(optimized.ingot_report(len(x))["programs"])
        assert '_packed"' in told, "no sweep packs"
        print(f"called a product of packed rows, {precision}", flush=True)


def sanitizer_missing(settings: Settings) -> str:
    if settings.device != "cuda":
        return "compute-sanitizer watches GPUs"
    return "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not here"


def sanitize(tool: str, settings: Settings) -> Outcome:
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", "--print-limit=20"]
    if tool == "racecheck":
        # It takes a bulk copy for a store of the thread that begins it, and knows nothing of the
        # barrier that the copy completes (of copies by tensor maps it knows no writer): factors of
        # halves look as if they were read before.
        command += ["--kernel-regex-exclude", "kns=takes_halves"]
    command += [sys.executable, ROOT / "tools" / "gpu-suite", "--call-small"]
    return outcome(*run_script(command, settings, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))


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


# bench -------------------------------------------------------------------------------------------


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


# ladder ------------------------------------------------------------------------------------------


def ladder_steps(settings: Settings) -> list[Step]:
    from ingot.bench.cases import bundled_cases

    cases = [c for c in bundled_cases() if c.mode == "training"]
    return [Step(f"{c.model} {c.shape}", c, alone=True) for c in cases]


def ladder(case: Any, settings: Settings) -> Outcome:
    command = [sys.executable, "-m", "ingot", "bench", "--precision", "all", "--no-compile"]
    command += ["--model", case.model, "--rows", case.rows, "--mode", case.mode]
    command += ["--device", settings.device, "--rounds", settings.rounds]
    status, lines = run_script([*command, "--results", settings.results], settings)
    # Of a terminal's table the lines with figures.
    return outcome(status, [line for line in lines if "│" in line] if not status else lines, 12)
