"""torch.addmm with factors, log-softmax."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / 5)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        x = torch.addmm(self.bias, x, self.weight, beta=0.5, alpha=2.0)
        return F.log_softmax(x, dim=1)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
