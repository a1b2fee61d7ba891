"""Checks maps over planes that no vector divides on a GPU, against fp64.

python check_planes.py [--device D] [--seconds S]

Chains behind convolutions whose planes have odd extents, in fp32 and in 16 bits, for several batch
sizes of one module, on inputs that lie plane behind plane, apart, from another address on, or with
channels last: results, written into memory full of NaN and held to eager's error and layout; with
gradients, in training mode, of the input and all parameters too. Prints a line a case, and what
fails; exit status 1 if anything does.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ["INGOT_TAKE"] = "all"  # chains that are smaller than what is worth a region

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import ingot  # noqa: E402
from check_heads import fill_freed_memory  # noqa: E402
from ingot.capture import gains  # noqa: E402
from measures import tell, unlike_eagers  # noqa: E402

FACTOR, FLOOR = 1.5, 1e-6
# Channels and planes: samples of whole vectors of eight, of four, of two, of none.
SHAPES = ((64, (55, 55)), (8, (3, 1)), (20, (7, 7)), (10, (13, 13)), (7, (17, 17)))
# Of one sample that lies apart, a gradient's stride along the batch is nobody's promise.
BATCHES = {False: (5, 1, 66), True: (5, 66)}


class Bias(nn.Module):
    """One value a channel, of parameters."""

    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(channels, 1, 1))
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x):
        return F.relu(x * self.scale + self.bias)


class Norm(nn.Module):
    """The same of statistics, with a residual."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x):
        return F.silu(self.norm(x)) + x


class Excited(nn.Module):
    """One value a channel and sample, and two results."""

    def __init__(self, channels: int):
        super().__init__()
        self.squeeze = nn.Linear(channels, channels)

    def forward(self, x):
        weight = torch.sigmoid(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        return torch.cat([F.hardswish(x * weight), F.gelu(x - weight)])


def laid_out(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same numbers, lying otherwise."""
    yield "dense", x
    yield "samples apart", torch.cat([x, x], dim=1)[:, : x.shape[1]]
    yield "planes apart", F.pad(x, (0, 0, 0, 1))[:, :, :-1]
    yield "begins anywhere", torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    yield "channels last", x.contiguous(memory_format=torch.channels_last)


def call_of(module: nn.Module, x: torch.Tensor, training: bool) -> list:
    """Result, buffers and gradients; of x as it lies."""
    x = x.detach().requires_grad_(training)
    module.zero_grad()
    with torch.set_grad_enabled(training):
        y = module(x)
    if not training:
        return [y]
    buffers = [buffer.clone() for buffer in module.buffers() if buffer.is_floating_point()]
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return [y.detach(), *buffers, x.grad, *(p.grad for p in module.parameters())]


def checked(device: str, make: type, shape: tuple, dtype: torch.dtype, training: bool) -> str:
    torch.manual_seed(1)
    channels, plane = shape
    twin = make(channels).to(device, dtype).train(training)
    made = ingot.optimize(copy.deepcopy(twin))
    exact, names = copy.deepcopy(twin).double(), ["result"]
    if training:
        names += [name for name, buffer in twin.named_buffers() if buffer.is_floating_point()]
        names += ["x", *(name for name, _ in twin.named_parameters())]
    for batch in BATCHES[training]:
        x = torch.randn(batch, channels, *plane, device=device).to(dtype)
        for how, given in laid_out(x):
            if x.is_cuda:
                fill_freed_memory()
            called = [call_of(module, given, training) for module in (made, twin)]
            truth = call_of(exact, given.double(), training)
            wrong = unlike_eagers(names, *called, truth, lambda _: FACTOR, FLOOR)
            if wrong:
                return f"batch {batch}, {how}: {wrong}"
    taken = made.ingot_report()["operators_replaced"] or device == "cpu"
    return "" if taken else "nothing is taken"


def cases(device: str):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for make in (Bias, Norm, Excited):
            for shape in SHAPES:
                # With gradients chains of a norm are taken, and those around a product.
                trains = dtype is torch.float32 and make is not Bias
                for training in (False, True) if trains else (False,):
                    size = "×".join(map(str, (shape[0], *shape[1])))
                    name = f"{str(dtype)[6:]} {make.__name__} {size}" + ", training" * training
                    yield name, partial(checked, device, make, shape, dtype, training)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=120.0)
    gains.least_saved = lambda *_: 0.0
    arguments = parser.parse_args()
    return tell(cases(arguments.device), arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
