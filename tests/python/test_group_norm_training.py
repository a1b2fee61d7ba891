"""Training through chains of group norms behind convolutions, which regions take where it pays."""

import pytest
import selection
import torch
from ingot.capture import gains, merged_axes, normalisations
from test_conv_training import (
    ACTIVATIONS,
    LAYERS,
    check_gradients_of_any_strides,
    compared,
    norm_of,
    peaks_of_steps,
)
from test_gradients import (
    backwards_of,
    calls_of,
    check_against_fp64,
    near_under_autocast,
    three_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def every_chain_pays(monkeypatch):
    monkeypatch.setattr(gains, "least_saved", lambda *_: 0.0)
    monkeypatch.setattr(gains, "_LEAST_OF_CHANNELS", 0)
    for module in (normalisations, merged_axes):  # as on a GPU
        monkeypatch.setattr(module, "norms_tokens", lambda device_type: True)


class Net(nn.Module):
    """A residual block of a diffusion network, and what stands behind it."""

    def __init__(self, between=F.silu, rank=2, groups=4, channels=8, **options):
        super().__init__()
        conv, _ = LAYERS[rank]
        self.stem, self.end = conv(3, channels, 1), conv(channels, 2, 1)
        self.convs = nn.ModuleList(conv(channels, channels, 3, padding=1) for _ in range(2))
        made = (nn.GroupNorm(groups, channels, **options) for _ in range(3))
        self.norms = nn.ModuleList(norm_of(n) if n.weight is not None else n for n in made)
        self.between = between

    def forward(self, x):
        x = self.stem(x)
        y = self.convs[0](self.between(self.norms[0](x)))
        y = x + self.convs[1](self.between(self.norms[1](y)))
        return self.end(self.between(self.norms[2](y)))


def lies_last(module: nn.Module, *inputs: torch.Tensor) -> list:
    form = torch.channels_last if inputs[0].dim() == 4 else torch.channels_last_3d
    return [module.to(memory_format=form), *(x.to(memory_format=form) for x in inputs)]


@pytest.mark.parametrize(("innermost", "name"), selection.checkered([False, True], ACTIVATIONS))
def test_activations(name, innermost):
    torch.manual_seed(1)
    made, x = Net(ACTIVATIONS[name]), torch.randn(4, 3, 6, 5)
    if innermost:
        made, x = lies_last(made, x)
    compared(made, [x], 3)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("rank", "space"), [(1, (9,)), (2, (7, 7)), (3, (3, 4, 4))])
def test_spaces_and_batches(rank, space, batch):
    torch.manual_seed(2)
    compared(Net(rank=rank), [torch.randn(batch, 3, *space)], 3)


@pytest.mark.parametrize(("groups", "channels"), [(1, 8), (8, 8), (2, 6), (3, 30)])
@pytest.mark.parametrize("innermost", [False, True])
def test_groups(groups, channels, innermost):
    torch.manual_seed(3)
    made, x = Net(groups=groups, channels=channels), torch.randn(3, 3, 6, 6)
    if innermost:
        made, x = lies_last(made, x)
    compared(made, [x])


def test_large_samples_in_parts(monkeypatch):
    monkeypatch.setattr(normalisations, "_MOST_OF_A_BLOCK", 0)
    torch.manual_seed(3)
    made, x = lies_last(Net(), torch.randn(2, 3, 32, 16))
    compared(made, [x], 3)


@pytest.mark.parametrize("innermost", [False, True])
def test_batches_of_many_sizes_share_their_programs(innermost):
    torch.manual_seed(4)
    made = Net().to(memory_format=torch.channels_last) if innermost else Net()
    module, twin, exact = three_of(made)
    for batch in (4, 9, 3):
        x = torch.randn(batch, 3, 6, 5)
        check_against_fp64(module, twin, exact, [lies_last(made, x)[1] if innermost else x])
    assert len(backwards_of(module)) == 3


@pytest.mark.parametrize("options", [{"affine": False}, {"eps": 0.3}])
def test_norms_of_other_kinds(options):
    torch.manual_seed(5)
    compared(Net(**options), [torch.randn(4, 3, 6, 5)], 3)


@pytest.mark.parametrize("innermost", [False, True])
def test_a_batch_of_none(innermost):
    torch.manual_seed(5)
    made, x = Net(), torch.randn(2, 3, 6, 5)
    if innermost:
        made, x = lies_last(made, x)
    module, twin, _ = three_of(made)
    for m in (module, twin):
        m(x).sum().backward()
        m.zero_grad()
        m(x[:0]).sum().backward()
    for own, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad)


def test_frozen_parameters():
    torch.manual_seed(6)
    made = Net()
    for parameter in (*made.norms[0].parameters(), made.norms[1].bias, made.stem.weight):
        parameter.requires_grad_(False)
    compared(made, [torch.randn(4, 3, 6, 5)], 3)


def test_second_derivatives_and_retained_graphs():
    torch.manual_seed(7)
    module, twin, _ = three_of(Net().double())
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for m in (module, twin):
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        first = torch.autograd.grad(g.square().sum(), [x, *m.parameters()], retain_graph=True)
        found.append([g, *first, *torch.autograd.grad(g.square().sum(), [x, *m.parameters()])])
    torch.testing.assert_close(*found)
    assert len(calls_of(module)) == 3


def test_checkpoints():
    torch.manual_seed(8)
    module, twin, _ = three_of(Net())
    x, found = torch.randn(3, 3, 6, 6), []
    for m in (module, twin):
        checkpoint(m, x, use_reentrant=False).square().sum().backward()
        found.append([p.grad for p in m.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("innermost", [False, True])
def test_gradients_of_any_strides(innermost):
    torch.manual_seed(9)

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 8, 1), norm_of(nn.GroupNorm(4, 8))

        def forward(self, x):
            return F.silu(self.norm(self.stem(x)))

    made, x = Chain(), torch.randn(4, 3, 5, 6)
    if innermost:
        made, x = lies_last(made, x)
    module, twin, _ = three_of(made)
    check_gradients_of_any_strides(module, twin, x)
    assert len(calls_of(module)) == 1


def test_autocast():
    torch.manual_seed(10)
    near_under_autocast(three_of(Net()), torch.randn(4, 3, 8, 8), 1e-3)


class Widened(Net):
    """As autocast of a GPU runs it: norms and activations in 32 bits, convolutions in 16."""

    def forward(self, x):
        x = self.stem(x)
        y = self.convs[0](self.between(self.norms[0](x.float())).to(x.dtype))
        y = x + self.convs[1](self.between(self.norms[1](y.float())).to(x.dtype))
        return self.end(self.between(self.norms[2](y.float())).to(x.dtype))


@pytest.mark.parametrize("innermost", [False, True])
def test_norms_in_32_bits_between_convolutions_in_16(innermost):
    torch.manual_seed(11)
    made, x = Widened(), torch.randn(4, 3, 8, 8, dtype=torch.bfloat16)
    for conv in (made.stem, made.end, *made.convs):
        conv.to(torch.bfloat16)
    if innermost:
        made, x = lies_last(made, x)
    module, twin, _ = three_of(made)
    found = []
    for m in (module, twin):
        m(x).float().square().sum().backward()
        found.append([p.grad.float() for p in m.parameters()])
    for own, other in zip(*found):
        assert (own - other).norm() <= 2e-2 * other.norm()
    for call in calls_of(module):
        # Statistics, and nothing else, in 32 bits: what convolutions read, and the sum, in 16.
        wide = [la for la in call.region.result_layouts if la.dtype == torch.float32]
        assert [len(la.shape) for la in wide] == [2, 2]
        (way,) = call._backwards.values()
        (program,) = way.programs


def test_what_convolutions_read_under_autocast_is_written_in_16_bits():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv, self.twice = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1), nn.ReLU()

        def forward(self, x, both=False):
            y = F.silu(self.norm(x))
            return (self.conv(y), self.conv(y)) if both else self.conv(y)

    torch.manual_seed(12)
    for both, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        torch._dynamo.reset()
        module, twin, _ = three_of(Chain())
        x = torch.randn(4, 8, 6, 6)  # in 32 bits, which autocast of a CPU leaves
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = module(x, both), twin(x, both)
        torch.testing.assert_close(found, expected)
        (call,) = calls_of(module)
        assert call.region.result_layouts[0].dtype == dtype


def test_terms_of_a_sum_get_one_gradient_and_the_sum_is_kept_for_them():
    class Residual(Net):
        def forward(self, x):
            x = self.stem(x)
            y = x + self.convs[0](self.between(self.norms[0](x)))
            return y + self.convs[1](self.between(self.norms[1](y)))

    torch.manual_seed(13)
    module = compared(Residual(), [torch.randn(4, 3, 6, 5)])
    call = next(c for c in calls_of(module) if c.region.graph["name"].startswith("add"))
    (way,) = call._backwards.values()
    outputs = next(n for n in way.derivative.graph.graph.nodes if n.op == "output").args[0]
    assert outputs[0] is outputs[1]
    leaves = len(call.region.leaves)
    assert not {0, 1}.intersection(way.kept)  # neither of the terms
    assert 0 in [way.derivative.stored[at - leaves] for at in way.kept if at >= leaves]


def test_peak_memory_of_a_training_step():
    torch.manual_seed(14)
    peaks = peaks_of_steps(Net())
    assert peaks[0] <= 0.9 * peaks[1]  # what the activations were applied to is not kept


def test_few_samples_of_few_channels_innermost_stay_pytorchs(monkeypatch):
    monkeypatch.setattr(gains, "_LEAST_OF_CHANNELS", 33)
    for batch, regions in ((4, 0), (5, 3)):
        torch._dynamo.reset()
        made, x = lies_last(Net(), torch.randn(batch, 3, 6, 5))
        module, *_ = three_of(made)
        module(x).sum().backward()
        assert len(calls_of(module)) == regions
