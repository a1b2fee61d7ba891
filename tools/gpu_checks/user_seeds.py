"""The seed models by a timer that is not Ingot's, with gradients on and off.

python user_seeds.py [--device cuda|cpu]

Triton's `do_bench`, which comes with PyTorch for GPUs: L2 is evicted before each call, figures are
medians. Eager and optimised calls take turns, in short bursts after a rest, so that no power limit
is reached; what they take at length is printed beside. With gradients on, ours must be 4.5 times as
fast as eager, and take 1.05 of the time with gradients off at most. One line for each model, PASS
or FAIL; exit status 1 after a FAIL. On a CPU small models are called, and nothing is measured.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ingot
import torch
from user_support import Verdicts, arguments, quiet

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEEDS = ("gemm_scale_bn", "gemm_bn_scale_softmax", "gemm_scale_bn_large")
TIMES_AS_FAST, ON_OVER_OFF = 4.5, 1.05
ROUNDS, REST_S = 9, 0.12
BURST_MS, LENGTH_MS = 12, 200  # of calls behind one another


def calls_of(name: str, device: str) -> dict[tuple[str, bool], Callable[[], object]]:
    """By (whose, whether gradients are on): what runs the model."""
    file = importlib.import_module(name)
    if device == "cpu":
        file.batch_size = file.in_features = file.out_features = 64
    eager = file.Model(*file.get_init_inputs()).to(device)
    ours = ingot.optimize(copy.deepcopy(eager))
    inputs = [x.to(device) for x in file.get_inputs()]

    def call(model: torch.nn.Module, gradients: bool) -> Callable[[], object]:
        def run() -> None:
            with torch.set_grad_enabled(gradients):
                model(*inputs)

        return run

    both = {"eager": eager, "ours": ours}
    return {(who, on): call(model, on) for who, model in both.items() for on in (True, False)}


def milliseconds(call: Callable[[], object], long: bool = False) -> float:
    from triton.testing import do_bench

    torch.cuda.synchronize()
    time.sleep(REST_S)
    return do_bench(call, warmup=2, rep=LENGTH_MS if long else BURST_MS, return_mode="median")


def timed(calls: dict) -> tuple[bool, str]:
    for call in calls.values():
        for _ in range(10):
            call()
    rounds = [{key: milliseconds(call) for key, call in calls.items()} for _ in range(ROUNDS)]
    faster = statistics.median(r["eager", True] / r["ours", True] for r in rounds)
    more = statistics.median(r["ours", True] / r["ours", False] for r in rounds)
    own = statistics.median(r["ours", True] for r in rounds)
    sustained = milliseconds(calls["eager", True], True) / milliseconds(calls["ours", True], True)
    remark = f"{own:.4f} ms, {faster:.2f} times as fast as eager ({sustained:.2f} at length)"
    remark += f", {more:.3f} of the time without gradients"
    return faster >= TIMES_AS_FAST and more <= ON_OVER_OFF, remark


def main() -> int:
    given = arguments(__doc__)
    quiet()
    sys.path.insert(0, str(EXAMPLES))
    verdicts = Verdicts()
    for name in SEEDS:
        calls = calls_of(name, given.device)
        if given.device == "cuda":
            verdicts.attempt(name, lambda calls=calls: timed(calls))
        else:
            verdicts.attempt(name, lambda calls=calls: [call() for call in calls.values()] and True)
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
