"""What follows from numbers alone is computed once, when a forward is captured."""

import copy

import ingot
import pytest
import torch
from ingot.capture import folding
from ingot.capture.captured import TorchStep
from ingot.capture.nodes import schema_name
from live import compare, no_gradients  # noqa: F401
from torch import nn

SIDE, WIDTH = 8, 16


class Model(nn.Module):
    """function: of x [N, SIDE, WIDTH], SIDE times WIDTH when nothing else is said."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(torch.relu(self.linear(x) * 2))


def windows(x):
    """As Swin transformers write the mask of their shifted windows."""
    mask = x.new_zeros((SIDE, WIDTH))
    count = 0
    for rows in ((0, -4), (-4, -2), (-2, None)):
        for columns in ((0, -3), (-3, None)):
            mask[rows[0] : rows[1], columns[0] : columns[1]] = count
            count += 1
    mask = mask.view(2, SIDE // 2, WIDTH).permute(1, 0, 2).reshape(-1, WIDTH)
    apart = mask.unsqueeze(1) - mask.unsqueeze(2)
    return x + apart.masked_fill(apart != 0, -1.0).sum(1)


def buckets(x):
    """As T5 counts positions, logarithms included."""
    at = torch.arange(SIDE)[:, None] - torch.arange(WIDTH)[None, :]
    far = (at.abs().float() / 3 + 1).log() * 2.5
    return x * torch.where(at < 3, at, far.long())


def of_the_batch(x):
    mask = x.new_zeros((x.shape[0], 1, 1))
    mask[1:] = 3
    return x + mask


def drawn(x):
    return x + torch.rand(SIDE, 1).round() * 0 + torch.ones(SIDE, 1).cumsum(0)


def in_halves(x):
    return x + torch.ones(SIDE, WIDTH, dtype=torch.bfloat16).cumsum(0) / 3


def written_later(x):
    mask = torch.ones(SIDE, WIDTH).cumsum(0)
    y = x + mask
    mask += y.mean()
    return y * mask


def two_calls(module):
    for rows in (4, 6):
        yield module(torch.randn(rows, SIDE, WIDTH).requires_grad_(torch.is_grad_enabled()))


FUNCTIONS = (windows, buckets, of_the_batch, drawn, written_later)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_results_are_pytorchs(function):
    compare(lambda: Model(function), two_calls)


def operators_of(function, dtype=torch.float32) -> set[str]:
    """That run at each call."""
    made = ingot.optimize(Model(function).to(dtype))
    made(torch.randn(4, SIDE, WIDTH, dtype=dtype))
    (graph,) = made._ingot.graphs
    found = {o["what"] for region in graph.compiled.captured.regions for o in region.operators}
    steps = graph.compiled.captured.steps
    return found | {schema_name(s.target) for s in steps if isinstance(s, TorchStep)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [windows, buckets], ids=lambda f: f.__name__)
def test_a_mask_costs_a_call_nothing(function, dtype):
    assert operators_of(function, dtype) <= {"linear", "mul", "relu", "add"}


def test_masks_in_16_bits():
    for dtype in (torch.bfloat16, torch.float16):
        module = Model(windows).to(dtype)
        twin = copy.deepcopy(module)
        made, x = ingot.optimize(module), torch.randn(4, SIDE, WIDTH, dtype=dtype)
        torch.testing.assert_close(made(x), twin(x))


def test_what_may_change_is_computed_at_each_call():
    assert not any("cumsum" in name for name in operators_of(in_halves))
    with torch.autocast("cpu", torch.bfloat16):  # which has it computed in fp32
        assert any("cumsum" in name for name in operators_of(in_halves))
    assert any("rand" in name for name in operators_of(drawn))


def test_large_constants_are_not_kept():
    def summed(x):
        return x + torch.ones(1 << 19).cumsum(0).sum()

    def large(x):
        return x.sum() * torch.ones(1 << 19).cumsum(0)

    assert not any("cumsum" in name for name in operators_of(summed))  # the sum is small
    assert any("cumsum" in name for name in operators_of(large))


def test_what_the_caller_gets_is_the_callers():
    made = ingot.optimize(Model(lambda x: (x, torch.ones(SIDE, 3).cumsum(0))))
    x = torch.randn(4, SIDE, WIDTH)
    for _ in range(3):
        _, counted = made(x)
        assert torch.equal(counted, torch.ones(SIDE, 3).cumsum(0))
        counted.zero_()


def test_nothing_is_computed_while_a_cuda_graph_is_captured(monkeypatch):
    from ingot.capture import folding
    from ingot.live import importing

    fold = folding.fold_constants

    def as_on_a_gpu(feed):
        monkeypatch.setattr(feed, "device_type", "cuda")
        fold(feed)
        monkeypatch.setattr(feed, "device_type", "cpu")

    monkeypatch.setattr(importing, "fold_constants", as_on_a_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert len(operators_of(windows)) > 5


def test_a_node_that_many_read_is_computed_once(monkeypatch):
    """A mask written region by region is read twice by each write: ways back double with each."""
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.ones.default, ([2],))
    for _ in range(40):
        more = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1))
        node = graph.call_function(torch.ops.aten.add.Tensor, (node, more))
    graph.output(node)
    for each in graph.nodes:
        each.meta["val"] = torch.empty(2)
    looked, real = [], torch.fx.Node.all_input_nodes

    def counting(self):
        looked.append(self)
        assert len(looked) < 1000
        return real.fget(self)

    monkeypatch.setattr(torch.fx.Node, "all_input_nodes", property(counting))
    assert folding.evaluated(node, {}).tolist() == [2.0**40] * 2
