"""A block on images with their channels last: norm, two linear layers, residual."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.norm = nn.LayerNorm(in_features)
        self.up = nn.Linear(in_features, out_features)
        self.down = nn.Linear(out_features, in_features)
        self.gamma = nn.Parameter(1e-1 * torch.ones(in_features))

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.gamma * y


def get_inputs():
    return [torch.rand(batch_size, 3, 4, in_features)]


def get_init_inputs():
    return [in_features, out_features]
