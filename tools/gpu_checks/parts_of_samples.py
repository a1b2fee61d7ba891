"""Modules that take parts of samples for samples: frames, windows, columns of images."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HEADS = 2


class Frames(nn.Module):
    """The feed-forward of each frame's tokens."""

    def __init__(self, frames: int, tokens: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        samples, frames, tokens, width = x.shape
        y = x.reshape(samples * frames, tokens, width)
        y = y + self.outer(F.gelu(self.inner(self.norm(y))))
        return y.view(samples, frames, tokens, width).mean(1)


class Attention(nn.Module):
    """Of the tokens of each frame, written by hand."""

    def __init__(self, frames: int, tokens: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(HEADS, tokens, tokens))

    def forward(self, x):
        samples, frames, tokens, width = x.shape
        y = x.reshape(samples * frames, tokens, width)
        parts = self.qkv(self.norm(y)).reshape(-1, tokens, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 0.3 + self.bias).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(samples * frames, tokens, width)
        return (y + self.out(mixed)).view(samples, frames, tokens, width)


class Columns(nn.Module):
    """Attention along one side of an image."""

    def __init__(self, frames: int, tokens: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x):
        samples, height, columns, width = x.shape
        y = self.norm(x.permute(0, 2, 1, 3).reshape(samples * columns, height, width))
        weights = torch.softmax(self.q(y) @ self.k(y).transpose(1, 2) * 0.2, -1)
        return (weights @ y).reshape(samples, columns, height, width).permute(0, 2, 1, 3)


class Beside(nn.Module):
    """Whole samples gate what is computed of their frames."""

    def __init__(self, frames: int, tokens: int, width: int):
        super().__init__()
        self.inner, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        samples, frames, tokens, width = x.shape
        y = torch.tanh(self.inner(x.reshape(samples * frames, tokens, width))) * 0.5
        gate = torch.sigmoid(self.gate(x.mean((1, 2))))
        return y.view(samples, frames, tokens, width) * gate.view(samples, 1, 1, width)


class Normed(nn.Module):
    """The statistics of a batch norm are those of all frames."""

    def __init__(self, frames: int, tokens: int, width: int):
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.BatchNorm1d(tokens)

    def forward(self, x):
        y = torch.relu(self.norm(self.inner(x.flatten(0, 1))))
        return y.view(x.shape)


MODULES = (Frames, Attention, Columns, Beside, Normed)
