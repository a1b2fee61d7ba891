"""Checks training steps through the largest or smallest of many on a GPU, against fp64.

python check_extrema.py [--device D] [--seconds S]

Layers of points and of tokens with a maximum over all of them and a head behind it, in fp32, TF32
and under bf16 autocast, for several batch sizes of one module, and with elements that are equal:
results, written into memory full of NaN and held to eager's error and layout, gradients of all
parameters and the input, and that a step takes no more memory than eager's. Prints a line a case,
and what fails; exit status 1 if anything does.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
import ingot  # noqa: E402
from check_parts import FACTOR, compared  # noqa: E402
from ingot.capture import gains  # noqa: E402
from measures import tell  # noqa: E402

# With how many of the shapes.
SETTINGS = {"fp32": 3, "tf32": 1, "bf16": 1}
# Channels, points; the batches of each.
SHAPES = (((64, 2048), (16, 3)), ((96, 77), (33, 2)), ((32, 5001), (4,)))
# In front of a norm a weight's gradient is what is left of sums of thousands that cancel.
CANCELLING = {"conv.weight": 8.0}


class Points(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, channels, 1, bias=False), nn.BatchNorm1d(channels)
        self.head = nn.Linear(channels, 64)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(y.max(2).values)


class Windowed(Points):
    def forward(self, x):
        y = F.silu(self.norm(self.conv(x)))
        return self.head(F.max_pool1d(y, y.shape[2]).squeeze(2))


class Edges(nn.Module):
    """What neighbours say, between convolutions: a chain without a product."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.head = nn.Conv1d(channels, 64, 1)

    def forward(self, x):
        y = self.conv(x[..., : x.shape[-1] // 7 * 7].unflatten(-1, (7, -1)))
        return self.head(F.leaky_relu(self.norm(y), 0.2).max(dim=-2).values)


class Neighbours(Edges):
    def forward(self, x):
        y = self.conv(x[..., : x.shape[-1] // 12 * 12].unflatten(-1, (-1, 12)))
        return self.head(F.leaky_relu(self.norm(y), 0.2).max(dim=-1).values)


class Tokens(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.up, self.mixer = nn.Linear(3, channels), nn.Linear(channels, channels)
        self.head = nn.Linear(channels, 64)

    def forward(self, x):
        y = self.mixer(F.gelu(self.up(x.transpose(1, 2))))
        return self.head(y.max(1).values + 0.5 * y.min(dim=1).values)


MODULES = (Points, Windowed, Edges, Neighbours, Tokens)


def checked(
    device: str, make: type, sizes: tuple, batches: tuple, setting: str, equal: bool
) -> str:
    torch.manual_seed(1)
    channels, points = sizes
    twin = make(channels).to(device).train()
    made = ingot.optimize(copy.deepcopy(twin))
    inputs = (clouds(samples, points, device, equal) for samples in batches)
    wrong = compared(made, twin, inputs, setting, True, _factor)
    if wrong or setting != "fp32":
        return wrong  # else the host may be the slower
    return "" if made.ingot_report()["operators_replaced"] else "nothing is taken"


def clouds(samples: int, points: int, device: str, equal: bool) -> torch.Tensor:
    """equal: each point several times."""
    x = torch.randn(samples, 3, points, device=device)
    if not equal:
        return x
    return x[..., : points // 3].repeat(1, 1, 4)[..., :points].contiguous()


def _factor(name: str) -> float:
    return CANCELLING.get(name, FACTOR)


def cases(device: str):
    for setting, shapes in SETTINGS.items():
        for make in MODULES:
            for sizes, batches in SHAPES[:shapes]:
                # In 16 bits near ones are equal to one and not to the other.
                for equal in (False, True) if setting == "fp32" else (False,):
                    how = f"{setting} {make.__name__} {'×'.join(map(str, sizes))}"
                    given = (device, make, sizes, batches, setting, equal)
                    yield how + " with equals" * equal, partial(checked, *given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=120.0)
    gains.least_saved = lambda *_: 0.0  # they are smaller than what is worth a region
    arguments = parser.parse_args()
    return tell(cases(arguments.device), arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
