"""The activation in half precision, the norm in float."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.LayerNorm(out_features)

    def forward(self, x):
        x = F.silu(self.linear(x).to(torch.bfloat16))
        return self.norm(x.to(self.norm.weight.dtype))


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
