"""The product of two linear layers, summed."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.left = nn.Linear(in_features, out_features)
        self.right = nn.Linear(in_features, out_features)

    def forward(self, x, y):
        return (self.left(x) * self.right(y)).sum(dim=-1)


def get_inputs():
    return [torch.rand(batch_size, in_features), torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
