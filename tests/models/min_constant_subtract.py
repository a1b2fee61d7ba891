"""The smaller of a linear layer and a learnt constant, less the constant."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
constant = 0.3


class Model(nn.Module):
    def __init__(self, in_features, out_features, constant):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.constant = nn.Parameter(torch.tensor(constant))

    def forward(self, x):
        x = torch.min(self.linear(x), self.constant)
        return x - self.constant


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, constant]
