"""torch.baddbmm with a bias, ReLU."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 1, out_features))
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / 6)

    def forward(self, x):
        weight = self.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        x = torch.baddbmm(self.bias, x, weight)
        return F.relu(x) + 1.0


def get_inputs():
    return [torch.rand(batch_size, 9, in_features)]


def get_init_inputs():
    return [in_features, out_features]
