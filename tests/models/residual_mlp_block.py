"""A transformer's feed-forward block with its norm in front and the residual around it."""

import torch
from torch import nn

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.norm = nn.LayerNorm(in_features)
        self.up = nn.Linear(in_features, out_features)
        self.act = nn.GELU()
        self.down = nn.Linear(out_features, in_features)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def get_inputs():
    return [torch.rand(batch_size, 7, in_features)]


def get_init_inputs():
    return [in_features, out_features]
