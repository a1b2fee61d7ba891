"""Post-norm residuals around two linear layers."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features):
        super().__init__()
        self.first = nn.Linear(in_features, in_features)
        self.norm1 = nn.LayerNorm(in_features)
        self.second = nn.Linear(in_features, in_features)
        self.norm2 = nn.LayerNorm(in_features)

    def forward(self, x):
        x = self.norm1(x + F.relu(self.first(x)))
        return self.norm2(x + self.second(x))


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features]
