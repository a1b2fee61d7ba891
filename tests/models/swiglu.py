"""A gated feed-forward block with its gate in a linear layer of its own."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gate = nn.Linear(in_features, out_features, bias=False)
        self.up = nn.Linear(in_features, out_features, bias=False)
        self.down = nn.Linear(out_features, in_features, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def get_inputs():
    return [torch.rand(batch_size, 6, in_features)]


def get_init_inputs():
    return [in_features, out_features]
