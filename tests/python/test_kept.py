"""What a training step keeps between forward and backward, and how long."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import ingot
import pytest
import selection
import torch
from ingot.live import steps
from test_gradients import calls_of, check_against_fp64, error, gradients_of, three_of
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))

from own_networks import Perceptron


class OneResidual(nn.Module):
    def __init__(self, reader):
        super().__init__()
        self.a, self.b, self.reader = nn.Linear(64, 64), nn.Linear(64, 64), reader

    def forward(self, x):
        return self.b(self.reader(x + self.a(x)))


class Summed(nn.Module):
    """A sum that is handed out, and another that something reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = x - self.a(x)
        return y, torch.sigmoid(y + self.b(nn.functional.layer_norm(y, (64,)))) * 2


def layers(*activations: nn.Module) -> nn.Sequential:
    """A product before each, the last of them behind all."""
    return nn.Sequential(*(part for a in activations for part in (nn.Linear(64, 64), a)))


MODULES = {
    "residual layers": lambda: residual(6),
    "residual layers, RMSNorm": lambda: residual(5, norm=nn.RMSNorm),
    "residual layers, tanh": lambda: residual(5, activation=nn.Tanh),
    "an autoencoder": lambda: layers(nn.GELU(), nn.GELU(), nn.GELU(), nn.Sigmoid()),
    "ReLU in front": lambda: layers(nn.ReLU(), nn.ReLU()),
    "tanh in front": lambda: layers(nn.GELU(), nn.Tanh()),
    "softmax in front": lambda: layers(nn.SiLU(), nn.Softmax(-1)),
    "log-softmax in front": lambda: layers(nn.SiLU(), nn.LogSoftmax(-1)),
    "softmax over the batch": lambda: layers(nn.Softmax(0)),
    "a normalised sum": lambda: OneResidual(nn.LayerNorm(64)),
    "a sum behind ReLU": lambda: OneResidual(nn.ReLU()),
    "a sum behind GELU": lambda: OneResidual(nn.GELU()),
    "a sum in batch norm": lambda: OneResidual(nn.BatchNorm1d(64)),
    "sums": Summed,
}


def kept_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """What autograd keeps that is no parameter."""
    memory: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)  # lives, so that no memory is counted twice
    for parameter in module.parameters():
        memory.pop(parameter.untyped_storage().data_ptr(), None)
    del result
    return sum(storage.nbytes() for storage in memory.values())


def worst(found: list, exact: list) -> float:
    return max(error(a, e) for a, e in zip(found, exact, strict=True))


def residual(layers: int, **parts: type) -> nn.Module:
    return Perceptron(64, 64, layers, **parts)


@pytest.mark.parametrize("name", selection.every(2, MODULES))
def test_no_more_is_kept_than_eager_keeps(name):
    torch.manual_seed(5)
    (optimised, module, exact), x = three_of(MODULES[name]()), torch.randn(48, 64)
    found, eager, truth = (gradients_of(m, [x]) for m in (optimised, module, exact))
    assert calls_of(optimised)
    assert worst(found, truth) <= 2 * worst(eager, truth) + 1e-7
    assert kept_bytes(optimised, x) <= kept_bytes(module, x) * 1.001 + 4096


class Dropping(nn.Module):
    """A residual block as libraries build it: its dropout drops nothing."""

    def __init__(self, rate: float | None):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)
        self.drop = nn.Identity() if rate is None else nn.Dropout(rate)

    def forward(self, x):
        return self.b(self.norm(x + self.drop(self.a(x))))


def test_what_drops_nothing_keeps_nothing():
    def stored(rate):
        (optimised, module, exact), x = three_of(Dropping(rate)), torch.randn(48, 64)
        found, eager, truth = (gradients_of(m, [x]) for m in (optimised, module, exact))
        assert worst(found, truth) <= 2 * worst(eager, truth) + 1e-7
        (call,) = calls_of(optimised)
        return len(call.region.graph["results"])

    assert stored(0.0) == stored(None)


class HandsOutASum(nn.Module):
    """A residual stream that eager does not keep: ReLU keeps its result."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = x + self.a(x)
        return h, self.b(torch.relu(h) * 2)


def test_what_is_handed_out_may_be_written_as_eagers():
    module, x, found = HandsOutASum(), torch.randn(48, 64), []
    optimised = ingot.optimize(module)
    for called in (optimised, module):
        module.zero_grad()
        h, y = called(x)
        with torch.no_grad():
            h += 1
        y.sum().backward()
        found.append([p.grad.clone() for p in module.parameters()])
    assert calls_of(optimised)
    for own, eagers in zip(*found, strict=True):
        torch.testing.assert_close(own, eagers)


class HandsOutWhatItReads(nn.Module):
    """A product, and what `reader` makes of it, of which eager keeps something else."""

    def __init__(self, reader):
        super().__init__()
        self.a, self.b, self.reader = nn.Linear(64, 64), nn.Linear(64, 64), reader

    def forward(self, x):
        h = self.a(x)
        return h, self.reader(self, h)


READERS = {
    "its result": lambda m, h: m.b(torch.relu(h)),
    "its result, summed": lambda m, h: h.sigmoid().sum(1),
    "a multiple": lambda m, h: m.b(h * 2),
    "what is normalised": lambda m, h: m.b(h - h.mean(1, keepdim=True)),
    "flags": lambda m, h: torch.where(h > 0, h, m.b.bias) * 3,
    "a copy": lambda m, h: nn.functional.gelu(h.clone()),
    "its largest": lambda m, h: h.max(1)[0],
    "a copy of a view": lambda m, h: nn.functional.gelu(h.T.contiguous()),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_product_that_is_handed_out_may_be_written_where_eager_does_not_keep_it(reader):
    module, x, found = HandsOutWhatItReads(READERS[reader]), torch.randn(48, 64), []
    optimised = ingot.optimize(module)
    for called in (optimised, module):
        module.zero_grad()
        h, y = called(x)
        with torch.no_grad():
            h += 1
        y.square().sum().backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert calls_of(optimised)
    for own, eagers in zip(*found, strict=True):
        torch.testing.assert_close(own, eagers, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reader", (lambda m, h: m.b(h), lambda m, h: h.abs()))
def test_a_product_that_eager_keeps_is_kept_once(reader):
    module, x = HandsOutWhatItReads(reader), torch.randn(48, 64)
    optimised = ingot.optimize(module)
    gradients_of(optimised, [x])
    assert kept_bytes(optimised, x) <= kept_bytes(module, x)


class ReadsInFront(nn.Module):
    def __init__(self, reader):
        super().__init__()
        self.a, self.reader = nn.Linear(64, 64), reader

    def forward(self, h):
        return self.a(self.reader(h))


FRONTS = {
    "its result": lambda h: torch.relu(h),
    "a multiple": lambda h: h * 0.5,
    "a view": lambda h: torch.tanh(h.unsqueeze(1)).squeeze(1),
    "of two": lambda h: torch.sigmoid(h) - h.mean(1, keepdim=True),
}
LAYOUTS = {
    "dense": lambda x: x * 1,
    "turned": lambda x: (x.T * 1).T,
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reader", FRONTS)
def test_blocks_whose_results_are_added_in_place(reader, layout):
    modules = [ReadsInFront(FRONTS[reader]) for _ in range(2)]
    found = []
    x = torch.randn(48, 64, requires_grad=True)
    for called in ([ingot.optimize(m) for m in modules], modules):
        h = LAYOUTS[layout](x)
        for block in called:
            h += block(h)
        parameters = [p for m in modules for p in m.parameters()]
        found.append(torch.autograd.grad(h.square().sum(), [x, *parameters]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_a_second_derivative_goes_through_a_copy():
    module = ReadsInFront(lambda h: torch.sigmoid(h) * 2)
    x, found = torch.randn(48, 64, requires_grad=True), []
    for called in (ingot.optimize(module), module):
        (first,) = torch.autograd.grad(called(x * 1).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, module.a.weight]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_what_comes_in_and_eager_keeps_is_kept_itself():
    module, x = layers(nn.GELU()), torch.randn(48, 64, requires_grad=True)
    optimised = ingot.optimize(module)
    optimised(x).sum().backward()
    assert kept_bytes(optimised, x) <= kept_bytes(module, x)


class ReadsCopies(nn.Module):
    """MoCo's way with a queue that it writes into before backward."""

    def __init__(self, reader):
        super().__init__()
        self.a, self.reader = nn.Linear(64, 64), reader
        self.register_buffer("queue", torch.randn(32, 64))

    def forward(self, x):
        return self.reader(self, x)


COPIES = {
    "of a buffer": lambda m, x: m.a(x) @ m.queue.clone().detach().T,
    "of a turned buffer": lambda m, x: m.a(x) @ m.queue.T.contiguous(),
    "of an input": lambda m, x: torch.relu(m.a(x.clone())),
    "of a part of an input": lambda m, x: torch.relu(m.a(x.split(64, 1)[0].clone())),
}


@pytest.mark.parametrize("reader", COPIES)
def test_what_a_forward_copies_may_be_written_before_backward(reader):
    module, found = ReadsCopies(COPIES[reader]), []
    optimised, state = ingot.optimize(module), module.queue.clone()
    for called in (optimised, module):
        module.zero_grad()
        torch.manual_seed(3)
        module.queue.copy_(state)
        x = torch.randn(48, 64)
        result = called(x)
        module.queue.zero_()
        if "input" in reader:
            x.zero_()
        result.square().sum().backward()
        found.append([p.grad.clone() for p in module.parameters()])
    assert calls_of(optimised)
    for own, eagers in zip(*found, strict=True):
        torch.testing.assert_close(own, eagers, rtol=1e-4, atol=1e-3)


class ReadsState(nn.Module):
    """Of what has no gradient: an input, and buffers in front of a layer."""

    def __init__(self, reader):
        super().__init__()
        self.a, self.gain, self.reader = nn.Linear(64, 64), nn.Parameter(torch.rand(64)), reader
        self.register_buffer("mean", torch.rand(64))

    def forward(self, x):
        return self.reader(self, x)


NOT_KEPT = {
    "an activation": lambda m, x: m.a(x.tanh()).relu(),
    "normalised": lambda m, x: m.a(nn.functional.normalize(x)).relu(),
    "centred": lambda m, x: m.a((x - m.mean) / 3).relu(),
    "its square": lambda m, x: m.a(x * x),
    "with a bias": lambda m, x: m.a(torch.relu(x + m.gain)),
    "a residual": lambda m, x: m.a(x.sigmoid()) + x,
    "where it is large": lambda m, x: torch.where(x > 0, m.a(m.gain.expand(x.shape)), x),
    "of the state": lambda m, x: m.a(m.gain.expand(x.shape) - m.mean).sigmoid(),
}
NOT_KEPT |= {
    "root mean square": lambda m, x: m.a(nn.functional.rms_norm(x, (64,), m.gain)),
    "an addend": lambda m, x: torch.addmm(x, m.a(x.sin()), m.a.weight).tanh(),
    "behind detach()": lambda m, x: m.a(
        (x.softmax(-1) + nn.functional.layer_norm(x, (64,), m.gain).detach()) * m.gain
    ),
}
ALSO_KEPT = {
    "a factor": lambda m, x: m.a(x * m.gain).relu(),
    "of a product": lambda m, x: m.a(m.gain.expand(x.shape)) * x,
}
EAGER_REFUSES = "modified by an inplace operation"


def gradients_after_writes(module: nn.Module, bf16: bool) -> list[torch.Tensor]:
    """Of the parameters, with another input and other state in place before backward."""
    torch.manual_seed(3)
    x, mean = torch.randn(48, 64), module.mean.clone()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        result = module(x)
    x.zero_()
    module.mean.zero_()
    parameters = list(module.parameters())
    found = torch.autograd.grad(result.float().square().sum(), parameters, allow_unused=True)
    module.mean.copy_(mean)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("reader", NOT_KEPT)
def test_inputs_without_a_gradient_may_be_written_as_eagers(reader, bf16):
    module = ReadsState(NOT_KEPT[reader])
    optimised = ingot.optimize(module)
    for _ in range(2):  # a call that is captured, and one that is not
        found = [gradients_after_writes(called, bf16) for called in (optimised, module)]
        for own, eagers in zip(*found, strict=True):
            assert error(own, eagers.double()) <= (3e-2 if bf16 else 1e-5)
    assert calls_of(optimised)


@pytest.mark.parametrize("rows, copied", [(200, 1), (300, 0)])
def test_large_tables_are_not_copied(rows, copied):
    """As causal masks are, of which eager keeps a comparison at most."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, rows)
            self.register_buffer("table", torch.ones(rows, rows).tril())

        def forward(self, x):
            return self.linear(x).masked_fill(self.table == 0, -9.0).softmax(-1)

    optimised = ingot.optimize(Masked())
    optimised(torch.randn(3, rows, 16)).sum().backward()
    (call,) = calls_of(optimised)
    assert len(call.region.written_inputs) == copied


@pytest.mark.parametrize("wanted", [False, True])
def test_an_input_of_a_frozen_layer_may_be_written_as_eagers(wanted):
    """Whose bias alone is trained: nothing reads what its weight multiplies."""
    module = ReadsState(lambda m, x: nn.functional.gelu(m.a(x)) * m.gain)
    module.a.weight.requires_grad_(False)
    optimised, found = ingot.optimize(module), []
    for called in (optimised, module):
        torch.manual_seed(3)
        source = torch.randn(48, 64, requires_grad=wanted)
        x = source * 1
        result = called(x)
        with torch.no_grad():
            x.zero_()
        of = [module.a.bias, module.gain, *([source] if wanted else [])]
        found.append(torch.autograd.grad(result.square().sum(), of))
    for own, eagers in zip(*found, strict=True):
        torch.testing.assert_close(own, eagers, rtol=1e-4, atol=1e-3)
    assert calls_of(optimised)


@pytest.mark.parametrize("reader", [*ALSO_KEPT.values(), lambda m, x: m.a(x).relu()])
def test_inputs_that_eager_keeps_are_not_copied(reader):
    module = ReadsState(reader)
    optimised, x = ingot.optimize(module), torch.randn(48, 64)
    for called in (optimised, module):
        with pytest.raises(RuntimeError, match=EAGER_REFUSES):
            gradients_after_writes(called, False)
    assert kept_bytes(optimised, x) <= kept_bytes(module, x)


@pytest.mark.parametrize("reader", [lambda m, x: m.a(x).relu(), *NOT_KEPT.values()])
def test_under_autocast_the_casts_of_inputs_are_kept(reader):
    module, x = ReadsState(reader), torch.randn(48, 64)
    optimised = ingot.optimize(module)
    with torch.autocast("cpu", torch.bfloat16):
        optimised(x)
        assert kept_bytes(optimised, x) <= kept_bytes(module, x)


NOTHING_STORED = {
    "scaled by a number": lambda m, x: torch.relu(m.a(x) * 0.5),
    "scaled by the state": lambda m, x: torch.relu(m.a(x) * m.mean),
    "divided": lambda m, x: (m.a(x) / 8).softmax(-1),
    "a scaled residual": lambda m, x: x + m.a(x) * 0.1,
    "summed": lambda m, x: (m.a(x) * m.mean).sum(-1).sigmoid(),
    "the mean": lambda m, x: m.a(x).mean(1, keepdim=True) - 1,
}
ONE_STORED = {
    "scaled by a parameter": lambda m, x: torch.relu(m.a(x) * m.gain),
    "its square": lambda m, x: m.a(x) * m.a(x) / 2,
    "a divisor": lambda m, x: m.mean / (m.a(x) * 2),
    "of a unit": lambda m, x: nn.functional.gelu(m.a(x) * 2).sum(-1),
}


@pytest.mark.parametrize(
    "reader, count",
    [*((r, 0) for r in NOTHING_STORED.values()), *((r, 1) for r in ONE_STORED.values())],
    ids=[*NOTHING_STORED, *ONE_STORED],
)
def test_products_that_no_derivative_reads_are_not_stored(reader, count):
    optimised, twin, exact = three_of(ReadsState(reader))
    check_against_fp64(optimised, twin, exact, [torch.randn(48, 64)])
    stored = [len(c.region.graph["results"]) - len(c.region.results) for c in calls_of(optimised)]
    assert stored == [count]


def test_a_second_derivative_reads_what_was_copied_where_it_is():
    """Beside a frozen layer, backward reads no activation that comes in, a second one does."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x, scale):
            return self.linear(x) * scale

    module, found = Scaled(), []
    for called in (ingot.optimize(module), module):
        torch.manual_seed(6)
        x, scale = torch.randn(4, 8), torch.randn(8, requires_grad=True)
        along = torch.randn(4, 8, requires_grad=True)
        (first,) = torch.autograd.grad(called(x, scale), scale, along, create_graph=True)
        found.append(torch.autograd.grad((first**3).sum(), along)[0])
    torch.testing.assert_close(*found)


@pytest.mark.thorough
def test_residual_layers_keep_two_tensors_a_layer():
    """A product and a sum, with each row's mean and deviation: the norm between them is computed
    again."""
    module, x = residual(12), torch.randn(48, 64)
    optimised = ingot.optimize(module)
    gradients_of(optimised, [x])
    statistics = 2 * 12 * x[:, 0].nbytes
    assert kept_bytes(optimised, x) <= (2 * 12 + 3) * x.nbytes + statistics
    assert kept_bytes(module, x) >= 3 * 12 * x.nbytes


def test_a_network_is_let_go_a_few_layers_at_a_time(monkeypatch):
    """Gradients of weights come between the regions of a backward pass, which hold few layers."""
    written: list[list[str]] = []
    function = steps._Writer.function

    def noted(writer):
        made = function(writer)
        written.append(list(writer.lines))
        return made

    monkeypatch.setattr(steps._Writer, "function", noted)
    module, x = residual(12), torch.randn(48, 64)
    gradients_of(ingot.optimize(module), [x])
    lines = max(written, key=len)
    kinds = ["region" if "region_" in line else "product" for line in lines if " = " in line]
    kinds = kinds[len([line for line in lines if "= args[" in line]) :]
    assert kinds.count("region") >= 5
    first, last = kinds.index("region"), len(kinds) - kinds[::-1].index("region") - 1
    assert kinds[first:last].count("product") >= 8


class Watched(nn.Module):
    """Only a running mean comes of what is computed."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        self.norm(self.a(x))
        return x


def test_a_region_that_moves_statistics_alone_keeps_nothing():
    module = Watched()
    optimised = ingot.optimize(copy.deepcopy(module))
    x = torch.randn(16, 8, requires_grad=True)
    for called in (optimised, module):
        x.grad = None
        called(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.ones_like(x))
    torch.testing.assert_close(optimised.norm.running_var, module.norm.running_var)
    report = optimised.ingot_report()
    assert report["operators_replaced"]
    assert report["unsupported"] == []
