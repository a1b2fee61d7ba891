"""Max pooling over the features, their sum, scaled."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
window = 2
factor = 0.5


class Model(nn.Module):
    def __init__(self, in_features, out_features, window, factor):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.pool = nn.MaxPool1d(window)
        self.factor = factor

    def forward(self, x):
        x = self.linear(x)
        x = self.pool(x.unsqueeze(1)).squeeze(1)
        x = torch.sum(x, dim=1)
        return x * self.factor


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, window, factor]
