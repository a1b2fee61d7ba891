"""Dropout in the middle of a chain, which still runs on both sides of it."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60
rate = 0.1


class Model(nn.Module):
    def __init__(self, in_features, out_features, rate):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.dropout = nn.Dropout(rate)
        self.scale = nn.Parameter(torch.rand(out_features))
        self.norm = nn.LayerNorm(out_features)

    def forward(self, x):
        x = F.gelu(self.linear(x)) * self.scale
        x = self.dropout(x)
        x = x * self.scale + 1.0
        return self.norm(x)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, rate]
