"""Three parts of one linear layer, by torch.split."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.width = out_features
        self.linear = nn.Linear(in_features, 3 * out_features)

    def forward(self, x):
        a, b, c = torch.split(self.linear(x), self.width, dim=1)
        return torch.tanh(a) * b + c


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
