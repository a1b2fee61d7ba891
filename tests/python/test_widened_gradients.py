"""Weights' gradients that a product writes in fp32, without the cast behind it."""

from __future__ import annotations

import pytest
import torch
from ingot.live import padded, widened
from test_padded_products import SimpleTensor, targets

aten = torch.ops.aten
FP32 = {"dtype": torch.float32}


def graph_of(*behind, dtype=torch.bfloat16, device="cuda", columns=64, read_twice=False):
    """aᵀ·b, and what follows: (operator, further arguments, keywords) each."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    turned = graph.call_function(aten.t.default, (a,))
    made = graph.call_function(aten.mm.default, (turned, b))
    shapes = {a: (4096, columns), b: (4096, 768), turned: (columns, 4096), made: (columns, 768)}
    for node, shape in shapes.items():
        node.meta["val"] = SimpleTensor(shape, dtype, device)
    product = made
    for target, args, kwargs in behind:
        before = made
        made = graph.call_function(target, (before, *args), kwargs)
        made.meta["val"] = SimpleTensor((columns, 768), kwargs.get("dtype", dtype), device)
    graph.output((made, product) if read_twice else (made,))
    return graph


CAST = (aten._to_copy.default, (), FP32)
TURN = (aten.t.default, (), {})


@pytest.mark.parametrize("behind", [(CAST,), (TURN, CAST), (TURN, TURN, CAST)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_takes_the_cast_over(behind, dtype, monkeypatch):
    monkeypatch.setattr(widened, "_IS_OFFERED", True)
    graph = graph_of(*behind, dtype=dtype)
    widened.widen_gradients(graph)
    graph.eliminate_dead_code()
    views = [target for target, *_ in behind[:-1]]
    assert targets(graph) == [widened.transposed_product_in_fp32, *views]
    assert all(n.meta["val"].dtype is torch.float32 for n in list(graph.nodes)[2:-1])
    graph.lint()


@pytest.mark.parametrize(
    ("behind", "given"),
    [
        ((CAST,), {"dtype": torch.float32}),
        ((CAST,), {"device": "cpu"}),
        ((CAST,), {"read_twice": True}),
        (((aten._to_copy.default, (), {"dtype": torch.float64}),), {}),
        (((aten.mul.Tensor, (2.0,), {}), CAST), {}),
        ((), {}),
    ],
)
def test_other_products_stay(behind, given, monkeypatch):
    monkeypatch.setattr(widened, "_IS_OFFERED", True)
    graph = graph_of(*behind, **given)
    before = targets(graph)
    widened.widen_gradients(graph)
    assert targets(graph) == before


def test_a_pytorch_without_such_a_product(monkeypatch):
    monkeypatch.setattr(widened, "_IS_OFFERED", False)
    graph = graph_of(CAST)
    widened.widen_gradients(graph)
    assert aten.mm.default in targets(graph)


def test_a_product_of_padded_rows_is_widened_too(monkeypatch):
    monkeypatch.setattr(widened, "_IS_OFFERED", True)
    graph = graph_of(CAST, columns=50257)
    padded.pad_gradients(graph)
    widened.widen_gradients(graph)
    graph.eliminate_dead_code()
    assert targets(graph) == [padded.padded, padded.transposed_product_of_padded]
    product = next(n for n in graph.nodes if n.target is padded.transposed_product_of_padded)
    assert product.args[-2:] == (50257, torch.float32)
