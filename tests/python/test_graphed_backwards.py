"""Backward passes of calls that are recorded and replayed, as test_graphed_calls.py has them: of
some results, twice, of calls that wait, of what was written or has moved meanwhile."""

from __future__ import annotations

import contextlib

import pytest
import torch
from host_graphs import Block, Counts, HostGraphs, TwoResults, host_graphs, pair, same, same_modules  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("host_graphs")


def test_gradients_of_earlier_calls_keep_their_values_and_add_up():
    ours, twin = pair(Block())
    for _ in range(8):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module(x).sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_two_forwards_before_a_backward():
    ours, twin = pair(Block())
    for _ in range(8):
        x, y = torch.randn(24, 16), torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            first, second = module(x), module(y)
            (first.square().sum() + second.sum()).backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_a_forward_whose_result_is_dropped():
    ours, twin = pair(Block())
    for _ in range(8):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            module(x)
            module(x).sum().backward()
        same_modules(ours, twin)


@pytest.mark.parametrize("replayed", [False, True])
def test_backward_twice(replayed):
    ours, twin = pair(Block(dropout=0.5))
    for step in range(7):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            torch.manual_seed(step)
            result = module(x)
            result.sum().backward(retain_graph=step > 4 or replayed)
            if step > 4 or replayed:
                result.square().sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches
    with pytest.raises(RuntimeError, match="second time"):
        result = ours(x)
        result.sum().backward()
        result.sum().backward()


def test_second_derivatives():
    ours, twin = pair(Block())
    for step in range(7):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            y = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(module(y).square().sum(), y, create_graph=step > 4)
            (slope.square().sum() + 0 * module(y).sum()).backward() if step > 4 else None
        same_modules(ours, twin)
    assert HostGraphs.launches


def test_the_input_has_a_gradient():
    ours, twin = pair(Block())
    for _ in range(7):
        x = torch.randn(24, 16)
        found = []
        for module in (ours, twin):
            module.zero_grad()
            y = x.clone().requires_grad_()
            (3 * module(2 * y)).sum().backward()
            found.append(y.grad)
        same(*found)
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_parameters_without_a_gradient_keep_none():
    ours, twin = pair(TwoResults())
    for step in range(8):
        x = torch.randn(12, 8)
        for module in (ours, twin):
            module.zero_grad()
            left, right = module(x)
            (left if step % 3 else left.sum() + right).sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_weights_that_are_written_between_forward_and_backward_are_refused():
    ours, _ = pair(Block())
    for _ in range(5):
        ours(torch.randn(24, 16)).sum().backward()
    result = ours(torch.randn(24, 16))
    with torch.no_grad():
        ours.second.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_what_is_kept_for_backward_may_be_somebody_elses():
    ours, twin = pair(Block())
    hooks = torch.autograd.graph.saved_tensors_hooks
    for _ in range(7):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            with hooks(torch.Tensor.double, torch.Tensor.float):
                result = module(x)
            result.sum().backward()
        same_modules(ours, twin)
    assert not HostGraphs.launches


def test_weights_that_move_between_forward_and_backward():
    """As those that are gathered anew for each pass."""
    ours, twin = pair(Block(dropout=0.2))
    for step in range(8):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            torch.manual_seed(step)
            result = module(x)
            if step in (4, 6):
                module.second.weight.data = module.second.weight.data.clone()
            result.sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    ours, twin = pair(Block(dropout=0.3))
    for step in range(8):
        x = torch.randn(24, 16, requires_grad=True)
        for module in (ours, twin):
            module.zero_grad()
            torch.manual_seed(step)
            checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
        same_modules(ours, twin)
    assert bool(HostGraphs.launches) == reentrant  # the other keeps nothing, by hooks


class Scaled(nn.Module):
    """Of what it is given backward reads the first, and not the second."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, shift):
        return torch.tanh(self.layer(x) + shift)


@pytest.mark.parametrize("at", [0, 1])
def test_inputs_at_one_place_that_are_written_before_the_backward(at):
    ours, twin = pair(Scaled())
    given = torch.randn(6, 8), torch.randn(6, 8)
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    for step in range(8):
        for module in (ours, twin):
            module.zero_grad()
            result = module(*given)
            if step > 5:
                given[at].add_(1.0)
            with refused if at == 0 and step > 5 else contextlib.nullcontext():
                result.sum().backward()
            if step > 5:
                given[at].sub_(1.0)
        same_modules(ours, twin)
    assert HostGraphs.launches > 3


class Centred(nn.Module):
    """Gives what depends on a buffer that it moves."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.5)
        return torch.tanh(h - self.mean)


@pytest.mark.parametrize("make", [Counts, Centred])
@pytest.mark.parametrize("how", ["twice", "penalty", "once"])
def test_a_call_computed_once_more_begins_with_its_own_buffers(make, how):
    ours, twin = pair(make())
    for _ in range(9):
        x = torch.randn(6, 8)
        for module in (ours, twin):
            module.zero_grad()
            y = x.clone().requires_grad_()
            result = module(y)
            if how == "penalty":
                (slope,) = torch.autograd.grad(result.square().sum(), y, create_graph=True)
                slope.square().sum().backward()
                continue
            result.sum().backward(retain_graph=how == "twice")
            if how == "twice":
                result.square().sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches


class Parts(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.left, self.right, self.how = nn.Linear(8, 4), nn.Linear(8, 4), how

    def forward(self, x):
        if self.how == "apart":
            return torch.tanh(self.left(x)), torch.tanh(self.right(x))
        h = self.left(x)
        return torch.tanh(h), torch.log(torch.softmax(200 * h, -1))


def test_results_with_a_backward_pass_each():
    ours, twin = pair(Parts("apart"))
    for _ in range(12):
        x = torch.randn(6, 8)
        for module in (ours, twin):
            module.zero_grad()
            left, right = module(x)
            left.sum().backward()
            right.square().sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches
    left, right = ours(torch.randn(6, 8))
    left.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        left.sum().backward()


def test_a_result_without_a_gradient_has_none_of_zeros():
    """Its branch has an infinite slope, of which zeros make NaN."""
    ours, twin = pair(Parts("joined"))
    for _ in range(9):
        x = torch.randn(6, 8)
        for module in (ours, twin):
            module.zero_grad()
            module(x)[0].sum().backward()
        assert all(p.grad.isfinite().all() for p in ours.left.parameters())
        same_modules(ours, twin)
    assert HostGraphs.launches >= 8


def test_hooks_are_not_called_without_a_gradient():
    ours, twin = pair(TwoResults())
    for module in (ours, twin):
        module.right.weight.register_hook(lambda gradient: gradient * 0.5)
    for _ in range(8):
        x = torch.randn(6, 8)
        for module in (ours, twin):
            module.zero_grad()
            module(x)[0].sum().backward()
        same_modules(ours, twin)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, state):
        return torch.tanh(self.layer(x) + state.detach())


def test_state_that_the_next_forward_detaches():
    ours, twin = pair(Recurrent())
    states = [torch.zeros(6, 8), torch.zeros(6, 8)]
    for _ in range(8):
        x = torch.randn(6, 8)
        for at, module in enumerate((ours, twin)):
            module.zero_grad()
            states[at] = module(x, states[at])
            states[at].sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_running_statistics_that_a_waiting_backward_has_seen():
    """Recorded between a forward and its backward, as where two networks play against each
    other."""
    ours, twin = pair(Block())
    for _ in range(9):
        x, y = torch.randn(24, 16), torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            module(x).mean().backward()
            (module(y).mean() - module(x).mean()).backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_gradients_by_torch_vmap():
    ours, twin = pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    for step in range(8):
        x, seeds = torch.randn(6, 8), torch.eye(6).unsqueeze(-1).expand(-1, -1, 8)
        found = []
        for module in (ours, twin):
            y = x.clone().requires_grad_()
            result = module(y)
            if step < 5:
                result.sum().backward()
                found.append(y.grad)
                continue
            found += torch.autograd.grad(result, y, seeds, is_grads_batched=True)
        same(*found)
    assert HostGraphs.launches


def test_gradients_of_one_number_for_many():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.shift = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

        def forward(self, x):
            return torch.tanh(self.layer(x)).sum() + self.shift.sum()

    ours, twin = pair(Sums())
    for _ in range(7):
        x = torch.randn(6, 8)
        for module in (ours, twin):
            module.zero_grad()
            module(x).backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4
