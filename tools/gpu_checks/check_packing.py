"""Checks on a GPU what sweeps pack on the way for the product behind them.

python check_packing.py [--seconds 120]

Of rows of many lengths, in fp32 and in TF32, that two products read: results have the same bits
whether the packed rows are all that is stored or stand beside them (in fp32), and those of products
of the stored rows, which a pass of its own packs; and the error that is promised relative to fp64.
What is not finite is eager's. Exit status: 1 where it is not so, or where no sweep packs.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import ingot  # noqa: E402
import torch  # noqa: E402
from check_handed import same  # noqa: E402
from measures import relative_error, tell  # noqa: E402
from network_rows import under  # noqa: E402
from torch import nn  # noqa: E402

ROWS = {
    "gelu": lambda a, b: nn.functional.gelu(a),
    "swiglu": lambda a, b: nn.functional.silu(a) * b,
    "softmax": lambda a, b: torch.softmax(a, -1),
    "layer norm": lambda a, b: nn.functional.layer_norm(a + b, a.shape[-1:]),
}
PROMISE = {"fp32": 2e-6, "tf32": 5e-4}
SAMPLES = 8192


@dataclass(frozen=True)
class Case:
    rows: str
    setting: str
    features: int
    outputs: int

    @property
    def name(self) -> str:
        return f"{self.rows} of {self.features}, {self.setting}, to {self.outputs}"


CASES = [
    *(Case("swiglu", "fp32", k, n) for k, n in ((96, 384), (160, 640), (2816, 1024), (5632, 1024))),
    *(Case("swiglu", "tf32", k, n) for k, n in ((768, 3072), (1088, 4096), (2816, 1024))),
    *(Case("gelu", "fp32", k, n) for k, n in ((224, 896), (11008, 1024))),
    *(Case("softmax", setting, 2048, 2048) for setting in PROMISE),
    *(Case("softmax", "fp32", k, 512) for k in (992, 1056)),
    *(Case("layer norm", setting, 1024, 4096) for setting in PROMISE),
    *(Case("layer norm", setting, 4160, 1024) for setting in PROMISE),
    Case("layer norm", "tf32", 10944, 1024),
]


class Products(nn.Module):
    """Of the same rows: so that they are packed wherever they come from."""

    def __init__(self, case: Case):
        super().__init__()
        self.one, self.other = (nn.Linear(case.features, case.outputs) for _ in range(2))

    def forward(self, rows):
        return self.one(rows), self.other(rows)


class Model(nn.Module):
    def __init__(self, case: Case, products: Products, alone: bool):
        super().__init__()
        self.rows, self.alone, self.products = ROWS[case.rows], alone, products

    def forward(self, a, b):
        rows = self.rows(a, b)
        return self.products(rows) if self.alone else (*self.products(rows), rows)


def packs(module: nn.Module) -> bool:
    """Of a module that was called."""
    return '_packed"' in json.dumps(module.ingot_report(SAMPLES)["programs"])


def check(case: Case) -> str:
    """What is wrong, if anything is."""
    torch.manual_seed(5)
    products = Products(case)
    beside, alone = (Model(case, products, way).cuda() for way in (False, True))
    inputs = [torch.randn(SAMPLES, case.features, device="cuda") for _ in range(2)]
    with under(case.setting):
        fast, fast_alone, by_itself = map(ingot.optimize, (beside, alone, products))
        (*found, rows), found_alone = fast(*inputs), fast_alone(*inputs)
        wrong = ""
        if not packs(fast) or not packs(fast_alone):
            wrong = "no sweep packs"
        elif not all(map(same, found, found_alone)):
            wrong = "other bits where the rows are not stored"
        elif not all(map(same, found, by_itself(rows))):
            wrong = "other bits than where a pass of its own packs"
        truth = copy.deepcopy(alone).double()(*(x.double() for x in inputs))
        error = relative_error(list(found), list(truth))
        print(f"  error {error:.2e}", flush=True)
        if not error <= PROMISE[case.setting]:
            wrong = wrong or "its error is above what is promised"
        inputs[0][7, 3], inputs[0][300, case.features - 1] = float("inf"), float("nan")
        finite, ours = alone(*inputs)[0].isfinite(), fast_alone(*inputs)[0].isfinite()
        if not torch.equal(finite, ours):
            wrong = wrong or "what is not finite is not eager's"
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    with torch.no_grad():
        return tell([(case.name, partial(check, case)) for case in CASES], given.seconds)


if __name__ == "__main__":
    sys.exit(main())
