"""A linear layer times a constant, through a leaky ReLU."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
factor = 2.0
slope = 0.1


class Model(nn.Module):
    def __init__(self, in_features, out_features, factor, slope):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.factor = factor
        self.act = nn.LeakyReLU(slope)

    def forward(self, x):
        return self.act(self.linear(x) * self.factor)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, factor, slope]
