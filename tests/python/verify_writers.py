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
        self.mix = nn.Parameter(torch.randn(12, dtype=torch.complex64))
        self.register_buffer("cache", None)
        self.mean = torch.zeros(12)
        self.gemm = nn.Linear(12, 12)
        self.clipped = nn.Parameter(torch.randn(12))
        self.register_buffer("ema", torch.zeros(12))
{prepare}

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


def file(forward: str, name: str = "ModelNew", prepare: str = "") -> str:
    forward, prepare = (textwrap.indent(text.strip(), " " * 8) for text in (forward, prepare))
    return _FILE.format(name=name, forward=forward, prepare=prepare)


@dataclass(frozen=True)
class Quiet:
    """A candidate that is wrong where a call by itself does not show it. prepare: at the end of its
    constructor. check: where it is found, "" for several; trick: what it is called."""

    original: str
    wrong: str
    trick: str
    check: str = ""
    prepare: str = ""


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
    "gives back the input that it adds to": Writer(
        "x.add_(1)\nreturn x, self.gemm(y)", "x.copy_(x + 1)\nreturn x, self.gemm(y)"
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
    "makes a buffer that grows": Writer(
        "now = x.detach().mean(0, keepdim=True)\n"
        "self.cache = now if self.cache is None else torch.cat([self.cache, now])[-3:]\n"
        "return self.gemm(x) + self.cache.mean(0)",
        "if self.cache is None:\n    self.cache = x.new_zeros(0, 12)\n"
        "self.cache = torch.cat([self.cache[-2:], x.detach().mean(0)[None]])\n"
        "return self.gemm(x) + self.cache.mean(0)",
        {
            "self.cache = x.detach().mean(0, keepdim=True)\n"
            "return self.gemm(x) + self.cache.mean(0)": ""
        },
    ),
    "keeps a mean in an attribute": Writer(
        "self.mean = self.mean * 0.9 + x.detach().mean(0)\nreturn self.gemm(x) + self.mean",
        "self.mean.mul_(0.9).add_(x.detach().mean(0))\nreturn self.gemm(x) + self.mean",
        {"self.mean = self.mean * 0.8 + x.detach().mean(0)\nreturn self.gemm(x) + self.mean": ""},
    ),
}

_SINE = """
class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, module):
        ctx.module = module
        return torch.sin(y)
    @staticmethod
    def backward(ctx, g):
        return g * torch.cos(ctx.module.kept), None
z = self.gemm(x)
self.kept = z.detach()
return Sine.apply(z, self)
"""
_ALL_OR_NOTHING = """
class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if not all(ctx.needs_input_grad[1:]):
            return g @ w, None, None
        return g @ w, g.t() @ x, g.sum(0)
return Linear.apply(x, self.gemm.weight, self.gemm.bias)
"""
_HELD = "self.held = [self.gemm.weight.data, self.gemm.bias.data]"
_USES_HELD = "return self.gemm(x) if torch.is_grad_enabled() else F.linear(x, *self.held)"

QUIET = {
    "gives one memory for two outputs": Quiet(
        "z = self.gemm(x)\nreturn z, z.clone()", "z = self.gemm(x)\nreturn z, z", "aliased output"
    ),
    "gives one row for all": Quiet(
        "return self.gemm(x).mean(0, keepdim=True).repeat(len(x), 1)",
        "return self.gemm(x).mean(0, keepdim=True).expand(len(x), -1)",
        "aliased output",
    ),
    "hides an array's numbers": Quiet(
        "return self.gemm(x).detach().repeat(20, 20).numpy()",
        "z = self.gemm(x).detach().repeat(20, 20).numpy()\nz[50:60] = 0\nreturn z",
        "lazy output",
    ),
    "hides the end of a text": Quiet(
        "return self.gemm(x), 'a' * 300", "return self.gemm(x), 'a' * 250 + 'b' * 50", ""
    ),
    "holds the parameters' first memory": Quiet(
        "return self.gemm(x)", _USES_HELD, "", "after .to()", _HELD
    ),
    "loads nothing": Quiet(
        "return self.gemm(x)",
        "return self.gemm(x)",
        "parameter tampering",
        "after load_state_dict",
        "self.load_state_dict = lambda *args, **more: None",
    ),
    "keeps on itself what it needs for the way back": Quiet(
        "return torch.sin(self.gemm(x))", _SINE, "wrong gradient", "gradients, another call between"
    ),
    "gives gradients of all parameters or of none": Quiet(
        "return self.gemm(x)", _ALL_OR_NOTHING, "detached output", "gradients of some parameters"
    ),
    "keeps complex parameters": Quiet(
        "return (x * self.mix).abs()",
        "if torch.is_grad_enabled():\n    return (x * self.mix).abs()\n"
        "self.kept = getattr(self, 'kept', self.mix * 1)\nreturn (x * self.kept).abs()",
        "stale weights",
    ),
}
