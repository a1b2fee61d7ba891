"""What runs between regions: PyTorch's operators, none more often or slower than need be."""

from __future__ import annotations

import weakref
from collections import Counter

import ingot
import pytest
import torch
from ingot.capture import masks, recorded
from ingot.capture.captured import Captured, Slot, Source, TorchStep
from ingot.live.compiled import Compiled
from ingot.live.steps import function_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

_aten = torch.ops.aten


class Attention(nn.Module):
    """mask: builds one from numbers of rows, of columns, and the input."""

    def __init__(self, mask):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.mask = mask

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(2, (2, 8)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mask = self.mask(q.size(2), k.size(2), x)
        return scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def _everything(rows, columns, x):
    seen = torch.arange(columns, device=x.device) + 0 >= 0
    return seen[None, None, None, :].expand(x.size(0), 1, rows, columns)


def _both(rows, columns, x):
    return _everything(rows, columns, x) & (torch.ones(rows, columns) > 0)


def _earlier(rows, columns, x):
    return torch.arange(columns) <= torch.arange(rows)[:, None]


def _some(rows, columns, x):
    return (torch.arange(columns) != 2).expand(rows, columns)


def _positive(rows, columns, x):
    return (x[:, :, 0] > -100)[:, None, None, :].expand(x.size(0), 1, rows, columns)


def _by_batch(rows, columns, x):
    within = torch.arange(x.size(0))[:, None, None, None] < 3
    return within.expand(x.size(0), 1, rows, columns)


def _added(rows, columns, x):
    return torch.ones(rows, columns)


@pytest.mark.parametrize(
    ("mask", "left_away"),
    [
        (_everything, True),
        (_both, True),
        (_earlier, True),  # and attention is causal in its place
        (_some, False),
        (_positive, False),
        (_by_batch, False),
        (_added, False),
    ],
)
def test_masks_that_hide_nothing_are_left_away(mask, left_away):
    model = Attention(mask).eval()
    optimised = ingot.optimize(model)
    for batch in (3, 5):
        x = torch.randn(batch, 6, 16)
        torch.testing.assert_close(optimised(x), model(x), rtol=1e-5, atol=1e-5)
    steps = [
        step
        for graph in optimised._ingot.graphs
        for step in graph.compiled.captured.steps
        if getattr(step, "what", "") == "scaled_dot_product_attention"
    ]
    assert steps
    for step in steps:
        mask_of = step.args[3] if len(step.args) > 3 else None
        assert (mask_of is None) == left_away
        assert any(step.args[5:6]) == (mask is _earlier)


def test_large_masks_are_not_computed(monkeypatch):
    monkeypatch.setattr(masks, "_MOST_ELEMENTS", 3)
    model = Attention(_everything).eval()
    optimised = ingot.optimize(model)
    x = torch.randn(3, 6, 16)
    torch.testing.assert_close(optimised(x), model(x), rtol=1e-5, atol=1e-5)


def _captured(steps, outputs, sources=1, slots=8):
    fed = [Source("input", f"x{index}", index) for index in range(sources)]
    return Captured(fed, steps, slots, outputs, None)


def _step(target, *args, result, **kwargs):
    return TorchStep(target, args, kwargs, result)


def test_arguments_of_steps_come_as_they_were():
    seen = []

    def target(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0]

    given = ([Slot(0), 1, (2, [None])], {"a": Slot(0), 3: 1.5}, slice(0, Slot(0), None))
    rest = {"dtype": torch.float32, "inf": float("inf"), "size": torch.Size([2]), "text": "it's"}
    run = function_of(_captured([_step(target, *given, result=1, **rest)], [Slot(1)]), [None])
    assert run((7,)) == ([7, 1, (2, [None])],)
    assert seen == [(([7, 1, (2, [None])], {"a": 7, 3: 1.5}, slice(0, 7, None)), rest)]
    assert type(seen[0][1]["size"]) is torch.Size


def test_tensors_go_where_they_are_read_last():
    alive: list[int] = []
    held: list[weakref.ref] = []

    def target(x):
        made = x + 1
        alive.append(sum(reference() is not None for reference in held))
        held.append(weakref.ref(made))
        return made

    steps = [_step(target, Slot(at), result=at + 1) for at in range(4)]
    steps.append(_step(target, Slot(0), result=5))  # which nothing reads
    steps.append(_step(target, Slot(4), result=6))
    run = function_of(_captured(steps, [Slot(6), None, 3]), [None] * len(steps))
    inputs = [torch.zeros(2)]
    result = run(inputs)
    assert inputs == [] and result[1:] == (None, 3) and result[0].tolist() == [5.0, 5.0]
    assert alive == [0, 1, 1, 1, 1, 1]


def test_constants_stay_for_the_next_call():
    step = _step(_aten.add.Tensor, Slot(0), Slot(1), result=2)
    captured = _captured([step], [Slot(2)])
    captured.sources.append(Source("constant", "c", tensor=torch.ones(2)))
    run = function_of(captured, [None])
    for _ in range(2):
        assert run((torch.zeros(2),))[0].tolist() == [1.0, 1.0]


def test_what_is_computed_again_is_shared_whatever_became_of_the_first():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(_aten.reshape.default, (x, [4]))
    square = graph.call_function(_aten.reshape.default, (first, [2, 2]))
    again = graph.call_function(_aten.reshape.default, (x, [4]))
    results = [graph.call_function(_aten.relu.default, (r,)) for r in (square, again)]
    graph.output(tuple(results))
    recorded._share(graph)
    graph.lint()
    found = torch.fx.GraphModule(torch.nn.Module(), graph)(torch.arange(-2.0, 2.0).view(1, 4))
    assert [r.tolist() for r in found] == [[[0.0, 0.0], [0.0, 1.0]], [0.0, 0.0, 0.0, 1.0]]


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return [(layer(x) * 2).unflatten(2, (4, 8)).transpose(1, 2) for layer in self.layers]


def test_backward_under_autocast_casts_an_input_once(monkeypatch):
    compiled = []
    init = Compiled.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        compiled.append(self)

    monkeypatch.setattr(Compiled, "__init__", noted)
    model = Projections()
    optimised = ingot.optimize(model)
    x = torch.randn(8, 5, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = optimised(x), model(x)
    weights = [torch.randn_like(r) for r in found]
    leaves = [x, *model.parameters()]
    gradients = torch.autograd.grad(found, leaves, weights)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, weights)):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    casts = Counter(
        (at, str(step.args), str(step.kwargs))
        for at, made in enumerate(compiled)
        for step in made.captured.steps
        if getattr(step, "what", "") == "_to_copy"
    )
    for at, made in enumerate(compiled[1:]):  # behind the forward, whose equal casts a plan merges
        for number, region in enumerate(made.captured.regions):
            values = (v for v in region.graph["values"] if v["op"] == "cast")
            casts.update((at, number, str(v["args"]), str(v.get("attributes"))) for v in values)
    assert casts and max(casts.values()) == 1


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("gradients", [True, False])
def test_a_plain_product_in_16_bits_is_pytorchs_in_training(gradients):
    """The same kernels either way: a region would only cost the host's time."""
    model = Plain().eval()
    optimised = ingot.optimize(model)
    x = torch.randn(8, 32)
    for dtype, taken in ((torch.bfloat16, not gradients), (torch.float32, True)):
        with (
            torch.set_grad_enabled(gradients),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        ):
            torch.testing.assert_close(optimised(x), model(x), rtol=2e-2, atol=2e-2)
        last = optimised._ingot.graphs[-1]
        assert bool(last.compiled and last.compiled.captured.regions) == taken
