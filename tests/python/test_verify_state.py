"""verify and what a call leaves behind: inputs, parameters and buffers that the original writes.
No run may begin from what another left, and what is left must be the original's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import selection
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from ingot.verify import VerifyOptions, verify_pair
from ingot.verify.bounds import Disturbance, Roundings
from ingot.verify.criteria import ErrorModel
from ingot.verify.execution import same_bits
from ingot.verify.looking import Look, form_of
from ingot.verify.overlaps import overlaps_of
from ingot.verify.reference import Reference
from ingot.verify.terms import Forms
from verify_writers import QUIET, WRITERS, file

CPU = torch.device("cpu")
ROUNDINGS = Roundings.of("fp32", torch.float32, ErrorModel.INDEPENDENT)


pytestmark = pytest.mark.usefixtures("one_thread")


def verify(folder: Path, original: str, candidate: str, **options):
    (folder / "model.py").write_text(original)
    (folder / "new.py").write_text(candidate)
    files = str(folder / "model.py"), str(folder / "new.py")
    options = {"seed": 3, "hostile": False, "time_limit_s": 60, **options}
    return verify_pair(*files, VerifyOptions(**options))


def why(result) -> str:
    return "\n".join(f"{c.name} [{c.mode}] {c.outcome}: {c.message}" for c in result.failures)


_TIMED = {"timing": True, "compile_baseline": False, "timing_budget_s": 1}


@pytest.mark.parametrize("name", selection.quick(("adds to an input",), WRITERS))
def test_honest_candidate_of_a_model_that_writes_is_verified(tmp_path, name):
    writer = WRITERS[name]
    original = file(writer.original, "Model")
    result = verify(tmp_path, original, file(writer.honest), hostile=True, **_TIMED)
    assert result.verified, why(result)
    allowed = [r.allowed_relative_error for r in result.accuracy if r.family == "own inputs"]
    assert max(allowed) < 3e-6  # of the roundings, not of what the runs before left


_WRONG = [(name, wrong) for name, writer in WRITERS.items() for wrong in writer.wrong]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] if number > 1 else [])
        for number, case in enumerate(_WRONG)
    ],
)
def test_wrong_candidate_of_a_model_that_writes_is_refused(tmp_path, name, wrong):
    result = verify(tmp_path, file(WRITERS[name].original, "Model"), file(wrong))
    assert not result.verified
    trick = WRITERS[name].wrong[wrong]
    assert not trick or result.tricks[0] == trick, why(result)


@pytest.mark.parametrize("name", selection.quick(list(QUIET)[-3:-1], QUIET))
def test_what_a_call_by_itself_does_not_show_is_found(tmp_path, name):
    case = QUIET[name]
    wrong = file(case.wrong, prepare=case.prepare)
    result = verify(tmp_path, file(case.original, "Model"), wrong)
    assert not result.verified
    assert result.tricks == ([case.trick] if case.trick else []), why(result)
    assert not case.check or {c.name for c in result.failures} == {case.check}, why(result)


def test_a_result_where_a_replaced_buffer_lay_is_not_the_state():
    told, state = [], torch.zeros(7, 11)
    look = Look(form_of("*", [state], False), CPU, [state], lambda *problem: told.append(problem))
    look(state)
    assert [trick for trick, _ in told] == ["aliased output"]
    look = Look(form_of("*", [state], False), CPU, [state], lambda *problem: told.append(problem))
    del state
    results = [torch.ones(7, 11) for _ in range(200)]
    for result in results:
        look(result)
    assert len(told) == 1, told


def test_memory_of_outputs_is_told_apart():
    room, other = torch.zeros(6, 8), torch.zeros(4)
    assert overlaps_of([*room.chunk(2), *other.chunk(2)]) == []
    assert overlaps_of([*room.chunk(2, dim=1), other[::2], other[1::2], room[:0]]) == []
    assert overlaps_of([room.t(), other, other[2:]]) == ["output 2 and output 1"]
    assert overlaps_of([room[:1].expand(3, -1), other]) == ["elements of output 0"]
    assert overlaps_of([other.unfold(0, 2, 1)]) == ["elements of output 0"]
    assert overlaps_of([room.as_strided((2, 3), (3, 2)), other.expand(2, 4)[:1]]) == []
    both = torch.zeros(3, dtype=torch.complex64)
    parts = torch.view_as_real(both)
    assert overlaps_of([both, parts[:, 1]]) == ["output 1 and output 0"]
    assert overlaps_of([parts[:, 1], parts[:, 0], both[1:]]) == [
        "output 2 and output 0",
        "output 2 and output 1",
    ]


class Twice(nn.Module):
    """Products whose operands lie at one place, and are not alike."""

    def __init__(self, how: str):
        super().__init__()
        self.gemm = nn.Linear(12, 12, dtype=torch.complex64 if how == "conjugate" else None)
        self.how = how

    def forward(self, x):
        weight, bias = self.gemm.weight.t(), self.gemm.bias
        if self.how == "conjugate":
            return (x + 0j) @ weight, x @ weight + 2 * (x.conj() @ weight)
        if self.how == "factors":
            return torch.addmm(bias, x, weight) - torch.addmm(bias, x, weight, beta=3, alpha=5)
        if self.how == "sums":
            total = bias.expand(len(x), -1)
            for _ in range(9):
                total = torch.addmm(total.relu(), x, weight)
            return total
        first = x @ weight
        if self.how == "written":
            x.mul_(3)
        else:
            x.numpy()[:] *= 3
        return first - x @ weight


@pytest.mark.parametrize("how", ["conjugate", "factors", "sums", "written", "written unseen"])
def test_products_of_one_address_are_not_taken_for_each_other(how):
    original = Reference(lambda: Twice(how), [], 5, CPU)
    single = torch.complex64 if how == "conjugate" else torch.float32
    values = [torch.randn(8, 12, generator=torch.Generator().manual_seed(6), dtype=single)]
    call = (original.initial_state, values, True, 7)
    truth = original.truth(*call)
    found, spreads, _ = original.truth_and_spread(*call, ROUNDINGS)
    for wanted, output, spread in zip(truth.outputs, found.outputs, spreads, strict=True):
        assert torch.equal(output, wanted)
        assert 1e-9 < spread.relative_error < 1e-5


def test_every_disturbed_run_begins_from_the_same_inputs_and_state():
    """Also where what is written are the values that were there, which roundings change."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, x):
            begins.append((x.clone(), self.seen.clone(), self.weight.detach().clone()))
            self.seen = self.seen + x.mean()
            self.weight.data.mul_(0.5)
            return x.mul_(1.0) * self.weight

    begins: list = []
    original = Reference(Keeps, [], 5, CPU)
    values = [torch.rand(8, 12)]
    original.eager(original.initial_state, values, True, "contiguous", 7)
    begins.clear()
    original.truth_and_spread(original.initial_state, values, True, 7, ROUNDINGS)
    assert len(begins) == 4
    for begin in begins[1:]:
        assert all(map(torch.equal, begin, begins[0]))


def test_a_second_look_leaves_the_original_as_its_call_did():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    original = Reference(lambda: Counts(12, 4), [], 5, CPU)
    call = (original.initial_state, [torch.rand(8, 12)], True, 7)
    original.truth_and_spread(*call, ROUNDINGS)
    spreads, _ = original.spread_again(*call, ROUNDINGS, runs=4)
    assert 1e-9 < spreads[0].relative_error < 1e-5
    assert original._exact.calls == 1


def test_what_has_been_written_is_no_leaf_any_more():
    weight, x = torch.rand(4, 4).double(), torch.rand(4, 4).double()
    disturbance = Disturbance(ROUNDINGS, Forms(), [weight])
    disturbance.start_run([x, weight], exact=True)
    with disturbance:
        x[1:].add_(1)
    assert disturbance.has_written([x]) and not disturbance.has_written([weight])


def test_bits_are_compared_wherever_they_lie():
    value = torch.rand(5, 8)
    room = torch.empty(41)
    misaligned = room[1:].view(5, 8).copy_(value)
    assert same_bits(value, misaligned) and same_bits(misaligned, value)
    misaligned[4, 7] += 1
    assert not same_bits(value, misaligned)


def test_an_input_off_its_alignment_may_not_be_changed_either(tmp_path):
    original = file("return self.gemm(x) + y", "Model")
    tampering = file("z = self.gemm(x) + y\nif x.data_ptr() % 16 == 4:\n    x.zero_()\nreturn z")
    result = verify(tmp_path, original, tampering, hostile=True)
    assert result.tricks == ["input tampering"], why(result)


_NORMALISED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear({k}, 64)
        self.bn = nn.BatchNorm1d(64, momentum={momentum})
        self.bn.running_var.fill_({variance})

    def forward(self, x):
        return self.bn({product})

def get_inputs():
    return [torch.randn({rows}, {k})]

def get_init_inputs():
    return []
"""
_ROUNDED = "x.bfloat16().float() @ self.gemm.weight.bfloat16().float().t() + self.gemm.bias"


@pytest.mark.parametrize(
    "sizes",
    [
        # Statistics that are mostly what they were before, and exact, until they have moved.
        {"rows": 256, "k": 64, "momentum": 0.875, "variance": 1e6},
        # A weight's roundings are the same for all rows: no number of rows averages them out.
        {"rows": 4096, "k": 32, "momentum": 0.125, "variance": 1.0},
    ],
)
def test_honest_statistics_of_rounded_operands_are_verified(tmp_path, sizes):
    original, candidate = (
        _NORMALISED.format(product=product, **sizes) for product in ("self.gemm(x)", _ROUNDED)
    )
    result = verify(tmp_path, original, candidate, precision="bf16")
    assert result.verified, why(result)
