"""Two linear layers with ReLU between them."""

import torch
from torch import nn

batch_size = 1024
in_features = 4096
out_features = 4096
hidden_features = 8192


class Model(nn.Module):
    def __init__(self, in_features, out_features, hidden_features):
        super().__init__()
        self.up = nn.Linear(in_features, hidden_features)
        self.down = nn.Linear(hidden_features, out_features)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, hidden_features]
