"""Batch norm, a bias of one element, divided, Swish."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
divisor = 1.5


class Model(nn.Module):
    def __init__(self, in_features, out_features, divisor):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=1e-5, momentum=0.1)
        self.bias = nn.Parameter(torch.randn(1))
        self.divisor = divisor

    def forward(self, x):
        x = self.bn(self.linear(x)) + self.bias
        x = x / self.divisor
        return x * torch.sigmoid(x)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, divisor]
