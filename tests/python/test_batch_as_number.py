"""Forwards that compute with the number of rows that a call brings, which is a symbol when they are
captured: parts of tables, ramps, shares."""

import pytest
import torch
from live import compare, no_gradients  # noqa: F401
from torch import nn
from torch.nn import functional

WIDTH = 16

FORMS = {
    "front of a table": lambda x, n, table: x + table[:n],
    "end of a table": lambda x, n, table: x + table[64 - n :],
    "every second": lambda x, n, table: x + table[: 2 * n : 2],
    "columns": lambda x, n, table: x + table.t()[:, :n].t(),
    "narrowed": lambda x, n, table: x + table.narrow(0, 1, n),
    "looked up": lambda x, n, table: x + table[torch.arange(n)],
    "one of a table": lambda x, n, table: x + table[n],
    "joined": lambda x, n, table: torch.cat([x, table[:n]]) * 2,
    "half": lambda x, n, table: x[: n // 2] * 2,
    "rest": lambda x, n, table: x[n // 2 :] * 2,
    "last": lambda x, n, table: x[n - 1] * 2,
    "split": lambda x, n, table: x.split([1, n - 1])[1] * 2,
    "ramp": lambda x, n, table: torch.arange(n)[:, None] * x,
    "share": lambda x, n, table: x.sum(0) / n,
    "step": lambda x, n, table: torch.add(x, x, alpha=n),
    "bound": lambda x, n, table: x.clamp(max=n) * 2,
    "repeated": lambda x, n, table: x[:1].repeat(n, 1) + x,
    "padded": lambda x, n, table: functional.pad(x, (0, 0, 0, n)) * 2,
    "triangle": lambda x, n, table: (x @ x.T).triu(n - 2) * 2,
    "masked": lambda x, n, table: x.masked_fill(torch.arange(n)[:, None] >= n - 1, 0.0),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.register_buffer("table", torch.randn(64, WIDTH))

    def forward(self, x):
        y = torch.relu(self.linear(x) * 2)
        return self.function(y, len(y), self.table)


@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS)
def test_results_are_pytorchs(function):
    def script(module):
        for rows in (6, 8):
            yield module(torch.randn(rows, WIDTH))

    compare(lambda: Model(function), script, gradients=[True])
