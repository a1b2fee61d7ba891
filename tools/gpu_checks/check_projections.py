"""Checks 16-bit projections with a bias, which the library adds, on a GPU, against fp64.

python check_projections.py [--device cuda] [--seconds S]

Layers of a transformer whose weights lie as [N, K] or [K, N], with a mask of flags that they share,
under autocast and as modules of 16 bits: results, held to eager's error (a sum that is rounded
twice has 1.4 times as much), and the gradients of all parameters and the input. Prints a line a
case, and what fails; exit status 1 if anything does.
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
from measures import tell, unlike_eagers  # noqa: E402

# Samples, tokens and width; the last one's weights have 2^20 to 2^22 numbers.
SHAPES = ((3, 17, 72), (2, 128, 256), (4, 256, 768))
# M, K, N of a product alone.
ALONE = ((1024, 768, 2304), (7, 40, 24), (1, 768, 768), (130, 64, 66), (2048, 33, 17))
# Of a product's type: whether autocast makes it, and whether gradients follow.
WAYS = {
    torch.bfloat16: ((True, True), (True, False), (False, True)),
    torch.float16: ((False, False),),
}
FACTOR, FLOOR = 1.2, 2e-7
# Of whole layers' gradients, in which roundings of many operators meet.
GRADIENTS = 2.0


class Projection(nn.Module):
    """x · w + b, w as [K, N] where it is turned."""

    def __init__(self, inputs: int, outputs: int, turned: bool):
        super().__init__()
        shape = (inputs, outputs) if turned else (outputs, inputs)
        self.weight = nn.Parameter(torch.randn(shape) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.turned:
            return F.linear(x, self.weight, self.bias)
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], flat.size(-1))


class Layer(nn.Module):
    def __init__(self, width: int, turned: bool):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (Projection(width, n * width, turned) for n in (3, 1))
        self.up = Projection(width, 4 * width, turned)
        self.down = Projection(4 * width, width, turned)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Layers(nn.Module):
    def __init__(self, width: int, turned: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, turned) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def outcome(module: nn.Module, inputs: tuple, dtype: torch.dtype | None, trains: bool) -> list:
    """dtype: autocast's. Results, then gradients."""
    x = inputs[0].detach().clone().requires_grad_(trains)
    module.zero_grad()
    with torch.set_grad_enabled(trains):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            y = module(x, *inputs[1:])
        if not trains:
            return [y]
        y.double().square().mean().mul(1e3).backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def check(module, inputs: tuple, dtype: torch.dtype, autocast: bool, trains: bool) -> str:
    twin = module.cuda() if autocast else module.cuda().to(dtype)
    x = inputs[0] if autocast else inputs[0].to(dtype)
    made, exact = ingot.optimize(copy.deepcopy(twin)), copy.deepcopy(twin).double()
    given, how = (x, *inputs[1:]), dtype if autocast else None
    outcome(made, given, how, trains)
    found, expected = (outcome(each, given, how, trains) for each in (made, twin))
    truth = outcome(exact, (x.double(), *inputs[1:]), None, trains)
    names = ["result", "x", *(name for name, _ in twin.named_parameters())]
    allowed = {"result": FACTOR}
    return unlike_eagers(
        names[: len(truth)],
        found,
        expected,
        truth,
        lambda name: allowed.get(name, GRADIENTS),
        FLOOR,
    )


def modules():
    for turned in (False, True):
        for rows, inputs, outputs in ALONE:
            x = torch.randn(rows, inputs, device="cuda")
            alone = nn.Sequential(Projection(inputs, outputs, turned), nn.ReLU(), nn.Tanh())
            yield f"{rows}×{inputs}→{outputs} {turned=}", alone, (x,)
        for samples, tokens, width in SHAPES:
            x = torch.randn(samples, tokens, width, device="cuda")
            mask = torch.ones(samples, 1, tokens, tokens, dtype=torch.bool, device="cuda").tril()
            mask[-1, :, :, tokens // 2 + 1 :] = False
            yield f"layers {samples}×{tokens}×{width} {turned=}", Layers(width, turned), (x, mask)


def cases():
    for name, module, inputs in modules():
        for dtype, ways in WAYS.items():
            for autocast, trains in ways:
                given = copy.deepcopy(module), inputs, dtype, autocast, trains
                yield f"{name} {dtype} {autocast=} {trains=}", partial(check, *given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--seconds", type=float, default=120.0)
    torch.manual_seed(0)
    return tell(cases(), parser.parse_args().seconds)


if __name__ == "__main__":
    sys.exit(main())
