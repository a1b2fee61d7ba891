"""Cosine similarity with learnt prototypes."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(out_features, in_features))

    def forward(self, x):
        return F.linear(F.normalize(x, dim=1), F.normalize(self.prototypes, dim=1)) * 16.0


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
