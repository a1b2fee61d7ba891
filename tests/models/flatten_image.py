"""An image flattened in front of the linear layer, seen as one again behind it."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        x = torch.sigmoid(self.linear(torch.flatten(x, 1)))
        return x.view(-1, 3, 4, 5)


def get_inputs():
    return [torch.rand(batch_size, 3, 3, 5)]


def get_init_inputs():
    return [in_features, out_features]
