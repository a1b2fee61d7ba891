"""Scaled, added to itself, clamped; then log-sum-exp times its own Mish."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60
factor = 2.0
low = -10.0
high = 10.0


class Model(nn.Module):
    def __init__(self, in_features, out_features, factor, low, high):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.factor = factor
        self.low = low
        self.high = high

    def forward(self, x):
        x = self.linear(x)
        x = x * self.factor
        x = x + x
        x = torch.clamp(x, self.low, self.high)
        x = torch.logsumexp(x, dim=1, keepdim=True)
        return x * F.mish(x)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, factor, low, high]
