"""In-place operators leave a transposed tensor transposed, where what takes their place without
writes gives a contiguous one."""

import copy

import ingot
import pytest
import torch
from torch import nn

WRITES = {
    "masked_fill": lambda y: y.masked_fill_(y > 0, 1.0),
    "cumsum": lambda y: y.cumsum_(-1),
    "cumprod": lambda y: y.cumprod_(-1),
    "tril": lambda y: y.tril_(),
    "triu": lambda y: y.triu_(),
    "renorm": lambda y: y.renorm_(2, 0, 1.0),
    "index_add": lambda y: y.index_add_(0, torch.tensor([1, 0]), torch.ones(2, 5, 3, 8)),
    "scatter": lambda y: y.scatter_(-1, torch.zeros(4, 5, 3, 1, dtype=torch.int64), 2.0),
}


class Model(nn.Module):
    def __init__(self, write, behind):
        super().__init__()
        self.linear, self.write, self.behind = nn.Linear(8, 8), write, behind

    def forward(self, x):
        y = (self.linear(x) * 2).transpose(1, 2)
        self.write(y)
        return self.behind(y)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_strides_and_what_reads_by_them(name, gradients):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 8)
    for behind in (lambda y: y, lambda y: y.as_strided((4, 3, 5, 8), (120, 40, 8, 1)) * 2):
        model = Model(WRITES[name], behind)
        made = ingot.optimize(copy.deepcopy(model))
        with torch.set_grad_enabled(gradients):
            found, expected = made(x), model(x)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
