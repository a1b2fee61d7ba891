"""Logits, probabilities and their largest, from one forward."""

import torch
from torch import nn

batch_size = 37
in_features = 45
out_features = 60


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        logits = self.linear(x)
        probabilities = torch.softmax(logits, dim=1)
        return {"logits": logits, "probabilities": probabilities, "best": probabilities.amax(dim=1)}


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
