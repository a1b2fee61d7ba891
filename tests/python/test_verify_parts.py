"""Parts of verify that hold a call against the truth: blocks, disturbed runs, the reference's
state, tensors in sealed memory."""

from __future__ import annotations

import contextlib
import dataclasses
import socket

import pytest
import torch
from ingot.verify import ahead, blocks, execution, judging, reference, trials
from ingot.verify.bounds import Roundings
from ingot.verify.cotangents import Cotangents
from ingot.verify.criteria import ErrorModel, judge
from ingot.verify.families import HOSTILE_BATCH, hostile_batch, hostile_families
from ingot.verify.measures import Measures, measure
from ingot.verify.randomness import Randomness
from ingot.verify.reference import Reference
from ingot.verify.repeats import Repeats
from ingot.verify.result import AccuracyRow, Check, VerifyResult
from ingot.verify.scalars import ElementByElement
from ingot.verify.terms import Forms, TermSizes
from ingot.verify.transport import Line
from torch import nn

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "ELEMENTS", 64)


@pytest.mark.parametrize("threads", [1, 3])
def test_each_block_is_worked_on_once_and_keeps_its_place(threads, monkeypatch, small_blocks):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    value = torch.zeros(100, 33)
    parts = blocks.parts_of(value)
    assert len(parts) > 8 * threads

    def add(number: int, part: torch.Tensor) -> int:
        part.add_(1)
        return number

    assert blocks.each(add, parts) == list(range(len(parts)))
    assert torch.equal(value, torch.ones(100, 33))
    across = value.t()
    blocks.each(add, blocks.parts_of(across))
    assert torch.equal(value, torch.full((100, 33), 2.0))
    covered = [i for rows in blocks.rows_of_parts(value) for i in range(100)[rows]]
    assert covered == list(range(100))


def test_measures_are_the_same_in_blocks_and_whole(small_blocks, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(50, 20, generator=generator, dtype=torch.float64)
    found = truth.float() + 3e-4 * (torch.rand(50, 20, generator=generator) > 0.9)
    truth[7] *= 1e300  # beyond the type
    found[7] = truth[7].float()
    found[9, 3] = torch.nan
    truth[11] = 0.0
    found[11] = 0.0
    truth[12] *= 1e-200
    found[12] = 0.0
    in_blocks = measure(truth, found, 50)
    monkeypatch.setattr(blocks, "ELEMENTS", 1 << 20)
    whole = measure(truth, found, 50)
    assert in_blocks.nonfinite_mismatches == whole.nonfinite_mismatches == 1
    assert in_blocks.mismatches == whole.mismatches > 50
    for one, other in zip(dataclasses.astuple(in_blocks), dataclasses.astuple(whole)):
        assert one == pytest.approx(other)


def test_sizes_of_terms_are_those_of_fp64():
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(24, 40, generator=generator, dtype=torch.float64)
    b = torch.randn(56, 40, generator=generator, dtype=torch.float64).t()
    a = a * torch.exp2(torch.linspace(-200, 200, 24, dtype=torch.float64))[:, None]
    a[3] = 0.0
    everything = slice(None)
    independent = TermSizes.of(a, b, ErrorModel.INDEPENDENT, Forms())
    wanted = 2**-22 * ((a * a) @ (b * b)).sqrt()
    torch.testing.assert_close(
        independent.block(everything, 2**-22, 0.0), wanted, rtol=1e-5, atol=0
    )
    stated = TermSizes.of(a, b, ErrorModel.STATED_BOUND, None)
    x, w = a.abs(), b.abs()
    reach = x.amax(-1, True) * w.sum(-2, True) + x.sum(-1, True) * w.amax(-2, True)
    wanted = 2**-22 * (x @ w) + 2**-36 * reach
    torch.testing.assert_close(stated.block(everything, 2**-22, 2**-36), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        stated.block(slice(5, 9), 2**-22, 2**-36), wanted[5:9], rtol=1e-5, atol=0
    )


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(48, 40)
        self.bn = nn.BatchNorm1d(40)

    def forward(self, x):
        return self.bn(torch.relu(self.gemm(x)))


class Clipping(Chain):
    """Changes its parameters in its forward, past their versions."""

    def forward(self, x):
        self.gemm.weight.data.mul_(0.5)
        return super().forward(x)


def _spread(model: type, rows: int = 30) -> tuple:
    original = Reference(model, [], 5, CPU)
    values = [torch.rand(rows, 48, generator=torch.Generator().manual_seed(6))]
    roundings = Roundings.of("fp32", torch.float32, ErrorModel.INDEPENDENT)
    call = (original.initial_state, values, True, 7)
    original.eager(original.initial_state, values, True, "contiguous", 7)
    truth = original.truth(*call, Cotangents(8))
    found, outputs, named = original.truth_and_spread(*call, roundings, Cotangents(8))
    assert torch.equal(found.outputs[0], truth.outputs[0])
    for name, gradient in truth.gradients.items():
        assert torch.equal(found.gradients[name], gradient)
    return outputs, named


def test_disturbances_are_as_large_in_blocks_as_whole(monkeypatch):
    whole, named_whole = _spread(Chain)
    monkeypatch.setattr(blocks, "ELEMENTS", 128)
    in_blocks, named_in_blocks = _spread(Chain)
    assert 1e-8 < whole[0].relative_error < 1e-6
    assert in_blocks[0].relative_error == pytest.approx(whole[0].relative_error, rel=0.3)
    assert (
        named_in_blocks.keys()
        == named_whole.keys()
        >= {"dp:gemm.weight", "di0", "b:bn.running_var"}
    )
    for name, spread in named_whole.items():
        error = named_in_blocks[name].relative_error
        assert error == spread.relative_error == 0 or 0.3 < error / spread.relative_error < 3, name


class Pairs(nn.Module):
    """Each pair of numbers normalised: what comes out is ±1, whatever rounding each had, but for
    that of their mean."""

    def __init__(self, mean: float, by_groups: bool):
        super().__init__()
        self.register_buffer("apart", torch.tensor([mean - 1.0, mean + 1.0]).repeat(24))
        self.norm = nn.GroupNorm(24, 48) if by_groups else nn.LayerNorm(2)

    def forward(self, x):
        x = 0.1 * x + self.apart
        return self.norm(x) if isinstance(self.norm, nn.GroupNorm) else self.norm(x.view(-1, 2))


@pytest.mark.parametrize("by_groups", [False, True])
def test_a_norms_mean_is_rounded_too(by_groups):
    (near_zero,), _ = _spread(lambda: Pairs(0.0, by_groups))
    (far_away,), _ = _spread(lambda: Pairs(1e3, by_groups))
    assert near_zero.relative_error < 3e-7
    assert 1e-4 < far_away.relative_error < 1e-3


@pytest.mark.parametrize("model", [Chain, Clipping])
def test_every_call_begins_from_the_state_that_was_asked_for(model):
    original = Reference(model, [], 5, CPU)
    values = [torch.rand(30, 48)]
    first = original.initial_state
    other = original.changed(first, 9)
    for state in (first, other, first):
        alone = Reference(model, [], 5, CPU)
        wanted = alone.truth(state, values, False, 1).outputs[0]
        for _ in range(2):
            eager = original.eager(state, values, False, "contiguous", 1).outputs[0]
            truth = original.truth(state, values, False, 1).outputs[0]
            assert torch.equal(truth, wanted)
            assert torch.allclose(eager.double(), wanted, rtol=1e-4, atol=1e-5)


def test_parameters_that_a_module_holds_are_not_written_again(monkeypatch):
    original = Reference(Chain, [], 5, CPU)
    written: list = []
    write = reference.execution.set_state
    monkeypatch.setattr(
        reference.execution,
        "set_state",
        lambda module, values, *more: written.append(set(values)) or write(module, values, *more),
    )
    for _ in range(2):
        original.eager(original.initial_state, [torch.rand(4, 48)], True, "contiguous", 1)
    assert "p:gemm.weight" in written[0]
    assert written[1] == {k for k in original.initial_state if k[0] == "b"}


def test_new_parameters_are_near_the_old_ones_and_alike_for_a_seed(small_blocks):
    original = Reference(Chain, [], 5, CPU)
    new = original.changed(original.initial_state, 11)
    again = original.changed(original.initial_state, 11)
    for name, old in original.initial_state.items():
        assert new[name].dtype == old.dtype
        assert torch.equal(new[name], again[name])
    weight, old = new["p:gemm.weight"], original.initial_state["p:gemm.weight"]
    assert 0.2 < float((weight - old).norm() / old.norm()) < 0.6
    assert not torch.equal(original.changed(original.initial_state, 12)["p:gemm.weight"], weight)


def test_tensors_of_every_layout_arrive_as_they_are():
    ours, theirs = socket.socketpair()
    base = torch.arange(60, dtype=torch.float32).view(6, 10)
    complex_base = torch.complex(base, -base)
    tensors = {
        "plain": base,
        "within": base[2:4],
        "across": base.t(),
        "strided": base[:, ::3],
        "expanded": base[:1].expand(4, 10),
        "number": torch.tensor(3.5),
        "none": base[:0],
        "conjugate": complex_base.conj(),
        "negative": complex_base.conj().imag,
        "flags": base > 30,
        "halves": base.half(),
    }
    with ours, theirs:
        Line(ours).send({"op": "x"}, tensors)
        header, received = Line(theirs).receive()
    assert header == {"op": "x"}
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor.resolve_conj().resolve_neg()), name


def test_large_models_on_a_cpu_get_fewer_rows_and_the_same_families():
    assert hostile_batch(CPU, 1000) == HOSTILE_BATCH
    assert hostile_batch(torch.device("cuda"), 1 << 26) == HOSTILE_BATCH
    rows = hostile_batch(CPU, 1 << 26)
    own = [torch.rand(200, 4)]
    usual, fewer = hostile_families(own, "fp32"), hostile_families(own, "fp32", (), rows)
    assert [f.name for f in usual] == [f.name for f in fewer]
    assert {f.batch for f in fewer} == {rows, 1, 3, 37}


def test_a_spread_may_exceed_what_squares_can_hold():
    found = [Measures(1e-3, 3e200, 1e-3, 0, 0), Measures(1e-3, 4e200, 1e-3, 0, 0)]
    assert reference._spread(found, torch.ones(2)).worst_row_error == pytest.approx(5e200 / 2**0.5)


def test_few_elements_may_be_infinite_by_rounding():
    found = [Measures(1e-3, 1e-3, 1e-3, 0, beyond) for beyond in (0, 3, 1)]
    assert reference._spread(found, torch.empty(100_000)).nonfinite_mismatches == 3
    spread = reference._spread(found, torch.empty(20_000))
    assert spread.nonfinite_mismatches == 2
    for beyond, passes in ((8, True), (9, False)):
        assert judge(Measures(0.0, 0.0, 0.0, 0, beyond), None, spread, 1e-7).passed is passes


def test_derivatives_element_by_element_send_a_nan_where_scalar_kernels_do():
    x = torch.randn(64, 64)
    x[3] = torch.nan

    def gradient(mode) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with mode:
            nn.functional.hardswish(nn.functional.elu(leaf)).backward(torch.ones_like(x))
        return leaf.grad

    usual, single = gradient(contextlib.nullcontext()), gradient(ElementByElement())
    assert usual[3].isnan().all() and not single.isnan().any()
    assert torch.allclose(usual[4:], single[4:])


@pytest.mark.parametrize(("shown", "runs"), [(1.2, 2), (1.7, 1)])
def test_what_hardly_exceeds_is_asked_for_again(shown, runs):
    """A family's first run exceeds what is allowed by so much, its second does not."""
    session = trials.Trials.__new__(trials.Trials)
    session._result = VerifyResult("", "", "cpu", "fp32")
    session._repeats = Repeats(session._result)
    session._random, asked = Randomness(1), []

    def run(trial) -> None:
        asked.append(trial.values)
        error = shown if len(asked) == 1 else 0.5
        judged = Measures(error * 1e-6, error * 1e-6, 0.0, 0, 0)
        row = AccuracyRow("", "eval", "output", judged, judged, 1e-6, 1e-6)
        session._result.accuracy.append(row)
        outcome = "failed" if error > 1 else "passed"
        session._result.checks.append(Check("", "eval", outcome, "too far", ""))

    session._run = run
    family = hostile_families([torch.rand(4, 4)], "fp32")[0]
    session._family_trial(family, False, lambda attempt: [attempt], None, False)
    assert asked == [[attempt] for attempt in range(runs)]
    assert [c.outcome for c in session._result.checks] == ["passed" if runs == 2 else "failed"]
    assert len(session._result.notes) == runs - 1


def test_what_is_started_ahead_ends_with_it(monkeypatch):
    """Also where nothing is verified or timed after all."""
    ended = []

    class Process:
        def __init__(self, limit: int, modules: tuple) -> None:
            self.modules = modules

        def close(self) -> None:
            ended.append(self.modules)

    monkeypatch.setattr(ahead, "CandidateProcess", Process)
    with ahead.Ahead(1 << 30, ("a",), timed=True, compiled=True) as both:
        checked = both.first()
        assert both.begin_second() is both.begin_second()
        assert checked.modules == ("a",) and not ended
    assert ended == [("a", *ahead._COMPILER)]
    with ahead.Ahead(1 << 30, ("a",)) as one:
        assert one.begin_second() is None
    assert ended[1:] == [("a",)]


def test_numbers_of_a_result_may_be_rounded_otherwise():
    """`.item()` of a sum is a float in the structure of what a model returns."""

    def said(*result):
        return execution.outputs_of(list(result))[1]

    x = torch.ones(2)
    assert execution.same_structure(said(x, 46.61545181274414), said(x, 46.615447998046875))
    assert execution.same_structure(said(1e-30, float("nan")), said(2e-30, float("nan")))
    for other in (46.62, -46.61545181274414, 46, "46.61545181274414", None):
        assert not execution.same_structure(said(x, other), said(x, 46.61545181274414)), other
    assert not execution.same_structure(said(x, 1.5), said(x, 1.5, 1.5))
    assert execution.without_numbers(said(1.5, 3)) == execution.without_numbers(said(2.5, 3))
    assert execution.without_numbers(said(1.5, 3)) != execution.without_numbers(said(1.5, 4))


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_one_number_has_its_bits_whatever_its_strides(shape):
    spread = torch.arange(4.0)[1::2][:1].view(1)
    spread = spread.as_strided(shape, (2,) * len(shape), 1)
    assert execution.same_bits(spread, torch.ones(shape))
    assert not execution.same_bits(spread, torch.zeros(shape))


def test_flags_are_eagers_or_the_truths():
    own, exact = torch.tensor([True, False, True]), torch.tensor([True, True, True])
    for flags, right in (([1, 0, 1], True), ([1, 1, 1], True), ([0, 0, 1], False)):
        found = torch.tensor(flags).bool()
        assert judging._is_eagers_or_true(found, own, exact, 0.0) == right
        assert judging._is_eagers_or_true(found, own, exact, 0.3) == right
        assert judging._is_eagers_or_true(found, own, exact, 0.4)
    assert not judging._is_eagers_or_true(own.int(), own, exact, 1.0)
    assert not judging._is_eagers_or_true(own[:2], own, exact, 1.0)
