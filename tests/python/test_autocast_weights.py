"""Which weights are cast in front of their region, where autocast keeps the cast."""

from __future__ import annotations

import pytest
import torch
from ingot.capture.captured import Source
from ingot.capture.feed import Feed, Placeholder
from ingot.live.autocast import cast_by_torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

_WIDE = 2048


def _feed(function, shapes, kinds, trains=True, device_type="cuda") -> Feed:
    mode = FakeTensorMode()
    with mode:
        values = [torch.empty(shape) for shape in shapes]
    traced = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    found = {
        node: Placeholder(Source(kind, node.name, index), (kind, node.name), requires_grad=trains)
        for index, (node, kind) in enumerate(zip(inputs, kinds))
    }
    return Feed(traced.graph, nn.Module(), found, device_type)


def _products(graph: torch.fx.Graph) -> dict[str, list[str]]:
    """Operands of each product: the node that an operand is, or "cast" for a cast weight."""
    return {
        node.name: ["cast" if "einsum" in a.name else a.name for a in node.all_input_nodes]
        for node in graph.nodes
        if node.op == "call_function" and "einsum" not in node.name
    }


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (torch.nn.functional.linear, ["x_1", "cast"]),
        (lambda x, w: torch.mm(x, w), ["x_1", "cast"]),
        (lambda x, w: torch.matmul(w, x), ["cast", "x_1"]),
    ],
)
def test_a_large_weight_is_cast_by_torch(function, found):
    feed = _feed(lambda x, w: function(x, w), [(_WIDE, _WIDE)] * 2, ["input", "parameter"])
    names = cast_by_torch(feed, torch.bfloat16)
    assert len(names) == 1
    assert list(_products(feed.graph).values()) == [found]
    cast = next(node for node in feed.graph.nodes if node.name == names[0])
    assert cast.meta["val"].dtype == torch.bfloat16
    feed.graph.lint()


def test_one_cast_serves_all_its_products():
    def forward(x, w):
        return torch.mm(torch.mm(x, w), w)

    feed = _feed(forward, [(_WIDE, _WIDE)] * 2, ["input", "parameter"])
    assert len(cast_by_torch(feed, torch.float16)) == 1
    assert list(_products(feed.graph).values()) == [["x_1", "cast"], ["mm", "cast"]]


def test_what_is_kept_from_autocast_keeps_its_weight():
    feed = _feed(
        lambda x, w: torch.mm(torch.mm(x, w), w), [(_WIDE, _WIDE)] * 2, ["input", "parameter"]
    )
    cast_by_torch(feed, torch.bfloat16, {"mm_1"})
    assert list(_products(feed.graph).values()) == [["x_1", "cast"], ["mm", "w_1"]]


def test_other_uses_of_a_weight_keep_it():
    feed = _feed(
        lambda x, w: torch.mm(x, w) + w.sum(), [(_WIDE, _WIDE)] * 2, ["input", "parameter"]
    )
    cast_by_torch(feed, torch.bfloat16)
    found = _products(feed.graph)
    assert found["mm"] == ["x_1", "cast"]
    assert found["sum_1"] == ["w_1"]


@pytest.mark.parametrize(
    ("shape", "kind", "trains", "device_type"),
    [
        ((64, 64), "parameter", True, "cuda"),  # sooner cast than asked for
        ((_WIDE, _WIDE), "input", True, "cuda"),
        ((_WIDE, _WIDE), "buffer", True, "cuda"),
        ((_WIDE, _WIDE), "parameter", False, "cuda"),  # autocast keeps none
        ((_WIDE, _WIDE), "parameter", True, "cpu"),
    ],
)
def test_other_weights_are_the_regions(shape, kind, trains, device_type):
    feed = _feed(lambda x, w: torch.mm(x, w), [shape] * 2, ["input", kind], trains, device_type)
    assert cast_by_torch(feed, torch.bfloat16) == []
    assert list(_products(feed.graph).values()) == [["x_1", "w_1"]]
