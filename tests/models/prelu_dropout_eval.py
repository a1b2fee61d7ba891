"""PReLU with a slope for each feature."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.act = nn.PReLU(out_features)

    def forward(self, x):
        return self.act(self.linear(x)) + 0.25


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
