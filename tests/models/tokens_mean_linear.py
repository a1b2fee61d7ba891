"""Mean over the tokens, a classifier behind it."""

import torch
from torch import nn
from torch.nn import functional as F

batch_size = 5
in_features = 44
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.embed = nn.Linear(in_features, out_features)
        self.head = nn.Linear(out_features, 10)

    def forward(self, x):
        x = F.gelu(self.embed(x))
        return self.head(x.mean(dim=1))


def get_inputs():
    return [torch.rand(batch_size, 6, in_features)]


def get_init_inputs():
    return [in_features, out_features]
