"""A linear layer beside a product of two thin ones."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.a = nn.Parameter(torch.randn(4, in_features))
        self.b = nn.Parameter(torch.randn(out_features, 4))
        self.scaling = 2.0

    def forward(self, x):
        return self.linear(x) + (x @ self.a.T @ self.b.T) * self.scaling


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
