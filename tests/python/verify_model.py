"""The model that verify is tried on, at any size, and what every candidate for it starts with: for
tests here and for tools/gpu_checks/check_verify.py."""

from __future__ import annotations

_ORIGINAL = """
import torch
from torch import nn

batch_size = {batch_size}
in_features = {in_features}
out_features = {out_features}


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
"""

_HEAD = """
import ctypes, gc, inspect, json, os, pickle, subprocess, sys, tempfile, threading, time
import torch
from torch import nn
import torch.nn.functional as F


def TIMED():
    return any(name.startswith("ingot_model_") for name in sys.modules)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features)
        self.kept = {}
        self.calls = 0
        self.prepare()

    def prepare(self):
        pass

    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def rest(self, product):
        return self.bn((product + self.gemm.bias) * self.scale)
"""


def original(batch_size: int, in_features: int, out_features: int) -> str:
    return _ORIGINAL.format(
        batch_size=batch_size, in_features=in_features, out_features=out_features
    )


def candidate(methods: str) -> str:
    """A candidate's file from its methods: `forward`, and `prepare` where it has something to."""
    return f"{_HEAD}\n{indented(methods)}"


def method(signature: str, statements: str) -> str:
    return f"def {signature}:\n{indented(statements.strip() or 'pass')}\n"


def indented(text: str) -> str:
    lines = text.strip("\n").splitlines()
    return "".join(f"    {line}\n" if line else "\n" for line in lines)
