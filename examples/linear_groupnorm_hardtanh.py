"""A linear layer, group normalisation and hardtanh."""

import torch
from torch import nn

batch_size = 1024
in_features = 4096
out_features = 4096
num_groups = 16


class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(num_groups, out_features)
        self.hardtanh = nn.Hardtanh(-2.0, 2.0)

    def forward(self, x):
        return self.hardtanh(self.norm(self.linear(x)))


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, num_groups]
