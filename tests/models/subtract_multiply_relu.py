"""A linear layer less a constant, times another, through a ReLU."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
less = 2.0
factor = 1.5


class Model(nn.Module):
    def __init__(self, in_features, out_features, less, factor):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.less = less
        self.factor = factor

    def forward(self, x):
        x = self.linear(x)
        x = x - self.less
        x = x * self.factor
        return torch.relu(x)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, less, factor]
