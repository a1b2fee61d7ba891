"""Forwards that write: into buffers with gradients switched off (power iterations, codebooks,
moving averages), which become part of a graph, and where autograd does not see it, which PyTorch
runs."""

from __future__ import annotations

import copy

import ingot
import pytest
import torch
from live import regions_run
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
# Calls before backward: of some models PyTorch refuses the second.
TWICE, ONCE = 2, 1


def discriminator(norm):
    return nn.Sequential(
        norm(nn.Conv2d(3, 8, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        norm(nn.Conv2d(8, 16, 4, 2, 1, bias=False)),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        norm(nn.Linear(64, 32)),
        nn.LeakyReLU(0.2),
        norm(nn.Linear(32, 1)),
    )


class Codebook(nn.Module):
    """Entries that follow the means of what is nearest to them."""

    def __init__(self, by_data):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(48, 16), nn.Linear(16, 8)
        self.by_data = by_data
        self.register_buffer("entries", torch.randn(16, 12))
        self.register_buffer("counts", torch.zeros(12))
        self.register_buffer("sums", self.entries.clone())

    def forward(self, x):
        z = self.encoder(x.flatten(1)[:, :48])
        distances = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.entries
        nearest = (distances + self.entries.pow(2).sum(0)).argmin(1)
        found = F.embedding(nearest, self.entries.t())
        if self.training:
            chosen = F.one_hot(nearest, 12).to(z.dtype)
            if self.by_data:
                self._move(self.counts.data, self.sums.data, self.entries.data, chosen, z)
            else:
                with torch.no_grad():
                    self._move(self.counts, self.sums, self.entries, chosen, z)
        return self.decoder(z + (found - z).detach()), (found.detach() - z).pow(2).mean()

    def _move(self, counts, sums, entries, chosen, z):
        counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        sums.mul_(0.9).add_(z.transpose(0, 1) @ chosen, alpha=0.1)
        entries.copy_(self.sums / (self.counts + 0.1))


class Momentum(nn.Module):
    """An encoder that follows another one."""

    def __init__(self, by_data):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.by_data = by_data

    def forward(self, x):
        x = x.flatten(1)[:, :48]
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters()):
                if self.by_data:
                    own.data = own.data * 0.9 + other.data * 0.1
                else:
                    own.mul_(0.9).add_(other, alpha=0.1)
            k = F.normalize(self.key(x * 0.5), dim=1)
        return q @ k.t() / 0.1


class Renormalised(nn.Module):
    """Batch renormalisation, and how often it was done."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(48, 32), nn.Linear(32, 8)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("deviation", torch.ones(32))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        h = self.first(x.flatten(1)[:, :48])
        if self.training:
            m, s = h.mean(0), h.std(0, unbiased=False) + 1e-3
            r = (s.detach() / self.deviation).clamp(1 / 3, 3)
            h = (h - m) / s * r + ((m.detach() - self.mean) / self.deviation).clamp(-5, 5)
            with torch.no_grad():
                self.mean += 0.1 * (m - self.mean)
                self.deviation += 0.1 * (s - self.deviation)
                self.count += 1
        else:
            h = (h - self.mean) / self.deviation
        return self.last(torch.relu(h))


class Masked(nn.Module):
    """Weights that a forward masks where they lie."""

    def __init__(self, by_data):
        super().__init__()
        self.first, self.last = nn.Linear(48, 32), nn.Linear(32, 8)
        self.register_buffer("mask", (torch.rand(32, 48) > 0.3).float())
        self.by_data = by_data

    def forward(self, x):
        if self.by_data:
            self.first.weight.data *= self.mask
        else:
            with torch.no_grad():
                self.first.weight.mul_(self.mask)
        return self.last(torch.relu(self.first(x.flatten(1)[:, :48])))


class Clamped(nn.Module):
    """An activation that goes on to have the derivative of what it was."""

    def __init__(self, write):
        super().__init__()
        self.first, self.last, self.write = nn.Linear(48, 32), nn.Linear(32, 8), write

    def forward(self, x):
        h = self.first(x.flatten(1)[:, :48])
        self.write(h)
        return torch.tanh(self.last(h * 2))


def by_switch(h):
    with torch.no_grad():
        h.clamp_(-0.3, 0.3)


def by_view(h):
    with torch.no_grad():
        h[:, :16].clamp_(-0.3, 0.3)


def by_detached(h):
    h.detach().clamp_(-0.3, 0.3)


def by_data(h):
    h.data.clamp_(-0.3, 0.3)


class Detached(nn.Module):
    """What is written with a derivative goes its own way, and what it was detached from keeps the
    one that it had."""

    def __init__(self, write, gives_both):
        super().__init__()
        self.linear, self.write, self.gives_both = nn.Linear(8, 8), write, gives_both

    def forward(self, x):
        h = self.linear(x)
        d = h.detach()
        self.write(d, h)
        return (d, h) if self.gives_both else d


@pytest.mark.parametrize("gives_both", [False, True], ids=["alone", "both"])
@pytest.mark.parametrize(
    "write",
    [
        lambda d, h: d.mul_(h.flip(-1)),
        lambda d, h: d[:, :4].add_(h[:, 4:]),
        lambda d, h: d.unfold(-1, 2, 2).mul_(h.flip(-1).unfold(-1, 2, 2)),
    ],
    ids=["whole", "part", "windows"],
)
def test_what_is_written_behind_detach_has_a_derivative_of_its_own(write, gives_both):
    torch._dynamo.reset()
    module, found = Detached(write, gives_both), []
    for called in (ingot.optimize(module), module):
        results = called(torch.linspace(-1, 1, 24).view(3, 8))
        results = results if gives_both else (results,)
        loss = sum((r * torch.linspace(0, 1, 24).view(3, 8)).sum() for r in results)
        found.append([*results, *torch.autograd.grad(loss, list(module.parameters()))])
    assert [r.requires_grad for r in found[0]] == [r.requires_grad for r in found[1]]
    torch.testing.assert_close(*found)


def by_comparison(h):
    """Seen by autograd: zeros come back, where from `h > 0` nothing would."""
    h.gt_(0)


def by_comparison_of_a_part(h):
    h[:, :16].less_equal_(0.1)


def by_logic(h):
    """What comes back goes through as it is."""
    h.round_().logical_not_()


def by_draws(h):
    h[:3].normal_(0.5, 0.0)
    h[3:].bernoulli_(1.0)


def by_embedding(h):
    """Rows that are longer are written by one operator, which switches gradients off inside."""
    torch.nn.functional.embedding(torch.arange(len(h)), h, max_norm=1.0)


@pytest.mark.parametrize(
    "make, calls",
    [
        (lambda: discriminator(nn.utils.parametrizations.spectral_norm), TWICE),
        (lambda: discriminator(nn.utils.spectral_norm), TWICE),
        (lambda: Codebook(by_data=False), TWICE),
        (lambda: Codebook(by_data=True), TWICE),
        (lambda: Momentum(by_data=False), TWICE),
        (lambda: Momentum(by_data=True), TWICE),
        (Renormalised, TWICE),
        (lambda: Masked(by_data=False), ONCE),
        (lambda: Masked(by_data=True), TWICE),
        (lambda: Clamped(by_switch), TWICE),
        (lambda: Clamped(by_view), TWICE),
        (lambda: Clamped(by_detached), TWICE),
        (lambda: Clamped(by_data), TWICE),
        (lambda: Clamped(by_embedding), TWICE),
        (lambda: Clamped(by_comparison), TWICE),
        (lambda: Clamped(by_comparison_of_a_part), TWICE),
        (lambda: Clamped(by_logic), TWICE),
        (lambda: Clamped(by_draws), TWICE),
    ],
    ids="spectral_norm spectral_norm_by_hook codebook codebook_by_data momentum momentum_by_data "
    "renormalised masked masked_by_data clamped clamped_view clamped_detached clamped_data "
    "clamped_rows compared compared_part negated drawn".split(),
)
def test_steps_of_training_are_eagers_and_the_products_ingots(make, calls):
    expected, _ = _trained(make, calls)
    true, _ = _trained(make, calls, torch.float64)
    torch._dynamo.reset()
    with regions_run() as ran:
        found, optimised = _trained(make, calls, wrap=ingot.optimize)
    assert ran
    assert not any(graph.problem and not graph.holds_nothing for graph in optimised._ingot.graphs)
    torch.testing.assert_close(found, expected, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(found, true, rtol=3e-5, atol=3e-5, check_dtype=False)


def _trained(make, calls, dtype=torch.float32, wrap=lambda module: module):
    """What three steps give, with one in eval mode and a call without gradients between them."""
    torch.manual_seed(0)
    module = make().to(dtype)
    run = wrap(module)
    optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    results = []
    for step in range(4):
        run.train(step != 2)
        x = torch.randn(6, 3, 8, 8).to(dtype).requires_grad_()
        optimiser.zero_grad()
        given = [run(x * (1 - 0.5 * call)) for call in range(calls)]
        outputs = [y for each in given for y in (each if isinstance(each, tuple) else (each,))]
        sum((y * torch.linspace(0, 1, y.numel()).view_as(y)).sum() for y in outputs).backward()
        optimiser.step()
        with torch.no_grad():
            outputs.append(run(x)[0])
        results.append([x.grad, *(p.grad for p in module.parameters()), *outputs])
        results.append([tensor.clone() for tensor in module.state_dict().values()])
        assert not any(buffer.requires_grad for buffer in module.buffers())
    return results, run


def test_what_pytorch_runs_is_told_once_a_line():
    optimised = ingot.optimize(Momentum(by_data=True))
    with pytest.warns(ingot.IngotWarning) as said:
        optimised(torch.randn(6, 48))
    told = [str(each.message) for each in said if "unseen by autograd" in str(each.message)]
    assert len(told) == 1 and "test_unseen_writes.py" in told[0]
    report = optimised.ingot_report()["unsupported"]
    assert [item["what"] for item in report].count("a write") == 1


def test_preparing_a_call_writes_nothing():
    module = Masked(by_data=True)
    before = copy.deepcopy(module.state_dict())
    ingot.optimize(module, torch.randn(6, 48))
    assert all(map(torch.equal, module.state_dict().values(), before.values()))
    with pytest.raises(ingot.IngotError, match="begins with what PyTorch runs"):
        ingot.optimize(module).ingot_prepare(torch.randn(6, 48))
    assert all(map(torch.equal, module.state_dict().values(), before.values()))
