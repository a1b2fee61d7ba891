"""Frozen weights on a GPU: never stale, as exact as before, and what they gain.

python frozen.py [--rounds 15]; INGOT_LIBRARY and PYTHONPATH as for any use of the package. Eval
mode, no gradients, cold L2, interleaved; exit status 1 where a check fails.
"""

from __future__ import annotations

import argparse
import copy
import sys

import ingot
import torch
from measures import Timer, relative_error
from torch import nn
from user_frozen import CHANGES

SHAPES = [(1024, 8192, 8192), (16384, 4096, 4096), (128, 8192, 8192), (64, 1000, 777)]
KERNELS = {"own": {}, "portable": {"capabilities": {"hopper_product": False}}}


class Model(nn.Module):
    def __init__(self, k: int, n: int):
        super().__init__()
        self.gemm, self.bn = nn.Linear(k, n), nn.BatchNorm1d(n)
        self.scale = nn.Parameter(torch.randn(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.gemm(x) * self.scale)


def check_again(model, x: torch.Tensor, change: str) -> list[str]:
    """The frozen module must give what a module frozen just now gives."""
    got = model(x)
    model.ingot_freeze()
    return [] if torch.equal(got, model(x)) else [f"stale after {change}"]


def check_changes(model, x: torch.Tensor) -> list[str]:
    problems = []
    for change in CHANGES:
        change(model.gemm)
        problems += check_again(model, x, change.__name__)
    model.gemm.weight.data.neg_()
    model.ingot_freeze()
    return problems + check_again(model, x, "a write by .data and a freeze")


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    failures = 0
    timer = Timer(torch.device("cuda"))
    for (m, k, n), (label, options) in ((s, o) for s in SHAPES for o in KERNELS.items()):
        original = Model(k, n).cuda().eval()
        x = torch.rand(m, k, device="cuda")
        plain = ingot.optimize(copy.deepcopy(original), (x,), options=options)
        frozen = ingot.optimize(copy.deepcopy(original), (x,), options=options)
        frozen.ingot_freeze()
        calls = {"plain": lambda plain=plain, x=x: plain(x), "frozen": lambda f=frozen, x=x: f(x)}
        results = {name: call() for name, call in calls.items()}
        ms = dict(zip(calls, timer.medians(list(calls.values()), arguments.rounds)))
        exact = original.double()(x.double())
        errors = {name: relative_error([result], [exact]) for name, result in results.items()}
        problems = check_changes(frozen, x)
        kept = frozen.ingot_report()["programs"][0]["frozen_bytes"]
        if kept == 0:
            problems.append("nothing was kept")
        if not errors["frozen"] < 2e-6:
            problems.append(f"error {errors['frozen']:.1e}")
        failures += bool(problems)
        print(
            f"{label:8} {m}x{k}->{n}: {ms['plain']:.4f} ms, frozen {ms['frozen']:.4f} ms "
            f"({ms['plain'] / ms['frozen']:.3f}x, {kept / 2**20:.0f} MiB); "
            f"errors {errors['plain']:.1e} {errors['frozen']:.1e}; same bits "
            f"{torch.equal(results['plain'], results['frozen'])}; {'; '.join(problems) or 'ok'}",
            flush=True,
        )
        del plain, frozen, original, x, exact, results
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
