"""Average pooling whose windows leave some features over."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
window = 7


class Model(nn.Module):
    def __init__(self, in_features, out_features, window):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.pool = nn.AvgPool1d(window)

    def forward(self, x):
        x = self.linear(x).unsqueeze(1)
        return torch.relu(self.pool(x)).squeeze(1)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, window]
