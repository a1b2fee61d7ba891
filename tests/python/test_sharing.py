"""What a forward computes twice alike is computed once, where nobody can tell."""

import ingot
import pytest
import torch
from live import compare, no_gradients, programs_of  # noqa: F401
from torch import nn
from torch.nn import functional

WIDTH = 8


class Model(nn.Module):
    """function: of x, a Linear and a BatchNorm1d."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(x, self.linear, self.norm)


def products(module):
    return sum(
        value["op"] == "matmul"
        for program in programs_of(module)
        for value in program.graph["values"]
    )


def each_layer_alike(x, linear, norm):
    y = x
    for _ in range(3):
        y = torch.tanh(y + torch.relu(linear(x)))
    return y


def layers_apart(x, linear, norm):
    for _ in range(3):
        x = torch.tanh(linear(x))
    return x


@pytest.mark.parametrize("function, count", [(each_layer_alike, 1), (layers_apart, 3)])
def test_products_that_are_computed(function, count):
    model = Model(function)
    optimised, x = ingot.optimize(model), torch.randn(4, WIDTH)
    torch.testing.assert_close(optimised(x), model(x), rtol=1e-5, atol=1e-5)
    assert products(optimised) == count


def two_calls(module):
    x = torch.randn(4, WIDTH).requires_grad_(torch.is_grad_enabled())
    for _ in range(2):
        yield module(x)


FUNCTIONS = {
    "gradients of both": lambda x, linear, norm: torch.relu(linear(x)) * torch.relu(linear(x)),
    "dropped twice": lambda x, linear, norm: (
        functional.dropout(linear(x), 0.5) + functional.dropout(linear(x), 0.5)
    ),
    "statistics that move twice": lambda x, linear, norm: norm(linear(x)) + norm(linear(x)),
    "views": lambda x, linear, norm: linear(x).t() @ linear(x).t().t(),
    "without gradients once": lambda x, linear, norm: (
        torch.relu(linear(x)) + torch.relu(linear(x.detach()))
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_right(name):
    compare(lambda: Model(FUNCTIONS[name]), two_calls, tolerance=1e-4)


def test_equal_results_are_tensors_of_their_own():
    model = Model(lambda x, linear, norm: (torch.relu(linear(x)), torch.relu(linear(x))))
    first, second = ingot.optimize(model)(torch.randn(4, WIDTH))
    torch.testing.assert_close(first, second)
    first.zero_()
    assert second.abs().sum() > 0


def test_a_result_that_is_written_into_is_read_by_nothing_else():
    """The second relu is of the forward's own: what the caller does to the first must not reach
    it, nor what backward reads of it."""

    def function(x, linear, norm):
        y = linear(x)
        return torch.relu(y), torch.relu(y) @ linear.weight

    def script(module):
        x = torch.randn(4, WIDTH).requires_grad_(torch.is_grad_enabled())
        first, second = module(x)
        with torch.no_grad():
            first.detach().zero_()
        yield second

    compare(lambda: Model(function), script)


def empty(x, linear, norm):
    """As a decoder's cache before its first token."""
    cache = x.new_empty(0, WIDTH)
    return torch.relu(linear(torch.cat([cache * 2, x]))), (cache + 1).sum()


def test_an_empty_tensor_leaves_the_rest_to_ingot():
    compare(lambda: Model(empty), two_calls)
