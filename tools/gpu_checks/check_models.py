"""Runs every model of tests/models on a GPU against fp64.

python check_models.py [--part I/N] [--only TEXT] [--device cuda|cpu] [--seconds S]

Both modes; the files' own odd sizes, and sizes that suit vectors and tiles, in fp32 and in bf16.
Each is called ten times with changing inputs, so that calls that are replayed are among them. An
error beyond three times eager's (and rounding) is a failure. Prints what failed and a line of
counts; exits with 1 if anything failed, with 3 if time ran out.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import ingot  # noqa: E402
import torch  # noqa: E402
from ingot.model_file import constants_of, load_model_file  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

FOLDER = ROOT / "tests" / "models"
OWN: dict = {}
TILES = {"batch_size": 200, "in_features": 512, "out_features": 768, "num_groups": 12}
VARIANTS = (
    ("own size", OWN, torch.float32),
    ("200×512→768", TILES, torch.float32),
    ("200×512→768 in bf16", TILES, torch.bfloat16),
)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
CALLS = 10
RANDOM = ("dropout",)  # in training nothing can be compared
ZERO = "max_subtract_mean_gelu"  # a number minus itself: in 16 bits all that is left is rounding


def distance(found, truth) -> float:
    """The largest relative Frobenius error of a result; infinite where NaN differs."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(truth), strict=True):
        wide, exact = a.double(), b.double()
        if not torch.equal(wide.isnan(), exact.isnan()):
            return float("inf")
        wide, exact = wide.nan_to_num(), exact.nan_to_num()
        worst = max(worst, ((wide - exact).norm() / (exact.norm() + 1e-30)).item())
    return worst


def changed(inputs: list, call: int) -> list:
    """The inputs of a later call: in place, so that their addresses stay."""
    for tensor in inputs:
        if tensor.is_floating_point():
            tensor.mul_(1.0 - 0.03 * call).add_(0.01)
    return inputs


def compare(path: Path, sizes: dict, dtype: torch.dtype, mode: str, device: str) -> str:
    """What is wrong, or "" if nothing is."""
    known = constants_of(path.read_text(encoding="utf-8"), str(path))
    loaded = load_model_file(path, {k: v for k, v in sizes.items() if k in known})
    torch.manual_seed(1)
    module = loaded.make_module().train(mode == "training").to(device)
    inputs = [v.to(device) for v in loaded.make_inputs()]
    if dtype != torch.float32:
        module = module.to(dtype)
        inputs = [v.to(dtype) if v.is_floating_point() else v for v in inputs]
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    optimised = ingot.optimize(module, inputs)
    for call in range(CALLS):
        fed = changed(inputs, call)
        found, expected = optimised(*fed), eager(*fed)
        wide = [v.double() if v.is_floating_point() else v for v in fed]
        truth = exact(*wide)
        off, eagers = distance(found, truth), distance(expected, truth)
        if not off <= ROUNDING[dtype] + 3 * eagers:
            return f"call {call}: error {off:.1e}, eager's {eagers:.1e}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="0/1", help="the I-th of N parts of the models")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    index, parts = map(int, arguments.part.split("/"))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # PyTorch logs what a model refuses
    started, compared, left, failed = time.monotonic(), 0, [], 0
    names = [p for p in sorted(FOLDER.glob("*.py")) if arguments.only in p.stem]
    for path in names[index::parts]:
        for label, sizes, dtype in VARIANTS:
            for mode in ("training", "eval"):
                if mode == "training" and any(word in path.stem for word in RANDOM):
                    continue
                if dtype != torch.float32 and path.stem == ZERO:
                    continue
                if time.monotonic() - started > arguments.seconds:
                    print(f"no time for {path.stem} and what follows")
                    return 3
                what = f"{path.stem} {label} {mode}"
                try:
                    with torch.no_grad():
                        wrong = compare(path, sizes, dtype, mode, arguments.device)
                except Exception as error:  # noqa: BLE001 - eager itself refuses some sizes and types
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    if "ingot" in frame.filename:
                        wrong = f"{type(error).__name__}: {error}"
                    else:
                        left.append(what)
                        continue
                compared += 1
                if wrong:
                    failed += 1
                    print(f"FAILED {what}: {wrong}")
    print(f"{failed} of {compared} failed; refused by PyTorch itself: {', '.join(left) or 'none'}")
    return 1 if failed or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
