"""Forty chains behind convolutions (conv_chains.py): eager, Ingot and, if wanted, torch.compile.

python time_conv_chains.py [--device cuda|cpu] [--small] [--seconds 170] [--chains A,B]
                           [--modes eval,training,gradients] [--rounds 9] [--compile]
                           [--channels-last] [--kernels] [--out FILE] [--again]
python time_conv_chains.py --table [--sm 90]

Modes: eval and training are forwards without gradients (training where a chain has a batch norm,
which alone tells the two apart), gradients is a training step, forward and backward. Interleaved
rounds with cold L2; medians, and the 95 % interval of Ingot's time over eager's. Errors are
relative Frobenius errors against fp64, the worst of output and gradients; Ingot's may be a small
factor of eager's. --kernels prints what each kernel of a call takes instead.

--table measures nothing: for each chain, how many of the operators behind the convolution Ingot
takes, in how many regions and kernels, on a GPU of that compute capability.

Rows go to --out as they come; those of the present sources are not measured again (but with
--again), so that a run goes on where the last one ended. Exit status: 1 something was wrong, 3 time
ran out, else 0.
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
from conv_chains import CHAINS, ConvChain  # noqa: E402
from ingot.bench.clocks import describe, read_clocks  # noqa: E402
from ingot.bench.rounds import compare  # noqa: E402
from ingot.capture.captured import Region  # noqa: E402
from ingot.capture.table import SHAPE_OPERATORS  # noqa: E402
from ingot.live.compiled import Compiled, RefusedError  # noqa: E402
from ingot.model_capture import capture  # noqa: E402
from measures import kernels_of, relative_error, short_rounds, too_large  # noqa: E402
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

MODES = ("eval", "training", "gradients")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


# Operators ---------------------------------------------------------------------------------------


def taken(chain: ConvChain, sm: int) -> dict:
    """What is taken of a chain, by its real size; nothing runs."""
    module = chain.build(False).eval().to("meta")
    inputs = [x.to("meta") for x in chain.inputs(False)]
    refused: dict[str, str] = {}
    with torch.no_grad():
        while True:
            captured = capture(module, inputs, refused=refused)
            try:
                compiled = Compiled(captured, "cuda", "fp32", False, {"sm": sm})
                break
            except RefusedError as error:
                refused.update(error.nodes)
    left = [step.what for step in captured.steps if not isinstance(step, Region)]
    left = [what for what in left if not _is_convolution(what) and not _is_view(what)]
    kernels = 0
    for program in compiled.programs:
        explained = program.explain(inputs[0].shape[0])["executable"]
        kernels += len(explained["program"]["steps"])
    return {
        "taken": sum(len(region.operators) for region in captured.regions),
        "left": left,
        "regions": len(captured.regions),
        "kernels": kernels,
    }


def _is_convolution(what: str) -> bool:
    return what.startswith("conv")


def _is_view(what: str) -> bool:
    return what == "getitem" or f"aten::{what}" in SHAPE_OPERATORS


def print_table(chains: list[ConvChain], sm: int) -> None:
    print("| chain | operators taken | left to PyTorch | regions | kernels |")
    print("| --- | --- | --- | --- | --- |")
    sums = [0, 0]
    for chain in chains:
        row = taken(chain, sm)
        total = row["taken"] + len(row["left"])
        sums = [sums[0] + row["taken"], sums[1] + total]
        print(
            f"| {chain.name} | {row['taken']} of {total} | {' '.join(row['left'])} "
            f"| {row['regions']} | {row['kernels']} |",
            flush=True,
        )
    print(f"| all | {sums[0]} of {sums[1]} | | | |")


# Times -------------------------------------------------------------------------------------------


class Subject:
    """One chain in one mode, with its module on the device."""

    def __init__(self, chain: ConvChain, mode: str, arguments: argparse.Namespace):
        torch.manual_seed(1)
        self.mode, self.device = mode, torch.device(arguments.device)
        self.module = chain.build(arguments.small).train(mode != "eval").to(self.device)
        x = chain.inputs(arguments.small)[0].to(self.device)
        if arguments.channels_last and x.dim() in FORMATS:
            self.module.convolution.to(memory_format=FORMATS[x.dim()])
            x = x.contiguous(memory_format=FORMATS[x.dim()])
        self.inputs = [x, x.flip(0).clone(memory_format=torch.preserve_format)]

    def run(self, module, x: torch.Tensor) -> list[torch.Tensor]:
        if self.mode != "gradients":
            with torch.no_grad():
                return [module(x)]
        module.zero_grad(set_to_none=True)
        y = module(x)
        y.backward(torch.ones_like(y))
        return [y.detach()]

    def everything(self, module, x: torch.Tensor) -> list[torch.Tensor]:
        found = self.run(module, x)
        if self.mode == "gradients":
            found += [p.grad for p in module.parameters()]
        return found

    def calls(self, module):
        return lambda i: self.run(module, self.inputs[i % 2])


def strides_of(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def measure(chain: ConvChain, mode: str, arguments: argparse.Namespace) -> dict:
    subject = Subject(chain, mode, arguments)
    module, x = subject.module, subject.inputs[0]
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    truth = subject.everything(exact, x.double())
    del exact
    optimised = ingot.optimize(copy.deepcopy(module))
    errors = {
        name: relative_error(subject.everything(made, x), truth)
        for name, made in ((INGOT, optimised), (EAGER, eager))
    }
    strides = [strides_of(subject.run(made, x)[0]) for made in (optimised, eager)]
    del truth
    row = {
        "chain": chain.name,
        "mode": mode,
        "shape": "×".join(map(str, x.shape)),
        "channels_last": arguments.channels_last,
        "small": arguments.small,
        "error": errors[INGOT],
        "eager_error": errors[EAGER],
        "left_to_pytorch": [item["what"] for item in optimised.ingot_report()["unsupported"]],
        "wrong": too_large(errors[INGOT], errors[EAGER]),
    }
    if not row["wrong"] and strides[0] != strides[1]:
        row["wrong"] = f"its strides are {strides[0]}, eager's {strides[1]}"
    if arguments.rounds:
        row |= timed(subject, {EAGER: eager, INGOT: optimised}, arguments)
    return row


def timed(subject: Subject, modules: dict, arguments: argparse.Namespace) -> dict:
    if arguments.compile:
        torch._dynamo.reset()
        modules[COMPILE] = torch.compile(copy.deepcopy(subject.module), dynamic=False)
    few, seconds = min(5, arguments.rounds), arguments.row_seconds
    options = short_rounds(arguments.rounds, seconds, fewest=few, calls=5, rest_s=0.01)
    named = {name: subject.calls(module) for name, module in modules.items()}
    return times_of(compare(named, subject.device, options), named)


def print_kernels(chain: ConvChain, mode: str, arguments: argparse.Namespace) -> None:
    """What each kernel of a call takes, eager's and Ingot's."""
    subject = Subject(chain, mode, arguments)
    for name, module in (
        (EAGER, copy.deepcopy(subject.module)),
        (INGOT, ingot.optimize(copy.deepcopy(subject.module))),
    ):
        call = subject.calls(module)
        for i in range(3):
            call(i)
        print(f"{chain.name} {mode} {name}")
        for kernel, took, _ in kernels_of(lambda call=call: call(0)):
            print(f"    {took:9.1f} us  {kernel[:100]}")


def key_of(row: dict) -> tuple:
    return row["chain"], row["mode"], row["channels_last"], row["small"]


def line(row: dict) -> str:
    text = f"{row['chain']:58} {row['mode']:9}"
    if "ratio" in row:
        compiled = f" compile {row['compile_ms']:8.3f}" if row["compile_ms"] else ""
        text += (
            f" eager {row['eager_ms']:8.3f}{compiled} Ingot {row['ingot_ms']:8.3f} ms ratio "
            f"{row['ratio']:.3f} [{row['ratio_lower']:.3f}, {row['ratio_upper']:.3f}]"
        )
    if "error" in row:
        text += f" error {row['error']:.1e} eager's {row['eager_error']:.1e}"
    return text + (f" WRONG {row['wrong']}" if row["wrong"] else "")


def asked(arguments: argparse.Namespace) -> list[tuple[ConvChain, str]]:
    wanted = arguments.chains.split(",") if arguments.chains else []
    found = []
    for mode in arguments.modes.split(","):
        for chain in CHAINS:
            told_apart = mode != "training" or "batchnorm" in chain.name
            if told_apart and (not wanted or chain.name in wanted):
                found.append((chain, mode))
    return found


def run(arguments: argparse.Namespace) -> int:
    shared = {"channels_last": arguments.channels_last, "small": arguments.small}
    wanted = [
        ({"chain": chain.name, "mode": mode, **shared}, partial(measure, chain, mode, arguments))
        for chain, mode in asked(arguments)
    ]
    rows, missed = measure_rows(RowTable(arguments.out, key_of), wanted, line, arguments, 3.0, 2.0)
    print_slower(rows, lambda row: f"{row['chain']} {row['mode']}")
    return status_of(rows, missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="at small sizes")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--row-seconds", type=float, default=2.0, help="for one row's rounds")
    parser.add_argument("--chains", default="", help="these alone, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=9, help="0: no times")
    parser.add_argument("--compile", action="store_true", help="time torch.compile as well")
    parser.add_argument("--channels-last", action="store_true", help="inputs and weights so")
    parser.add_argument("--kernels", action="store_true", help="print what each kernel takes")
    parser.add_argument("--again", action="store_true", help="measure what --out has as well")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="operators taken; measures nothing")
    parser.add_argument("--sm", type=int, default=90, help="compute capability, for --table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.table:
        print_table([chain for chain, mode in asked(arguments) if mode == "eval"], arguments.sm)
        return 0
    print(describe(read_clocks(0)) if arguments.device == "cuda" else "cpu")
    if arguments.kernels:
        for chain, mode in asked(arguments):
            print_kernels(chain, mode, arguments)
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
