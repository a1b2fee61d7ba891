"""Sigmoid, a sum over the features, log-sum-exp over the whole batch."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        x = torch.sigmoid(self.linear(x))
        x = torch.sum(x, dim=1)
        return torch.logsumexp(x, dim=0)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
