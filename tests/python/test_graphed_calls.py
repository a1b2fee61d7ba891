"""Calls that are recorded and replayed (`mode="reduce-overhead"`), on a CPU: a recorder that runs a
function again stands for CUDA graphs. Whatever is done to a module and its twin, which PyTorch
runs, outputs, gradients and buffers must stay the same."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref

import ingot
import pytest
import torch
from ingot.live import backend, graphed
from ingot.live.recording import NotRecordableError, Recording
from torch import nn
from torch.utils.checkpoint import checkpoint


class HostGraphs:
    """Runs what was recorded again, into the same memory."""

    recordings = launches = 0

    def __init__(self, device):
        self.device = device

    def beside(self):
        return contextlib.nullcontext()

    def recorded(self, function):
        HostGraphs.recordings += 1
        result = list(function())

        def launch():
            HostGraphs.launches += 1
            with torch.enable_grad():
                found = function()
            for own, value in zip(result, found):
                if own is not None and own is not value:
                    own.detach().copy_(value.detach())

        return launch, result

    def random_state(self):
        return torch.get_rng_state()

    def set_random_state(self, state):
        torch.set_rng_state(state)

    def stream(self):
        return None


@pytest.fixture(autouse=True)
def host_graphs(monkeypatch):
    monkeypatch.setattr(backend, "recorder_of", lambda device_type: HostGraphs)
    monkeypatch.setattr(graphed, "_is_captured", lambda: False)
    monkeypatch.setenv("INGOT_MODES", "all")
    record = Recording._record

    def without_running(self):
        """A graph that is recorded does not run."""
        before, random = [self._own[at].clone() for at in self._state], torch.get_rng_state()
        record(self)
        torch.set_rng_state(random)
        for at, value in zip(self._state, before):
            self._own[at].data.copy_(value)

    monkeypatch.setattr(Recording, "_record", without_running)
    HostGraphs.recordings = HostGraphs.launches = 0
    torch.manual_seed(3)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.second(torch.relu(self.norm(self.first(x)))))


class TwoResults(nn.Module):
    """Of which one loss reads the first alone."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return torch.sigmoid(self.left(h)), torch.sigmoid(self.right(h)) * 2


def pair(module, **options):
    twin = copy.deepcopy(module)
    return ingot.optimize(module, options={"mode": "reduce-overhead", **options}), twin


def same(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def same_modules(ours, twin, gradients=True):
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        same(a, b)
        if gradients:
            same(a.grad, b.grad)
    for a, b in zip(ours.buffers(), twin.buffers(), strict=True):
        same(a, b)


def quietly():
    warnings.simplefilter("ignore")


def test_a_training_loop_is_replayed():
    ours, twin = pair(Block())
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, twin)]
    for _ in range(9):
        x = torch.randn(24, 16)
        results = []
        for module, optimiser in zip((ours, twin), optimisers):
            optimiser.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimiser.step()
            results.append(loss)
        same(*results)
        same_modules(ours, twin)
    assert HostGraphs.recordings == 2
    assert HostGraphs.launches == 2 * 6
    (told,) = [o for o in ours.ingot_report()["optimisations"] if "CUDA graphs" in o["what"]]
    assert told["identity_or_reason"].endswith("6 replays")


def test_results_of_earlier_calls_keep_their_values():
    ours, twin = pair(Block().eval())
    kept = []
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(24, 16)
            kept.append((ours(x), twin(x)))
    assert HostGraphs.launches > 3
    for a, b in kept:
        same(a, b)


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


def test_dropout_draws_what_eager_draws():
    ours, twin = pair(Block(dropout=0.3))
    for step in range(7):
        x = torch.randn(24, 16)
        found = []
        for module in (ours, twin):
            torch.manual_seed(step)
            found.append((module(x), torch.rand(3)))
            found[-1][0].sum().backward()
        same(found[0][0], found[1][0])
        same(found[0][1], found[1][1])
    assert HostGraphs.launches > 4


def test_modes_sizes_and_weights_change():
    ours, twin = pair(Block())
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        size = (24, 7, 33)[step // 5 % 3]
        x = torch.randn(size, 16, generator=generator)
        for module in (ours, twin):
            module.train(step % 10 < 7)
            if step == 40:
                module.second.weight = nn.Parameter(module.second.weight.detach() * 2)
            if step == 44:
                module.first.weight.data = module.first.weight.data * 0.5
            if step == 50:
                module.first.bias.requires_grad_(False)
            if step == 55:
                module.norm.momentum = 0.3
        if step % 4 == 3:
            with torch.no_grad():
                same(ours(x), twin(x))
        else:
            results = [module(x) for module in (ours, twin)]
            same(*results)
            for result in results:
                result.sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.recordings > 4


def test_weights_that_are_written_between_forward_and_backward_are_refused():
    ours, _ = pair(Block())
    for _ in range(5):
        ours(torch.randn(24, 16)).sum().backward()
    result = ours(torch.randn(24, 16))
    with torch.no_grad():
        ours.second.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


class Shares(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        y = torch.relu(self.layer(x))
        if self.how == "input":
            return y, x.view(-1)
        if self.how == "each other":
            return y, y.view(-1)
        return y.unsqueeze(0).expand(3, -1, -1)


@pytest.mark.parametrize("how", ["input", "each other", "itself"])
def test_results_that_share_memory_are_not_replayed(how):
    ours, twin = pair(Shares(how))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(7):
            x = torch.randn(6, 8)
            results = [module(x) for module in (ours, twin)]
            for a, b in zip(*results):
                same(a, b)
    # What TorchDynamo makes of such views behind its graph is none of the graph's.
    assert HostGraphs.launches or any("not replayed" in str(w.message) for w in said)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.layer(x)) * self.calls


def test_buffers_that_a_forward_writes():
    ours, twin = pair(Counts())
    for _ in range(9):
        x = torch.randn(6, 8)
        same(ours(x), twin(x))
        same(ours.calls, twin.calls)
        version = ours.calls._version
    ours(x)
    assert ours.calls._version > version
    assert HostGraphs.launches


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.sigmoid(self.layer(x))
        x.mul_(2)
        return y


def test_an_input_that_is_written():
    ours, twin = pair(WritesItsInput())
    for _ in range(7):
        x = torch.randn(6, 8)
        mine = x.clone()
        same(ours(mine), twin(x))
        same(mine, x)


def test_a_function_that_cannot_be_recorded_runs_as_it_is(monkeypatch):
    def refuses(self, function):
        raise NotRecordableError("it waits for the GPU")

    monkeypatch.setattr(HostGraphs, "recorded", refuses)
    ours, twin = pair(Block())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(7):
            x = torch.randn(24, 16)
            same(ours(x), twin(x))
            same_modules(ours, twin)
    assert any("it waits for the GPU" in str(w.message) for w in said)


def test_what_pytorch_runs_is_replayed_too():
    ours, twin = pair(nn.Sequential(nn.Conv1d(3, 4, 3), nn.MaxPool1d(2)))
    quietly()
    for _ in range(7):
        x = torch.randn(5, 3, 12)
        for module in (ours, twin):
            module.zero_grad()
            module(x).sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


def test_torch_compile_has_the_mode():
    module = Block()
    twin = copy.deepcopy(module)
    ours = torch.compile(module, backend="ingot", mode="reduce-overhead")
    for _ in range(7):
        x = torch.randn(24, 16)
        for each in (ours, twin):
            each.zero_grad()
            each(x).sum().backward()
        same_modules(module, twin)
    assert HostGraphs.launches > 4


def test_the_mode_is_not_there_until_it_is_proven(monkeypatch):
    monkeypatch.delenv("INGOT_MODES")
    with pytest.raises(ValueError, match="it must be one of default"):
        ingot.optimize(Block(), options={"mode": "reduce-overhead"})


def test_modes_are_checked():
    with pytest.raises(ValueError, match="reduce-overhead"):
        ingot.optimize(Block(), options={"mode": "max-speed"})
    with pytest.raises(Exception, match="reduce-overhead"):
        torch.compile(Block(), backend="ingot", mode="max-autotune")(torch.randn(4, 16))
    made = ingot.optimize(Block(), options={"mode": "default"})
    made(torch.randn(4, 16))
    again = copy.deepcopy(ingot.optimize(Block(), options={"mode": "reduce-overhead"}))
    assert again._ingot.is_replayed


def test_frozen_weights_are_not_replayed():
    ours, twin = pair(Block().eval())
    with torch.no_grad():
        for step in range(12):
            if step == 6:
                ours.ingot_freeze()
                HostGraphs.launches = 0
            for module in (ours, twin):
                module.second.weight.mul_(0.9)
            x = torch.randn(24, 16)
            same(ours(x), twin(x))
    assert not HostGraphs.launches


def test_a_module_that_is_dropped_is_freed():
    ours, _ = pair(Block())
    for _ in range(6):
        ours(torch.randn(24, 16)).sum().backward()
    assert HostGraphs.launches
    gone = weakref.ref(ours._ingot), weakref.ref(ours.first.weight)
    del ours
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_recordings_are_prepared_beside():
    ours, twin = pair(Block())
    ours.ingot_prepare(torch.randn(24, 16))
    same_modules(ours, twin)
    for _ in range(6):
        x = torch.randn(24, 16)
        same(ours(x), twin(x))
    ours.ingot_prepare(torch.randn(24, 16))
    same_modules(ours, twin)


class MovesItsWeight(nn.Module):
    """Under no_grad, as codebooks and constraints of weights do."""

    def __init__(self, needs_gradient):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.book = nn.Parameter(torch.ones(8), requires_grad=needs_gradient)

    def forward(self, x):
        with torch.no_grad():
            self.book.mul_(0.9)
        return torch.relu(self.layer(x)) * self.book


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_forward_that_moves_a_weight(needs_gradient):
    ours, twin = pair(MovesItsWeight(needs_gradient))
    quietly()
    for _ in range(8):
        x = torch.randn(6, 8)
        results = [module(x) for module in (ours, twin)]
        same(*results)
        for result in results:
            result.sum().backward()
        same_modules(ours, twin)


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


class ModelNew(ingot.OptimizedModule, Block):
    ingot_options = {"mode": "reduce-overhead"}


def test_a_class_may_ask_for_the_mode():
    torch.manual_seed(0)
    ours = ModelNew(dropout=0.2)
    twin = Block(dropout=0.2)
    twin.load_state_dict(ours.state_dict())
    for step in range(7):
        x = torch.randn(24, 16)
        for module in (ours, twin):
            module.zero_grad()
            torch.manual_seed(step)
            module(x).sum().backward()
        same_modules(ours, twin)
    assert HostGraphs.launches > 4


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


def test_what_communicates_is_not_recorded():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert "communicates" in graphed.why_not(gm, [])
    assert graphed.why_not(torch.fx.symbolic_trace(Block()), []) is None


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


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(inside):
    ours, twin = pair(Block().eval())
    for _ in range(8):
        x = torch.randn(24, 16)
        with torch.inference_mode():
            given = torch.randn(24, 16) if inside else x
            same(ours(given), twin(given))
    assert HostGraphs.launches == 5


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


class WritesData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.book = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.book.data.mul_(0.9)
        return torch.relu(self.layer(x)) * self.book


def test_writes_past_autograd_are_not_recorded():
    ours, twin = pair(WritesData())
    for _ in range(7):
        x = torch.randn(6, 8)
        with torch.no_grad():
            same(ours(x), twin(x))
        same_modules(ours, twin)


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


def test_an_optimisers_step_is_not_recorded():
    ours, twin = nn.Linear(8, 8), nn.Linear(8, 8)
    twin.load_state_dict(ours.state_dict())
    optimisers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (ours, twin)]
    step = torch.compile(optimisers[0].step, backend="ingot", mode="reduce-overhead")
    for _ in range(8):
        x = torch.randn(6, 8)
        for module in (ours, twin):
            module.zero_grad()
            module(x).sum().backward()
        step()
        optimisers[1].step()
        same_modules(ours, twin)


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
