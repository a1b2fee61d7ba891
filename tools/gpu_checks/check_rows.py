"""Checks sweeps along rows of awkward lengths on a GPU, and the loss over them, against fp64.

python check_rows.py [LENGTH ...] [--part K/N] [--device cuda] [--seconds S]

Lengths around vectors of four and eight, in registers, in loops that a block or a cluster makes,
in waves, and by blocks that stay, several of these kernels side by side, too; rows as they lie in
memory, in a view that begins elsewhere, with gaps between them, and one alone; values as they come,
with -inf among them and rows of nothing else. Results are written into memory full of NaN, and
errors held to eager's. Prints a line a length, and what fails; exit status 1 if anything does.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

LENGTHS = (
    *(77, 1001, 4099, 12289, 32769, 50257, 50260, 65535, 131072, 131073, 393215),
    *(393220, 1 << 20, (1 << 20) + 1, (3 << 20) + 4, 5 << 20),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENTS = 1 << 21


class Along(nn.Module):
    def __init__(self, what: Callable, columns: int, dtype: torch.dtype):
        super().__init__()
        self.what = what
        made = torch.rand(2, columns, device="cuda").to(dtype)
        self.register_buffer("weight", made[0].clone())
        self.register_buffer("bias", made[1].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


def _norm(module: Along, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias)


OPERATORS: dict[str, Callable] = {
    "softmax": lambda m, x: torch.softmax(x * 0.5, -1),
    "log_softmax": lambda m, x: torch.log_softmax(x, -1) * 2,
    "logsumexp": lambda m, x: torch.logsumexp(x, -1),
    "layer_norm": _norm,
    "norm without weights": lambda m, x: F.layer_norm(x, x.shape[-1:]) * 2,
    "softmax of layer_norm": lambda m, x: torch.softmax(_norm(m, x), -1),
    "argmax": lambda m, x: torch.argmax(x * 2, -1),
    "argmax of equals": lambda m, x: torch.argmax((x * 2).round(), -1),
    "argmax of NaN": lambda m, x: torch.argmax(torch.where(x > 3, torch.nan, x), -1),
    "largest": lambda m, x: torch.amax(x, -1),
    "map": lambda m, x: torch.sigmoid(x) * x + 1,
    "map of rows": lambda m, x: (x - x[:, :1]) * 0.5 + m.bias,
}
_NORMS = {"layer_norm", "norm without weights", "softmax of layer_norm"}
_FINITE_ALONE = _NORMS | {"map of rows", "map"}


class Loss(nn.Module):
    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.float(), words)


def layouts(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    whole = (torch.randn(rows * columns + 8, device="cuda") * 3).to(dtype)
    yield "dense", whole[: rows * columns].view(rows, columns)
    yield "begins elsewhere", whole[1 : rows * columns + 1].view(rows, columns)
    wide = (torch.randn(rows, columns + 3, device="cuda") * 3).to(dtype)
    yield "gaps", wide[:, :columns]
    yield "one row", wide[:1, :columns]
    few = whole[: rows * columns].view(rows, columns).clone()
    few[:, ::3] = -torch.inf
    few[1 % rows] = -torch.inf
    yield "-inf", few


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative; infinite where one is finite, or a number, and the other is not."""
    found, truth = found.double(), truth.double()
    finite = truth.isfinite()
    strange = (found.isnan() != truth.isnan()) | (found.isinf() != truth.isinf())
    if bool((strange | (~finite & ~truth.isnan() & (found != truth))).any()):
        return float("inf")
    scale = torch.where(finite, truth, 0).norm()
    return float(torch.where(finite, found - truth, 0).norm() / scale.clamp_min(1e-30))


def spoil_memory(like: torch.Tensor) -> None:
    """What is allocated next is full of NaN."""
    freed = [torch.full_like(like.contiguous(), torch.nan) for _ in range(2)]
    del freed


def check_operators(columns: int, dtype: torch.dtype) -> list[str]:
    import ingot

    problems = []
    rows = max(3, _ELEMENTS // columns)
    for name, what in OPERATORS.items():
        module = Along(what, columns, dtype)
        optimized = None
        for layout, x in layouts(rows, columns, dtype):
            if layout == "-inf" and name in _FINITE_ALONE:
                continue
            if optimized is None:
                optimized = ingot.optimize(Along(what, columns, dtype), [x])
                optimized.load_state_dict(module.state_dict())
                if not optimized.ingot_report()["operators_replaced"]:
                    problems.append(f"{name}: nothing is taken")
            expected = module(x)
            spoil_memory(x)
            found = optimized(x)
            label = f"{columns} {str(dtype)[6:]} {name}, {layout}"
            if found.dtype == torch.int64:
                same = torch.equal(found, expected)
                problems += [] if same else [f"{label}: other places"]
                continue
            truth = copy.deepcopy(module).double()(x.double())
            ours, eager = error(found, truth), error(expected, truth)
            if not ours <= 1.5 * eager + (1e-6 if dtype == torch.float32 else 1e-3):
                problems.append(f"{label}: {ours:.1e}, eager {eager:.1e}")
    return problems


def check_loss(columns: int, dtype: torch.dtype) -> list[str]:
    import ingot

    rows = max(3, _ELEMENTS // columns)
    problems = []
    words = torch.randint(0, columns, (rows,), device="cuda")
    words[0] = -100
    words[-1], words[1] = columns - 1, 0
    optimized = ingot.optimize(Loss(), [torch.rand(rows, columns, device="cuda").to(dtype), words])
    for layout, x in layouts(rows, columns, dtype):
        if layout in ("one row", "-inf"):
            continue

        def step(loss: nn.Module, of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            leaf = of.detach().requires_grad_()
            value = loss(leaf, words)
            (gradient,) = torch.autograd.grad(value, leaf)
            return value, gradient

        spoil_memory(x)
        found, expected = step(optimized, x), step(Loss(), x)
        leaf = x.double().requires_grad_()
        value = F.cross_entropy(leaf, words)
        truth = value, torch.autograd.grad(value, leaf)[0]
        for what, f, e, t in zip(("loss", "gradient"), found, expected, truth):
            ours, eager = error(f, t), error(e, t)
            if not ours <= 1.5 * eager + 1e-6:
                label = f"{columns} {str(dtype)[6:]} {what}, {layout}"
                problems.append(f"{label}: {ours:.1e}, eager {eager:.1e}")
    return problems


def check_side_by_side(columns: int) -> list[str]:
    """Kernels whose blocks stay, on several streams: few of each are there, and wait for none that
    is not. The bits of calls one after the other."""
    import ingot

    optimized = ingot.optimize(Along(OPERATORS["softmax"], 1, torch.float32))
    x = [torch.randn(24, columns, device="cuda") * 3 for _ in range(4)]
    expected = [optimized(one) for one in x]
    streams = [torch.cuda.Stream() for _ in x]
    problems = []
    for _ in range(3):
        torch.cuda.synchronize()
        found = []
        for stream, one in zip(streams, x):
            with torch.cuda.stream(stream):
                found.append(optimized(one))
        torch.cuda.synchronize()
        if not all(map(torch.equal, found, expected)):
            problems.append(f"{columns}: other bits on streams side by side")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", nargs="*", type=int)
    parser.add_argument("--part", default="0/1", help="K/N: each N-th length, from the K-th on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    from ingot.capture import gains

    gains.takes_everything = True
    gains._LEAST_OF_LOSSES = {}
    deadline = time.monotonic() + arguments.seconds
    failures: list[str] = []
    done = 0
    torch.manual_seed(11)
    first, step = map(int, arguments.part.split("/"))
    for columns in (arguments.lengths or LENGTHS)[first::step]:
        for dtype in DTYPES:
            if time.monotonic() > deadline:
                failures.append(f"{columns} {dtype}: no time left")
                continue
            with torch.no_grad():
                found = check_operators(columns, dtype)
            found += check_loss(columns, dtype)
            if dtype == torch.float32 and columns > 1 << 18 and columns % 4 == 0:
                with torch.no_grad():
                    found += check_side_by_side(columns)
            failures += found
            done += 1
            torch._dynamo.reset()
        print(f"{columns}: {len(failures)} failures so far", flush=True)
    for failure in failures:
        print(failure)
    print(f"{done} kinds of rows, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
