"""Training steps of chains of norms at real sizes: gradients against fp64, and times.

python check_conv_training.py [--seconds 60] [--rows A,B] [--all] [--least BYTES]

Each row is a chain behind a convolution, of which the convolution's result is given: batch or group
norm, with a sum, with an activation. Errors of the output, of all gradients and of running
statistics are relative Frobenius errors against fp64, the worst; Ingot's may be a small factor of
eager's. Times are of forward and backward, interleaved rounds with cold L2, medians, and the 95 %
interval of Ingot's over eager's; peak memory is of one step. --all takes chains that the rule for
what pays would leave to PyTorch, too (--least: from other bytes on than its own): for setting that
rule.

Exit status: 1 something was wrong, 3 time ran out, else 0.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "python", Path(__file__).parent):
    sys.path.insert(0, str(folder))

import ingot  # noqa: E402
import torch  # noqa: E402
from ingot.bench.rounds import compare  # noqa: E402
from ingot.capture import gains  # noqa: E402
from measures import FACTOR, relative_error, short_rounds  # noqa: E402
from row_table import EAGER, INGOT, times_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

DEVICE = "cuda"
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


class Chain(nn.Module):
    def __init__(self, channels: int, kind: str):
        super().__init__()
        self.kind = kind
        groups = kind.startswith("gn")
        self.norm = nn.GroupNorm(32, channels) if groups else nn.BatchNorm2d(channels)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        nn.init.normal_(self.norm.bias)

    def forward(self, x, residual):
        if self.kind == "gn_add_silu":
            return F.silu(self.norm(x + residual))
        y = self.norm(x)
        if "add" in self.kind:
            y = y + residual
        if "relu" in self.kind:
            return F.relu(y, inplace=True)
        return F.silu(y, inplace=True) if "silu" in self.kind else y


@dataclass(frozen=True)
class Row:
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    last: bool = False

    @property
    def name(self) -> str:
        kind = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return f"{self.kind} {'x'.join(map(str, self.shape))} {kind}{' last' * self.last}"


F32, B16 = torch.float32, torch.bfloat16
STEM, FIRST, THIRD, LAST = (
    (32, 64, 112, 112),
    (64, 256, 56, 56),
    (32, 256, 14, 14),
    (32, 2048, 7, 7),
)
ROWS = [
    Row("bn_relu", FIRST, F32),
    Row("bn_add_relu", FIRST, F32),
    Row("bn_relu", FIRST, B16),
    Row("bn_add_relu", FIRST, B16),
    Row("bn_relu", FIRST, B16, True),
    Row("bn_add_relu", FIRST, B16, True),
    Row("bn_add_relu", FIRST, F32, True),
    Row("bn_add_relu", LAST, F32),
    Row("bn_relu", STEM, B16),
    Row("bn_silu", (32, 144, 56, 56), F32),
    Row("bn_relu", (32, 512, 7, 7), F32),
    Row("bn_relu", (32, 512, 7, 7), B16),
    Row("bn_relu", THIRD, B16),
    Row("bn_add_relu", (32, 1024, 14, 14), B16),
    Row("bn_add_relu", LAST, B16),
    Row("bn_relu", (32, 128, 28, 28), B16),
    Row("bn_add_relu", (32, 512, 28, 28), B16),
    Row("gn_silu", (16, 320, 64, 64), F32),
    Row("gn_silu", (16, 320, 64, 64), B16),
    Row("gn_add_silu", (16, 320, 64, 64), F32),
    Row("gn_relu", (4, 128, 256, 256), F32),
    Row("gn_silu", (16, 640, 32, 32), B16),
]


class Subject:
    def __init__(self, row: Row):
        torch.manual_seed(5)
        layout = torch.channels_last if row.last else torch.contiguous_format
        count = 3 if "add" in row.kind else 2
        self.given = [
            torch.randn(row.shape, device=DEVICE, dtype=row.dtype).to(memory_format=layout)
            for _ in range(count)
        ]
        self.given[0].mul_(2).add_(0.5)
        self.module = Chain(row.shape[1], row.kind).to(DEVICE).train()
        if row.kind.startswith("gn"):  # which takes no parameters of another dtype
            self.module.to(row.dtype)

    def run(self, module, dtype=None) -> list[torch.Tensor]:
        x, gradient, *residual = (t.to(dtype) if dtype else t for t in self.given)
        leaves = [t.detach().requires_grad_() for t in (x, *residual)]
        module.zero_grad(set_to_none=True)
        y = module(leaves[0], leaves[1] if residual else None)
        y.backward(gradient)
        return [y.detach(), *(t.grad for t in leaves), *(p.grad for p in module.parameters())]

    def everything(self, module, dtype=None) -> list[torch.Tensor]:
        found = self.run(module, dtype)
        buffers = [b for b in module.buffers() if b.is_floating_point()]
        return [t.clone() for t in (*found, *buffers)]

    def peak(self, module) -> int:
        self.run(module)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(module)
        return torch.cuda.max_memory_allocated() - before


def measure(row: Row, seconds: float) -> dict:
    torch._dynamo.reset()
    subject = Subject(row)
    eager, exact = copy.deepcopy(subject.module), copy.deepcopy(subject.module).double()
    optimised = ingot.optimize(copy.deepcopy(subject.module))
    truth = subject.everything(exact, torch.float64)
    del exact
    subjects = {INGOT: optimised, EAGER: eager}
    errors = {name: relative_error(subject.everything(m), truth) for name, m in subjects.items()}
    del truth
    torch.cuda.empty_cache()
    first, second = (subject.run(optimised) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second))
    del first, second
    peaks = {name: subject.peak(m) for name, m in subjects.items()}
    taken = [g.compiled for g in optimised._ingot.graphs if g.compiled]
    wrong = []
    if not errors[INGOT] <= max(FACTOR * errors[EAGER], ROUNDING[row.dtype]):
        wrong.append("error")
    if not same:
        wrong.append("not deterministic")
    if peaks[INGOT] > peaks[EAGER] * 1.001 + (1 << 20):
        wrong.append("memory")
    calls = {name: (lambda i, m=m: subject.run(m)) for name, m in subjects.items()}
    options = short_rounds(9, seconds, fewest=5, calls=5, rest_s=0.02)
    comparison = compare(calls, torch.device(DEVICE), options)
    return {
        **times_of(comparison, (EAGER, INGOT)),
        "errors": errors,
        "peaks": peaks,
        "regions": sum(len(c.captured.regions) for c in taken),
        "wrong": " ".join(wrong),
    }


def line(row: Row, found: dict) -> str:
    errors, peaks = found["errors"], found["peaks"]
    return (
        f"{row.name:34} {found['regions']} eager {found['eager_ms']:8.4f} Ingot "
        f"{found['ingot_ms']:8.4f} ms ratio {found['ratio']:.3f} [{found['ratio_lower']:.3f}, "
        f"{found['ratio_upper']:.3f}] error {errors[INGOT]:.1e} eager's {errors[EAGER]:.1e} peak "
        f"{peaks[INGOT] >> 20} of {peaks[EAGER] >> 20} MB"
        + (f" WRONG {found['wrong']}" if found["wrong"] else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--row-seconds", type=float, default=1.0, help="for one row's rounds")
    parser.add_argument("--rows", default="", help="those whose names hold one of these")
    parser.add_argument("--all", action="store_true", help="take what would not pay as well")
    parser.add_argument("--least", type=float, help="bytes that a chain must save to be taken")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.all or arguments.least is not None:
        least = arguments.least or 0.0
        gains.least_saved = lambda *_: least
        gains.takes_channels_last = True
    wanted = arguments.rows.split(",") if arguments.rows else [""]
    started, missed, wrong, longest = time.monotonic(), 0, 0, 3.0
    for row in ROWS:
        if not any(part in row.name for part in wanted):
            continue
        begun = time.monotonic()
        if begun - started + longest > arguments.seconds:
            missed += 1
            continue
        found = measure(row, arguments.row_seconds)
        wrong += bool(found["wrong"])
        print(line(row, found), flush=True)
        longest = max(longest, time.monotonic() - begun)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - started:.0f} s, {wrong} wrong, {missed} not reached")
    return 1 if wrong else 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
