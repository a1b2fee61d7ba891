"""Softmax with some features masked out."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.register_buffer("mask", torch.arange(out_features) >= 40)

    def forward(self, x):
        x = self.linear(x).masked_fill(self.mask, float("-inf"))
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
