"""Programs that once gave silently other numbers than PyTorch, most of them where two extents that
mean different things are equal; and random ones of the kind.

INGOT_SQUARES=2000 runs that many other ones than the few of every run.
"""

import os
import random

import ingot
import pytest
import selection
import torch
from live import compare
from random_agreement import agree
from square_programs import difference, draw_program
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
COUNT = int(os.environ.get("INGOT_SQUARES", "0"))
N = 4


class Square(nn.Module):
    """Layers and parameters of one size, for a function of them and of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear, self.other = nn.Linear(N, N), nn.Linear(N, N)
        self.vector, self.matrix = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(N, N))
        self.cube = nn.Parameter(torch.randn(N, N, N))
        self.batch_norm = nn.BatchNorm1d(N)
        self.image_norm = nn.BatchNorm2d(N)
        self.instance_norm = nn.InstanceNorm2d(N, track_running_stats=True)
        self.register_buffer("ones", torch.ones(N))
        self.convolution = nn.Conv2d(N, N, 3, padding=1)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _written(m, x):
    h = m.linear(x) + 0
    h[:, 0] = x[:, 0]
    h[..., 1:] *= 2
    h[:, :, 2] = m.vector
    return torch.tanh(h) * 2


def _over_all(m, x):
    return m.linear(x) + F.layer_norm(m.other(m.matrix), (N, N), m.matrix, m.matrix)


def _widened_batch_norm(m, x, y):
    return m.batch_norm(m.linear(x).unsqueeze(-1).expand(-1, -1, 3)) * y


def _widened_instance_norm(m, x, y):
    return m.instance_norm(m.linear(x).unsqueeze(-1).expand(-1, -1, -1, 3)) * y


def _unread_instance_norm(m, x):
    h = m.linear(x)
    m.instance_norm(h)
    return h * 2


def _unread_batch_norm(m, x):
    m.image_norm(x.relu() * 2)
    return x.sin() * 2 + m.linear(x)


def _in_other_dtypes(m, x):
    h = 1e4 * m.linear(x).sigmoid() + 1e4
    narrow = h.half()  # a sum of which is infinite in 16 bits
    wide = torch.linalg.vector_norm(h, dim=-1, dtype=torch.float64)
    return narrow.sum(-1, dtype=torch.float32), narrow.mean(0, dtype=torch.float32), wide * 2


def _of_single_numbers(m, x):
    h = m.linear(x).tanh()
    y = h.sum().transpose(0, -1).softmax(0).sum(0).amax(-1) + h.mean().max(0)[0]
    return y * 2, h * y, h.mean().argmax(0)


def _attention_of_planes(m, x):
    y = m.convolution(x).flatten(2)
    return torch.softmax(y.transpose(1, 2) @ y, -1)


# What is computed, and of which inputs.
PROGRAMS = {
    "each row with every matrix of the batch": (
        lambda m, x, y: torch.tanh(m.linear(x) @ y) * 2,
        [("B", N), ("B", N, N)],
    ),
    "a difference the other way round, scaled": (
        lambda m, x: torch.rsub(m.linear(x), x, alpha=2) * 2,
        [("B", N)],
    ),
    "a quotient rounded down": (
        lambda m, x: torch.div(m.linear(x) * 0 + 1, 0.1 + 0 * x, rounding_mode="floor") + x,
        [("B", N)],
    ),
    "a norm's weight turned round": (
        lambda m, x: F.layer_norm(m.linear(x), (N, N), (m.matrix * 2).t(), m.matrix),
        [("B", N, N)],
    ),
    "all dimensions turned round": (
        lambda m, x: m.linear(x) * (m.cube * 2).T + m.cube.T,
        [("B", N, N, N)],
    ),
    "a norm over all dimensions": (_over_all, [("B", N, N)]),
    "a batch norm of an expanded tensor": (_widened_batch_norm, [("B", N), ("B", N, 3)]),
    "an instance norm of an expanded tensor": (
        _widened_instance_norm,
        [("B", N, N), ("B", N, N, 3)],
    ),
    "products of unlike leading axes": (
        lambda m, x, y: torch.tanh(m.linear(x) + m.other(y)),
        [("B", 1, N, N), ("B", 3, N, N)],
    ),
    "products of four and of five axes": (
        lambda m, x, y: torch.tanh(m.linear(x) + m.other(y)),
        [(N, N, N, N), (N, N, N, N, N)],
    ),
    "attention of a convolution's planes": (_attention_of_planes, [("B", N, N, N)]),
    "an instance norm that nothing reads": (_unread_instance_norm, [("B", N, N, N)]),
    "a batch norm of images that nothing reads": (_unread_batch_norm, [("B", N, N, N)]),
    "sums in another dtype": (_in_other_dtypes, [("B", N)]),
    "a step to the other end": (
        lambda m, x: torch.lerp(m.linear(x) * 1e6, x, 1.0) + torch.lerp(x * 1e6, x, m.ones),
        [("B", N)],
    ),
    "a dimension between two that are merged": (
        lambda m, x: (m.linear(x).mean(0).flatten() * m.vector[:, None]).tanh(),
        [("B", N, N)],
    ),
    "single numbers with a dimension": (_of_single_numbers, [("B", N, N, N)]),
    "parts written in place": (_written, [("B", N, N)]),
}


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("name", selection.every(2, PROGRAMS))
def test_results_gradients_and_state_are_pytorchs(name, caplog):
    function, shapes = PROGRAMS[name]
    torch._dynamo.reset()

    def script(m):
        for batch in (N, 3):
            sizes = [[batch if size == "B" else size for size in shape] for shape in shapes]
            yield m(*(torch.randn(s, requires_grad=torch.is_grad_enabled()) for s in sizes))

    # Before norms, gradients of biases are sums that cancel.
    compare(lambda: Square(function), script, tolerance=3e-4)
    assert "failed" not in caplog.text


@pytest.mark.parametrize("gradients", [True, False])
def test_a_batch_norm_of_a_transposed_tensor_lies_as_pytorchs(gradients):
    def function(m, x):
        return m.batch_norm(m.linear(x).transpose(1, 2)).transpose(1, 2) + m.linear(x)

    model, x = Square(function), torch.randn(3, N, N)
    with torch.set_grad_enabled(gradients):
        assert ingot.optimize(model)(x).stride() == model(x).stride()


def test_a_view_of_a_norm_of_turned_rows_has_a_backward_of_regions(caplog):
    """By its statistics, a norm would lie as its operand does: nothing to take a view of."""

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(128, 32)

        def forward(self, x):
            return torch.relu(self.linear(self.norm(x).view(-1, 128)))

    def script(m):
        for batch in (4, 3):
            yield m(torch.randn(batch, 8, 16).transpose(1, 2).requires_grad_())

    compare(Viewed, script)
    assert "failed" not in caplog.text


class _Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "reduced",
    [
        lambda x: x.softmax(0),
        lambda x: torch.amax(x, -1),
        lambda x: x.logsumexp(0) + x.max(0).values,
        lambda x: x.mean(0) * x,
    ],
)
def test_a_single_number_has_a_dimension_to_reduce(reduced, caplog):
    def function(m, x):
        h = F.gelu(m.linear(x))
        return h + reduced(h.sum())

    torch._dynamo.reset()
    compare(lambda: Square(function), lambda m: [m(torch.randn(N, N, requires_grad=True))])
    with torch.no_grad():
        x = torch.tensor(2.0)
        assert torch.equal(ingot.optimize(_Applied(reduced))(x), reduced(x))
    assert not caplog.records


def test_a_few_random_programs_of_equal_extents():
    agree(range(6, 12), draw_program, difference)


@pytest.mark.thorough
@pytest.mark.timeout(300 + 10 * COUNT)
def test_random_programs_of_equal_extents():
    seeds = random.sample(range(10**6, 10**9), COUNT) if COUNT else range(100, 164)
    agree(seeds, draw_program, difference)


def test_a_product_of_all_three_is_what_overflows_in_addcmul():
    def function(m, x):
        y = m.linear(x) * 0 + 1.9e19
        return torch.addcmul(y, y, y, value=-0.5) * 1

    model = Square(function)
    x = torch.randn(3, N)
    assert torch.equal(ingot.optimize(model)(x), model(x))
