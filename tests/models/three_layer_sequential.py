"""An MLP as nn.Sequential, with a different activation behind each layer."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, out_features),
            nn.SELU(),
            nn.Linear(out_features, out_features),
            nn.Softplus(),
            nn.Linear(out_features, in_features),
            nn.LogSoftmax(dim=-1),
        )

    def forward(self, x):
        return self.layers(x)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
