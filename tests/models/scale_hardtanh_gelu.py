"""Scaled, clamped by Hardtanh, through a GELU."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
factor = 0.5


class Model(nn.Module):
    def __init__(self, in_features, out_features, factor):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.factor = factor
        self.hardtanh = nn.Hardtanh(min_val=-2, max_val=2)
        self.gelu = nn.GELU()

    def forward(self, x):
        return self.gelu(self.hardtanh(self.linear(x) * self.factor))


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, factor]
