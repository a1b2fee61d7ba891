"""Checks training through attention that is written out on a GPU, against fp64.

python check_attention.py [--device cuda] [--seconds S]

Softmaxes of scores, with what stands around them, over rows of lengths that vectors divide and
others, which lie within a sample's heads: results, written into memory full of NaN and held to
eager's error and layout, and gradients of all parameters and the input, in fp32, TF32 and bf16
(autocast and weights), and that a step takes no more memory than eager's. Prints a line a case, and
what fails; exit status 1 if anything does.
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
from check_heads import fill_freed_memory  # noqa: E402
from ingot.capture import token_chains  # noqa: E402
from measures import tell, unlike_eagers  # noqa: E402
from network_rows import peak_bytes, under  # noqa: E402

# Samples, tokens, width, heads.
SHAPES = ((512, 49, 96, 3), (16, 197, 192, 3), (6, 512, 256, 4), (33, 50, 64, 2), (5, 1001, 64, 1))
KINDS = ("scaled", "causal", "bias", "table", "padding", "positions")
SETTINGS = ("fp32", "tf32", "bf16", "bf16_weights")
# Of eager's error, whose operators round as often.
FACTOR, FLOOR = 1.5, 1e-6
# Of a step's peak: what the allocator rounds up, and what a library product of fp32 may use
# (docs/limits.md).
MEMORY, ROUNDED, OF_LIBRARY = 1.01, 4e6, 32 << 20


class Attention(nn.Module):
    def __init__(self, tokens: int, width: int, heads: int, kind: str):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if kind == "bias":
            self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))
        if kind in ("table", "positions"):
            self.table = nn.Embedding(32, heads)
            self.register_buffer("at", torch.randint(0, 32, (tokens, tokens)))
        self.register_buffer("padding", (torch.rand(1, tokens) > 0.2).float())
        self.register_buffer("later", torch.ones(tokens, tokens).bool().triu(1))

    def weights_of(self, scores: torch.Tensor) -> torch.Tensor:
        if self.kind == "causal":
            scores = scores.masked_fill(self.later, float("-inf"))
        elif self.kind == "bias":
            scores = scores + self.bias
        elif self.kind == "table":
            scores = scores + self.table(self.at).permute(2, 0, 1)
        elif self.kind == "padding":
            scores = scores + (1.0 - self.padding[:, None, None]) * -1e4
        return F.softmax(scores, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.kind == "positions":  # as no fused kernel of PyTorch's reads them
            bias = self.table(self.at).permute(2, 0, 1).unsqueeze(0)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            weights = self.weights_of(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5)
            mixed = weights.to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def step_of(module: nn.Module, x: torch.Tensor, goal: torch.Tensor, setting: str) -> list:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=setting == "bf16"):
        y = module(x)
    y.backward(goal.to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def training_of(shape: tuple, kind: str, setting: str) -> str:
    samples, *sizes = shape
    torch.manual_seed(1)
    twin = Attention(*sizes, kind).cuda()
    twin = twin.bfloat16() if setting == "bf16_weights" else twin
    made, exact = ingot.optimize(copy.deepcopy(twin)), copy.deepcopy(twin).double()
    x, goal = (torch.randn(samples, *sizes[:2], device="cuda") for _ in range(2))
    x = x.to(twin.out.weight.dtype)
    truth = step_of(exact, x.double(), goal.double(), "fp32")
    with under(setting):
        step_of(made, x, goal, setting)
        fill_freed_memory()
        found, expected = (step_of(module, x, goal, setting) for module in (made, twin))
        steps = [partial(step_of, each, x, goal, setting) for each in (made, twin)]
        peaks = [peak_bytes(step, x.device) for step in steps]
    names = ["result", "x", *(name for name, _ in twin.named_parameters())]
    wrong = unlike_eagers(names, found, expected, truth, lambda _: FACTOR, FLOOR)
    held = {operator["what"] for operator in made.ingot_report()["operators_replaced"]}
    if held.isdisjoint({"softmax", "_safe_softmax"}):
        return "the softmax was left to PyTorch"
    allowed = MEMORY * peaks[1] + ROUNDED + (OF_LIBRARY if setting in ("fp32", "tf32") else 0)
    if not wrong and peaks[0] > allowed:
        return f"a step's peak is {peaks[0] / 1e6:.1f} MB, eager's {peaks[1] / 1e6:.1f} MB"
    return wrong


def cases():
    for setting in SETTINGS:
        for at, shape in enumerate(SHAPES):
            for kind in KINDS if at == 0 else KINDS[at % 2 :: 2]:
                name = f"{setting} {'×'.join(map(str, shape))} {kind}"
                yield name, partial(training_of, shape, kind, setting)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda",))
    parser.add_argument("--seconds", type=float, default=120.0)
    token_chains.takes_everything = True  # they are smaller than what is worth a region
    return tell(cases(), parser.parse_args().seconds)


if __name__ == "__main__":
    sys.exit(main())
