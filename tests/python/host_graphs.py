"""A recorder that stands for CUDA graphs on a CPU, and modules beside their twins, for tests of
calls that are recorded and replayed."""

from __future__ import annotations

import contextlib
import copy
import warnings

import ingot
import pytest
import torch
from ingot.live import backend, graphed
from ingot.live.recording import Recording
from torch import nn


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


@pytest.fixture
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


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.layer(x)) * self.calls
