"""Tokens: a linear layer on [batch, token, channel], group norm over channels after a transpose."""

import torch
from torch import nn

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(4, out_features)

    def forward(self, x):
        x = torch.relu(self.linear(x))
        return self.norm(x.transpose(1, 2))


def get_inputs():
    return [torch.rand(batch_size, 6, in_features)]


def get_init_inputs():
    return [in_features, out_features]
