"""Parts of a tensor that are taken one by one have the gradient of one operator, without zeros."""

import copy
import operator

import ingot
import pytest
import torch
from ingot.capture.unbinding import unbind_parts
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

_aten = torch.ops.aten


def rewritten(function, *sizes: int) -> torch.fx.Graph:
    """Traced on tensors without memory, every one in need of a gradient, and checked to compute the
    same."""
    x = torch.randn(*sizes)
    module = make_fx(lambda x: function(x), tracing_mode="fake")(x)
    unbind_parts(module.graph, set(module.graph.nodes))
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(x), function(x))
    return module.graph


def count(graph: torch.fx.Graph, target) -> int:
    return sum(node.target is target for node in graph.nodes)


def product_of_parts(x, order=(2, 0, 3, 1, 4)):
    parts = x.permute(order)
    q, k, v = (parts.select(0, at) for at in range(3))
    return q * k + v


def test_selects_of_each_index_are_one_operator():
    graph = rewritten(product_of_parts, 2, 5, 3, 4, 6)
    assert count(graph, _aten.unbind.int) == 1 and count(graph, _aten.select.int) == 0
    (unbind,) = (node for node in graph.nodes if node.target is _aten.unbind.int)
    assert unbind.args[0].op == "placeholder" and unbind.args[1] == 2  # before it is permuted


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_orders_and_dimensions(order, dim):
    def function(x):
        turned = x.permute(order)
        parts = [turned.select(dim, at - 3) for at in range(3)]
        return parts[0] * parts[1] - parts[2]

    assert count(rewritten(function, 3, 3, 3), _aten.unbind.int) == 1


def test_a_transposed_tensor_is_unbound_before_it():
    def function(x):
        a, b = x.transpose(-1, 0).unbind(0)
        return a * b

    graph = rewritten(function, 4, 5, 2)
    (unbind,) = (node for node in graph.nodes if node.target is _aten.unbind.int)
    assert unbind.args[0].op == "placeholder" and count(graph, _aten.transpose.int) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.select(0, 0) * x.select(0, 2),  # not of each index
        lambda x: x.select(0, 0) * x.select(1, 1),
        lambda x: (x.select(0, 0), x.select(0, 1), x.select(0, 2)),  # handed out
    ],
)
def test_others_stay(function):
    assert count(rewritten(function, 3, 3), _aten.unbind.int) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_written_stays(whole):
    def function(x):
        y = x + 1
        seen = y.view(2, 3)
        parts = [seen.select(0, at) for at in range(2)]
        (y if whole else parts[0]).mul_(2)
        return parts[0] + parts[1]

    module = make_fx(lambda x: function(x), tracing_mode="fake")(torch.randn(6))
    unbind_parts(module.graph, set(module.graph.nodes))
    assert count(module.graph, _aten.unbind.int) == 0


def test_what_needs_no_gradient_stays():
    module = make_fx(lambda x: product_of_parts(x), tracing_mode="fake")(torch.randn(2, 5, 3, 4, 6))
    unbind_parts(module.graph, set())
    assert count(module.graph, _aten.select.int) == 3
    assert count(module.graph, operator.getitem) == 0


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(made.transpose(1, 2).reshape(rows, length, width))


def test_a_part_of_no_parts_raises_pytorchs_error(caplog):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu().select(0, 0)

    made = ingot.optimize(First())
    with pytest.raises(IndexError):
        made(torch.randn(0, 4))
    assert "ZeroDivisionError" not in caplog.text


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_an_attention_are_written_once(autocast):
    torch.manual_seed(0)
    module = Attention()
    twin, made = copy.deepcopy(module), ingot.optimize(module)
    x = torch.randn(3, 5, 16)

    def step(called):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            called(x).float().square().sum().backward()

    step(made), step(twin)
    tolerance = {"rtol": 5e-2, "atol": 5e-2} if autocast else {}
    for own, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad, **tolerance)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        step(made)
    assert not any(event.name == "aten::select_backward" for event in watched.events())
