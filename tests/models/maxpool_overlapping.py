"""Max pooling with overlapping windows."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
window = 3
step = 2


class Model(nn.Module):
    def __init__(self, in_features, out_features, window, step):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.pool = nn.MaxPool1d(window, stride=step)

    def forward(self, x):
        x = torch.tanh(self.linear(x)).unsqueeze(1)
        return self.pool(x).squeeze(1) * 2.0


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, window, step]
