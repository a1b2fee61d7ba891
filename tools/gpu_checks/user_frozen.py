"""Frozen weights (`ingot_freeze`) under every change that docs/inference.md promises to see.

python user_frozen.py [--device cuda|cpu]

After each change the frozen model must give what the original gives. One line each, PASS or FAIL;
exit status 1 after a FAIL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import ingot
import torch
from torch import nn
from user_support import Verdicts, arguments, close, quiet

SIZES = {
    "cuda": ((1024, 4096), (4096, 2048), (512, 8192), (16384, 1024)),
    "cpu": ((64, 128), (33, 96)),
}


def assigned(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight) / layer.in_features**0.5


def replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight) / layer.in_features**0.5)


def scaled(layer: nn.Linear) -> None:
    layer.weight.mul_(1.5)


def loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({k: v * 0.5 for k, v in layer.state_dict().items()})


def stepped(layer: nn.Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.01).step()
    layer.weight.grad = None


CHANGES: tuple[Callable, ...] = (assigned, replaced, scaled, loaded, stepped)


def transposed(layer: nn.Linear) -> None:
    """The same tensor, address and version; other strides. Of a square matrix."""
    layer.weight.data = layer.weight.data.t()


def tried(rows: int, width: int, change: Callable, device: str):
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU()).to(device).eval()
    x = torch.randn(rows, width, device=device)
    ours = ingot.optimize(module, [x])
    ours.ingot_freeze()
    for _ in range(3):
        ours(x)
    kept = [program["frozen_bytes"] for program in ours.ingot_report()["programs"]]
    change(module[0])
    good = all(close(ours(x), module(x)) for _ in range(3))
    return good, f"frozen bytes {kept}"


def main() -> int:
    given = arguments(__doc__)
    quiet()
    verdicts = Verdicts()
    with torch.no_grad():
        for rows, width in SIZES[given.device]:
            for change in (*CHANGES, transposed):
                verdicts.attempt(
                    f"{rows}x{width}, weight {change.__name__}",
                    lambda: tried(rows, width, change, given.device),  # noqa: B023
                )
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
