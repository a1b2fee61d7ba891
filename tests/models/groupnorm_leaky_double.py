"""Group norm, leaky ReLU, added to itself."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
num_groups = 30


class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(num_channels=out_features, num_groups=num_groups)
        self.act = nn.LeakyReLU(negative_slope=0.01)

    def forward(self, x):
        x = self.act(self.norm(self.linear(x)))
        return x + x


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, num_groups]
