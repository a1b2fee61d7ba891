"""Training through chains of batch norms behind convolutions, which regions take where it pays."""

import copy

import ingot
import pytest
import selection
import torch
from ingot.capture import gains
from ingot.capture.captured import Region
from test_gradients import (
    backwards_of,
    calls_of,
    check_against_fp64,
    error,
    near_under_autocast,
    peak_of,
    three_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LAYERS = {
    1: (nn.Conv1d, nn.BatchNorm1d),
    2: (nn.Conv2d, nn.BatchNorm2d),
    3: (nn.Conv3d, nn.BatchNorm3d),
}
ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "leaky": lambda y: F.leaky_relu(y, 0.1),
}


@pytest.fixture(autouse=True)
def every_chain_pays(monkeypatch):
    monkeypatch.setattr(gains, "least_saved", lambda *_: 0.0)
    monkeypatch.setattr(gains, "takes_channels_last", True)


def norm_of(norm: nn.Module) -> nn.Module:
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias)
    return norm


class Net(nn.Module):
    """A block of a residual network behind a convolution, and one behind it."""

    def __init__(self, between=F.relu, rank=2, projected=False, **options):
        super().__init__()
        conv, norm = LAYERS[rank]
        self.stem, self.end = conv(3, 8, 1), conv(8, 2, 1)
        self.first, self.second = conv(8, 8, 1, bias=False), conv(8, 8, 3, padding=1)
        norms = 3 if projected else 2
        self.norms = nn.ModuleList(norm_of(norm(8, **options)) for _ in range(norms))
        self.aside = conv(8, 8, 1) if projected else None
        self.between = between

    def forward(self, x):
        x = self.stem(x)
        y = self.between(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y = y + (x if self.aside is None else self.norms[2](self.aside(x)))
        return self.end(self.between(y))


def compared(made: nn.Module, inputs: list, regions: int | None = None) -> nn.Module:
    module, twin, exact = three_of(made)
    check_against_fp64(module, twin, exact, inputs)
    for own, other in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(own, other)
    if regions is not None:
        assert len(calls_of(module)) == regions
        assert all(way.programs for way in backwards_of(module))
        assert len(backwards_of(module)) == regions
    return module


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("plane", selection.quick([(5, 7)], [(6, 6), (5, 7)]))
def test_activations(name, plane):
    torch.manual_seed(1)
    compared(Net(ACTIVATIONS[name]), [torch.randn(4, 3, *plane)], 2)


@pytest.mark.parametrize("batch", selection.quick([1], [1, 5]))
@pytest.mark.parametrize(("rank", "space"), [(1, (9,)), (2, (7, 7)), (3, (3, 4, 4))])
def test_spaces_and_batches(rank, space, batch):
    torch.manual_seed(2)
    compared(Net(rank=rank), [torch.randn(batch, 3, *space)], 2)


def test_batches_of_many_sizes_share_their_programs():
    torch.manual_seed(2)
    module, twin, exact = three_of(Net())
    for batch in (4, 9, 3):
        check_against_fp64(module, twin, exact, [torch.randn(batch, 3, 6, 5)])
    assert len(backwards_of(module)) == 2


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("plane", selection.quick([(6, 6)], [(6, 6), (5, 7)]))
def test_channels_last(plane, projected):
    torch.manual_seed(3)
    made = Net(projected=projected).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, *plane).contiguous(memory_format=torch.channels_last)
    module, twin, exact = three_of(made)
    for m in (module, twin, exact):
        given = x.double() if m is exact else x
        y = m(given)
        y.backward(torch.ones_like(y))
        assert y.is_contiguous(memory_format=torch.channels_last)
    for own, other, true in zip(module.parameters(), twin.parameters(), exact.parameters()):
        if true.grad.norm() > 1e-6:
            assert error(own.grad, true.grad) <= max(2e-6, 4 * error(other.grad, true.grad))
    for call in calls_of(module):
        for way in call._backwards.values():
            (program,) = way.programs  # one: nothing of it lies across
            wide = [a.axes for a in program._leaf_layouts if a.axes[0] is not None]
            assert wide and all(axes[-1] == 1 for axes in wide)


@pytest.mark.parametrize(
    ("options", "regions"),
    [
        ({"momentum": None}, None),  # TorchDynamo breaks the graph where the factor is read
        ({"track_running_stats": False}, 2),
        ({"eps": 0.1, "momentum": 0.3}, 2),
    ],
)
def test_norms_of_other_kinds(options, regions):
    torch.manual_seed(4)
    compared(Net(**options), [torch.randn(4, 3, 5, 6)], regions)


def test_norms_without_parameters():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6, affine=False)
            self.end = nn.Conv2d(6, 2, 1)

        def forward(self, x):
            return self.end(F.silu(self.norm(self.conv(x))))

    torch.manual_seed(4)
    compared(Plain(), [torch.randn(4, 3, 5, 6)], 1)


def test_norms_in_eval_mode():
    torch.manual_seed(5)
    module, twin, exact = three_of(Net())
    x = torch.randn(4, 3, 5, 6)
    for m in (module, twin, exact):
        m(x.double() if m is exact else x)
        m.eval()
    before = [buffer.clone() for buffer in module.buffers()]
    check_against_fp64(module, twin, exact, [x])
    assert all(map(torch.equal, before, module.buffers()))


def test_a_norm_that_is_called_twice_stays_pytorchs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))
            self.norm, self.own = norm_of(nn.BatchNorm2d(3)), norm_of(nn.BatchNorm2d(3))

        def forward(self, x):
            y = F.relu(self.norm(self.convs[0](x)))
            y = F.relu(self.norm(self.convs[1](y)))
            return F.relu(self.own(self.convs[2](y)))

    torch.manual_seed(6)
    module = compared(Twice(), [torch.randn(4, 3, 5, 6)], 1)
    assert not any(graph.problem for graph in module._ingot.graphs)


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (4, 8, 1, 1), (1, 1, 5, 6), (8, 5, 6)])
def test_sums_with_what_is_broadcast(shape):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), norm_of(nn.BatchNorm2d(8))
            self.shift, self.end = nn.Parameter(torch.randn(shape)), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.end(torch.relu(self.norm(self.conv(x)) + self.shift))

    torch.manual_seed(7)
    compared(Shifted(), [torch.randn(4, 3, 5, 6)])


FROZEN = ["first", "norms.0.weight", "norms.1.bias", "norms", "stem"]


@pytest.mark.parametrize("frozen", selection.every(2, FROZEN))
def test_frozen_parameters(frozen):
    torch.manual_seed(8)
    made, x = Net(), torch.randn(4, 3, 5, 6)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    module, twin, exact = three_of(made)
    for m in (module, twin, exact):
        m(x.double() if m is exact else x).square().sum().backward()
    for own, other, true in zip(module.parameters(), twin.parameters(), exact.parameters()):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None and true.grad.norm() > 1e-4:
            assert error(own.grad, true.grad) <= max(2e-6, 4 * error(other.grad, true.grad))


def test_second_derivatives_and_retained_graphs():
    torch.manual_seed(9)
    module, twin, _ = three_of(Net(F.silu))
    x, found = torch.randn(4, 3, 5, 6, requires_grad=True), []
    for m in (module, twin):
        loss = m(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
        once = torch.autograd.grad(loss, x, retain_graph=True)[0]
        torch.testing.assert_close(once, slope.detach(), rtol=1e-4, atol=1e-7)
        found.append(torch.autograd.grad(slope.square().sum(), [x, m.norms[1].weight]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-7)


def test_checkpoints_and_hooks():
    torch.manual_seed(10)
    module, twin, _ = three_of(Net())
    x, seen = torch.randn(4, 3, 5, 6), {}
    for m in (module, twin):
        given = x.clone().requires_grad_()
        hooked = []
        y = checkpoint(m, given, use_reentrant=False)
        y.register_hook(lambda g, hooked=hooked: hooked.append(g.clone()))
        y.square().sum().backward()
        seen[m] = [given.grad, *hooked, *(p.grad for p in m.parameters())]
    for own, other in zip(seen[module], seen[twin], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


class Chain(nn.Module):
    """Whose gradient is given from outside."""

    def __init__(self, aside=False):
        super().__init__()
        self.conv, self.norm, self.aside = nn.Conv2d(3, 8, 1), norm_of(nn.BatchNorm2d(8)), aside

    def forward(self, x):
        y = self.conv(x)
        z = self.norm(y)
        return F.relu(z + y.detach() if self.aside else z)


@pytest.mark.parametrize("aside", [False, True])
def test_gradients_of_any_strides(aside):
    torch.manual_seed(11)
    module, twin, _ = three_of(Chain(aside))
    check_gradients_of_any_strides(module, twin, torch.randn(4, 3, 5, 6))


def check_gradients_of_any_strides(module: nn.Module, twin: nn.Module, x: torch.Tensor) -> None:
    dense = torch.randn(4, 8, 5, 6)
    for given in (
        dense,
        dense.contiguous(memory_format=torch.channels_last),
        torch.randn(4, 8, 7, 9)[:, :, 1:6, 2:8],
        torch.randn(4, 8, 6, 5).mT,
        torch.randn(4, 8, 1, 1).expand(4, 8, 5, 6),
        torch.randn(()).expand(4, 8, 5, 6),
    ):
        found, expected = (
            torch.autograd.grad(m(x), list(m.parameters()), given) for m in (module, twin)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_autocast():
    torch.manual_seed(12)
    three = three_of(Net())
    near_under_autocast(three, torch.randn(4, 3, 8, 8), 1e-3)
    halves = [layout.dtype for call in calls_of(three[0]) for layout in call.region.result_layouts]
    assert torch.bfloat16 in halves and torch.float32 in halves  # results, and statistics


@pytest.mark.parametrize("projected", [False, True])
def test_forward_keeps_no_more_than_eager(projected):
    """x, and where a sum is let through, the result, which eager keeps as well."""
    torch.manual_seed(13)
    module = ingot.optimize(Net(projected=projected))
    module(torch.randn(4, 3, 8, 8)).sum().backward()
    for call in calls_of(module):
        (way,) = call._backwards.values()
        leaves, stored = len(call.region.leaves), way.derivative.stored
        large = [at for at in way.kept if at < leaves and at not in small_leaves(call.region)]
        kept = [stored[at - leaves] for at in way.kept if at >= leaves]
        norms = sum(o["what"] == "batch_norm" for o in call.region.operators)
        sums = any(o["what"] == "add" for o in call.region.operators)
        assert len(large) == norms
        assert [place for place in kept if place < call.results] == [0] * sums


def small_leaves(region: Region) -> set[int]:
    values = [v for v in region.graph["values"] if v["op"] in ("input", "parameter", "buffer")]
    return {at for at, value in enumerate(values) if value["shape"][0] != "B"}


def peaks_of_steps(made: nn.Module) -> list[int]:
    """Of training steps, optimised and eager."""
    module, twin, _ = three_of(made)
    x, peaks = torch.randn(16, 3, 32, 32), []

    def step(m):
        m.zero_grad()
        m(x).sum().backward()

    for m in (module, twin):
        step(m), step(m)
        peaks.append(peak_of(lambda m=m: step(m)))
    return peaks


def test_peak_memory_of_a_training_step():
    torch.manual_seed(14)
    peaks = peaks_of_steps(Net())
    # A third vector of statistics is kept beside mean and rstd, of 8 channels.
    assert peaks[0] <= peaks[1] + 2 * 64


class Stage(nn.Module):
    """Blocks of a residual network, the first with a projection: what one gives convolutions read,
    and the next block's sum with its dimensions merged."""

    def __init__(self, handed_out=False):
        super().__init__()
        self.stem, self.end = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(norm_of(nn.BatchNorm2d(8)) for _ in range(4))
        self.handed_out = handed_out

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.norms[0](self.convs[0](x)) + self.norms[1](self.convs[1](x)))
        first = x
        for conv, norm in list(zip(self.convs, self.norms))[2:]:
            x = F.relu(norm(conv(x)) + x)
        y = self.end(x)
        return (y, first.flatten(2)) if self.handed_out else y


def test_results_that_are_one_tensor_lie_in_one_memory():
    torch.manual_seed(15)
    module = compared(Stage(), [torch.randn(4, 3, 8, 8)])
    same = [call.region.same for call in calls_of(module)]
    assert same == [{1: 0}, {1: 0}, {}]
    peaks = peaks_of_steps(Stage())
    assert peaks[0] <= peaks[1] + 4 * 64


def test_what_the_caller_may_write_into_has_memory_of_its_own():
    torch.manual_seed(16)
    module, twin, _ = three_of(Stage(handed_out=True))
    for m in (module, twin):
        y, first = m(torch.ones(4, 3, 8, 8))
        with torch.no_grad():
            first.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert not calls_of(module)[0].region.same


def test_what_does_not_pay_stays_pytorchs(monkeypatch):
    monkeypatch.undo()
    torch.manual_seed(15)
    made = Net()
    twin = copy.deepcopy(made)
    with pytest.warns(ingot.IngotWarning):
        module = ingot.optimize(made)
        x = torch.randn(4, 3, 5, 6)
        y = module(x)
    assert not calls_of(module) and torch.equal(y, twin(x))


def test_what_pays_is_told_by_size(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(gains, "least_saved", lambda *_: 400_000.0)
    for side, regions in ((2, 0), (16, 2)):
        torch._dynamo.reset()
        module = ingot.optimize(Net())
        module(torch.randn(4, 3, side, side)).sum().backward()
        assert len(calls_of(module)) == regions


@pytest.mark.parametrize(("channels", "regions"), [(8, 1), (256, 0)])
def test_a_norm_of_few_channels_pays_alone(monkeypatch, channels, regions):
    monkeypatch.undo()
    monkeypatch.setattr(gains, "least_saved", lambda *_: 100_000.0)
    torch._dynamo.reset()
    conv = nn.Conv2d(3, channels, 1, bias=False)  # a norm takes what a bias adds away
    made = nn.Sequential(conv, norm_of(nn.BatchNorm2d(channels)))
    twin = copy.deepcopy(made)
    module = ingot.optimize(made)
    x = torch.randn(4, 3, 8, 8)
    for each in (module, twin):
        (each(x) * torch.linspace(-1, 1, channels)[:, None, None]).relu().sum().backward()
    assert len(calls_of(module)) == regions
    for own, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made[1].running_var, twin[1].running_var)
