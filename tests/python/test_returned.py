"""What a forward returns and computes other results from: their gradients by it are eager's, and
what keeps it or has a hook on it sees all of them."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import selection
import torch
from live import regions_run
from standalone_support import pair_of, two_layers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.norm, self.body, self.seen = nn.BatchNorm1d(32), body, None

    def forward(self, x):
        return self.body(self, x)


def class_activation(m, x):
    h = torch.relu(m.norm(m.a(x)))
    return h, m.head(F.gelu(h))


def hidden_states(m, x):
    first = F.gelu(m.a(x))
    second = F.gelu(m.b(first)) + first
    return first, second, m.head(F.silu(second))


def a_view(m, x):
    h = F.gelu(m.a(x)).view(-1, 4, 8)
    return h, m.head(F.relu(h).reshape(-1, 32))


def under_several_names(m, x):
    h = F.gelu(m.a(x))
    return h, h, h.view(-1, 4, 8), m.head(F.silu(h))


def a_view_of_a_result(m, x):
    h = F.gelu(m.a(x))
    parts = h.view(-1, 4, 8)
    return h, parts, m.head(F.silu(parts).reshape(-1, 32))


def a_half(m, x):
    left, right = F.gelu(m.a(x)).chunk(2, -1)
    return left, m.head(torch.cat((left * right, right), -1))


def a_view_of_the_input(m, x):
    parts = x.view(-1, 4, 8)
    return parts, m.head(F.gelu(m.a(parts.reshape(-1, 32))))


def turned(m, x):
    h = F.gelu(m.a(x)).t()
    return h, m.head(F.silu(h.t()))


def written_in_place(m, x):
    h = F.gelu(m.a(x))
    h.mul_(2)
    return h, m.head(F.silu(h))


def logits_with_their_loss(m, x):
    logits = m.head(F.gelu(m.a(x)))
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)), logits


def an_error_with_what_it_is_of(m, x):
    y = m.head(F.gelu(m.a(x)))
    return (y - 1).square().mean(), y


def an_attribute(m, x):
    m.seen = F.gelu(m.a(x))
    return m.seen, m.head(F.silu(m.seen))


def inside_a_checkpoint(m, x):
    def part(x):
        h = F.gelu(m.a(x))
        return h, F.gelu(m.b(h))

    h, y = checkpoint(part, x, use_reentrant=False)
    return h, m.head(F.relu(y))


def around_a_checkpoint(m, x):
    h = F.gelu(m.a(x))
    y = checkpoint(lambda x: F.gelu(m.b(x)), F.silu(h), use_reentrant=False)
    return h, y, m.head(F.relu(y) + h)


def where_the_graph_breaks(m, x):
    h = F.gelu(m.a(x))
    y = F.silu(m.b(h))
    torch._dynamo.graph_break()
    return h, y, m.head(F.relu(y) + h)


FORWARDS = (
    class_activation,
    hidden_states,
    a_view,
    under_several_names,
    a_view_of_a_result,
    a_half,
    a_view_of_the_input,
    turned,
    written_in_place,
    logits_with_their_loss,
    an_error_with_what_it_is_of,
    an_attribute,
    inside_a_checkpoint,
    around_a_checkpoint,
    where_the_graph_breaks,
)


def outcome(called, module, x):
    """What may be asked of a call's results, and which of them are one tensor, or one memory."""
    x = x.clone().requires_grad_()
    results = called(x)
    alike = [[a is b, a.data_ptr() == b.data_ptr()] for a in results for b in results]
    options = {"retain_graph": True, "allow_unused": True}
    asked = [torch.autograd.grad(r.square().sum(), results, **options) for r in results]
    loss = sum((at + 1) * result.square().mean() for at, result in enumerate(results))
    first = torch.autograd.grad(loss, results, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [*results, x], **options)
    hooked = [[] for _ in results]
    for result, seen in zip(results, hooked):
        result.retain_grad()
        result.register_hook(seen.append)
    loss.backward()
    kept = [result.grad for result in results]
    parameters = [p.grad for p in module.parameters()]
    return alike, [results, asked, second, hooked, kept, x.grad, parameters]


@pytest.mark.parametrize("body", FORWARDS)
def test_gradients_by_results(body):
    agrees(body, ingot.optimize)


@pytest.mark.parametrize("body", selection.every(4, FORWARDS))
def test_gradients_by_results_under_torch_compile(body):
    torch._dynamo.reset()
    agrees(body, lambda module: torch.compile(module, backend="ingot"))


def agrees(body, made):
    torch.manual_seed(0)
    module = Model(body)
    twin, x = copy.deepcopy(module), torch.randn(16, 32)
    expected = outcome(twin, twin, x)
    with warnings.catch_warnings(), regions_run() as ran:
        warnings.simplefilter("ignore")
        found = outcome(made(module), module, x)
    assert ran
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_second_derivatives_by_inputs_and_parameters_are_whole():
    """By h itself they are not where its own derivative reads h (docs/limits.md)."""

    def body(m, x):
        h = torch.tanh(m.a(x))
        return h, m.head(F.gelu(h))

    torch.manual_seed(0)
    module = Model(body)
    x, found = torch.randn(16, 32, requires_grad=True), []
    for called in (module, ingot.optimize(copy.deepcopy(module))):
        h, y = called(x)
        (by_h,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
        (by_x,) = torch.autograd.grad(h.square().sum() + by_h.sum(), x, create_graph=True)
        of = [x, called.a.weight, called.a.bias, called.head.weight]
        found.append([by_h, by_x, *torch.autograd.grad(by_x.square().sum(), of)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def regions_of_a_call(body) -> int:
    """How many regions it runs."""
    torch.manual_seed(0)
    optimised = ingot.optimize(Model(body))
    with regions_run() as ran:
        optimised(torch.randn(16, 32))
    return len(ran)


def what_has_no_gradient(m, x):
    h = F.gelu(m.a(x))
    return h, h.detach() * 2, (h > 0).float(), h.argmax(-1)


def what_nothing_follows_from(m, x):
    h = F.gelu(m.a(x))
    return h.detach(), F.silu(h)


@pytest.mark.parametrize("body", [what_has_no_gradient, what_nothing_follows_from])
def test_what_no_gradient_comes_back_from_is_of_the_same_region(body):
    assert regions_of_a_call(body) == 1


def test_without_gradients_nothing_is_cut():
    assert regions_of_a_call(hidden_states) > 1
    with torch.no_grad():
        assert regions_of_a_call(hidden_states) == 1


def test_what_only_another_part_of_the_graph_reads_is_not_cut():
    def beside(m, x):
        h = F.gelu(m.a(x))
        y = F.silu(m.b(h))
        return checkpoint(lambda x, y: m.head(F.relu(x) + y), h, y, use_reentrant=False)

    assert regions_of_a_call(beside) == 2


IN_FILES = {
    "hidden": "h = F.gelu(self.a(x))\nreturn h, F.gelu(self.b(F.silu(h)))",
    "chain": "h = F.gelu(self.a(x))\ny = F.silu(h) * 2\nreturn h, y, self.b(y)",
    "view": "h = F.gelu(self.a(x)).view(-1, 8, 8)\nreturn h, F.gelu(self.b(h.view(-1, 64)))",
}


@pytest.mark.parametrize("forward", IN_FILES.values(), ids=IN_FILES)
def test_standalone_files(forward, tmp_path):
    pair = pair_of(tmp_path, two_layers(tmp_path, forward))
    (x,) = pair.inputs
    found = outcome(pair.ours, pair.ours, x)
    assert pair.calls
    expected = outcome(pair.reference, pair.reference, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
