"""Which dimensions the importer merges, and that results stay PyTorch's whatever it decides."""

import copy
import warnings

import ingot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ingot.model_capture import capture
from ingot.runtime.layouts import LeafLayout
from ingot.runtime.library import IngotError
from torch import nn
from torch.nn import functional as F

warnings.simplefilter("ignore", ingot.IngotWarning)


class Behind(nn.Module):
    def __init__(self, behind, dimensions: int = 3):
        super().__init__()
        layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.convolution, self.behind = layer(3, 8, 3, padding=1), behind
        self.scale = nn.Parameter(torch.randn(8, *[1] * dimensions))

    def forward(self, x):
        return self.behind(self.convolution(x), self.scale)


SPACE = (5, 6, 7)


def shapes_of(behind, dimensions: int = 3) -> list[list]:
    """Of the regions' inputs that have the batch."""
    x = torch.randn(2, 3, *SPACE[:dimensions])
    with torch.no_grad():
        captured = capture(Behind(behind, dimensions).eval(), [x])
    values = [value for region in captured.regions for value in region.graph["values"]]
    return [v["shape"] for v in values if v["op"] == "input" and v["shape"][0] == "B"]


@pytest.mark.parametrize(
    "behind, shape",
    [
        (lambda y, s: F.gelu(torch.tanh(y)), ["B", 1, 1, 8 * 210]),
        (lambda y, s: torch.tanh(y * s), ["B", 8, 1, 210]),
        (lambda y, s: torch.tanh(torch.softmax(y, 1)), ["B", 8, 1, 210]),
        (lambda y, s: torch.tanh(y.mean((2, 3, 4))), ["B", 8, 1, 210]),
        (lambda y, s: torch.tanh(y.amax(2)), ["B", 8, 5, 42]),
        (lambda y, s: torch.tanh(y).sum(-1), ["B", 1, 240, 7]),
        (lambda y, s: torch.tanh(y.max(dim=1, keepdim=True)[0]), ["B", 8, 1, 210]),
    ],
    ids="nothing scale softmax mean depth width channels".split(),
)
def test_what_operators_do_not_tell_apart_is_one_axis(behind, shape):
    (found,) = shapes_of(behind)
    assert [e for e in found if e != 1] == [e for e in shape if e != 1]


def test_what_needs_five_axes_is_pytorchs():
    assert shapes_of(lambda y, s: torch.softmax(torch.softmax(y, 1), 3).amax(2) * 2) == []


def test_a_transposition_keeps_two_dimensional_space_apart():
    (found,) = shapes_of(lambda y, s: torch.tanh(y.permute(0, 2, 3, 1)) * 2, 2)
    assert [e for e in found if e != 1] == ["B", 5, 6, 8]


def test_an_operator_alone_is_left_as_it_is():
    """A norm by itself is PyTorch's, with a format that it knows."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8)).eval()
    with torch.no_grad():
        captured = capture(model, [torch.randn(2, 3, 9, 9)])
    assert [step.what for step in captured.steps] == ["conv2d", "max_pool2d", "batch_norm"]


def test_with_gradients_nothing_is_merged():
    x = torch.randn(2, 3, *SPACE)
    captured = capture(Behind(lambda y, s: torch.tanh(y * s)).train(), [x], gradients=True)
    assert [step.what for step in captured.steps] == ["conv3d", "mul", "tanh"]


def test_dimensions_that_memory_tells_apart_are_no_axis():
    layout = LeafLayout((0, 1, None, (2, 3)))
    x = torch.randn(2, 8, 5, 6)
    assert layout.sizes_and_strides(x) == ([2, 8, 1, 30], [240, 30, 0, 1])
    innermost = x.contiguous(memory_format=torch.channels_last)
    assert layout.sizes_and_strides(innermost) == ([2, 8, 1, 30], [240, 1, 0, 8])
    with pytest.raises(IngotError, match="do not lie in memory as one"):
        layout.sizes_and_strides(x.transpose(2, 3))


POINTWISE = (
    torch.tanh,
    F.hardswish,
    lambda y: torch.clamp(y, -0.5, 0.5),
    lambda y: y * 1.5 + y,
    lambda y: y + torch.linspace(0, 1, y.shape[-1]),
    lambda y: y * y.mean(-1, keepdim=True),
)
WITH_DIMENSION = (
    lambda y, d: torch.softmax(y, d),
    lambda y, d: y - y.amax(d, keepdim=True),
    lambda y, d: y.sum(d),
    lambda y, d: y.min(dim=d)[0],
    lambda y, d: torch.logsumexp(y, d, keepdim=True) + y,
)


@st.composite
def chains(draw):
    dimensions = draw(st.integers(2, 3))
    rank, steps = dimensions + 2, []
    for _ in range(draw(st.integers(2, 5))):
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(range(len(POINTWISE)))), None))
        else:
            chosen = draw(st.sampled_from(range(len(WITH_DIMENSION))))
            steps.append((chosen, draw(st.integers(1, rank - 1))))
            rank -= chosen in (2, 3)
        if rank < 3:
            break
    return dimensions, steps, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(chains())
@pytest.mark.thorough
def test_any_chain_behind_a_convolution_is_pytorchs(chain):
    dimensions, steps, innermost = chain

    def behind(y, scale):
        y = y * scale
        for chosen, dim in steps:
            y = POINTWISE[chosen](y) if dim is None else WITH_DIMENSION[chosen](y, dim)
        return y

    torch.manual_seed(5)
    module, x = Behind(behind, dimensions).eval(), torch.randn(3, 3, *SPACE[:dimensions])
    if innermost:
        order = {2: torch.channels_last, 3: torch.channels_last_3d}[dimensions]
        module.convolution.to(memory_format=order)
        x = x.contiguous(memory_format=order)
    torch._dynamo.reset()
    exact = copy.deepcopy(module).double()
    with torch.no_grad():
        truth, expected = exact(x.double()), module(x)
        found = ingot.optimize(copy.deepcopy(module))(x)
    size = truth.norm() + 1e-30
    error = [((y.double() - truth).norm() / size).item() for y in (found, expected)]
    assert found.shape == expected.shape
    assert error[0] <= max(4 * error[1], 2e-6)
    strides = [[s for s, n in zip(y.stride(), y.shape) if n > 1] for y in (found, expected)]
    assert strides[0] == strides[1]


class Ordered(nn.Module):
    """A chain that says how its four dimensions are to lie, behind a product or a convolution."""

    def __init__(self, of_planes):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3) if of_planes else nn.Linear(9, 16)

    def forward(self, x):
        y = torch.relu(self.first(x)).contiguous(memory_format=torch.channels_last)
        z = y.to(torch.float32, copy=True, memory_format=torch.channels_last)
        return torch.tanh(y) * 0.5 + z.clone(memory_format=torch.channels_last)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("of_planes", [True, False])
def test_an_order_of_four_dimensions_is_kept(of_planes, gradients):
    torch.manual_seed(0)
    module, x = Ordered(of_planes), torch.randn(3, 4, 7, 9)
    optimised = ingot.optimize(copy.deepcopy(module))
    with torch.set_grad_enabled(gradients):
        found, expected = optimised(x), module(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    if gradients:
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(optimised.first.weight.grad, module.first.weight.grad)


class Spread(nn.Module):
    """A chain of operands that are spread over some dimensions of [2, *sizes]."""

    def __init__(self, sizes, spread, order):
        super().__init__()
        self.order = order
        self.operands = nn.ParameterList(
            torch.randn(*(1 if along else size for size, along in zip(sizes, each)))
            for each in spread
        )

    def forward(self, x):
        y = torch.tanh(x.permute(0, *(1 + at for at in self.order)))
        for operand in self.operands:
            y = torch.relu(y * operand + 0.5)
        return y.sum(-1), y


@pytest.mark.thorough
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_extents_of_one_hide_nothing(data):
    rank = data.draw(st.integers(3, 4))
    sizes = data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 8]), min_size=rank, max_size=rank))
    flags = st.lists(st.booleans(), min_size=rank, max_size=rank)
    spread = data.draw(st.lists(flags, min_size=1, max_size=3))
    order = data.draw(st.permutations(range(rank)))
    # Slices have gaps between their dimensions.
    own = [sizes[order.index(at)] for at in range(rank)]
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 2]), min_size=rank, max_size=rank))
    x = torch.randn(2, *(size + gap for size, gap in zip(own, gaps)))
    x = x[(slice(None), *map(slice, own))]
    model = Spread(sizes, spread, order)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = ingot.optimize(copy.deepcopy(model))(x), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rotated_heads_of_one_token():
    """As language models decode: four heads of 16 numbers share a table of 16."""

    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(64, 64)

        def forward(self, x, table):
            q = self.query(x).view(x.shape[0], -1, 4, 16).transpose(1, 2)
            turned = torch.cat((-q[..., 8:], q[..., :8]), -1)
            return q * table.cos().unsqueeze(1) + turned * table.sin().unsqueeze(1)

    model = Rotated()
    made = ingot.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for tokens in (9, 1, 1):
            x, table = torch.randn(2, tokens, 64), torch.randn(1, tokens, 16)
            torch.testing.assert_close(made(x, table), model(x, table), rtol=1e-4, atol=1e-5)
