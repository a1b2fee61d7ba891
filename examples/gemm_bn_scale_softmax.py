"""A linear layer, batch normalisation, a scale and softmax over the features."""

import torch
from torch import nn

batch_size = 1024
in_features = 8192
out_features = 8192
scale_shape = (1,)


class Model(nn.Module):
    def __init__(self, in_features, out_features, eps=1e-5, momentum=0.1, scale_shape=(1,)):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))

    def forward(self, x):
        x = self.scale * self.bn(self.gemm(x))
        return torch.softmax(x, dim=1)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, 1e-5, 0.1, scale_shape]
