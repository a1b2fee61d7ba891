"""A product by einsum, ELU."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / 5)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        x = torch.einsum("bi,oi->bo", x, self.weight) + self.bias
        return F.elu(x, alpha=0.8)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
