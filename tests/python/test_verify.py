"""verify against honest and dishonest candidates: each known trick is caught and named, and its
honest twin passes."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import selection
import torch

sys.path.insert(0, str(Path(__file__).parent))

import ingot.verify
import verify_adversaries as adversaries
import verify_pairs as pairs
from ingot.verify import PairError, VerifyOptions, timing, verify_pair
from ingot.verify.confinement import unreadable
from ingot.verify.criteria import Spread, judge
from ingot.verify.families import hostile_families, lay_out, with_batch
from ingot.verify.measures import Measures, measure
from ingot.verify.randomness import Randomness
from ingot.verify.reference import Results

pytestmark = pytest.mark.usefixtures("one_thread")


def verify(folder: Path, source: str, original: str = pairs.ORIGINAL, **options):
    (folder / "model.py").write_text(original)
    (folder / "model_new.py").write_text(source)
    options.setdefault("seed", 11)
    options.setdefault("time_limit_s", 60)
    return verify_pair(
        str(folder / "model.py"), str(folder / "model_new.py"), VerifyOptions(**options)
    )


# Between them: statistics folded, statistics by hand. All twins of the adversaries
# together are verified below.
_TELLING = (
    "folds the statistics in eval mode",
    "updates statistics by hand",
)


def why(result) -> str:
    return "\n".join(f"{c.name} [{c.mode}] {c.outcome}: {c.message}" for c in result.failures)


@pytest.mark.parametrize("name", selection.quick(_TELLING, pairs.HONEST))
def test_honest_candidate_is_verified(tmp_path, name):
    result = verify(tmp_path, pairs.candidate(pairs.HONEST[name]))
    assert result.verified, why(result)
    assert {row.mode for row in result.accuracy} == {"training", "eval"}
    assert any(row.tensor == "bn.running_var" for row in result.accuracy)


# A hang is caught at the end of its time; the others end when they are found out.
_LIMITS = {"hangs": {"time_limit_s": 6}, "takes all memory": {"memory_limit": 1 << 30}}


# Each takes seconds and processes of its own: all tricks are played in `make test-all`.
_PLAYED = (
    "returns the first result of a shape",
    "zeroes its input",
    "leaves the running statistics",
    "hands out one buffer again and again",
    "dies",
)


@pytest.mark.parametrize("name", selection.quick(_PLAYED, pairs.DISHONEST))
def test_dishonest_candidate_is_caught_and_named(tmp_path, name):
    source, trick = pairs.DISHONEST[name]
    limits = _LIMITS.get(name, {})
    result = verify(tmp_path, pairs.candidate(source), hostile=False, **limits)
    assert not result.verified
    assert result.tricks[0] == trick, why(result)


_TIMED = {"timing": True, "compile_baseline": False, "timing_budget_s": 1}


def _tricks(name: str) -> str:
    return adversaries.CASES[name].trick.split(" or ")[0]


@pytest.mark.parametrize("name", selection.one_of_each(adversaries.CASES, _tricks, step=9))
def test_adversary_is_caught_and_named(tmp_path, name):
    case = adversaries.CASES[name]
    options = {"hostile": case.hostile, **(_TIMED if case.timed else {}), **case.options}
    result = verify(tmp_path, adversaries.dishonest(case), **options)
    assert not result.verified
    assert result.tricks[0] in case.trick.split(" or "), why(result)
    if case.timed:
        assert [c.name for c in result.failures] == ["timing"], why(result)


@pytest.mark.alone
def test_honest_twins_of_all_adversaries_are_verified(tmp_path):
    result = verify(tmp_path, adversaries.all_twins(), **_TIMED)
    assert result.verified, why(result)


@pytest.mark.thorough
def test_compiled_candidate_is_verified(tmp_path):
    """torch.compile itself replaces functions of torch."""
    source = pairs.candidate(
        """
def prepare(self):
    self.fast = torch.compile(self.plain, backend="eager")

def forward(self, x):
    return self.fast(x)
"""
    )
    result = verify(tmp_path, source, hostile=False, time_limit_s=240)
    assert result.verified, why(result)


@pytest.mark.thorough
def test_the_original_is_compiled_beside_the_candidate(tmp_path):
    """torch.compile reads the original's file, which the candidate may not."""
    source = pairs.candidate(pairs.HONEST["operator by operator"])
    timed = {"timing": True, "compile_baseline": True, "timing_budget_s": 1, "time_limit_s": 240}
    result = verify(tmp_path, source, hostile=False, **timed)
    assert result.verified, why(result)
    assert "torch.compile" in str(result.timing)


def test_worker_has_loaded_all_of_itself_before_any_candidate():
    """What is imported later could be somebody else's by then."""
    program = "import sys, ingot.verify.worker; print(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    root = Path(ingot.verify.__file__).parent
    # Programs that the parent starts in processes of their own.
    beside = {"__init__", "compile_ahead", "build_ahead"}
    needed = {f"ingot.verify.{p.stem}" for p in root.glob("*.py") if p.stem not in beside}
    needed |= {f"ingot.bench.{name}" for name in ("rounds", "statistics", "subjects", "timers")}
    assert needed <= set(answer.stdout.split())


def test_worker_cannot_reach_the_parents_memory():
    """By way of C, of which the audit hook hears nothing; for root too."""
    program = (
        "import ctypes, os\n"
        "from ingot.verify.confinement import confine_worker\n"
        "confine_worker()\n"
        "name = f'/proc/{os.getppid()}/mem'.encode()\n"
        "print(ctypes.CDLL(None).open(name, 2))\n"
    )

    def opened() -> int:
        arguments = [sys.executable, "-c", program]
        answer = subprocess.run(arguments, capture_output=True, text=True, check=True)
        return int(answer.stdout)

    with unreadable():
        assert opened() == -1


def test_seeds_told_to_the_worker_do_not_lead_to_the_inputs():
    """A candidate knows the seeds of construction and calls: none gives the seed of an input."""
    drawn = Randomness(7)
    told = {drawn.construction} | {drawn.next("calls") for _ in range(64)}
    kept = {drawn.next(p) for p in ("inputs", "parameters") for _ in range(64)}
    assert not told & kept
    differences = {a - b for a in told for b in kept}
    assert len(differences) > 0.99 * len(told) * len(kept)  # no step leads from one to the other
    again = Randomness(7)
    assert again.construction == drawn.construction
    assert Randomness(None).construction != Randomness(None).construction


@pytest.mark.thorough
def test_process_that_leaves_the_session_is_ended(tmp_path):
    source = pairs.candidate(
        f"""
def forward(self, x):
    import subprocess
    if not self.training:
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open({str(tmp_path / "pid")!r}, "w").write(str(started.pid))
    return self.plain(x)
"""
    )
    assert verify(tmp_path, source, hostile=False).verified
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    for _ in range(50):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("it is still there")


def test_other_parameters_from_the_same_seed_are_found(tmp_path):
    source = pairs.candidate(pairs.HONEST["operator by operator"])
    swapped = source.replace(
        "        self.gemm = nn.Linear(in_features, out_features)\n"
        "        self.scale = nn.Parameter(torch.randn(out_features))\n",
        "        self.scale = nn.Parameter(torch.randn(out_features))\n"
        "        self.gemm = nn.Linear(in_features, out_features)\n",
    )
    assert swapped != source
    result = verify(tmp_path, swapped, hostile=False)
    assert [c.name for c in result.failures] == ["construction"]
    assert "scale" in result.failures[0].message


def test_output_of_another_type_is_wrong(tmp_path):
    source = pairs.candidate("def forward(self, x):\n    return self.plain(x).double()\n")
    result = verify(tmp_path, source, hostile=False)
    assert not result.verified
    assert "output 0 is torch.float64" in why(result)


def test_missing_parameter_is_named(tmp_path):
    source = pairs.candidate(pairs.HONEST["operator by operator"])
    result = verify(tmp_path, source.replace("self.scale", "self.factor"), hostile=False)
    assert not result.verified
    assert "missing ['scale']" in why(result)


@pytest.mark.thorough
def test_refusing_another_batch_size_is_declined_not_wrong(tmp_path):
    source = pairs.candidate(
        """
def forward(self, x):
    if x.shape[0] != 64:
        raise ValueError("made for a batch of 64")
    return self.plain(x)
"""
    )
    result = verify(tmp_path, source)
    assert not result.verified
    assert {c.outcome for c in result.failures} == {"declined"}
    assert verify(tmp_path, source, strict=False).verified


def test_a_note_says_that_model_stood_in_for_model_new(tmp_path):
    result = verify(tmp_path, pairs.ORIGINAL, hostile=False)
    assert result.verified
    assert any("defines no ModelNew: its Model was compared" in note for note in result.notes)
    result = verify(tmp_path, pairs.candidate(pairs.HONEST["operator by operator"]), hostile=False)
    assert not any("ModelNew" in note for note in result.notes)


def test_error_in_the_candidate_names_its_line(tmp_path):
    source = pairs.candidate("def forward(self, x):\n    return x.no_such_method()\n")
    result = verify(tmp_path, source)
    line = source.splitlines().index("        return x.no_such_method()") + 1
    assert f"model_new.py:{line}" in why(result)


def test_candidate_that_does_not_parse_is_a_verdict(tmp_path):
    result = verify(tmp_path, "class ModelNew(\n")
    assert not result.verified
    assert "SyntaxError" in why(result)


def test_original_that_raises_is_bad_input(tmp_path):
    good = pairs.candidate(pairs.HONEST["operator by operator"])
    with pytest.raises(PairError, match="no class 'Model'"):
        verify(tmp_path, good, original="x = 1\n")
    with pytest.raises(PairError, match="ZeroDivisionError"):
        verify(tmp_path, good, original="1 / 0\n")
    broken = pairs.ORIGINAL.replace("self.gemm(x)", "self.gemm(x[:, 1:])")
    with pytest.raises(PairError, match="raises RuntimeError on its own inputs"):
        verify(tmp_path, good, original=broken)
    with pytest.raises(PairError, match="no such file"):
        verify_pair(str(tmp_path / "absent.py"), str(tmp_path / "model_new.py"))


def test_overrides_reach_what_the_file_computes(tmp_path):
    good = pairs.candidate(pairs.HONEST["operator by operator"])
    original = pairs.ORIGINAL.replace("out_features = 80", "out_features = in_features // 2")
    result = verify(tmp_path, good, original, overrides={"in_features": 40}, hostile=False)
    assert result.verified, why(result)


@pytest.mark.thorough
def test_random_original_is_held_to_eager(tmp_path):
    original = pairs.ORIGINAL.replace(
        "return self.bn(self.gemm(x) * self.scale)",
        "return nn.functional.dropout(self.bn(self.gemm(x) * self.scale), 0.5, self.training)",
    )
    without = verify(
        tmp_path, pairs.candidate(pairs.HONEST["operator by operator"]), original, hostile=False
    )
    assert not without.verified


# Measures and criteria


def test_measures_of_a_known_error():
    truth = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64)
    found = truth.clone()
    found[1, 0] += 0.05
    measured = measure(truth, found, 2)
    assert measured.relative_error == pytest.approx(0.05 / math.hypot(5.0, 0.5))
    assert measured.worst_row_error == pytest.approx(0.1)
    assert measured.scaled_error == pytest.approx(0.0125)
    assert measured.mismatches == 1
    assert measured.nonfinite_mismatches == 0


def test_measures_of_positions():
    found = torch.tensor([[3], [5]])
    assert measure(found.double(), found, 2) == Measures(0.0, 0.0, 0.0, 0, 0)
    assert measure(found.double(), found + 1, 2).mismatches == 2


def test_measures_of_non_finite_positions():
    nan, inf = math.nan, math.inf
    truth = torch.tensor([[nan, inf, -inf, 1.0, 2.0]], dtype=torch.float64)
    assert measure(truth, truth.float(), 1).nonfinite_mismatches == 0
    found = torch.tensor([[nan, -inf, 1.0, nan, 2.0]])
    assert measure(truth, found, 1).nonfinite_mismatches == 3
    overflowing = torch.tensor([[1e39]], dtype=torch.float64)
    assert measure(overflowing, torch.tensor([[inf]]), 1).nonfinite_mismatches == 0


def test_measures_survive_large_and_small_magnitudes():
    truth = torch.tensor([[1e200, 1e-200], [1e-300, 0.0]], dtype=torch.float64)
    measured = measure(truth, truth * (1 + 1e-3), 2)
    assert measured.relative_error == pytest.approx(1e-3)
    assert measured.worst_row_error == pytest.approx(1e-3)


def test_judgement_by_eager_and_by_spread():
    def of(error):
        return Measures(error, error, error, 0, 0)

    spread = Spread(1e-7, 1e-7, 1e-7)
    unit = 2.0**-24
    assert judge(of(3e-7), of(1e-8), spread, unit).passed
    assert not judge(of(3e-6), of(1e-8), spread, unit).passed
    assert judge(of(3e-6), of(2.9e-6), spread, unit).passed
    assert not judge(of(math.nan), of(1e-8), spread, unit).passed
    assert judge(of(2e-7), of(0.0), Spread(0.0, 0.0, 0.0), unit).passed  # rounded when stored


def test_families_keep_shape_and_type():
    own = [torch.rand(8, 6), 3, torch.rand(8, 1).half()]
    for family in hostile_families(own, "fp32"):
        made = family.make(with_batch(own, family.batch), torch.Generator().manual_seed(1))
        rows = family.batch or 8
        assert made[1] == 3
        assert made[0].shape == (rows, 6)
        assert made[0].dtype == torch.float32
        assert made[2].dtype == torch.float16


@pytest.mark.parametrize(
    ("precision", "dtype", "reach"),
    [
        ("fp32", torch.float32, 60),
        ("fp16", torch.float32, 6),
        ("fp32", torch.float16, 6),
        ("bf16", torch.bfloat16, 60),
    ],
)
def test_families_stay_within_fp16_where_products_round_to_it(precision, dtype, reach):
    own = [torch.rand(64, 48, dtype=dtype)]
    ranges = [f for f in hostile_families(own, precision) if f.name.startswith("2^±")]
    assert [f.name for f in ranges] == [f"2^±{reach} across rows", f"2^±{reach} within rows"]
    for family in ranges:
        (made,) = family.make(own, torch.Generator().manual_seed(1))
        largest = made.float().abs().max().item()
        assert 2.0 ** (reach - 3) < largest < 2.0 ** (reach + 4)


def test_layouts_hold_the_same_values():
    value = torch.rand(5, 7)
    strided, misaligned = lay_out(value, "strided"), lay_out(value, "misaligned")
    assert torch.equal(strided, value)
    assert not strided.is_contiguous()
    assert torch.equal(misaligned, value)
    assert misaligned.data_ptr() % 16 == 4
    turned = lay_out(value, "turned")
    assert torch.equal(turned, value) and turned.stride() == (1, 5)
    images = lay_out(torch.rand(2, 3, 4, 5), "turned")
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_another_function_for_inputs_that_lie_turned_is_found(tmp_path):
    wrong = "def forward(self, x):\n    return self.plain(x) * (2 if x.stride(0) == 1 else 1)"
    result = verify(tmp_path, pairs.candidate(wrong))
    assert {check.name for check in result.failures} == {"turned"}, why(result)


# Timing

_QUICK = {"hostile": False, "timing": True, "compile_baseline": False, "timing_budget_s": 3}


@pytest.mark.alone
@pytest.mark.thorough
def test_timing_of_an_honest_pair(tmp_path):
    source = pairs.candidate(pairs.HONEST["operator by operator"])
    result = verify(tmp_path, source, **_QUICK)
    assert result.verified, why(result)
    subjects = result.timing["subjects"]
    assert set(subjects) == {"eager", "candidate"}
    lower, middle, upper = subjects["eager"]["ratio"]
    assert lower <= middle <= upper
    assert 0.2 < middle < 5
    assert result.timing["rounds"] >= 7


class _ClaimingProcess:
    """A worker whose calls take a millisecond, and which claims these in turn; eager takes two."""

    def __init__(self, *claims: float, error: float = 0.0) -> None:
        self.claims, self.error = list(claims), error
        self.busy = 0.0

    def processor_seconds(self) -> float:
        return self.busy

    def answer(self) -> tuple:  # to the request to load, which was made ahead
        return {}, {}, 0.0

    def request(self, header: dict, tensors: dict | None, limit: float) -> tuple:
        if header["op"] == "compare":
            samples = {"eager": [2e-3] * 9, "candidate": [self.claims.pop(0)] * 9}
            return {"cold_s": samples, "warm_s": {}, "note": ""}, {}, 0.0
        assert header["op"] == "repeat"
        self.busy += 1e-3 * header["calls"]
        reply = {"calls": [header["calls"] - 1], "positions": [[0, 3]], "marked": []}
        result = torch.full((4, 4), 1 + self.error)
        tensors = {"r0.o0": result, "g0.o0": result[0, :2]}
        return reply, tensors, 1e-3 * header["calls"]

    def timed(
        self, eager: Callable[[], None] = lambda: time.sleep(2e-3), eager_error: float = 0.0
    ) -> dict:
        exact = Results([torch.ones(4, 4, dtype=torch.float64)], "*", {}, [])
        by_eager = Results([torch.full((4, 4), 1 + eager_error)], "*", {}, [])
        return timing.time_pair(
            self,
            header={"budget_s": 1.0, "seed": 5},
            state={},
            input_sets=[[torch.rand(4, 4)]],
            time_limit=10.0,
            truth=timing.Truth(lambda *_: exact, 1e-6, {}, eager, lambda *_: by_eager),
            device="cpu",
        )


def test_claimed_time_is_held_against_the_parents_clock():
    """Where a worker's clock could be bent without a trace, its claims still meet another one."""
    process = _ClaimingProcess(1e-4, 1e-4, 1e-4)
    with pytest.raises(timing.ClaimRefusedError, match="claims 0.1000 ms") as caught:
        process.timed()
    assert caught.value.trick == "claims a false time"
    assert not process.claims


def test_a_timed_result_may_be_as_far_off_as_eagers_on_the_same_inputs():
    assert _ClaimingProcess(1e-3, error=9e-6).timed()
    assert _ClaimingProcess(1e-3, error=2e-5).timed(eager_error=3e-5)
    for eager_error in (0.0, 1e-5):
        with pytest.raises(timing.ClaimRefusedError, match="a timed call is wrong") as caught:
            _ClaimingProcess(1e-3, error=2e-5).timed(eager_error=eager_error)
        assert caught.value.trick == timing.WRONG_WHEN_TIMED


def test_a_moments_stop_of_the_parent_hides_no_slow_baseline():
    """One call in three: by their mean, eager's two milliseconds would be true."""
    number = itertools.count()
    process = _ClaimingProcess(1e-3)
    with pytest.raises(timing.ClaimRefusedError, match="claims 2.0000 ms for eager") as caught:
        process.timed(lambda: time.sleep(6e-3) if next(number) % 3 == 0 else None)
    assert caught.value.trick == "slows the baseline"


def test_a_machine_that_was_busy_while_a_pair_was_timed_is_asked_again():
    process = _ClaimingProcess(1e-4, 1e-3)
    assert process.timed()["subjects"]["candidate"]["median_ms"] == 1.0
    assert not process.claims
