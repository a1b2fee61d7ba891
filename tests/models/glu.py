"""The gated linear unit of torch.nn."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, 2 * out_features)

    def forward(self, x):
        return F.glu(self.linear(x), dim=-1) * 0.5


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
