"""A second bias, Hardtanh, Mish, group norm."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
num_groups = 12


class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(out_features))
        self.act = nn.Sequential(nn.Hardtanh(), nn.Mish())
        self.norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.norm(self.act(self.linear(x) + self.bias))


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, num_groups]
