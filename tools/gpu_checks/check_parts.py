"""Checks modules whose samples are parts of samples (frames, windows, columns) on a GPU, against
fp64.

python check_parts.py [--device D] [--seconds S]

Feed-forwards, attention and norms of what a view folds into the batch, in eval and as training
steps in fp32, as steps with TF32 and under bf16 autocast, for several batch sizes of one module:
results, written into memory full of NaN and held to eager's error and layout, gradients of all
parameters and the input, and that a step takes no more memory than eager's. Prints a line a case,
and what fails; exit status 1 if anything does.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import ingot  # noqa: E402
from check_heads import fill_freed_memory  # noqa: E402
from ingot.capture import token_chains  # noqa: E402
from measures import tell, unlike_eagers  # noqa: E402
from network_rows import peak_bytes, under  # noqa: E402
from parts_of_samples import MODULES  # noqa: E402

# Frames, tokens, width; the batches of each.
SHAPES = (((8, 197, 384), (8, 3, 1)), ((5, 7, 90), (33, 2)), ((64, 49, 96), (4,)))
# In eval and as a training step, with how many of the shapes.
SETTINGS = {"fp32": (1, 3), "tf32": (0, 1), "bf16": (0, 1)}
# Of eager's error, whose operators round as often.
FACTOR, FLOOR = 1.5, 1e-6
# Of a step's peak: what the allocator rounds up, and what a library product may use.
MEMORY, ROUNDED = 1.02, 36e6


def call_of(module: nn.Module, x: torch.Tensor, setting: str, training: bool) -> list:
    x = x.detach().clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=setting == "bf16"):
            y = module(x)
    found = [y.detach()]
    if training:
        found += [b.clone() for b in module.buffers() if b.is_floating_point()]
        module.zero_grad()
        # Of numbers that differ little a norm's gradient is what rounding leaves.
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
        found += [x.grad, *(parameter.grad for parameter in module.parameters())]
    return found


def compared(
    made: nn.Module,
    twin: nn.Module,
    inputs: Iterable[torch.Tensor],
    setting: str,
    training: bool,
    factor_of: Callable[[str], float] = lambda name: FACTOR,
) -> str:
    """What is wrong with an optimised module's calls, beside its twin's and that in fp64, or with
    the memory of the last, if anything is. factor_of: by the name of a tensor."""
    exact, names = copy.deepcopy(twin).double(), ["result"]
    if training:
        names += [name for name, buffer in twin.named_buffers() if buffer.is_floating_point()]
        names += ["x", *(name for name, _ in twin.named_parameters())]
    for x in inputs:
        with under(setting):
            if x.is_cuda:
                fill_freed_memory()
            called = [call_of(module, x, setting, training) for module in (made, twin)]
            truth = call_of(exact, x.double(), "fp32", training)
            wrong = unlike_eagers(names, *called, truth, factor_of, FLOOR)
            if wrong:
                return f"batch {len(x)}: {wrong}"
    with under(setting):
        steps = [partial(call_of, each, x, setting, training) for each in (made, twin)]
        own, eager = (peak_bytes(step, x.device) or 0 for step in steps)
    if training and own > MEMORY * eager + ROUNDED:
        return f"a step's peak is {own / 1e6:.1f} MB, eager's {eager / 1e6:.1f} MB"
    return ""


def checked(
    device: str, make: type, sizes: tuple, batches: tuple, setting: str, training: bool
) -> str:
    torch.manual_seed(1)
    twin = make(*sizes).to(device).train(training)
    made = ingot.optimize(copy.deepcopy(twin))
    inputs = (torch.randn(samples, *sizes, device=device) for samples in batches)
    wrong = compared(made, twin, inputs, setting, training)
    if wrong or setting != "fp32":
        return wrong  # else the host is the slower, or the products are PyTorch's
    parts = [region.per_sample for graph in made._ingot.graphs for region in _regions(graph)]
    return "" if max(parts, default=0) > 1 else f"parts of samples are nobody's batch: {parts}"


def _regions(graph) -> list:
    return graph.compiled.captured.regions if graph.compiled else []


def cases(device: str):
    for setting, of_mode in SETTINGS.items():
        for training, shapes in enumerate(of_mode):
            for make in MODULES:
                for sizes, batches in SHAPES[:shapes]:
                    mode = "training" if training else "eval"
                    name = f"{setting} {mode} {make.__name__} {'×'.join(map(str, sizes))}"
                    how = (device, make, sizes, batches, setting, bool(training))
                    yield name, partial(checked, *how)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=120.0)
    token_chains.takes_everything = True  # they are smaller than what is worth a region
    arguments = parser.parse_args()
    return tell(cases(arguments.device), arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
