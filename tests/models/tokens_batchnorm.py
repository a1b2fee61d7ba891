"""Batch norm over the channels of tokens, through views."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x):
        batch, tokens, width = x.shape
        x = self.linear(x.reshape(batch * tokens, width))
        x = F.relu(self.bn(x))
        return x.view(batch, tokens, -1)


def get_inputs():
    return [torch.rand(batch_size, 6, in_features)]


def get_init_inputs():
    return [in_features, out_features]
