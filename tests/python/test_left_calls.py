"""Calls that hold nothing for Ingot run the original's forward, with nothing around it."""

import copy
import warnings

import ingot
import pytest
import torch
from ingot.live.shortcut import Guards
from live import regions_run
from torch import nn


class Sorted(nn.Module):
    """Nothing that Ingot takes; knows whether it was captured."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, x, *, flip=False):
        captured = torch.compiler.is_dynamo_compiling()
        if not captured:
            self.asked.append(x.shape[0])
        return torch.sort(x, descending=flip)[0] + (1e-3 if captured else 0.0)


class Mixed(nn.Module):
    """A product where gradients are off alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return torch.sort(x)[0] if torch.is_grad_enabled() else torch.relu(self.layer(x) * 2 + 1)


class Broken(nn.Module):
    """Nothing before the break, a product behind it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        x = torch.sort(x)[0]
        torch._dynamo.graph_break()
        return torch.relu(self.layer(x) * 2 + 1)


@pytest.fixture
def sorting():
    module = Sorted()
    with pytest.warns(ingot.IngotWarning):
        made = ingot.optimize(module)
        made(torch.randn(4, 8))
    module.asked.clear()
    return module, made


def test_the_second_call_is_the_originals(sorting):
    module, made = sorting
    for rows in (4, 5, 400):
        x = torch.randn(rows, 8)
        assert torch.equal(made(x), torch.sort(x)[0])  # captured, it would add something
    assert module.asked == [4, 5, 400]
    assert "holds nothing" in made._ingot.graphs[0].problem


@pytest.mark.parametrize(
    ("given", "keywords"),
    [
        (torch.randn(4, 9), {}),
        (torch.randn(1, 8), {}),
        (torch.randn(4, 8).double(), {}),
        (torch.randn(4, 8, requires_grad=True), {}),
        (torch.randn(4, 8), {"flip": True}),
    ],
    ids=["size", "batch of one", "dtype", "gradient", "keyword"],
)
def test_another_kind_of_call_is_looked_at(sorting, given, keywords):
    module, made = sorting
    made(given, **keywords)
    assert module.asked == []


def test_modes_are_told_apart():
    module = Mixed()
    with pytest.warns(ingot.IngotWarning):
        made = ingot.optimize(copy.deepcopy(module))
        for _ in range(6):
            x = torch.randn(256, 64)
            assert torch.equal(made(x), module(x))
    assert made._ingot.left._last is not None
    for _ in range(2):
        with torch.no_grad(), regions_run() as ran:
            torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
        assert ran
    assert [graph.holds_nothing for graph in made._ingot.graphs] == [True, False]


def test_a_call_of_which_a_part_is_taken_is_not_left():
    module = Broken()
    with torch.no_grad(), pytest.warns(ingot.IngotWarning):
        made = ingot.optimize(copy.deepcopy(module))
        for _ in range(3):
            x = torch.randn(256, 64)
            with regions_run() as ran:
                torch.testing.assert_close(made(x), module(x), rtol=1e-4, atol=1e-5)
            assert len(ran) == 1
    assert not made._ingot.left


class CutInTwo(nn.Module):
    """Nothing on either side of a break, until `shown`; knows whether it was captured."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.shown, self.asked = [False], []

    def forward(self, x):
        if not torch.compiler.is_dynamo_compiling():
            self.asked.append(1)
        x = torch.sort(x)[0]
        torch._dynamo.graph_break()
        return torch.relu(self.layer(x) * 2 + 1) if self.shown[0] else torch.sort(-x)[0]


def test_a_call_in_several_graphs_that_hold_nothing_is_the_originals_but_for_one_in_a_few():
    module = CutInTwo()
    with torch.no_grad(), pytest.warns(ingot.IngotWarning):
        made = ingot.optimize(module)
        for _ in range(33):
            x = torch.randn(256, 64)
            assert torch.equal(made(x), torch.sort(-x)[0])
    assert 29 <= len(module.asked) <= 31


def test_what_comes_behind_a_break_is_seen_in_the_end():
    module = CutInTwo()
    with torch.no_grad(), pytest.warns(ingot.IngotWarning):
        made = ingot.optimize(module)
        calls_with_regions(made, 3)
        module.shown[0] = True
        assert all(calls_with_regions(made, 40)[17:])
        module.shown[0] = False  # what is compiled already is Dynamo's to choose
        assert not any(calls_with_regions(made, 3))
        module.shown[0] = True
        assert all(calls_with_regions(made, 3))


def test_a_call_that_is_left_cannot_be_prepared(sorting):
    with pytest.raises(ingot.IngotError, match="holds nothing"):
        sorting[1].ingot_prepare(torch.randn(4, 8))


class Switched(nn.Module):
    """Nothing before its switch is set."""

    def __init__(self):
        super().__init__()
        self.layer, self.shown = nn.Linear(64, 64), False

    def forward(self, x, *rest, scale=2.0, **others):
        return torch.relu(self.layer(x) * scale + 1) if self.shown else torch.sort(x)[0] * scale


@pytest.mark.parametrize("keywords", [{}, {"scale": 3.0}, {"unread": 1}], ids=str)
def test_a_module_that_has_changed_is_looked_at_again(keywords):
    module = Switched()
    made = ingot.optimize(copy.deepcopy(module))
    x = torch.randn(256, 64)
    for shown in (False, True, False):
        module.shown = made.shown = shown
        with torch.no_grad(), regions_run() as ran, warnings.catch_warnings():
            warnings.simplefilter("ignore", ingot.IngotWarning)
            for _ in range(6):
                torch.testing.assert_close(
                    made(x, **keywords), module(x, **keywords), rtol=1e-4, atol=1e-5
                )
        assert bool(ran) == shown
    assert len(made._ingot.left._known) == 1


class Inside(nn.Module):
    """A product where a part of it says so."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(64, 64)
        self.part.shown = False

    def forward(self, x):
        return torch.relu(self.part(x) * 2 + 1) if self.part.shown else torch.sort(x)[0]


@pytest.fixture
def inside():
    made = ingot.optimize(Inside())
    with torch.no_grad(), pytest.warns(ingot.IngotWarning):
        made(torch.randn(256, 64))
        yield made


def calls_with_regions(made, calls: int) -> list[bool]:
    found = []
    for _ in range(calls):
        with regions_run() as ran:
            made(torch.randn(256, 64))
        found.append(bool(ran))
    return found


def test_guards_are_not_asked_at_each_call(inside, monkeypatch):
    asked, matches = [], Guards.matches
    monkeypatch.setattr(Guards, "matches", lambda *args: asked.append(1) or matches(*args))
    for _ in range(128):
        inside(torch.randn(256, 64))
    assert 3 <= len(asked) <= 4


def test_a_change_within_is_seen_in_the_end(inside):
    assert not any(calls_with_regions(inside, 3))
    inside.part.shown = True
    assert all(calls_with_regions(inside, 40)[17:])
    inside.part.shown = False  # and is told apart from then on
    assert not any(calls_with_regions(inside, 3))
    inside.part.shown = True
    assert all(calls_with_regions(inside, 3))


def test_a_change_is_seen_in_the_end_where_all_calls_were_left(inside):
    assert not any(calls_with_regions(inside, 40))
    assert inside._ingot_left is not None
    inside.part.shown = True
    assert all(calls_with_regions(inside, 80)[64:])
    inside.part.shown = False  # and calls of the mode are told apart from then on
    assert not any(calls_with_regions(inside, 40))
    inside.part.shown = True
    assert all(calls_with_regions(inside, 3))


def test_copies_of_a_module_that_is_left():
    parametrized = Inside()
    nn.utils.parametrizations.weight_norm(parametrized.part)
    parametrized.shift = nn.Parameter(torch.zeros(2, 2))
    nn.utils.parametrizations.orthogonal(parametrized, "shift")
    made = ingot.optimize(parametrized)
    x = torch.randn(256, 64)
    with torch.no_grad(), pytest.warns(ingot.IngotWarning):
        for _ in range(40):
            made(x)
        assert made._ingot_left is not None
        copied = copy.deepcopy(made)  # PyTorch's, slot by slot
        for _ in range(3):
            assert torch.equal(copied(x), made(x))


def test_what_is_prepared_is_looked_at_at_once(inside):
    assert not any(calls_with_regions(inside, 40))
    inside.part.shown = True
    inside.ingot_prepare(torch.randn(256, 64))
    assert all(calls_with_regions(inside, 3))


def test_gradients_and_the_training_flag_are_told_apart_at_once():
    made = ingot.optimize(Mixed())
    x = torch.randn(256, 64)
    with pytest.warns(ingot.IngotWarning):
        for _ in range(40):
            made(x)
    assert made._ingot_left is not None
    for training in (True, False):
        made.train(training)
        with torch.no_grad():
            assert all(calls_with_regions(made, 3))
        made(x)


class Counting(Inside):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_kinds_are_bounded():
    made = ingot.optimize(Counting())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ingot.IngotWarning)
        for turn in range(200):
            made.part.shown = turn % 3 == 0
            made(torch.randn(256, 64))
    assert made.calls == 200 and 0 < len(made._ingot.left._times) <= 64


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="from 2.9 on")
def test_switches_of_both_kinds_may_disagree(inside):
    """PyTorch's own question after one of them raises then."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        for _ in range(3):
            x = torch.randn(256, 64)
            assert torch.equal(inside(x), torch.sort(x)[0])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_what_is_left_is_right_after_any_change(inside):
    x = torch.randn(256, 64)
    inside(x)
    inside.part.shown = True
    assert torch.equal(inside(x), torch.relu(inside.part(x) * 2 + 1))


def test_a_call_through_a_wrapper_is_left():
    class Wrapped(Sorted):
        forward = torch.no_grad()(Sorted.forward)

    module = Wrapped()
    with pytest.warns(ingot.IngotWarning):
        made = ingot.optimize(module)
        made(torch.randn(4, 8), flip=True)
    made._ingot._compiled = None
    made(torch.randn(5, 8), flip=True)


def longer(made):
    return lambda: made(torch.randn(300, 64))


def with_an_attribute(made):
    made.other = torch.zeros(2)
    return lambda: made(torch.randn(256, 64))


def without_an_attribute(made):
    del made.shift
    made.other = 3
    return lambda: made(torch.randn(256, 64))


def with_a_tensor_in_its_place(made):
    made.shift = torch.zeros(2)
    return lambda: made(torch.randn(256, 64))


def as_keyword(made):
    return lambda: made(x=torch.randn(256, 64))


def too_many(made):
    return lambda: pytest.raises(TypeError, made, torch.randn(256, 64), torch.randn(2))


def a_number(made):
    return lambda: pytest.raises(TypeError, made, 3)


@pytest.mark.parametrize(
    "change",
    [
        longer,
        with_an_attribute,
        without_an_attribute,
        with_a_tensor_in_its_place,
        as_keyword,
        too_many,
        a_number,
    ],
)
def test_calls_of_another_kind_are_told_after_many_of_one(inside, change, monkeypatch):
    inside.shift = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ingot.IngotWarning)
        for _ in range(8):
            inside(torch.randn(256, 64))
        assert inside._ingot.left._last is not None
        call, asked = change(inside), []
        kind = inside._ingot.left.kind
        monkeypatch.setattr(inside._ingot.left, "kind", lambda *a: asked.append(1) or kind(*a))
        call()
    assert asked
