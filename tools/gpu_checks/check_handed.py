"""Checks on a GPU what one product hands to the next as halves.

python check_handed.py [--seconds 120] [--rounds 15]

Blocks of two products and more, no gradients: of each the error of Ingot with and without handing
on, and eager's, relative to fp64; and with --rounds the medians of interleaved rounds with cold L2.
Exit status 1: an error above twice that without it and 2e-6, results that differ from call to call
or are not eager's where they are not finite, or no product that hands on.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import ingot  # noqa: E402
import torch  # noqa: E402
from measures import Timer, relative_error, tell  # noqa: E402
from torch import nn  # noqa: E402

PLAIN = {"capabilities": {"handed_halves": False}}


class Block(nn.Module):
    """A transformer's feed-forward block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class NormedGated(Gated):
    """Both products of the norm's rows, which are stored packed alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.norm = nn.RMSNorm(width)

    def forward(self, x):
        return x + super().forward(self.norm(x))


class Uneven(nn.Module):
    """Hidden features from 1e-15 to 1e15, samples from 1e-6 to 1e6."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width)
        with torch.no_grad():
            self.up.weight *= torch.logspace(-15, 15, hidden)[:, None]

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def layers(*widths: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        modules: list[nn.Module] = []
        for inner, outer in zip(widths, widths[1:], strict=False):
            modules += [nn.Linear(inner, outer), nn.ReLU()]
        return nn.Sequential(*modules[:-1])

    return make


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    frozen: bool = False


CASES = (
    Case("block 7168 x 1024 x 4096", lambda: Block(1024, 4096), (1024, 7, 1024)),
    Case("block 7168 x 768 x 3072", lambda: Block(768, 3072), (1024, 7, 768)),
    Case("block 4096 x 768 x 3072", lambda: Block(768, 3072), (8, 512, 768)),
    Case("block 6272 x 384 x 1536", lambda: Block(384, 1536), (32, 196, 384)),
    Case("gated 7168 x 2048 x 5632", lambda: Gated(2048, 5632), (1024, 7, 2048)),
    Case("normed gated 7168 x 1024 x 2816", lambda: NormedGated(1024, 2816), (1024, 7, 1024)),
    Case("block 16384 x 4096 x 16384", lambda: Block(4096, 16384), (16384, 4096)),
    Case("frozen 7168 x 1024 x 4096", lambda: Block(1024, 4096), (1024, 7, 1024), frozen=True),
    Case("block 16384 x 1024 x 4096", lambda: Block(1024, 4096), (16384, 1024)),
    Case("layers 16384 x 1024", layers(1024, 1024, 1024, 1024), (16384, 1024)),
    Case("six layers 16384", layers(1024, 2048, 1024, 2048, 1024, 512, 1024), (16384, 1024)),
    Case("ragged 7101 x 1000 x 4032 x 500", layers(1000, 4032, 500), (7101, 1000)),
    Case("three 6001 x 960 x 2880 x 960 x 64", layers(960, 2880, 960, 64), (6001, 960)),
    Case("uneven 8192 x 1024 x 2048", lambda: Uneven(1024, 2048), (8192, 1024)),
)


def optimised(module: nn.Module, x, frozen: bool, options=None) -> nn.Module:
    result = ingot.optimize(copy.deepcopy(module), (x,), options=options)
    result.ingot_prepare(x)
    if frozen:
        result.ingot_freeze()
    return result


def hands_on(module: nn.Module, batch: int) -> bool:
    """Whether a call's memory holds the factors of halves."""
    return "'s factors\"" in json.dumps(module.ingot_report(batch)["programs"])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_not_finite(module: nn.Module, ours: nn.Module, x: torch.Tensor) -> str:
    """One infinity, one NaN, one large value: what eager has where it is not finite."""
    spoiled = x.clone()
    rows = spoiled.view(-1, spoiled.shape[-1])
    rows[3, 5], rows[200, 7], rows[-1, 0] = float("inf"), float("nan"), 3e38
    expected, found = module(spoiled), ours(spoiled)
    finite = expected.isfinite()
    differs = not torch.equal(finite, found.isfinite())
    signs = [torch.where(t.isinf(), t.sign(), 0) for t in (expected, found)]
    differs |= not torch.equal(*signs)
    if not differs:
        differs = relative_error([found[finite]], [expected[finite].double()]) > 1e-5
    return "what is not finite is not eager's" if differs else ""


def check(case: Case, timer: Timer, rounds: int) -> str:
    """What is wrong, if anything is."""
    torch.manual_seed(3)
    module = case.make().cuda().eval()
    x = torch.randn(case.shape, device="cuda")
    if isinstance(module, Uneven):
        x *= torch.logspace(-6, 6, len(x), device="cuda")[:, None]
    handed, plain = (optimised(module, x, case.frozen, o) for o in (None, PLAIN))
    results = [call(x) for call in (handed, plain, module)]
    truth = copy.deepcopy(module).double()(x.double())
    errors = [relative_error([r], [truth]) for r in results]
    line = f"  error {errors[0]:.2e}, packed {errors[1]:.2e}, eager {errors[2]:.2e}"
    if rounds:
        times = timer.medians([lambda: handed(x), lambda: plain(x), lambda: module(x)], rounds)
        line += f", ms {times[0]:.4f}, packed {times[1]:.4f} ({times[0] / times[1]:.3f}), eager "
        line += f"{times[2]:.3f}"
    print(line, flush=True)
    if not hands_on(handed, len(x)) or hands_on(plain, len(x)):
        return "it hands nothing on, or did without"
    if not errors[0] <= max(2 * errors[1], 2e-6):
        return "its error is above twice that of packing"
    if not all(same(results[0], handed(x)) for _ in range(3)):
        return "its bits differ from call to call"
    return check_not_finite(module, handed, x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=0)
    given = parser.parse_args()
    timer = Timer(torch.device("cuda"))
    with torch.no_grad():
        cases = [(case.name, partial(check, case, timer, given.rounds)) for case in CASES]
        return tell(cases, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
