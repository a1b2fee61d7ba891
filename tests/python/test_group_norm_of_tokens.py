"""Group norms over samples whose channels are innermost in memory, as GPUs run them; here by the
CPU's kernels."""

import copy

import ingot
import pytest
import torch
from ingot.capture import cutting, gains, merged_axes, normalisations
from test_gradients import calls_of
from test_kept import kept_bytes
from torch import nn

# Beyond one and a half of eager's.
LEAST = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}


class Tokens(nn.Module):
    def __init__(self, channels, groups, order, affine):
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.norm = nn.GroupNorm(groups, channels, affine=affine)
        self.order = order
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        return self.norm(self.linear(x).permute(self.order))


@pytest.fixture(autouse=True)
def as_for_a_gpu(monkeypatch):
    make = cutting.Call
    monkeypatch.setattr(cutting, "Call", lambda *given: make(*given[:-1], "cuda"))


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups", "order"),
    [
        ((5, 6, 60), 4, (0, 2, 1)),
        ((3, 5, 4, 48), 6, (0, 3, 1, 2)),
        ((3, 5, 4, 48), 1, (0, 3, 2, 1)),
        ((3, 7, 48), 48, (0, 2, 1)),
    ],
)
def test_it_is_taken_and_right(shape, groups, order, affine, dtype):
    torch.manual_seed(0)
    module = Tokens(shape[-1], groups, order, affine).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    exact = copy.deepcopy(module).double()
    results = []
    for made in (ingot.optimize(copy.deepcopy(module)), module, exact):
        kind = next(made.parameters()).dtype
        given = x.detach().to(kind, copy=True).requires_grad_()
        result = made(given)
        torch.manual_seed(1)
        result.backward(torch.randn(result.shape, dtype=dtype).to(result.dtype))
        results.append((result, given.grad, *(p.grad for p in made.norm.parameters())))
        if made is not module and made is not exact:
            assert made.ingot_report()["unsupported"] == []
    assert results[0][0].stride() == results[1][0].stride()
    for found, eager, truth in zip(*results):
        assert error(found, truth) <= 1.5 * error(eager, truth) + LEAST[dtype]


@pytest.mark.parametrize(
    ("tokens", "parts", "offset", "dtype"),
    [
        (6, 1, 0.0, torch.float32),
        (300, 2, 100.0, torch.float32),
        (4096, 16, 0.0, torch.float32),
        (4096, 16, 0.0, torch.bfloat16),
        (641, 1, 100.0, torch.float32),
        (300, 2, 0.0, torch.float64),
    ],
)
def test_statistics_of_large_samples_are_taken_in_parts(tokens, parts, offset, dtype, monkeypatch):
    monkeypatch.setattr(normalisations, "_MOST_OF_A_BLOCK", 0)
    assert normalisations._parts_of(tokens) == parts
    torch.manual_seed(0)
    module = Tokens(24, 4, (0, 2, 1), True).to(dtype)
    nn.init.constant_(module.linear.bias, offset)
    x = torch.randn(3, tokens, 24, dtype=dtype)
    optimised, exact = ingot.optimize(copy.deepcopy(module)), copy.deepcopy(module).double()
    with torch.no_grad():
        found, eager, truth = optimised(x), module(x), exact(x.double())
    assert optimised.ingot_report()["unsupported"] == []
    assert error(found, truth) <= 1.5 * error(eager, truth) + LEAST[dtype]


class BetweenConvolutions(nn.Module):
    def __init__(self, dimensions):
        super().__init__()
        layer = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.first, self.norm = layer(8, 24, 1), nn.GroupNorm(4, 24)
        self.second = layer(24, 8, 3)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.second(nn.functional.silu(self.norm(self.first(x))))


def left_of(optimised) -> set[str]:
    return {item["what"] for item in optimised.ingot_report()["unsupported"]}


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_norm_between_convolutions_is_one_region_however_they_lie(dimensions, monkeypatch):
    for module in (normalisations, merged_axes):
        monkeypatch.setattr(module, "norms_tokens", lambda device_type: True)
    monkeypatch.setattr(normalisations, "_MOST_OF_A_BLOCK", 0)
    torch.manual_seed(0)
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[dimensions]
    module = BetweenConvolutions(dimensions).eval().to(memory_format=order)
    x = torch.randn(2, 8, *[6, 12, 9][:dimensions]).to(memory_format=order)
    optimised, exact = ingot.optimize(copy.deepcopy(module)), copy.deepcopy(module).double()
    with torch.no_grad(), pytest.warns(ingot.IngotWarning, match="PyTorch runs conv"):
        found, eager, truth = optimised(x), module(x), exact(x.double())
    assert left_of(optimised) == {f"conv{dimensions}d"}
    assert found.stride() == eager.stride()
    assert error(found, truth) <= 1.5 * error(eager, truth) + 1e-6


def graph_with(weight_order, reader):
    """silu of a tensor, unflattened, that is read by a convolution or returned, too."""
    graph = torch.fx.Graph()
    aten = torch.ops.aten
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    weight.meta["val"] = torch.empty(6, 4, 3, 3, device="meta").to(memory_format=weight_order)
    made = graph.call_function(aten.silu.default, (x,))
    made.meta["val"] = torch.empty(2, 4, 30, device="meta")
    whole = graph.call_function(aten.unflatten.int, (made, 2, [5, 6]))
    read = graph.call_function(aten.conv2d.default, (whole, weight))
    graph.output((read, whole) if reader == "returned" else read)
    return made


@pytest.mark.parametrize(
    ("weight_order", "reader", "may"),
    [
        (torch.channels_last, "convolution", True),
        (torch.contiguous_format, "convolution", False),
        (torch.channels_last, "returned", False),
    ],
)
def test_what_convolutions_turn_is_not_turned_back(weight_order, reader, may):
    from ingot.capture.layout import may_lie_channels_last

    assert may_lie_channels_last(graph_with(weight_order, reader)) is may


def test_what_is_turned_must_be_large(monkeypatch):
    made = graph_with(torch.contiguous_format, "convolution")
    graph = made.graph
    with graph.inserting_before(made):
        norm = graph.call_function(torch.ops.aten.group_norm.default, (made.args[0], 2))
    norm.args[0].meta["val"] = torch.empty(2, 5, 6, 4, device="meta").permute(0, 3, 1, 2)
    norm.meta["val"] = made.meta["val"]
    made.args = (norm,)
    monkeypatch.setattr(gains, "takes_everything", False)
    assert not gains.turns_too_little([norm, made])  # by one block a sample
    monkeypatch.setattr(normalisations, "_MOST_OF_A_BLOCK", 0)
    assert gains.turns_too_little([norm, made])
    monkeypatch.setattr(gains, "_LEAST_TURNED", 2 * 4 * 30 * 4)
    assert not gains.turns_too_little([norm, made])


class Between(Tokens):
    """Turned, normalised and turned back, between two products or in front of one."""

    def __init__(self, order, back, behind):
        super().__init__(48, 6, order, True)
        self.back, self.behind = back, behind

    def forward(self, x):
        x = self.linear(x) if self.behind else x
        return self.linear(self.norm(x.permute(self.order)).permute(self.back)).relu()


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    ("shape", "order", "back"),
    [
        ((5, 6, 48), (0, 2, 1), (0, 2, 1)),
        ((3, 5, 4, 48), (0, 3, 1, 2), (0, 2, 3, 1)),
    ],
)
def test_no_more_is_kept_than_eager_keeps(shape, order, back, behind, device_type, monkeypatch):
    if device_type == "cpu":
        monkeypatch.undo()
    module, x = Between(order, back, behind), torch.randn(shape, requires_grad=True)
    optimised = ingot.optimize(module)
    optimised(x).sum().backward()
    assert calls_of(optimised)
    assert kept_bytes(optimised, x) <= kept_bytes(module, x)
