"""Which weights are cast in front of their region, where autocast keeps the cast."""

from __future__ import annotations

import copy

import ingot
import pytest
import torch
from ingot.capture.captured import Source
from ingot.capture.feed import Feed, Placeholder
from ingot.live import autocast, importing, widened
from ingot.live.autocast import cast_by_torch, cast_weights, read_uncast
from ingot.runtime.signature import BATCH
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
_WIDE, _MIDDLE = 2048, 1024


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


def test_with_gradients_regions_cast_weights():
    feed = _feed(
        lambda x, w, small: torch.mm(torch.mm(torch.mm(x, w), w), small),
        [(_MIDDLE, _MIDDLE), (_MIDDLE, _MIDDLE), (_MIDDLE, 64)],
        ["input", "parameter", "parameter"],
    )
    cast_weights(feed, torch.bfloat16)
    (cast,) = (node for node in feed.graph.nodes if "copy" in node.name)
    found = _products(feed.graph)
    assert (found["mm"], found["mm_1"]) == (["x_1", cast.name], ["mm", cast.name])
    assert found["mm_2"] == ["mm_1", "small_1"]
    feed.graph.lint()


def test_a_large_weight_is_still_cast_by_torch():
    """Which hands the same cast to several calls in one context."""
    shapes, kinds = [(_WIDE, _WIDE)] * 2, ["input", "parameter"]
    feed = _feed(lambda x, w: torch.mm(x, w), shapes, kinds)
    cast_weights(feed, torch.bfloat16)
    assert list(_products(feed.graph).values()) == [["x_1", "w_1"]]


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (lambda h, w: torch.mm(h.float(), w), "half"),
        (lambda h, w: torch.nn.functional.linear(h.to(torch.float32), w), "half"),
        (lambda h, w: torch.mm(h.float() * 2, w), "mul"),
        (lambda h, w: (lambda wide: torch.mm(wide, w) + wide)(h.float()), "to"),
        (lambda h, w: torch.mm(h.double(), w.double()), "to"),
    ],
    ids="mm linear computed read_twice double".split(),
)
def test_what_a_product_would_have_cast_back_is_not_cast(function, read):
    def forward(x, w):
        half = x.to(torch.bfloat16)
        return function(half, w)

    feed = _feed(forward, [(8, 8)] * 2, ["input", "parameter"])
    half = next(node for node in feed.graph.nodes if node.op == "call_function")
    read_uncast(feed, torch.bfloat16)
    product = next(n for n in feed.graph.nodes if n.name in ("mm", "linear"))
    assert (product.args[0] is half) == (read == "half")
    assert read == "half" or read in product.args[0].name
    feed.graph.lint()


def test_what_is_kept_from_autocast_reads_its_cast():
    feed = _feed(
        lambda x, w: torch.mm(x.to(torch.bfloat16).float(), w), [(8, 8)] * 2, ["input", "parameter"]
    )
    read_uncast(feed, torch.bfloat16, {"mm"})
    (product,) = (node for node in feed.graph.nodes if node.name == "mm")
    assert product.args[0].meta["val"].dtype == torch.float32


class _Widening(nn.Module):
    """Brings what it multiplies to its weight's dtype, as T5's feed-forwards do."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        h = self.dropout(torch.relu(self.up(x)))
        return self.down(h.to(self.down.weight.dtype))


def test_a_cast_that_goes_is_not_missed():
    torch.manual_seed(0)
    module = _Widening()
    twin = copy.deepcopy(module)
    optimised = ingot.optimize(module)
    found = []
    for called in (optimised, twin):
        torch.manual_seed(1)
        x = torch.randn(6, 32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            result = called(x)
        result.float().square().sum().backward()
        found.append([result, x.grad, *(p.grad for p in called.parameters())])
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("where", ["result", "weight", "dropped"])
def test_what_may_be_written_before_backward_keeps_its_cast(where):
    def function(x, w):
        half = torch.mm(x, w).to(torch.bfloat16)
        weight = w.to(torch.bfloat16).float() if where == "weight" else w
        read = torch.dropout(half, 0.5, False) if where == "dropped" else half
        return torch.mm(read.float(), weight), half

    feed = _feed(function, [(8, 8)] * 2, ["input", "parameter"])
    before = len(feed.graph.nodes)
    read_uncast(feed, torch.bfloat16)
    assert len(feed.graph.nodes) == before - (where == "weight")  # of what nobody gets


class _Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.out = nn.Linear(4 * width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.out(self.down(nn.functional.gelu(self.up(self.norm(x)))).relu())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Casts of weights are written, of any size and on a CPU; gives what was multiplied into fp32,
    by its shape."""
    made = []

    def product(a, b):
        made.append((a.size(1), b.size(1)))
        return a.t().float() @ b.float()

    def cast_everywhere(feed, dtype, refused=()):
        for weight, users in autocast._weights(feed, refused, 1):
            autocast.write_cast(weight, dtype, users)

    monkeypatch.setattr(importing, "cast_weights", cast_everywhere)
    monkeypatch.setattr(widened, "transposed_product_in_fp32", product)
    monkeypatch.setattr(widened, "_is_on_a_gpu", lambda node: True)
    monkeypatch.setattr(widened, "_IS_OFFERED", True)
    return made


def _step(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = module(x)
    variables = [x, *(p for p in module.parameters() if p.requires_grad)]
    return result.detach(), list(torch.autograd.grad(result.square().sum(), variables))


def _stored_casts(module: nn.Module, at: int = 0) -> list[tuple[int, ...]]:
    """Shapes of the weights of which a region keeps the cast."""
    region = module._ingot.graphs[0].compiled.captured.regions[at]
    casts = {at for at, value in enumerate(region.graph["values"]) if value["op"] == "cast"}
    return [
        layout.shape
        for result, layout in zip(region.graph["results"], region.result_layouts)
        if result["value"] in casts and layout.shape[0] != BATCH
    ]


@pytest.mark.parametrize("frozen", [(), ("down",)])
def test_backward_reads_the_casts_and_gives_fp32(as_on_a_gpu, frozen):
    torch.manual_seed(0)
    module = _Block()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    optimised = ingot.optimize(copy.deepcopy(module))
    x = torch.randn(64, 32)
    wide = copy.deepcopy(module).double()(x.double())
    for _ in range(2):
        (expected, wanted), (result, found) = _step(module, x), _step(optimised, x)
        assert (result - wide).abs().max() <= 2 * (expected - wide).abs().max()
        for gradient, other in zip(found, wanted):
            assert gradient.dtype == torch.float32
            assert (gradient - other).norm() < 1e-2 * other.norm()
    shapes = {(128, 32), (32, 128), (32, 32)} - ({(32, 128)} if frozen else set())
    assert set(as_on_a_gpu) == shapes
    # Autocast keeps no cast of a frozen weight.
    assert set(_stored_casts(optimised)) == shapes
    report = optimised.ingot_report()
    assert "_to_copy" not in {item["what"] for item in report["operators_replaced"]}


def test_a_weight_whose_cast_backward_does_not_read_keeps_none(as_on_a_gpu):
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.ReLU())
    optimised = ingot.optimize(copy.deepcopy(module))
    with torch.autocast("cpu", torch.bfloat16):
        optimised(torch.randn(16, 32)).sum().backward()
    assert _stored_casts(optimised) == [(32, 64)]  # nothing has a gradient before the first


class _Sorted(nn.Module):
    """Two regions, and between them a product that is PyTorch's."""

    def __init__(self):
        super().__init__()
        self.first, self.alone, self.second = _Block(), nn.Linear(32, 32), _Block()

    def forward(self, x):
        return self.second(self.alone(self.first(x).sort(dim=1)[0]).sort(dim=1)[0])


def test_each_region_casts_its_own_weights(as_on_a_gpu):
    torch.manual_seed(0)
    module = _Sorted()
    optimised = ingot.optimize(copy.deepcopy(module))
    x = torch.randn(64, 32)
    (_, wanted), (_, found) = _step(module, x), _step(optimised, x)
    for gradient, other in zip(found, wanted):
        assert gradient.dtype == torch.float32
        assert (gradient - other).norm() < 3e-2 * other.norm()
    for at in range(2):
        assert set(_stored_casts(optimised, at)) == {(128, 32), (32, 128), (32, 32)}
    assert len(as_on_a_gpu) == 6
    steps = optimised._ingot.graphs[0].compiled.captured.steps
    assert [getattr(step, "target", None) for step in steps].count(aten.linear.default) == 1
