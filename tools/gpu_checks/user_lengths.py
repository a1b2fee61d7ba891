"""Sequences whose length changes from call to call: training, generating, a new length's cost.

python user_lengths.py [--device cuda|cpu]

Results and gradients are held to eager's error against fp64, and captures are counted. One line
each, PASS or FAIL; exit status 1 after a FAIL. The last lines say, as a remark, what calls of ever
other lengths take beside eager's.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time

import ingot
import torch
from torch import nn
from torch.nn import functional as F
from user_support import Verdicts, arguments, error, exact_twin, quiet

# Width, heads, words, layers, batch, and the longest sequence.
SIZES = {"cuda": (512, 8, 4000, 4, 8, 700), "cpu": (32, 4, 50, 1, 3, 40)}
MOST_CAPTURES = {"training": 2, "generating": 7}


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, past):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v)))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value), (k, v)


class Language(nn.Module):
    def __init__(self, width: int, heads: int, words: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens, past=None, targets=None):
        x, kept = self.embed(tokens), []
        for at, block in enumerate(self.blocks):
            x, pair = block(x, None if past is None else past[at])
            kept.append(pair)
        logits = self.head(x)
        if targets is None:
            return logits, kept
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def lengths(longest: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, longest, (count,), generator=generator).tolist()


def gradients(model, tokens, targets) -> list[torch.Tensor]:
    loss = model(tokens, None, targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def trained(device: str):
    torch._dynamo.reset()
    *sizes, batch, longest = SIZES[device]
    model = Language(*sizes).to(device)
    ours, exact = ingot.optimize(copy.deepcopy(model)), exact_twin(model)
    worst = 0.0
    for length in lengths(longest, 8):
        tokens, targets = torch.randint(sizes[2], (2, batch, length), device=device)
        found, eager, wanted = (gradients(m, tokens, targets) for m in (ours, model, exact))
        for ours_, eagers, exact_ in zip(found, eager, wanted):
            worst = max(worst, error(ours_, exact_) / max(error(eagers, exact_), 3e-7))
    captures = len(ours._ingot.graphs)
    good = worst <= 1.5 and captures <= MOST_CAPTURES["training"]
    return good, f"errors at most {worst:.2f} of eager's, {captures} captures"


def generated(device: str):
    torch._dynamo.reset()
    *sizes, batch, longest = SIZES[device]
    model = Language(*sizes).to(device).eval()
    ours, exact = ingot.optimize(copy.deepcopy(model)), exact_twin(model)
    worst = 0.0
    for start in lengths(longest // 2, 3):
        tokens = torch.randint(sizes[2], (batch, start), device=device)
        pasts: list = [None] * 3
        for _ in range(10):
            found = [m(tokens, past) for m, past in zip((ours, model, exact), pasts)]
            (mine, eager, wanted), pasts = zip(*found)
            worst = max(worst, error(mine, wanted) / max(error(eager, wanted), 3e-7))
            tokens = wanted[:, -1:].argmax(-1)
    captures = len(ours._ingot.graphs)
    good = worst <= 1.5 and captures <= MOST_CAPTURES["generating"]
    return good, f"errors at most {worst:.2f} of eager's, {captures} captures"


def same_bits(device: str):
    torch._dynamo.reset()
    *sizes, batch, longest = SIZES[device]
    ours = ingot.optimize(Language(*sizes).to(device).eval())
    inputs = [
        torch.randint(sizes[2], (batch, length), device=device) for length in lengths(longest, 4)
    ]
    first = [ours(tokens)[0].clone() for tokens in inputs]
    again = [ours(inputs[at])[0] for at in (3, 0, 2, 1)]
    return all(torch.equal(first[at], found) for at, found in zip((3, 0, 2, 1), again))


def milliseconds(model, inputs: list, device: str) -> float:
    """A call's, one after another, each of another length."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for tokens in inputs[:3]:
        model(tokens)
    found = []
    for tokens in inputs[3:]:
        wait()
        start = time.perf_counter()
        model(tokens)
        wait()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def timed(device: str):
    torch._dynamo.reset()
    *sizes, batch, longest = SIZES[device]
    model = Language(*sizes).to(device).eval()
    ours = ingot.optimize(copy.deepcopy(model))
    some = sorted(set(lengths(longest, 60)))
    inputs = [torch.randint(sizes[2], (batch, length), device=device) for length in some]
    eager = milliseconds(model, inputs, device)
    new, known = (milliseconds(ours, inputs, device) for _ in range(2))
    return True, f"eager {eager:.3f} ms, new lengths {new:.3f}, lengths seen before {known:.3f}"


def main() -> int:
    given = arguments(__doc__)
    quiet()
    verdicts = Verdicts()
    verdicts.attempt("training", lambda: trained(given.device))
    with torch.no_grad():
        verdicts.attempt("generating", lambda: generated(given.device))
        verdicts.attempt("the same bits in any order", lambda: same_bits(given.device))
        verdicts.attempt("timed", lambda: timed(given.device))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
