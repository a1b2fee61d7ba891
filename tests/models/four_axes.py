"""A linear layer on images with their channels last."""

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

    def forward(self, x):
        return F.silu(self.linear(x)) + 1.0


def get_inputs():
    return [torch.rand(batch_size, 3, 4, in_features)]


def get_init_inputs():
    return [in_features, out_features]
