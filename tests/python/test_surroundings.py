"""What the libraries around PyTorch ask of a model, and do to it: trainers, exporters, wrappers."""

from __future__ import annotations

import copy
import gc
import inspect
import subprocess
import sys
import typing
import warnings

import ingot
import pytest
import torch
from ingot.capture import derivative
from ingot.live.backend import IngotWarning
from live import compare, no_gradients, regions_run, x  # noqa: F401
from torch import nn
from torch.nn import functional as F


class Scored(nn.Module):
    """A loss inside, as trainers want it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0):
        """Scores, or their loss."""
        y = self.b(torch.relu(self.a(x))) * scale
        return y if labels is None else F.cross_entropy(y, labels)


class OfItsOwn(ingot.OptimizedModule, Scored):
    pass


@pytest.mark.parametrize("optimised", [lambda: ingot.optimize(Scored()), OfItsOwn])
def test_a_forward_tells_the_parameters_of_the_original(optimised):
    """A trainer passes a model those columns of a data set that its forward has parameters for."""
    forward = optimised().forward
    assert inspect.signature(forward) == inspect.signature(Scored().forward)
    assert typing.get_type_hints(forward) == typing.get_type_hints(Scored.forward)
    assert forward.__doc__ == "Scores, or their loss."


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_names_inputs_by_position_and_by_name(strict):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimised = ingot.optimize(module)
    shapes = ({0: torch.export.Dim("batch")},)
    for given in (shapes, {"input": shapes[0]}):
        exported = torch.export.export(optimised, (x(),), dynamic_shapes=given, strict=strict)
        fed = x(7)
        torch.testing.assert_close(exported.module()(fed), module(fed))


def test_a_symbolic_trace_sees_the_original():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fed = x()
    traced = torch.fx.symbolic_trace(ingot.optimize(module))
    torch.testing.assert_close(traced(fed), module(fed))
    assert any(node.op == "call_module" for node in traced.graph.nodes)


def test_labels_bind_no_batch_size():
    optimised, batches = ingot.optimize(Scored()), (8, 5, 16, 2)
    with torch.enable_grad(), regions_run() as ran, warnings.catch_warnings():
        warnings.simplefilter("ignore", IngotWarning)
        for batch in batches:
            optimised(x(batch), torch.randint(0, 8, (batch,))).backward()
    assert len(optimised._ingot.graphs) == 1
    assert len(ran) >= len(batches)


class Contrastive(nn.Module):
    """Two views of a batch, each compared with all others: sizes that follow from a sum."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, first, second):
        z = F.normalize(torch.cat([self.encoder(first), self.encoder(second)]), dim=1)
        count = len(first)
        itself = torch.eye(2 * count, dtype=torch.bool)
        positives = torch.cat([torch.arange(count, 2 * count), torch.arange(count)])
        return F.cross_entropy((z @ z.T / 0.5).masked_fill(itself, -torch.inf), positives)


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_both_views_of_a_contrastive_loss_are_taken():
    compare(Contrastive, lambda m: (m(x(n), x(n)) for n in (6, 5, 2)), graphs=1)
    optimised = ingot.optimize(Contrastive())
    optimised(x(6), x(6))
    assert "linear" not in {item["what"] for item in optimised.ingot_report()["unsupported"]}


def test_tensors_without_data_are_pytorchs_without_an_error(caplog):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimised = ingot.optimize(module)
    with pytest.warns(IngotWarning, match="its tensors are on 'meta'"):
        assert optimised(torch.empty(3, 8, device="meta")).shape == (3, 8)
    assert not caplog.records
    optimised.to_empty(device="cpu")
    nn.init.ones_(optimised[0].weight), nn.init.zeros_(optimised[0].bias)
    fed = x()
    with regions_run() as ran:
        torch.testing.assert_close(
            optimised(fed), torch.relu(fed.sum(1, keepdim=True).expand(4, 8))
        )
    assert ran


@pytest.mark.parametrize("by_name", [False, True])
def test_nested_tensors_are_pytorchs_between_others(by_name):
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimised, fed = ingot.optimize(module), x()
    parts = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    for _ in range(2):
        with regions_run() as ran:
            optimised(fed)
        assert ran
        found = optimised(input=parts) if by_name else optimised(parts)
        for own, part in zip(found.unbind(), parts.unbind(), strict=True):
            torch.testing.assert_close(own, module(part))


@pytest.mark.thorough
def test_parameters_can_be_swapped_after_a_call():
    """As PyTorch does where a module's conversion makes tensors of another class."""
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimised, other, fed = ingot.optimize(module), nn.Parameter(torch.randn(8, 8)), x()
    optimised(fed)
    gc.collect()
    expected = torch.relu(F.linear(fed, other, module[0].bias))
    torch.utils.swap_tensors(module[0].weight, other)
    with regions_run() as ran:
        torch.testing.assert_close(optimised(fed), expected)
    assert ran


def test_what_is_called_of_a_forward_that_is_not_captured_may_be_optimised_by_itself():
    class Model(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            for _ in range(2):
                if x.sum() > 0:
                    x = self.part(x)
            return x

    part = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nn.init.zeros_(part[0].weight), nn.init.constant_(part[0].bias, -1)
    for each, taken in ((part, False), (ingot.optimize(part), True)):
        optimised = ingot.optimize(Model(each))
        with regions_run() as ran, pytest.warns(IngotWarning, match="what it calls of classes"):
            for _ in range(6):
                optimised(torch.ones(4, 8))
        assert bool(ran) == taken


def test_a_forward_that_was_replaced_before_is_told():
    module = Scored()
    forward = module.forward
    module.forward = lambda *args: forward(*args) * 2
    with pytest.warns(IngotWarning, match="its forward was replaced"):
        ingot.optimize(module)
    module = Scored()
    module.compile(backend="eager")
    with pytest.warns(IngotWarning, match="compile"):
        ingot.optimize(module)


def test_a_forward_that_is_replaced_afterwards_is_called():
    module = Scored()
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    forward, fed = optimised.forward, x()
    optimised.forward = lambda *args: forward(*args) * 2
    with regions_run() as ran:
        torch.testing.assert_close(optimised(fed), twin(fed) * 2)
    assert ran


@pytest.mark.parametrize("frozen", [True, False])
def test_inputs_made_in_inference_mode_are_what_they_are_to_pytorch(frozen, caplog):
    """They can be saved for no backward pass; where nothing needs them there, nothing is wrong."""
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module[0].requires_grad_(not frozen)
    optimised, results = ingot.optimize(copy.deepcopy(module)), []
    with torch.inference_mode():
        fed = x()
    for each in (module, optimised):
        with torch.enable_grad():
            if frozen:
                each(fed).sum().backward()
                results.append(each[2].weight.grad)
            else:
                with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
                    each(fed)
    assert not caplog.records
    if frozen:
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("rows", [64, 2048])
def test_a_table_made_in_inference_mode_may_be_added(rows):
    """By a check before training, and kept: eager's sum keeps none of it, of whatever size."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.table = nn.Embedding(20, 64), nn.LayerNorm(64), None
            self.b = nn.Linear(64, 16)

        def forward(self, tokens):
            if self.table is None:
                self.table = torch.arange(64.0).sin() * torch.ones(tokens.shape[1], 1)
            return torch.tanh(self.b(self.norm(self.a(tokens) + self.table)))

    module, tokens, results = Model(), torch.randint(0, 20, (2, rows)), []
    for each in (ingot.optimize(copy.deepcopy(module)), module):
        with torch.inference_mode():
            each(tokens)
        assert each.table.is_inference()
        with torch.enable_grad(), regions_run() as ran:
            each(tokens).sum().backward()
        assert ran or each is module
        results.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)


IN_THREADS = """
import threading, ingot, torch
fast = ingot.optimize(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU()))
for sizes in ((4, 16), (2, 4, 16)):
    thread = threading.Thread(target=fast, args=(torch.randn(sizes),))
    thread.start()
    thread.join()
"""


def test_captures_in_threads_that_end():
    """As a server's requests come, of which none is the main thread's."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", IN_THREADS], check=True, timeout=300)


def test_pytorchs_own_frames_are_no_captures_that_failed(caplog):
    caplog.set_level("INFO", logger="ingot")
    module = ingot.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    module(torch.randn(4, 8))
    assert "captured" in caplog.text and "could not capture" not in caplog.text


def test_casts_of_a_recording_are_in_no_cache_of_autocasts(monkeypatch):
    """Another thread that leaves autocast would wait for Python to throw them away, with the lock
    of the cache, for which the recording waits."""
    cached = []
    init = derivative._Trace.__init__

    def watched(self, *arguments, **named):
        cached.append(torch.is_autocast_cache_enabled())
        init(self, *arguments, **named)

    monkeypatch.setattr(derivative._Trace, "__init__", watched)
    module = ingot.optimize(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)))
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(4, 8)).sum().backward()
        assert torch.is_autocast_cache_enabled()
    assert cached and not any(cached)
