"""Group norm, Swish, a learnt factor for each feature, Swish."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60
num_groups = 4


class Model(nn.Module):
    def __init__(self, in_features, out_features, num_groups):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(num_groups, out_features)
        self.factor = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        x = self.norm(self.linear(x))
        x = x * torch.sigmoid(x)
        x = x * self.factor
        return x * torch.sigmoid(x)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, num_groups]
