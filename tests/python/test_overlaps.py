"""Inputs and buffers that share memory, of which a forward writes one."""

from __future__ import annotations

import copy
import random

import ingot
import pytest
import torch
from ingot.live.overlaps import _overlap
from live import compare, regions_run
from torch import nn

quiet = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Two(nn.Module):
    """Writes the one, and reads the other before and after."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        before = torch.tanh(y)
        x.add_(1)
        return torch.relu(self.linear(y)) + before, x * 2


class Cache(nn.Module):
    """Views of one buffer, as the layers of a cache."""

    def __init__(self, write, read):
        super().__init__()
        self.linear, self.write, self.read = nn.Linear(4, 4), write, read
        self.register_buffer("cache", torch.zeros(2, 4))
        self.register_buffer("keys", self.cache[0])
        self.register_buffer("values", self.cache[1])

    def forward(self, x):
        h = torch.relu(self.linear(x))
        getattr(self, self.write).add_(h.detach().mean(0))
        return torch.tanh(self.linear(h)) + getattr(self, self.read).sum()


class Flat(Cache):
    """Without the buffer that the two are views of."""

    def __init__(self):
        super().__init__("keys", "values")
        del self.cache


def _numbers():
    return torch.arange(40.0).view(10, 4) / 40


def _whole_and_view():
    x = _numbers()
    return x[:6], x.view(10, 4)[:6]


def _parts():
    x = _numbers()
    return x[:6], x[4:]


def _beside():
    x = _numbers()
    return x[:5], x[5:]


def _columns():
    x = torch.arange(40.0).view(5, 8) / 40
    return x[:, :4], x[:, 4:]


def _apart():
    return _numbers()[:6], _numbers()[:6]


@quiet
@pytest.mark.parametrize("pair", [_whole_and_view, _parts])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_arguments_that_overlap_are_eagers(pair, turned, gradients):
    """At the first call, and at one behind those that do not."""

    def given(make):
        x, y = make()
        return (y, x) if turned else (x, y)

    for calls in ([pair], [_apart, pair, _apart, pair]):
        module = Two()
        found, expected = [], []
        torch._dynamo.reset()
        for run, told in ((copy.deepcopy(module), expected), (ingot.optimize(module), found)):
            for make in calls:
                args = given(make)
                with torch.set_grad_enabled(gradients):
                    results = run(*args)
                if gradients:
                    (results[0].sum() + results[1].sum()).backward()
                told.append([t.detach().clone() for t in (*results, *args)])
            told.append([p.grad for p in run.parameters() if gradients])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@quiet
@pytest.mark.parametrize("pair", [_beside, _columns, _apart])
def test_parts_that_do_not_overlap_are_ingots(pair):
    module = Two()
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    with torch.no_grad():
        for _ in range(2):
            args, others = pair(), pair()
            with regions_run() as ran:
                found = optimised(*args)
            torch.testing.assert_close(found, twin(*others), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(args, others)
            assert ran


@quiet
@pytest.mark.parametrize("backend", [False, True])
@pytest.mark.parametrize(
    ("write", "read"),
    [("keys", "cache"), ("cache", "keys"), ("values", "cache"), ("cache", "values")],
)
def test_buffers_that_are_views_of_another_are_eagers(write, read, backend):
    module = Cache(write, read)
    twin = copy.deepcopy(module)
    run = torch.compile(module, backend="ingot") if backend else ingot.optimize(module)
    for _ in range(2):
        x = torch.randn(3, 4)
        found, expected = run(x), twin(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dict(module.named_buffers()), dict(twin.named_buffers()))
        found.sum().backward()
        expected.sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, twin.linear.weight.grad)


class Tokens(nn.Module):
    """Counts in one element of a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))
        self.register_buffer("first", self.counts[0])

    def forward(self, x):
        self.first.add_(1)
        return torch.relu(self.linear(x)) * self.counts.sum()


@quiet
def test_a_number_that_is_part_of_a_buffer_is_eagers():
    module = Tokens()
    twin = copy.deepcopy(module)
    twin.first = twin.counts[0]
    optimised = ingot.optimize(module)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(optimised(x), twin(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.counts, twin.counts)


@quiet
def test_buffers_that_lie_side_by_side_are_ingots():
    module = Flat()
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    with torch.no_grad():
        x = torch.randn(3, 4)
        with regions_run() as ran:
            torch.testing.assert_close(optimised(x), twin(x), rtol=1e-5, atol=1e-5)
        assert ran
        optimised.keys = optimised.values  # no graph of TorchDynamo's is another for it
        twin.keys = twin.values
        torch.testing.assert_close(optimised(x), twin(x), rtol=1e-5, atol=1e-5)
        optimised.keys, twin.keys = optimised.values[:], twin.values[:]
        torch.testing.assert_close(optimised(x), twin(x), rtol=1e-5, atol=1e-5)


class Broken(nn.Module):
    """A view, and what it is of, on the way across a break of the graph."""

    def __init__(self, unseen):
        super().__init__()
        self.first, self.last, self.unseen = nn.Linear(4, 4), nn.Linear(4, 4), unseen

    def forward(self, x):
        h = self.first(x)
        part = h[:2]
        if self.unseen:
            with torch.no_grad():
                h.clamp_(-0.1, 0.1)
        else:
            torch._dynamo.graph_break()
        part.mul_(2)
        return torch.tanh(self.last(h)) * 2


@quiet
@pytest.mark.parametrize("unseen", [False, True])
def test_views_across_a_break_of_the_graph(unseen):
    def script(m):
        for _ in range(2):
            yield m(torch.randn(5, 4))

    compare(lambda: Broken(unseen), script, taken=False)


@pytest.mark.parametrize("calls", [[_parts], [_apart, _parts, _parts]])
def test_it_is_said_once(calls):
    optimised = ingot.optimize(Two())
    with torch.no_grad(), pytest.warns(ingot.IngotWarning) as said:
        for make in calls:
            optimised(*make())
    told = [str(each.message) for each in said if "shares memory" in str(each.message)]
    assert len(told) == 1


def test_which_parts_of_one_tensor_overlap():
    """Never said not to where they do, and said of what is cut along one dimension."""
    drawn = random.Random(0)
    base = torch.zeros(256)
    places = torch.arange(256)

    def part():
        dims = drawn.randint(0, 3)
        while True:
            size = [drawn.randint(0, 5) for _ in range(dims)]
            stride = [drawn.choice((0, 1, 2, 3, 4, 8, 16, 32)) for _ in range(dims)]
            offset = drawn.randint(0, 60)
            if offset + sum((n - 1) * s for n, s in zip(size, stride) if n) < 256:
                return size, stride, offset

    apart = 0
    for _ in range(3000):
        a, b = part(), part()
        truth = set(places.as_strided(*a).flatten().tolist()) & set(
            places.as_strided(*b).flatten().tolist()
        )
        found = _overlap(base.as_strided(*a), base.as_strided(*b))
        assert found or not truth, (a, b)
        apart += not found
    assert apart > 500
    grid = base.view(4, 8, 8)
    for dim in range(3):
        half = grid.shape[dim] // 2
        one, other = grid.narrow(dim, 0, half), grid.narrow(dim, half, half)
        assert not _overlap(one, other) and not _overlap(other, one)
        assert _overlap(grid, other) and _overlap(other, grid)
