"""Operators alone (operators.py): eager, Ingot, a copy of the same bytes and, if wanted,
torch.compile.

python time_operators.py [--device cuda|cpu] [--small] [--seconds 90] [--operators A,B]
                         [--rounds 9] [--gradients] [--compile] [--everything] [--out FILE]
                         [--again]

Interleaved rounds with cold L2; medians. A row's bytes are those that the operator must read and
write: its operands and its result once, and what must be read twice since no GPU can keep it. The
copy moves as many. × bytes: a time over the copy's. PyTorch's own is good enough up to 1.25; ours
should be 1.15 where it is not. Errors are relative Frobenius errors against fp64; Ingot's may be a
small factor of eager's.

--gradients: a training step, forward and backward, instead of the forward without gradients.
--everything: takes over what Ingot can, whatever it is thought to gain.

Rows go to --out as they come; those of the present sources are not measured again (but with
--again). Exit status: 1 something was wrong, 3 time ran out, else 0.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "python", Path(__file__).parent):
    sys.path.insert(0, str(folder))

import ingot  # noqa: E402
import torch  # noqa: E402
from ingot.bench.clocks import describe, read_clocks  # noqa: E402
from ingot.bench.rounds import compare  # noqa: E402
from ingot.capture import gains  # noqa: E402
from measures import short_rounds, too_large  # noqa: E402
from operators import OPERATORS, Operator  # noqa: E402
from row_table import (  # noqa: E402
    COMPILE,
    EAGER,
    INGOT,
    RowTable,
    measure_rows,
    print_slower,
    status_of,
    times_of,
)

COPY = "copy"
SLOW_EAGER, FAST_ENOUGH = 1.25, 1.15  # × bytes


class Subject:
    """One operator, with its module and two sets of inputs on the device."""

    def __init__(self, operator: Operator, arguments: argparse.Namespace):
        torch.manual_seed(1)
        self.device, self.gradients = torch.device(arguments.device), arguments.gradients
        self.module = operator.build(arguments.small).to(self.device)
        self.inputs = [operator.inputs(arguments.small, self.device) for _ in range(2)]
        if self.gradients:
            for inputs in self.inputs:
                inputs[0].requires_grad_()
        y = self.run(copy.deepcopy(self.module), self.inputs[0])[0]
        tensors = [*self.inputs[0], *self.module.parameters(), y]
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)
        self.bytes += operator.rereads * 4 * self.inputs[0][0].numel()

    def run(self, module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.gradients:
            with torch.no_grad():
                return [module(*inputs)]
        module.zero_grad(set_to_none=True)
        inputs[0].grad = None
        y = module(*inputs)
        y.backward(torch.ones_like(y))
        return [y.detach(), inputs[0].grad]

    def calls(self, module):
        return lambda i: self.run(module, self.inputs[i % 2])

    def copies(self):
        source = torch.zeros(max(1, self.bytes // 8), device=self.device)
        target = torch.zeros_like(source)
        return lambda i: target.copy_(source)

    def truth(self) -> list[torch.Tensor]:
        module = copy.deepcopy(self.module).double()
        inputs = [t.detach().double() if t.is_floating_point() else t for t in self.inputs[0]]
        if self.gradients:
            inputs[0].requires_grad_()
        return self.run(module, inputs)


def error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest; of positions, how many are others."""
    worst = 0.0
    for one, true in zip(found, truth, strict=True):
        if not true.is_floating_point():
            worst = max(worst, (one != true).double().mean().item())
        else:
            worst = max(worst, ((one.double() - true).norm() / true.norm()).item())
    return worst


def measure(operator: Operator, arguments: argparse.Namespace) -> dict:
    subject = Subject(operator, arguments)
    eager, optimised = copy.deepcopy(subject.module), ingot.optimize(copy.deepcopy(subject.module))
    truth = subject.truth()
    errors = {}
    for name, made in ((INGOT, optimised), (EAGER, eager)):
        errors[name] = error(subject.run(made, subject.inputs[0]), truth)
    del truth
    row = {
        "operator": operator.name,
        "mode": mode_of(arguments),
        "shape": "×".join(map(str, subject.inputs[0][0].shape)),
        "small": arguments.small,
        "bytes": subject.bytes,
        "error": errors[INGOT],
        "eager_error": errors[EAGER],
        "taken": taken(optimised),
        "wrong": too_large(errors[INGOT], errors[EAGER]),
    }
    if arguments.rounds:
        row |= timed(subject, {EAGER: eager, INGOT: optimised}, arguments)
    return row


def mode_of(arguments: argparse.Namespace) -> str:
    return "gradients" if arguments.gradients else "forward"


def taken(optimised) -> bool:
    return bool(optimised.ingot_report()["operators_replaced"])


def timed(subject: Subject, modules: dict, arguments: argparse.Namespace) -> dict:
    if arguments.compile:
        torch._dynamo.reset()
        modules[COMPILE] = torch.compile(copy.deepcopy(subject.module), dynamic=False)
    few = min(5, arguments.rounds)
    options = short_rounds(
        arguments.rounds, arguments.row_seconds, fewest=few, calls=3, rest_s=0.005
    )
    named = {name: subject.calls(module) for name, module in modules.items()}
    comparison = compare({**named, COPY: subject.copies()}, subject.device, options)
    row = times_of(comparison, named)
    copy_ms = 1e3 * comparison.summary(COPY).median
    row["copy_ms"] = round(copy_ms, 5)
    for name in ("eager", "ingot"):
        row[f"{name}_of_bytes"] = round(row[f"{name}_ms"] / copy_ms, 3)
    return row


def line(row: dict) -> str:
    text = f"{row['operator']:24} {row.get('shape', ''):18}"
    if "ratio" in row:
        compiled = f" compile {row['compile_ms']:7.3f}" if row["compile_ms"] else ""
        text += (
            f" copy {row['copy_ms']:7.3f} eager {row['eager_ms']:7.3f}{compiled} Ingot "
            f"{row['ingot_ms']:7.3f} ms, x bytes {row['eager_of_bytes']:6.2f} "
            f"{row['ingot_of_bytes']:5.2f} ratio {row['ratio']:.3f}"
        )
    if "error" in row:
        text += f" error {row['error']:.1e} {row['eager_error']:.1e}"
        text += "" if row["taken"] else " (PyTorch's)"
    return text + (f" WRONG {row['wrong']}" if row["wrong"] else "")


def key_of(row: dict) -> tuple:
    return row["operator"], row["mode"], row["small"]


def run(arguments: argparse.Namespace) -> int:
    names = arguments.operators.split(",") if arguments.operators else []
    shared = {"mode": mode_of(arguments), "small": arguments.small}
    wanted = [
        ({"operator": operator.name, **shared}, partial(measure, operator, arguments))
        for operator in OPERATORS
        if not names or operator.name in names
    ]
    rows, missed = measure_rows(RowTable(arguments.out, key_of), wanted, line, arguments, 1.0, 1.0)
    slow = [
        f"{row['operator']} {row['ingot_of_bytes']:.2f} (eager {row['eager_of_bytes']:.2f})"
        for row in rows
        if row.get("ingot_of_bytes", 0) > FAST_ENOUGH and row["eager_of_bytes"] > SLOW_EAGER
    ]
    print("above 1.15 × bytes where eager is above 1.25: " + (", ".join(slow) or "none"))
    print_slower(rows, lambda row: row["operator"])
    return status_of(rows, missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="at small sizes")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--row-seconds", type=float, default=0.6, help="for one row's rounds")
    parser.add_argument("--operators", default="", help="these alone, separated by commas")
    parser.add_argument("--rounds", type=int, default=9, help="0: no times")
    parser.add_argument("--gradients", action="store_true", help="training steps")
    parser.add_argument("--compile", action="store_true", help="time torch.compile as well")
    parser.add_argument("--everything", action="store_true", help="take what can be taken")
    parser.add_argument("--again", action="store_true", help="measure what --out has as well")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    gains.takes_everything = arguments.everything
    print(describe(read_clocks(0)) if arguments.device == "cuda" else "cpu")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
