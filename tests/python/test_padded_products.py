"""Products of 16 bits whose rows do not start at multiples of 16 bytes: which are worth a region,
and what their backward pass makes of them."""

from types import SimpleNamespace

import pytest
import torch
from ingot.capture import host_time, weighing
from ingot.capture.table import has_uneven_rows
from ingot.live import padded
from test_gradients import calls_of, error, gradients_of, three_of
from torch import nn

M, N, K = 24, 37, 16


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 37])
def test_padded_products_are_the_products(columns):
    torch.manual_seed(0)
    a, w, x = torch.randn(M, columns), torch.randn(columns, K), torch.randn(M, K)
    copy = padded.padded(a)
    assert copy.shape[1] % 8 == 0 and copy.shape[1] - columns < 8
    assert torch.equal(copy[:, :columns], a) and not copy[:, columns:].any()
    torch.testing.assert_close(padded.product_of_padded(copy, w), a @ w)
    turned = padded.transposed_product_of_padded(copy, x, columns)
    assert turned.shape == (columns, K) and turned.is_contiguous()
    torch.testing.assert_close(turned, a.t() @ x)


def backward_graph(columns: int, rows: int = 4096, dtype=torch.bfloat16, device="cuda"):
    """Of a linear layer, as it is traced."""
    graph = torch.fx.Graph()
    aten = torch.ops.aten
    made = [graph.placeholder(name) for name in ("gradient", "w", "x")]
    shapes = ((rows, columns), (columns, 768), (rows, 768))
    made.append(graph.call_function(aten.mm.default, (made[0], made[1])))
    made.append(graph.call_function(aten.t.default, (made[0],)))
    made.append(graph.call_function(aten.mm.default, (made[4], made[2])))
    for node, shape in zip(made, (*shapes, (rows, 768), (columns, rows), (columns, 768))):
        node.meta["val"] = SimpleTensor(shape, dtype, device)
    graph.output((made[3], made[5]))
    return graph


class SimpleTensor(torch.Tensor):
    """On a device that this machine need not have."""

    @staticmethod
    def __new__(cls, shape, dtype, device):
        made = torch.Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype, device="meta"))
        made.at = torch.device(device)
        return made

    @property
    def device(self):
        return self.at

    def new_empty(self, shape):
        return SimpleTensor(shape, self.dtype, self.at)


def targets(graph) -> list:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_both_products_share_a_copy():
    graph = backward_graph(50257)
    padded.pad_gradients(graph)
    graph.eliminate_dead_code()
    assert targets(graph) == list(padded.PADDED)
    graph.lint()


@pytest.mark.parametrize(
    "given",
    [
        {"columns": 50264},
        {"columns": 50257, "dtype": torch.float32},
        {"columns": 50257, "device": "cpu"},
        {"columns": 257, "rows": 64},
    ],
)
def test_others_stay(given):
    graph = backward_graph(**given)
    padded.pad_gradients(graph)
    assert not set(targets(graph)) & set(padded.PADDED)


def product(words: int, rows: int = 4096, dtype=torch.bfloat16) -> torch.fx.Node:
    module = nn.Linear(768, words, bias=False).to("meta", dtype)
    x = torch.empty(rows, 768, dtype=dtype, device="meta")
    graph = torch.export.export(module, (x,)).graph
    return next(node for node in graph.nodes if "linear" in str(node.target))


def test_rows_of_uneven_length():
    halves = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((), (0,), (3, 8), (8, 9))]
    assert [has_uneven_rows(x) for x in halves] == [False, False, False, True]
    assert not has_uneven_rows(torch.empty(8, 9)) and not has_uneven_rows(None)


def test_alone_it_is_worth_a_region_whatever_the_host_does():
    feed = SimpleNamespace(tf32=False)
    cut = SimpleNamespace(device_type="cuda", waits_for_host=True, autocast=False, feed=feed)

    def pays(*given, device_type="cuda"):
        cut.device_type = device_type
        return host_time.pays_in_few_bits(cut, [product(*given)])

    assert not pays(50257, device_type="cpu")
    assert pays(50257) and pays(30522) and pays(50257, 4096, torch.float16)
    assert not pays(50264) and not pays(50257, 16) and not pays(129)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(K), nn.Linear(K, N, bias=False)

    def forward(self, x):
        return self.head(self.norm(x))


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("shape", [(M, K), (2, 12, K)])
def test_gradients(shape, follows, monkeypatch):
    """As on a GPU: every product that reads rows of uneven length."""

    def is_slow(gradient, node):
        return gradient.meta["val"].shape[-1] == N

    copies, copy = [], padded.padded
    monkeypatch.setattr(padded, "_is_slow", is_slow)
    monkeypatch.setattr(padded, "padded", lambda x: copies.append(x) or copy(x))
    monkeypatch.setattr(weighing, "_pays", lambda cut, computing: True)
    torch.manual_seed(1)
    model = nn.Sequential(Head(), nn.Tanh()) if follows else Head()
    module, twin, exact = three_of(model.bfloat16())
    x = torch.randn(shape, dtype=torch.bfloat16)
    found, eager, truth = (gradients_of(each, [x]) for each in (module, twin, exact))
    for own, other, exactly in zip(found, eager, truth):
        assert own.dtype == other.dtype and own.stride() == other.stride()
        assert error(own, exactly) <= max(8e-3, 1.5 * error(other, exactly))
    assert len(copies) == 1 and calls_of(module)
