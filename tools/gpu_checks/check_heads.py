"""Checks 16-bit products whose rows do not start at multiples of 16 bytes on a GPU, against fp64.

python check_heads.py [--device cuda] [--seconds S]

Heads over vocabularies of odd and even lengths, alone and with what follows in the epilogue, in
bf16 and fp16: results, written into memory full of NaN and held to eager's error and layout, and
gradients of all parameters and the input, with modules of 16 bits and under autocast. Prints a line
a case, and what fails; exit status 1 if anything does.
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
from ingot.capture import host_time  # noqa: E402
from measures import tell, unlike_eagers  # noqa: E402

# Rows, K, N; trained: products that are large enough for padded copies.
SHAPES = ((333, 1024, 1001), (300, 2048, 1030), (1, 768, 50257), (517, 64, 30522))
TRAINED = ((2048, 768, 2049), (1024, 1024, 4098))
DTYPES = (torch.bfloat16, torch.float16)
# Of eager's error, whose products round as often.
FACTOR, FLOOR = 1.3, 1e-6


class Head(nn.Module):
    def __init__(self, width: int, words: int, follows: bool):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=follows)
        self.follows = follows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.norm(x))
        return torch.tanh(y) * 2 if self.follows else y


def fill_freed_memory() -> None:
    """With NaN: what a kernel leaves out shows."""
    torch.full((1 << 28,), torch.nan, device="cuda")


def forward_of(shape: tuple, follows: bool, dtype: torch.dtype) -> str:
    rows, width, words = shape
    twin = Head(width, words, follows).cuda().to(dtype).eval()
    made, exact = ingot.optimize(copy.deepcopy(twin)), copy.deepcopy(twin).double()
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    with torch.no_grad():
        made(x)
        fill_freed_memory()
        found, expected, truth = made(x), twin(x), exact(x.double())
    return unlike_eagers(["result"], [found], [expected], [truth], lambda _: FACTOR, FLOOR)


def gradients_of(module: nn.Module, x: torch.Tensor, goal: torch.Tensor, autocast: bool) -> list:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = module(x)
    wide = y if y.dtype == torch.float64 else y.float()
    F.cross_entropy(wide.flatten(0, -2), goal).backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def training_of(shape: tuple, follows: bool, dtype: torch.dtype) -> str:
    """dtype: fp32 is under autocast."""
    rows, width, words = shape
    twin = Head(width, words, follows).cuda().to(dtype)
    made, exact = ingot.optimize(copy.deepcopy(twin)), copy.deepcopy(twin).double()
    x = torch.randn(4, rows // 4, width, device="cuda", dtype=dtype)
    goal, autocast = torch.randint(words, (rows,), device="cuda"), dtype == torch.float32
    gradients_of(made, x, goal, autocast)
    fill_freed_memory()
    found, expected = (gradients_of(module, x, goal, autocast) for module in (made, twin))
    truth = gradients_of(exact, x.double(), goal, False)
    names = ["x", *(name for name, _ in twin.named_parameters())]
    wrong = unlike_eagers(names, found, expected, truth, lambda _: FACTOR, FLOOR)
    held = {operator["what"] for operator in made.ingot_report()["operators_replaced"]}
    return wrong or ("" if "linear" in held else "the product was left to PyTorch")


def cases():
    checks = [(forward_of, shape, dtype) for shape in SHAPES for dtype in DTYPES]
    checks += [
        (training_of, shape, dtype) for shape in TRAINED for dtype in (*DTYPES, torch.float32)
    ]
    for check, shape, dtype in checks:
        for follows in (False, True):
            name = f"{check.__name__} {'×'.join(map(str, shape))} {dtype} {follows=}"
            yield name, partial(check, shape, follows, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--seconds", type=float, default=120.0)
    host_time._LONE_SECONDS = 0.0  # they are smaller than what is worth a region of its own
    return tell(cases(), parser.parse_args().seconds)


if __name__ == "__main__":
    sys.exit(main())
