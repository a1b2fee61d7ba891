"""Models that write into what they are given, or hold, for the tests of verify: of each an honest
candidate by other operators, and wrong ones."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

_FILE = """
import torch
from torch import nn
import torch.nn.functional as F


class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(12, 12)
        self.clipped = nn.Parameter(torch.randn(12))
        self.register_buffer("ema", torch.zeros(12))

    def forward(self, x, y):
{forward}

def get_inputs():
    return [torch.randn(16, 12), torch.randn(16, 12)]


def get_init_inputs():
    return []
"""


@dataclass(frozen=True)
class Writer:
    """original, honest, wrong: statements of forward. wrong: with the trick that is named, "" where
    none is."""

    original: str
    honest: str
    wrong: dict = field(default_factory=dict)


def file(forward: str, name: str = "ModelNew") -> str:
    return _FILE.format(name=name, forward=textwrap.indent(forward.strip(), " " * 8))


WRITERS = {
    "adds to an input": Writer(
        "x.add_(1)\nreturn torch.relu(self.gemm(y)) + x",
        "x.copy_(x + 1)\nreturn x + torch.relu(self.gemm(y))",
        {
            "x.add_(1)\nreturn torch.relu(self.gemm(y)) + x + 0.5": "",
            "return torch.relu(self.gemm(y)) + (x + 1)": "input not written",
            "x.add_(1)\nz = torch.relu(self.gemm(y)) + x\nx.add_(1e-3)\nreturn z": "",
            "x.add_(1)\nz = torch.relu(self.gemm(y)) + x\ny.zero_()\nreturn z": "input tampering",
        },
    ),
    "writes an input between two products of it": Writer(
        "a = self.gemm(x)\nx.mul_(2)\nreturn a + torch.relu(self.gemm(x))",
        "a = self.gemm(x)\nx.add_(x.clone())\nreturn torch.relu(self.gemm(x)) + a",
        {"a = self.gemm(x)\nx.mul_(2)\nreturn a + torch.relu(a)": ""},
    ),
    "writes its weight between two products of it": Writer(
        "a = self.gemm(x)\nwith torch.no_grad():\n    self.gemm.weight.mul_(0.5)\n"
        "return a + torch.relu(self.gemm(x))",
        "a = self.gemm(x)\nself.gemm.weight.data.div_(2)\nreturn torch.relu(self.gemm(x)) + a",
        {
            "a = self.gemm(x)\nself.gemm.weight.data.div_(2)\nreturn a + torch.relu(a)": "",
            "a = self.gemm(x)\nreturn a + torch.relu(F.linear(x, self.gemm.weight * 0.5, "
            "self.gemm.bias))": "",
        },
    ),
    "puts another tensor in a buffer's place": Writer(
        "z = self.gemm(x)\nself.ema = self.ema * 0.9 + z.detach().mean(0)\nreturn z + self.ema",
        "z = self.gemm(x)\nself.ema.mul_(0.9).add_(z.detach().mean(0))\nreturn z + self.ema",
        {
            "z = self.gemm(x)\nself.ema = self.ema * 0.9 + z.detach().mean(0)\n"
            "y = z + self.ema\nself.ema = self.ema + 0.01\nreturn y": "",
        },
    ),
}
