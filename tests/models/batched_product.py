"""A batched product of inputs, then scaled and normalised."""

import torch
from torch import nn

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.scale = in_features**-0.5
        self.width = out_features

    def forward(self, x, y):
        x = torch.bmm(x, y) * self.scale
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [
        torch.rand(batch_size, 9, in_features),
        torch.rand(batch_size, in_features, out_features),
    ]


def get_init_inputs():
    return [in_features, out_features]
