"""Numbers that change from call to call: step counts, temperatures, levels of noise. One capture
serves all of them, and one region what is computed with them."""

from __future__ import annotations

import math

import pytest
import selection
import torch
from live import compare
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")

FORMS = {
    "scaled": lambda h, k: h * k,
    "divided": lambda h, k: h / (k + 1),
    "both": lambda h, k: h * (1.0 / (k + 1)) + k * 0.1,
    "from": lambda h, k: k - h,
    "less": lambda h, k: h - 0.5 * k,
    "cosine": lambda h, k: h * (0.5 + 0.5 * math.cos(k / 100 * math.pi)),
    "decayed": lambda h, k: h / max(0.1, 0.9**k),
    "compared": lambda h, k: torch.where(h > k * 0.1, h, h * 0.5),
    "large": lambda h, k: h * (k * 16777217),
}


class Model(nn.Module):
    def __init__(self, function, counts):
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)
        self.function, self.counts, self.steps = function, counts, 1

    def forward(self, x, number):
        if self.counts:
            self.steps += 1
            number = self.steps
        return torch.tanh(self.last(self.function(torch.relu(self.first(x)), number)))


@pytest.mark.parametrize(("form", "kind"), selection.checkered(FORMS, [int, float, "attribute"]))
def test_one_region_serves_all(form, kind):
    function = FORMS[form]
    regions = []

    def script(module):
        for step in range(2, 8):
            number = step if kind == "attribute" else kind(step)
            yield module(torch.randn(6, 16).requires_grad_(), number)
        if hasattr(module, "_ingot"):
            graph = module._ingot.graphs[-1]
            regions.append([len(r.operators) for r in graph.compiled.captured.regions])
            assert not graph.compiled.captured.unsupported

    # The first number is taken for a fixed one, until a second comes.
    compare(lambda: Model(function, kind == "attribute"), script, graphs=2)
    assert len(regions) == 2 and all(len(found) == 1 for found in regions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_are_rounded_as_pytorch_rounds_them(dtype):
    """Beside 16 bits a number is one of fp32, a tensor of one element need not be."""

    class Cast(Model):
        def forward(self, x, number):
            return self.last(torch.relu(self.first(x)).to(dtype).mul(number).float())

    def script(module):
        module(torch.randn(6, 16), 1.5)  # for which it is a fixed number
        for step in range(2, 6):
            yield module(torch.randn(6, 16), 1.003 * step)

    compare(lambda: Cast(None, False), script, gradients=(False,), tolerance=1e-5, taken=False)


class Dropping(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(16, 24), nn.Linear(24, 8), rate

    def forward(self, x):
        h = nn.functional.dropout(torch.relu(self.first(x)), self.rate, self.training)
        return torch.tanh(self.last(h)) * self.rate


def test_a_number_where_no_size_is_symbolic():
    """Modules of one class, each with its rate: at a batch of one the rate alone is a symbol."""

    def script(module):
        for batch, rate in ((6, 0.1), (1, 0.1), (1, 0.3), (1, 0.5)):
            module.rate = rate
            torch.manual_seed(batch)
            yield module(torch.randn(batch, 16).requires_grad_())
        if hasattr(module, "_ingot"):
            graphs = module._ingot.graphs
            assert not any(graph.problem for graph in graphs)
            assert all(graph.compiled.captured.regions for graph in graphs)

    for rate in (0.1, 0.2):
        compare(lambda rate=rate: Dropping(rate), script)
