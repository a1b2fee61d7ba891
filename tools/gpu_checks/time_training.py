"""Times training steps with several builds of libingot, in turns: the models that the project's
targets name, with and without x's gradient.

python time_training.py [--rounds 3] [--eager] LIBRARY...

Each round runs every library in a process of its own, L2 evicted and weights written before each
step. For each case the medians of each library in milliseconds, and the error of its gradients
against fp64 beside eager's. --eager adds PyTorch's own times.
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
CASES = (
    ("gemm_scale_bn 1024x8192->8192", "examples/gemm_scale_bn.py", (1024,), 8192, 8192),
    ("gemm_scale_bn 16384x4096->4096", "examples/gemm_scale_bn.py", (16384,), 4096, 4096),
    (
        "gemm_bn_scale_softmax 1024x8192->8192",
        "examples/gemm_bn_scale_softmax.py",
        (1024,),
        8192,
        8192,
    ),
    ("residual MLP 7168x1024->4096", "tests/models/residual_mlp_block.py", (1024, 7), 1024, 4096),
)
STEPS, WARM = 15, 4


def make(file: str, inputs: int, outputs: int):
    import torch

    names: dict = {}
    exec(compile((ROOT / file).read_text(), file, "exec"), names)
    torch.manual_seed(0)
    return names["Model"](inputs, outputs).cuda()


def gradients(module, x, given) -> list:
    module.zero_grad(set_to_none=True)
    own = x.detach().clone().requires_grad_(x.requires_grad)
    module(own).backward(given)
    return [p.grad for p in module.parameters()] + ([own.grad] if own.requires_grad else [])


def milliseconds(module, x, given) -> float:
    import torch

    flushed = torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for step in range(WARM + STEPS):
        module.zero_grad(set_to_none=True)
        x.grad = None
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.0)
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        module(x).backward(given)
        end.record()
        torch.cuda.synchronize()
        if step >= WARM:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def errors(module, twin, x, given) -> tuple[float, float]:
    """Of the worst gradient, Ingot's and eager's; what is zero but for rounding has none."""
    exact = copy.deepcopy(twin).double()
    truth = gradients(exact, x.detach().double().requires_grad_(x.requires_grad), given.double())
    size = [t.square().mean().sqrt().item() for t in truth]
    worst = []
    for m in (module, twin):
        found = gradients(m, x, given)
        worst.append(
            max(
                ((a.double() - b).norm() / b.norm()).item()
                for a, b, rms in zip(found, truth, size)
                if rms > 1e-9 * max(size)
            )
        )
    return worst[0], worst[1]


def child(by_eager: bool) -> None:
    import ingot
    import torch

    found = {}
    for name, file, leading, inputs, outputs in CASES:
        twin = make(file, inputs, outputs)
        for needed in (False, True):
            module = twin if by_eager else ingot.optimize(copy.deepcopy(twin))
            x = torch.randn(*leading, inputs, device="cuda").requires_grad_(needed)
            given = torch.randn_like(module(x))
            label = name + (" with x" if needed else "")
            found[label] = [milliseconds(module, x, given)]
            if not by_eager:
                found[label] += errors(module, twin, x, given)
            del module, x, given
            torch.cuda.empty_cache()
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--child", choices=("ingot", "eager"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.child:
        return child(options.child == "eager")
    runs = [*options.libraries, *(["eager"] if options.eager else [])]
    seen: dict[str, dict[str, list]] = {}
    for _ in range(options.rounds):
        for run in runs:
            who = "eager" if run == "eager" else "ingot"
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
            if who == "ingot":
                environment["INGOT_LIBRARY"] = str(Path(run).resolve())
            command = [sys.executable, __file__, "--child", who]
            text = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            for label, numbers in json.loads(text.splitlines()[-1]).items():
                seen.setdefault(label, {}).setdefault(run, []).append(numbers)
    for label, by_run in seen.items():
        print(label)
        for run, rounds in by_run.items():
            times = " ".join(f"{numbers[0]:.3f}" for numbers in rounds)
            line = f"  {run:48} {statistics.median(n[0] for n in rounds):8.3f} ms ({times})"
            if len(rounds[0]) > 1:
                line += f", error {rounds[0][1]:.2e}, eager's {rounds[0][2]:.2e}"
            print(line)


if __name__ == "__main__":
    main()
