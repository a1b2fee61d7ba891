"""PyTorch's own suites on a device (torch_suites.py): all modules in both modes, all operators that
Ingot knows, forward and backward.

python check_torch_suites.py [NAME ...] [--device cuda|cpu] [--part K/N] [--samples 2]
                             [--seconds 500]

Prints what differs from PyTorch alone, and how many regions were taken. Exit status: 1 something
differed, or nothing was taken where something must be; 3 time ran out; else 0.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "python", Path(__file__).parent):
    sys.path.insert(0, str(folder))

import torch  # noqa: E402
import torch_suites  # noqa: E402


def cases(device: str, samples: int) -> dict:
    found = {}
    for name in sorted(torch_suites.MODULES):
        for training in (True, False):
            mode = "training" if training else "eval"
            what = partial(torch_suites.check_module, name, training, device, samples)
            found[f"{name}, {mode}"] = what
    for name in sorted(torch_suites.OPERATORS):
        found[f"{name} (operator)"] = partial(torch_suites.check_operator, name, device, samples)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="modules or operators; all of them without")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="0/1", help="K/N: each N-th, from the K-th on")
    parser.add_argument("--samples", type=int, default=2, help="of PyTorch's inputs of each")
    parser.add_argument("--seconds", type=float, default=500.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    deadline = time.monotonic() + arguments.seconds
    found = {
        case: check
        for case, check in cases(arguments.device, arguments.samples).items()
        if not arguments.names
        or case.rpartition(", ")[0] in arguments.names
        or case.removesuffix(" (operator)") in arguments.names
    }
    first, step = map(int, arguments.part.split("/"))
    failures, taken, done = [], 0, 0
    chosen = list(found.items())[first::step]
    for case, check in chosen:
        if time.monotonic() > deadline:
            break
        try:
            # PyTorch's convolutions are to be the same on both sides.
            with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                regions = check()
        except Exception as error:  # of PyTorch's own making, too
            raised = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            failures.append(f"{case}: {told} ({Path(raised.filename).name}:{raised.lineno})")
            regions = None
        if regions == 0 and case.partition(",")[0] in torch_suites.TAKEN:
            failures.append(f"{case}: nothing of it was taken")
        taken += regions or 0
        done += 1
    for failure in failures:
        print(failure)
    print(f"{done} of {len(chosen)} cases, {taken} regions taken, {len(failures)} failures")
    return 1 if failures else 3 if done < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
