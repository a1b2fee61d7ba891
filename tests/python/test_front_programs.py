"""Random programs, and what they have found: modules with state, branches and configurations that
change between the calls, through Ingot against PyTorch alone.

INGOT_PROGRAMS=2000 runs that many other ones than the few of every run.
"""

from __future__ import annotations

import os
from functools import partial

import hypothesis
import ingot
import pytest
import torch
from hypothesis import strategies as st
from ingot.live import products
from live import compare, regions_run, x
from program_runs import difference
from programs import draw_program
from random_agreement import by_compile, by_optimize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._vmap_internals import _vmap
from torch.nn import functional as F

COUNT = int(os.environ.get("INGOT_PROGRAMS", "25"))

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


@pytest.mark.thorough
@pytest.mark.timeout(300 + 10 * COUNT)
def test_random_programs():
    taken = []

    @hypothesis.settings(
        max_examples=COUNT,
        derandomize="INGOT_PROGRAMS" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        st.randoms(use_true_random=False), st.sampled_from([by_optimize, by_optimize, by_compile])
    )
    def agrees(rng, wrap):
        program = draw_program(rng)
        with regions_run() as ran:
            found = difference(program, wrap)
        taken.append(bool(ran))
        assert found is None, f"{wrap.__name__}: {found}\n{program}"

    agrees()
    assert sum(taken) > len(taken) / 2


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 6)


def _twice(m, fed, loss):
    """First and second derivatives of a loss by inputs and parameters."""
    wanted = [fed, *m.parameters()]
    result = m(fed)
    first = torch.autograd.grad(loss(result), wanted, create_graph=True, allow_unused=True)
    needing = [g.square().sum() for g in first if g is not None and g.requires_grad]
    second = torch.autograd.grad(loss(result) + sum(needing), wanted, allow_unused=True)
    return [torch.zeros(()) if g is None else g.detach() for g in (*first, *second)]


def test_a_second_derivative_where_one_operand_is_computed_from_another():
    class Model(Two):
        def forward(self, x):
            h = torch.tanh(self.a(x).cumsum(1))
            return (h.transpose(1, 2) @ h * 0.1).amax(2)

    def script(m):
        fed = torch.randn(4, 5, 8, requires_grad=True)
        yield _twice(m, fed, lambda y: y.square().sum())

    compare(Model, script, gradients=(True,), tolerance=1e-4)


def test_a_second_derivative_of_what_leaves_a_parameter_unread():
    class Model(Two):
        def forward(self, x):
            unread = self.a(x)
            return (x * 2).sum() + self.b(x).tanh().sum() + unread.shape[0]

    def script(m):
        yield _twice(m, torch.randn(3, 8, requires_grad=True), lambda y: y.square())

    compare(Model, script, gradients=(True,), tolerance=1e-4)


def test_a_second_derivative_beside_state_that_was_replaced():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.state = torch.ones(1)

        def forward(self, x):
            y = torch.tanh(self.a(x)) * 2
            self.state = y.mean().detach() + 0.5 * self.state
            return y

    def script(m):
        for _ in range(2):
            fed = torch.randn(3, 8, requires_grad=True)
            yield _twice(m, fed, lambda y: y.square().sum())
        yield m.state

    compare(Model, script, gradients=(True,), tolerance=1e-4)


def test_a_second_derivative_of_a_product_with_an_expanded_weight():
    def make():
        linear = nn.Linear(8, 8, bias=False)
        return nn.Sequential(linear, nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh())

    def script(m):
        fed = torch.randn(1, 5, 8).expand(17, 5, 8).requires_grad_()
        yield _twice(m, fed, lambda y: y.square().sum())

    compare(make, script, gradients=(True,), tolerance=1e-3)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_buffer_that_counts_stays_the_same_tensor(mode):
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            y = torch.relu(self.a(x)) * 2 / (self.calls + 1)
            self.calls += 1
            return y

    def script(m):
        before = m.calls
        with mode():
            yield m(x())
        yield m(x())
        yield m.calls is before, m.calls.is_inference(), before.clone()

    compare(Model, script, gradients=(False,))


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "beside a linear"])
def test_results_lie_in_memory_as_pytorchs(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(6, 4)

        def forward(self, x):
            return torch.relu(x) * 2 + 1, torch.tanh(self.l(x)) if "linear" in kind else None

    fed = torch.randn(4, 6, 6, 6).contiguous(memory_format=torch.channels_last)
    if kind == "transposed":
        fed = torch.randn(6, 5).t()
    model = Model()
    with regions_run() as ran:
        found, expected = ingot.optimize(model)(fed)[0], model(fed)[0]
    assert ran and found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["dead", "detached", "whole numbers"])
def test_hooks_of_weights_without_a_gradient_are_not_called(kind):
    class Model(Two):
        def forward(self, x):
            a, b = torch.tanh(self.a(x)), F.log_softmax(self.b(x), 1) * 2
            if kind == "detached":
                b = b + a.detach()
            return (b, a.argmax(-1)) if kind == "whole numbers" else (b, None)

    seen = []

    def script(m):
        m.a.weight.register_hook(seen.append)
        yield m(x())[0]

    compare(Model, script, gradients=(True,))
    assert not seen


def test_results_that_no_loss_depends_on_give_no_gradients():
    class Model(Two):
        def forward(self, x):
            return torch.tanh(self.a(x)) * 2, torch.tanh(self.b(x)) * 2, self.b(x).argmax(-1)

    def script(m):
        m(x())[1].sum().backward()
        yield [p.grad is None for p in m.parameters()]
        first = torch.autograd.grad(m(x())[1].sum(), m.b.weight, create_graph=True)
        first[0].square().sum().backward()
        yield [p.grad is None for p in m.parameters()]
        yield m(x())[0]

    compare(Model, script, gradients=(True,))


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1), (0, 1, 2), (3,)])
def test_results_that_no_loss_depends_on_make_no_gradient_nan(needed):
    """The derivative of a deviation is infinite where it is zero."""

    class Model(Two):
        def forward(self, x):
            h = self.a(x)
            left, right = torch.tanh(h).chunk(2, dim=-1)
            return left * 2, right * 2, (h * 0).square().mean(-1).sqrt(), h.argmax(-1), h * 3

    def script(m):
        for batch in (4, 4, 2):
            given = torch.randn(batch, 8, requires_grad=True)
            results = m(given)
            sum(results[at if at < 3 else 4].square().sum() for at in needed).backward()
            yield given.grad, [p.grad for p in m.a.parameters()]
            yield [p.grad is None for p in m.b.parameters()]

    compare(Model, script, gradients=(True,))


def test_results_that_share_memory_where_leading_axes_are_merged():
    class Model(Two):
        def forward(self, x):
            y = self.a(x)
            return y, y.detach(), torch.tanh(self.b(x)) * 2

    def script(m):
        y, same, z = m(torch.randn(2, 4, 3, 8))
        yield y, same, z, y.data_ptr() == same.data_ptr()

    compare(Model, script)


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class ThroughConjugates(Square):
    def forward(self, x):
        y = torch.tanh(self.a(x)) * 2
        return torch.tanh(self.b(torch.complex(y, y * 2).conj().imag)) * 2


def test_negated_views_inside_a_forward_and_for_gradients():
    """The memory of `.conj().imag` holds the numbers with the other sign."""

    def script(m):
        for batch in (4, 4, 2):
            yield m(x(batch))
            if torch.is_grad_enabled():
                given = torch.randn(batch, 8, dtype=torch.complex64).conj().imag
                assert given.is_neg()
                y = m(x(batch))
                yield torch.autograd.grad(y, list(m.parameters()), given, create_graph=True)
                yield torch.autograd.grad(y, list(m.parameters()), given, retain_graph=True)
                yield torch.autograd.grad(y, list(m.parameters()), -given, retain_graph=True)

    compare(ThroughConjugates, script)


def test_gradients_that_have_no_memory():
    def script(m):
        leaves, zeros = list(m.parameters()), torch._efficientzerotensor((4, 8))
        for given in (zeros, torch.ones(4, 8), zeros):
            y = m(x(4))
            yield torch.autograd.grad(y, leaves, given, retain_graph=True)
            yield torch.autograd.grad(y, leaves, given, create_graph=True)

    compare(ThroughConjugates, script, gradients=(True,), tolerance=3e-4)


@pytest.mark.parametrize("norm", [nn.Identity, nn.LayerNorm, nn.BatchNorm1d])
def test_gradients_of_many_directions_at_once(norm):
    """Of torch.vmap's tensors, which have no memory of their own."""

    class Model(Square):
        def __init__(self):
            super().__init__()
            self.norm = norm(8)

        def forward(self, x):
            y = torch.tanh(self.norm(self.a(x))) * 2
            return torch.relu(y), torch.tanh(self.b(y)) * 2

    def script(m):
        for batch in (4, 3):
            fed = x(batch).requires_grad_()
            leaves, directions = [fed, *m.a.parameters()], torch.randn(5, batch, 8)
            first, last = m(fed)
            for results, given in (
                ([first], [directions]),
                ([first, last], [directions, 2 * directions]),
                ([first], [directions]),
            ):
                yield torch.autograd.grad(
                    results, leaves, given, retain_graph=True, is_grads_batched=True
                )
            one = partial(torch.autograd.grad, last, leaves, retain_graph=True)
            yield torch.vmap(one)(directions)
            yield torch.autograd.functional.jacobian(m, fed, vectorize=True)
            yield torch.autograd.grad((first * last).sum(), leaves)

    compare(Model, script, gradients=(True,))


def test_gradients_of_many_directions_through_an_encoder():
    """Its derivative reads sizes of the batch and of the length."""

    def script(m):
        for batch in (2, 3):
            fed = torch.randn(batch, 3, 8, requires_grad=True)
            directions = torch.randn(5, batch, 3, 8)
            leaves = [fed, *m.parameters()]
            y = m(fed)
            yield torch.autograd.grad(y, leaves, directions, is_grads_batched=True)

    def make():
        return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))

    compare(make, script, gradients=(True,))


def test_products_of_many_directions_at_once_are_pytorchs():
    def one(direction, weight):
        found.append(products.pays(direction, weight))
        return direction

    found: list[bool] = []
    with FakeTensorMode():  # of a GPU's tensors
        directions = torch.empty(3, 1024, 1024, device="cuda")
        one(directions[0], directions[1])
        _vmap(one, in_dims=(0, None))(directions, directions[1])
    assert found == [True, False]
