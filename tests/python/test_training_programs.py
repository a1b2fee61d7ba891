"""Programs that gave silently other numbers than PyTorch where models are trained, most of them
under autocast, in second derivatives or beside writes; and random ones of the kind.

INGOT_TRAININGS=2000 runs that many other ones than the few of every run.
"""

import copy
import itertools
import os
import random

import ingot
import pytest
import torch
from ingot.capture import kept as keeping
from live import compare, regions_run
from random_agreement import agree
from test_gradients import calls_of
from torch import nn
from torch.nn import functional as F
from training_programs import difference, draw_training

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
COUNT = int(os.environ.get("INGOT_TRAININGS", "0"))
HALVES = [torch.bfloat16, torch.float16]


class Model(nn.Module):
    """Layers of one size, for a function of them and of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.batch_norm = nn.RMSNorm(32), nn.BatchNorm1d(32)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _both(function, dtype, *inputs):
    """Results by PyTorch and through Ingot, under autocast to `dtype` if there is one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(function)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        expected = twin(*inputs)
        with regions_run() as ran:
            found = ingot.optimize(model)(*inputs)
    assert ran, "nothing was taken"
    return found, expected


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("gradients", [True, False])
def test_an_rms_norm_of_16_bits_has_pytorchs_eps(dtype, gradients):
    x = torch.randn(16, 32) * 0.02

    def function(m, x):
        return m.norm(F.linear(x, m.linear.weight)) * 2

    with torch.set_grad_enabled(gradients):
        found, expected = _both(function, dtype, x)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


# What jumps where an operand moves by a rounding, of numbers in the order of 1.
DECISIONS = {
    "compared": lambda h: torch.where(h > 0.3125, 3.0, 0.0),
    "compared twice": lambda h: torch.where((h > -0.25) & (h < 0.25), 3.0, 0.0),
    "compared with others": lambda h: torch.where(h > h.mean(1, True), 1.0, 2.0),
    "the largest": lambda h: (h == h.amax(1, True)).to(h.dtype),
    "rounded down": lambda h: torch.floor(h * 16),
    "divided": lambda h: torch.div(h, 0.125, rounding_mode="trunc"),
}
CHAINS = {
    "linear": lambda m, h: h + 0,
    "tanh": lambda m, h: torch.tanh(h) * 1.7,
    "softmax": lambda m, h: torch.softmax(h * 3, -1) * 10,
    "batch norm": lambda m, h: m.batch_norm(h),
    "rms norm": lambda m, h: m.norm(h),  # its derivative stays PyTorch's
    "linear again": lambda m, h: m.other(torch.relu(h)),
}


QUICK = [("linear", torch.bfloat16), ("rms norm", torch.bfloat16)]


@pytest.mark.parametrize(
    ("chain", "dtype"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.thorough)
        for case in itertools.product(CHAINS, [None, *HALVES])
    ],
)
def test_backward_decides_as_forward_did(chain, dtype):
    x, scale = torch.randn(256, 32), torch.ones(256, 32, requires_grad=True)
    for name, decision in DECISIONS.items():
        scale.grad = None

        def function(m, x, scale, decision=decision):
            h = CHAINS[chain](m, m.linear(x))
            return decision(h) * scale, h * 2

        found, _ = _both(function, dtype, x, scale)
        sum(result.float().sum() for result in found).backward()
        assert torch.equal(found[0].detach().float(), scale.grad), name


def _copied(m, x):
    h = m.linear(x)
    h.copy_(m.other(x))
    return torch.tanh(h) * 2


def _copied_in_parts(m, x):
    h = m.linear(x) * 1
    h.view(-1).copy_(m.other(x).view(-1))
    h.t_().copy_(x.t())
    return torch.tanh(h) * 2


def _added_nothing(m, x):
    return torch.addmm(m.linear(x), x, m.other.weight, beta=0).tanh() * 2


def _into_a_new_one(m, x):
    return torch.empty_like(m.linear(x)).copy_(m.other(x)).tanh() * 2


@pytest.mark.parametrize("function", [_copied, _copied_in_parts, _added_nothing, _into_a_new_one])
def test_what_was_written_over_has_the_gradient_that_pytorch_gives_it(function):
    model, gradients = Model(function), []
    x = torch.randn(8, 32)
    for each in (model, ingot.optimize(model)):
        model.zero_grad()
        with regions_run() as ran:
            each(x).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert ran
    given = [{name for name, g in found.items() if g is not None} for found in gradients]
    assert given[0] == given[1]
    for name in given[0]:
        torch.testing.assert_close(gradients[1][name], gradients[0][name])


def _largest_of_all(m, x):
    h = m.linear(x)
    F.batch_norm(x.mT @ h, None, None, training=True)
    return h.amax() * 2


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_a_maximum_of_16_bits_reaches_an_element(dtype):
    model = Model(_largest_of_all)
    optimised = ingot.optimize(model)
    for _ in range(4):  # what a bias adds up to need not have more than 16 bits
        model.zero_grad()
        with torch.autocast("cpu", dtype), regions_run() as ran:
            result = optimised(torch.randn(4, 4, 32, 32))
        result.float().backward()
        assert ran and model.linear.bias.grad.sum().item() == pytest.approx(2, rel=0.01)


def _largest_of_rows(m, x):
    return (m.linear(x) * m.other.bias + m.other.weight[0]).amax(1) * 2


def _largest_of_a_product(m, x):
    return m.linear(x).amax(1) * 2


def _largest_with_place(m, x):
    values, places = (m.linear(x) * m.other.bias).max(1)
    return values * 2


@pytest.mark.parametrize(
    ("function", "kept"),
    [(_largest_of_rows, 1), (_largest_of_a_product, 0), (_largest_with_place, 0)],
)
def test_what_a_maximum_is_of_is_kept_where_kernels_round_otherwise(function, kept, monkeypatch):
    """Another kernel may round a product and a sum once, and equal no element of it then."""
    x, counts, gradients = torch.randn(64, 32), [], []
    model = Model(function)
    for alike in (True, False):
        monkeypatch.setattr(keeping, "computes_alike", lambda device_type, alike=alike: alike)
        torch._dynamo.reset()
        model.zero_grad()
        optimised = ingot.optimize(model)
        optimised(x).sum().backward()
        counts.append(sum(len(call.region.result_layouts) for call in calls_of(optimised)))
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert counts[1] == counts[0] + kept
    model.zero_grad()
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for found in gradients:
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["written before", "written behind a copy"])
def test_a_buffer_that_a_training_step_reads_and_writes(order):
    class Counting(Model):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("count", torch.ones(()))

        def forward(self, x):
            read = self.count if order == "written before" else self.count.clone()
            if order == "written before":
                self.count.add_(1)
            y = torch.tanh(self.linear(x) * read) * 2
            if order != "written before":
                self.count.mul_(0.9).add_(y.detach().mean())
            return y

    def script(m):
        for _ in range(2):
            result = m(torch.randn(4, 32))
            if result.requires_grad:
                result.square().sum().backward()
            yield result.detach()

    compare(Counting, script)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_a_softmax_of_a_single_row_is_zero(dtype):
    model = Model(lambda m, x: torch.softmax(x.to(dtype) + m.linear(x), 0))
    optimised = ingot.optimize(model)
    for batch in (3, 1):
        model.zero_grad()
        with torch.autocast("cpu", dtype), regions_run() as ran:
            result = optimised(torch.randn(batch, 32))
        (result * torch.randn(32).to(dtype)).sum().backward()
    assert ran and not model.linear.bias.grad.any()


def _flags(m, x):
    h = m.linear(x)
    flags = (h > 0).masked_fill(h > 1, False)
    return flags, torch.where(flags, h, h * 2)


def _only_moved(m, x):
    m.batch_norm(x * m.batch_norm.weight)
    return x.min()


def _expanded_as(m, x):
    h = x.clamp(min=torch.sigmoid(x) * 0.5)
    return x.expand_as(h), h, m.linear(x)


@pytest.mark.parametrize("function", [_flags, _only_moved, _expanded_as])
def test_what_could_not_be_run(function, caplog):
    def script(m):
        yield m(torch.randn(8, 32))

    compare(lambda: Model(function), script, taken=function is not _only_moved)
    assert "failed" not in caplog.text


def test_a_few_random_programs_that_are_trained():
    agree(range(2000, 2008), draw_training, difference)


@pytest.mark.thorough
@pytest.mark.timeout(300 + 10 * COUNT)
def test_random_programs_that_are_trained():
    seeds = random.sample(range(10**6, 10**9), COUNT) if COUNT else range(2008, 2060)
    agree(seeds, draw_training, difference)
