"""Times blocks whose special functions weigh (GELU, SiLU, tanh) with several builds of libingot, in
turns: forward alone, and training steps.

python time_functions.py [--rounds 2] [--only NAME,...] [--compile] LIBRARY...

Each round runs every library in a process of its own. Of each case the median milliseconds of each
library, L2 cold, and the error of what it gives against fp64. --compile adds torch.compile's times.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLS, WARM = 25, 5


def cases() -> dict:
    """name: (module, shape of x, type, training step, TF32 allowed)."""
    import torch
    from torch import nn

    class Chain(nn.Module):
        def __init__(self, k: int, n: int) -> None:
            super().__init__()
            self.linear = nn.Linear(k, n)
            self.added = nn.Parameter(torch.randn(n))

        def forward(self, x):
            y = self.linear(x) + self.added
            y = torch.nn.functional.gelu(torch.tanh(torch.sigmoid(y) * y))
            return torch.nn.functional.hardtanh(y)

    class Gated(nn.Module):
        def __init__(self, k: int, n: int) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)

        def forward(self, x):
            return torch.nn.functional.silu(self.gate(x)) * self.up(x)

    def mlp(k: int, n: int, approximate: str = "none"):
        return nn.Sequential(nn.Linear(k, n), nn.GELU(approximate), nn.Linear(n, k))

    def gelu(k: int, n: int, approximate: str = "none"):
        return nn.Sequential(nn.Linear(k, n), nn.GELU(approximate))

    norm = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024))
    f32, bf16 = torch.float32, torch.bfloat16
    big = (7168, 1024)
    return {
        "gelu fp32": (gelu(1024, 4096), big, f32, False, False),
        "gelu tanh fp32": (gelu(1024, 4096, "tanh"), big, f32, False, False),
        "gelu tf32": (gelu(1024, 4096), big, f32, False, True),
        "swiglu fp32": (Gated(1024, 4096), big, f32, False, False),
        "mlp step fp32": (mlp(1024, 4096), big, f32, True, False),
        "mlp step tf32": (mlp(1024, 4096), big, f32, True, True),
        "gelu bf16": (gelu(1024, 4096), big, bf16, False, False),
        "gelu tanh bf16": (gelu(1024, 4096, "tanh"), big, bf16, False, False),
        "swiglu bf16": (Gated(1024, 4096), big, bf16, False, False),
        "layernorm fp32": (norm, big, f32, False, False),
        "chain bf16": (Chain(8192, 8192), (1024, 8192), bf16, False, False),
        "chain fp32": (Chain(8192, 8192), (1024, 8192), f32, False, False),
        "mlp step bf16": (mlp(1024, 4096), big, bf16, True, False),
    }


def one(compiled: bool, only: str) -> None:
    """Runs in a process of its own: a JSON line."""
    import torch

    warnings.simplefilter("ignore")
    import ingot

    flushed = torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
    found = {}
    for name, (module, shape, dtype, is_step, tf32) in cases().items():
        if only and name not in only.split(","):
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.03)
        module = module.cuda().to(dtype)
        x = torch.randn(shape, device="cuda").to(dtype)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        exact = copy.deepcopy(module).double()
        new = torch.compile(module) if compiled else ingot.optimize(module, [x])

        def call(subject, given=x, is_step=is_step, parameters=module):
            if not is_step:
                with torch.no_grad():
                    return [subject(given)]
            parameters.zero_grad(set_to_none=True)
            y = subject(given)
            y.backward(y.detach())
            return [p.grad for p in parameters.parameters()]

        times = []
        for _ in range(WARM + CALLS):
            flushed.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # the host is ahead of the GPU
            start.record()
            got = call(new)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        wanted = call(exact, x.double(), is_step, exact)
        error = max(
            ((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, wanted, strict=True)
        )
        found[name] = (statistics.median(times[WARM:]), error)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one == "compile", arguments.only)
        return
    subjects = {f"{i}: {Path(path).name}": path for i, path in enumerate(arguments.libraries)}
    if arguments.compile:
        subjects["torch.compile"] = ""
    found: dict = {}  # by case and library
    for _ in range(arguments.rounds):
        for name, path in subjects.items():
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
            if path:
                environment["INGOT_LIBRARY"] = str(Path(path).resolve())
            command = [sys.executable, __file__, "--one", "ingot" if path else "compile"]
            command += ["--only", arguments.only]
            answer = subprocess.run(command, env=environment, capture_output=True, text=True)
            if answer.returncode:
                print(name, answer.stderr[-1500:], flush=True)
                continue
            answered = json.loads(answer.stdout.splitlines()[-1])
            print(name, answered, flush=True)  # what was measured, should the time end here
            for case, measured in answered.items():
                found.setdefault(case, {}).setdefault(name, []).append(measured)
    for case, by_subject in found.items():
        parts = [
            f"{name} {min(t for t, _ in measured):.4f} ms ({measured[0][1]:.1e})"
            for name, measured in by_subject.items()
        ]
        print(f"{case:18s}", ", ".join(parts), flush=True)


if __name__ == "__main__":
    main()
