"""How long a user waits: the first call, the first call from the cache, a call's host time.

python check_latency.py [--device cuda|cpu] [--seconds 50]

Two new processes, one after the other, share a cache that is empty at first. In each, for each
model: the first call after `ingot.optimize` returned, up to when its result is there (PyTorch and
the device were warm; the library is so from the second model on). In the second also what one call
of the optimised module takes the host: gradients off, with no synchronisation. Exit status 1 where
a figure misses its bound. On a CPU the host does it all: tiny shapes only, and one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
EXAMPLES = ROOT / "examples"

TINY = {"batch_size": 16, "in_features": 64, "out_features": 64}
# Model, sizes, and in which mode.
CASES = (
    ("gemm_scale_bn", {}, "training"),
    ("gemm_scale_bn", {}, "eval"),
    ("gemm_bn_scale_softmax", {}, "training"),
    ("gemm_scale_bn", TINY, "training"),
    ("gemm_scale_bn", TINY, "eval"),
    ("gemm_bn_scale_softmax", TINY, "training"),
)
BOUNDS_MS = {"empty": 5000.0, "cached": 50.0, "host": 0.045}
HOST_CALLS = {"tiny": 2000, "real": 1000}
# Calls between synchronisations: more would fill the launch queue and time the device instead.
BURST = 100


def cases_of(device: str) -> tuple:
    return CASES if device == "cuda" else tuple(c for c in CASES if c[1] is TINY)


def measure(model: str, sizes: dict, mode: str, device: str, with_host: bool) -> dict:
    """Milliseconds of the first call in this process, and of later ones on the host."""
    import ingot
    import torch
    from ingot.model_file import load_model_file

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    calls = HOST_CALLS["tiny" if sizes else "real"]
    loaded = load_model_file(EXAMPLES / f"{model}.py", sizes)
    module = loaded.make_module().to(device).train(mode == "training")
    inputs = [v.to(device) if isinstance(v, torch.Tensor) else v for v in loaded.make_inputs()]
    with torch.no_grad():
        module(*inputs)  # PyTorch's own first call: its libraries and its allocator
        wait()
        eager = host_time(module, inputs, wait, calls) if with_host else 0.0
        optimised = ingot.optimize(module, inputs)
        start = time.perf_counter()
        optimised(*inputs)
        wait()
        figures = {"first": (time.perf_counter() - start) * 1e3}
        if not optimised.ingot_report()["programs"]:
            raise SystemExit(f"{model}: nothing was taken over")
        if with_host:
            figures |= {"host": host_time(optimised, inputs, wait, calls), "eager_host": eager}
    return figures


def host_time(module, inputs: list, wait, calls: int) -> float:
    """Milliseconds a call, the median of bursts."""
    for _ in range(20):
        module(*inputs)
    wait()
    bursts = []
    for _ in range(calls // BURST):
        start = time.perf_counter()
        for _ in range(BURST):
            module(*inputs)
        bursts.append((time.perf_counter() - start) / BURST * 1e3)
        wait()
    return median(bursts)


def in_new_process(device: str, cache: str, limit: float, with_host: bool) -> list[dict]:
    command = [sys.executable, __file__, "--device", device, "--measure"]
    answer = subprocess.run(
        [*command, *(["--with-host"] if with_host else [])],
        capture_output=True,
        text=True,
        timeout=max(limit, 5.0),
        env={**os.environ, "INGOT_CACHE_DIR": cache},
        check=False,
    )
    if answer.returncode != 0:
        raise SystemExit((answer.stdout + answer.stderr).strip()[-800:])
    return json.loads(answer.stdout.strip().splitlines()[-1])


def rows_of(device: str, deadline: float) -> list[dict]:
    with tempfile.TemporaryDirectory() as cache:
        runs = [
            in_new_process(device, cache, deadline - time.monotonic(), with_host)
            for with_host in (False, True)
        ]
    rows = []
    for (model, sizes, mode), empty, cached in zip(cases_of(device), *runs, strict=True):
        first = {"empty": empty["first"], "cached": cached.pop("first")}
        shape = "16x64->64" if sizes else "1024x8192->8192"
        rows.append({"case": f"{model} {shape} {mode}", **first, **cached})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=110.0, help="stop before this")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--with-host", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        if arguments.device == "cpu":
            import torch

            torch.set_num_threads(1)
        figures = [
            measure(*case, arguments.device, arguments.with_host)
            for case in cases_of(arguments.device)
        ]
        print(json.dumps(figures))
        return 0
    try:
        rows = rows_of(arguments.device, time.monotonic() + arguments.seconds)
    except subprocess.TimeoutExpired:
        print(f"ran out of its {arguments.seconds:.0f} s")
        return 1
    print(f"{'':48} {'empty ms':>8} {'cached ms':>9} {'host us':>8} {'eager us':>8}")
    missed = []
    for row in rows:
        late = [name for name, bound in BOUNDS_MS.items() if row[name] > bound]
        missed += late
        print(
            f"{row['case']:48} {row['empty']:8.1f} {row['cached']:9.1f} {row['host'] * 1e3:8.1f} "
            f"{row['eager_host'] * 1e3:8.1f}  {'late: ' + ', '.join(late) if late else 'ok'}"
        )
    worst = {name: max(row[name] for row in rows) for name in BOUNDS_MS}
    print(
        f"worst: empty {worst['empty']:.0f} ms (at most {BOUNDS_MS['empty']:.0f}), cached "
        f"{worst['cached']:.1f} ms (at most {BOUNDS_MS['cached']:.0f}), host "
        f"{worst['host'] * 1e3:.1f} us (at most {BOUNDS_MS['host'] * 1e3:.0f}): "
        f"{f'{len(missed)} missed' if missed else 'all met'}"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
