"""Times cases with several builds of libingot, in turns: blocks whose special functions weigh
(GELU, SiLU, tanh), or training steps of the models that the project's targets name.

python time_builds.py functions|steps [--rounds 2] [--only A,B] [--eager] [--compile] LIBRARY...

Each round runs every library in a process of its own, L2 evicted and weights written before each
call. Of each case the median milliseconds of each library, and the errors against fp64 of what it
gives and of what eager does. --eager and --compile add PyTorch's own times, and torch.compile's.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import ingot  # noqa: E402
import torch  # noqa: E402
from measures import Timer, relative_error  # noqa: E402
from torch import nn  # noqa: E402

CALLS, WARM = 25, 5
LEAD = 400_000  # cycles by which the host is ahead of the GPU
EAGER, COMPILE = "eager", "torch.compile"


@dataclass(frozen=True)
class Case:
    """of_x: a step has x's gradient, too. lead: cycles that the GPU waits before a call."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    step: bool = False
    of_x: bool = False
    tf32: bool = False
    lead: int = 0


class Chain(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n)
        self.added = nn.Parameter(torch.randn(n))

    def forward(self, x):
        y = self.linear(x) + self.added
        y = nn.functional.gelu(torch.tanh(torch.sigmoid(y) * y))
        return nn.functional.hardtanh(y)


class Gated(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)

    def forward(self, x):
        return nn.functional.silu(self.gate(x)) * self.up(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


def gelu(approximate: str = "none") -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(approximate))


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024))


def block(name: str, make: Callable[[], nn.Module], **settings) -> Case:
    def with_small_weights() -> nn.Module:
        module = make()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.03)
        return module

    return Case(name, with_small_weights, **{"shape": (7168, 1024), "lead": LEAD, **settings})


def functions() -> list[Case]:
    gated, chain = partial(Gated, 1024, 4096), partial(Chain, 8192, 8192)
    by_tanh, bf16 = partial(gelu, "tanh"), torch.bfloat16
    return [
        block("gelu fp32", gelu),
        block("gelu tanh fp32", by_tanh),
        block("gelu tf32", gelu, tf32=True),
        block("swiglu fp32", gated),
        block("mlp step fp32", mlp, step=True),
        block("mlp step tf32", mlp, step=True, tf32=True),
        block("gelu bf16", gelu, dtype=bf16),
        block("gelu tanh bf16", by_tanh, dtype=bf16),
        block("swiglu bf16", gated, dtype=bf16),
        block("layernorm fp32", norm),
        block("chain bf16", chain, shape=(1024, 8192), dtype=bf16),
        block("chain fp32", chain, shape=(1024, 8192)),
        block("mlp step bf16", mlp, step=True, dtype=bf16),
    ]


def model(file: str, inputs: int, outputs: int) -> nn.Module:
    names: dict = {}
    exec(compile((ROOT / file).read_text(), file, "exec"), names)
    return names["Model"](inputs, outputs)


def steps() -> Iterator[Case]:
    for name, file, leading, inputs, outputs in (
        ("gemm_scale_bn", "examples/gemm_scale_bn.py", (1024,), 8192, 8192),
        ("gemm_scale_bn", "examples/gemm_scale_bn.py", (16384,), 4096, 4096),
        ("gemm_bn_scale_softmax", "examples/gemm_bn_scale_softmax.py", (1024,), 8192, 8192),
        ("residual MLP", "tests/models/residual_mlp_block.py", (1024, 7), 1024, 4096),
    ):
        make = partial(model, file, inputs, outputs)
        label = f"{name} {'x'.join(map(str, leading))}x{inputs}->{outputs}"
        yield Case(label, make, (*leading, inputs), step=True)
        yield Case(f"{label} with x", make, (*leading, inputs), step=True, of_x=True)


SETS = {"functions": functions, "steps": steps}


def results(case: Case, module: nn.Module, x: torch.Tensor, given: torch.Tensor) -> list:
    """The result, or the gradients of a step."""
    if not case.step:
        with torch.no_grad():
            return [module(x)]
    module(x).backward(given)
    return [t.grad for t in (*module.parameters(), x) if t.requires_grad]


def clear(module: nn.Module, x: torch.Tensor) -> None:
    module.zero_grad(set_to_none=True)
    x.grad = None


def measure(case: Case, who: str, timer: Timer) -> tuple[float, float, float]:
    """Milliseconds, and the errors of what is measured and of eager."""
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    torch.manual_seed(0)
    eager = case.make().cuda().to(case.dtype)
    module = copy.deepcopy(eager)
    if who != EAGER:
        module = torch.compile(module) if who == COMPILE else ingot.optimize(module)
    x = torch.randn(case.shape, device="cuda").to(case.dtype).requires_grad_(case.of_x)
    with torch.no_grad():
        given = torch.randn_like(copy.deepcopy(eager)(x))
    exact, wide = copy.deepcopy(eager).double(), x.detach().double().requires_grad_(case.of_x)
    truth = results(case, exact, wide, given.double())
    errors = []
    for subject in (module, eager):
        clear(subject, x)
        errors.append(relative_error(results(case, subject, x, given), truth))
    del exact, wide, truth
    times = []
    for _ in range(WARM + CALLS):
        clear(module, x)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.0)
        torch.cuda._sleep(case.lead)
        times.append(timer.once(lambda: results(case, module, x, given)))
    return statistics.median(times[WARM:]), *errors


def child(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    timer, found = Timer(torch.device("cuda")), {}
    for case in SETS[arguments.set]():
        if not arguments.only or case.name in arguments.only.split(","):
            found[case.name] = measure(case, arguments.child, timer)
            torch.cuda.empty_cache()
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=SETS)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    subjects = {f"{i}: {Path(path).name}": path for i, path in enumerate(arguments.libraries)}
    subjects |= {EAGER: ""} if arguments.eager else {}
    subjects |= {COMPILE: ""} if arguments.compile else {}
    found: dict = {}  # by case and subject
    for _ in range(arguments.rounds):
        for name, path in subjects.items():
            library = {"INGOT_LIBRARY": str(Path(path).resolve())} if path else {}
            command = [sys.executable, __file__, arguments.set, "--only", arguments.only]
            command += ["--child", name]
            answer = subprocess.run(
                command, env={**os.environ, **library}, capture_output=True, text=True
            )
            if answer.returncode:
                print(name, answer.stderr[-1500:], flush=True)
                continue
            answered = json.loads(answer.stdout.splitlines()[-1])
            print(name, answered, flush=True)  # what was measured, should the time end here
            for case, measured in answered.items():
                found.setdefault(case, {}).setdefault(name, []).append(measured)
    for case, by_subject in found.items():
        print(case)
        for name, measured in by_subject.items():
            times = [ms for ms, _, _ in measured]
            _, error, eager_error = measured[0]
            print(
                f"  {name:48} {statistics.median(times):8.4f} ms "
                f"({' '.join(f'{ms:.4f}' for ms in times)}), error {error:.1e}, "
                f"eager's {eager_error:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
