"""Calls that are recorded and replayed (`mode="reduce-overhead"`), on a CPU, where a recorder that
runs a function again stands for CUDA graphs. Whatever is done to a module and its twin, which
PyTorch runs, outputs, gradients and buffers must stay the same."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import ingot
import pytest
import torch
from host_graphs import Block, Counts, HostGraphs, host_graphs, pair, quietly, same, same_modules  # noqa: F401
from ingot.live import graphed
from ingot.live.recording import NotRecordableError
from torch import nn

pytestmark = pytest.mark.usefixtures("host_graphs")


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
    with pytest.raises(ValueError, match="no mode 'reduce-overhead'"):
        ingot.optimize(Block(), options={"mode": "reduce-overhead"})


def test_modes_are_checked():
    with pytest.raises(ValueError, match="no mode"):
        ingot.optimize(Block(), options={"mode": "max-speed"})
    with pytest.raises(Exception, match="no mode"):
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


def test_what_communicates_is_not_recorded():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert "communicates" in graphed.why_not(gm, [])
    assert graphed.why_not(torch.fx.symbolic_trace(Block()), []) is None


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(inside):
    ours, twin = pair(Block().eval())
    for _ in range(8):
        x = torch.randn(24, 16)
        with torch.inference_mode():
            given = torch.randn(24, 16) if inside else x
            same(ours(given), twin(given))
    assert HostGraphs.launches == 5


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
