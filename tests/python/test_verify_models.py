"""verify and models out of the ordinary: right candidates for them are verified, and what is the
original's fault is not called the candidate's."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from ingot.report.accuracy import telling_rows
from ingot.verify import PairError, VerifyOptions, verify_pair
from ingot.verify.execution import outputs_of
from ingot.verify.reference import rows_of

HEAD = "import sys, torch\nfrom torch import nn\n"


pytestmark = pytest.mark.usefixtures("one_thread")


def model(body: str, inputs: str = "[torch.rand(16, 12)]", extra: str = "") -> str:
    """A model file with one linear layer; body: of forward."""
    return (
        HEAD
        + textwrap.dedent(extra)
        + "class Model(nn.Module):\n"
        + "    def __init__(self):\n        super().__init__()\n"
        + "        self.gemm = nn.Linear(12, 10)\n"
        + "    def forward(self, x, *more):\n"
        + textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8)
        + f"\ndef get_inputs():\n    return {inputs}\ndef get_init_inputs():\n    return []\n"
    )


def verify(folder: Path, original: str, candidate: str | None = None, **options):
    """candidate: None takes the original's own text."""
    (folder / "model.py").write_text(original)
    (folder / "new.py").write_text(candidate or original)
    options.setdefault("seed", 3)
    options.setdefault("hostile", False)
    files = str(folder / "model.py"), str(folder / "new.py")
    return verify_pair(*files, VerifyOptions(time_limit_s=60, **options))


def why(result) -> str:
    return "\n".join(f"{c.name} [{c.mode}] {c.outcome}: {c.message}" for c in result.failures)


@pytest.mark.thorough
def test_inputs_that_ask_for_gradients(tmp_path):
    original = model(
        "return torch.relu(self.gemm(x))", inputs="[torch.rand(16, 12, requires_grad=True)]"
    )
    result = verify(tmp_path, original)
    assert result.verified, why(result)
    wrong = original.replace("self.gemm(x)", "self.gemm(x) + 1e-3")
    assert not verify(tmp_path, original, wrong).verified


def test_a_nans_row_may_be_a_term_of_a_gradient_as_in_other_kernels_of_pytorchs(tmp_path):
    """PyTorch's vectors let nothing through where ReLU6 was given NaN, its single elements all."""
    body = "y = self.gemm(x)\nreturn {}"
    original = model(body.format("nn.functional.relu6(y)"))
    chosen = "torch.where(y >= 6, 6.0, torch.where(y <= 0, 0.0, {}))"
    result = verify(tmp_path, original, model(body.format(chosen.format("y"))), hostile=True)
    assert result.verified, why(result)
    half = model(body.format(chosen.format("y * torch.where(y.isnan(), 0.5, 1.0)")))
    assert not verify(tmp_path, original, half, hostile=True).verified


@pytest.mark.thorough
def test_complex_outputs(tmp_path):
    original = model("return torch.fft.rfft(self.gemm(x))")
    result = verify(tmp_path, original)
    assert result.verified, why(result)
    wrong = original.replace("torch.fft.rfft(self.gemm(x))", "torch.fft.rfft(self.gemm(x)).conj()")
    assert not verify(tmp_path, original, wrong).verified
    rounded = "torch.complex(*[v.bfloat16().float() for v in (y.real, y.imag)])"
    coarse = original.replace("return torch", "y = torch") + ""
    coarse = coarse.replace("rfft(self.gemm(x))", f"rfft(self.gemm(x))\n        return {rounded}")
    result = verify(tmp_path, original, coarse)
    assert not result.verified
    assert "exceeds" in why(result)


@pytest.mark.thorough
def test_complex_parameters(tmp_path):
    original = model("return (self.gemm(x) * self.mix).abs()").replace(
        "self.gemm = nn.Linear(12, 10)\n",
        "self.gemm = nn.Linear(12, 10)\n"
        "        self.mix = nn.Parameter(torch.randn(10, dtype=torch.complex64))\n",
    )
    result = verify(tmp_path, original, hostile=True)
    assert result.verified, why(result)


BATCH = """
import dataclasses
@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    shift: dict
class Fold:
    def __init__(self, by):
        self.by = by
"""
BATCH_INPUTS = "[torch.rand(16, 12), Batch(torch.rand(16, 12), {'s': torch.rand(10)}), Fold(2.0)]"
BATCH_BODY = """
batch, fold = more
assert isinstance(batch, Batch) and isinstance(fold, Fold)
return self.gemm(x + batch.rows) * fold.by + batch.shift["s"]
"""


@pytest.mark.thorough
def test_inputs_of_classes_of_the_models_own_file(tmp_path):
    original = model(BATCH_BODY, BATCH_INPUTS, BATCH)
    timed = {"timing": True, "compile_baseline": False, "timing_budget_s": 1}
    result = verify(tmp_path, original, hostile=True, **timed)
    assert result.verified, why(result)
    tampering = original.replace("    batch, fold", "    more[0].rows.zero_()\n        batch, fold")
    result = verify(tmp_path, original, tampering)
    assert "input tampering" in result.tricks, why(result)
    without = original.replace("class Fold", "class Other").replace("isinstance(fold, Fold)", "1")
    with pytest.raises(PairError, match=r"class of its own, Fold, which .*new.py does not define"):
        verify(tmp_path, original, without)


@pytest.mark.thorough
def test_one_number_a_row_may_nearly_cancel(tmp_path):
    """Right, by other operators: of 2048 rows, some come near zero by cancellation."""
    inputs = "[torch.rand(2048, 12)]"
    original = model("return torch.logsumexp(self.gemm(x), dim=1, keepdim=True) - 2.35", inputs)
    body = "return self.gemm(x).exp().sum(1, keepdim=True).log() - 2.35"
    for seed in (3, 6):
        result = verify(tmp_path, original, model(body, inputs), seed=seed)
        assert result.verified, why(result)
    lower = model(body.replace("self.gemm(x)", "self.gemm(x.bfloat16().float())"), inputs)
    assert not verify(tmp_path, original, lower).verified


def test_rows_of_one_number_are_one_row():
    assert rows_of(torch.rand(7, 3)) == 7
    assert rows_of(torch.rand(7, 1)) == 1
    assert rows_of(torch.rand(7)) == 1
    assert rows_of(torch.rand(())) == 1
    assert rows_of(torch.rand(1, 3)) == 1


@pytest.mark.thorough
def test_a_model_that_exits_is_bad_input(tmp_path):
    original = model("sys.exit(0)")
    good = model("return self.gemm(x)")
    with pytest.raises(PairError, match="raises SystemExit on its own inputs"):
        verify(tmp_path, original, good)
    at_once = good.replace("self.gemm = ", "sys.exit(3)\n        self.gemm = ")
    with pytest.raises(PairError, match="SystemExit"):
        verify(tmp_path, at_once, good)
    in_eval = model("if not self.training: sys.exit(0)\nreturn self.gemm(x)")
    result = verify(tmp_path, in_eval, good)
    assert not result.verified
    assert "the original raises SystemExit" in why(result)


def test_a_candidate_that_exits_says_where(tmp_path):
    original = model("return self.gemm(x)")
    result = verify(tmp_path, original, model("sys.exit(0)"))
    assert result.tricks == ["crash"]
    assert "SystemExit: 0 (new.py:" in why(result)


@pytest.mark.thorough
def test_timed_calls_of_a_random_model_are_not_held_against_fp64(tmp_path):
    original = model("return nn.functional.dropout(self.gemm(x), 0.5, self.training)")
    timed = {"timing": True, "compile_baseline": False, "timing_budget_s": 1}
    result = verify(tmp_path, original, **timed)
    assert result.verified, why(result)
    assert any("random numbers" in note for note in result.notes)


@pytest.mark.thorough
def test_models_without_gradients_need_none(tmp_path):
    """An argmax, integers, what works on its input in place, frozen parameters."""
    for body in (
        "return self.gemm(x).argmax(1)",
        "return self.gemm(x).detach()",
        "x.mul_(2.0)\nreturn self.gemm(x)",
        "return self.gemm(x), self.gemm(x).argmax(1), x.shape[0]",
    ):
        result = verify(tmp_path, model(body))
        assert result.verified, why(result)
    frozen = model("return self.gemm(x)").replace(
        "self.gemm = nn.Linear(12, 10)\n",
        "self.gemm = nn.Linear(12, 10)\n        self.gemm.weight.requires_grad_(False)\n",
    )
    result = verify(tmp_path, frozen)
    assert result.verified, why(result)
    names = {row.tensor for row in result.accuracy if row.kind == "gradient"}
    assert names == {"gradient of gemm.bias", "gradient of input 0"}


def test_the_table_has_the_telling_statistic_and_gradient():
    def row(kind: str, tensor: str, error: float, eager: float = 1e-7) -> dict:
        found = {"relative_error": error}
        limits = {"allowed_relative_error": 10 * eager, "eager": {"relative_error": eager}}
        return {"family": "f", "mode": "eval", "tensor": tensor, "candidate": found, **limits} | {
            "kind": kind
        }

    rows = [
        row("output", "output", 1e-7),
        row("buffer", "bn.running_mean", 1e-7),
        row("buffer", "bn.running_var", 2e-7),
        row("gradient", "gradient of w", 2e-7),
        row("gradient", "gradient of v", 3e-7),
        row("gradient", "gradient of a bias before a norm", 5e8, 4e8),
    ]
    names = [r["tensor"] for r in telling_rows(rows)]
    assert names == ["output", "bn.running_var", "gradient of v"]
    rows[-1]["candidate"]["relative_error"] = 1e10
    assert telling_rows(rows)[-1] is rows[-1]


@pytest.mark.thorough
def test_refusing_gradients_aloud_is_declined(tmp_path):
    original = model("return self.gemm(x)")
    refusing = original.replace(
        "return self.gemm(x)",
        "if torch.is_grad_enabled(): raise NotImplementedError('no gradients')\n"
        "        return self.gemm(x)",
    )
    result = verify(tmp_path, original, refusing)
    assert {c.outcome for c in result.failures} == {"declined"}
    assert verify(tmp_path, original, refusing, strict=False).verified


def test_gradients_of_lower_precision_are_wrong(tmp_path):
    original = model("return self.gemm(x)")
    lower = original.replace(
        "class Model",
        """
class Coarse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        return g * (1 + 1e-4)
class Model""",
    ).replace("return self.gemm(x)", "return Coarse.apply(self.gemm(x))")
    result = verify(tmp_path, original, lower)
    assert result.tricks == ["wrong gradient"], why(result)


def kinked(original: str, times: int, change: str, forward: str) -> str:
    """The original with `change` of the gradient `g` in so many backward passes; forward: of its
    result, with `Kink.apply` where that is to happen."""
    return original.replace(
        "class Model",
        f"""
class Kink(torch.autograd.Function):
    calls = 0
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        Kink.calls += 1
        g = g.clone()
        if Kink.calls <= {times}:
            {change}
        return g
class Model""",
    ).replace("return self.gemm(x)", forward)


@pytest.mark.parametrize(
    ("times", "verified"),
    [
        pytest.param(1, True, marks=pytest.mark.thorough),
        (2, True),
        pytest.param(3, False, marks=pytest.mark.thorough),
    ],
)
def test_a_gradient_that_is_slightly_off_once_is_asked_for_again(tmp_path, times, verified):
    original = model("return self.gemm(x)")
    once = kinked(original, times, "g[0, 0] *= 0.95", "return Kink.apply(self.gemm(x))")
    result = verify(tmp_path, original, once)
    assert result.verified == verified, why(result)
    assert result.tricks == ([] if verified else ["wrong gradient"])
    again = [note for note in result.notes if "asked for again" in note]
    assert len(again) == min(times, 2)
    assert all(row.candidate.relative_error < 1e-5 for row in result.accuracy) == verified


@pytest.mark.parametrize(
    ("times", "verified"), [pytest.param(1, True, marks=pytest.mark.thorough), (3, False)]
)
def test_a_kink_of_hostile_inputs_is_asked_for_again(tmp_path, times, verified):
    """Beyond a clamp's bounds nearly all of the gradient is zero: one element is a tenth of it."""
    original = model("return self.gemm(x)")
    forward = "y = self.gemm(x)\n        return Kink.apply(y) if x.mean() > 900 else y"
    once = kinked(original, times, "g[0, 0] = 0", forward)
    result = verify(tmp_path, original, once, hostile=True)
    assert result.verified == verified, why(result)
    assert result.tricks == ([] if verified else ["wrong gradient"])
    again = [note for note in result.notes if "a kink may have changed sides" in note]
    assert len(again) == min(times, 2)


@pytest.mark.thorough
def test_sigterm_leaves_nothing_behind(tmp_path):
    """Neither shared memory nor what the candidate started outside its session."""
    hanging = model("return self.gemm(x)").replace(
        "    def forward",
        "    def forward(self, x, *more):\n"
        "        import subprocess, time\n"
        "        other = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid))\n"
        "        time.sleep(600)\n"
        "    def unused",
    )
    (tmp_path / "model.py").write_text(model("return self.gemm(x)", "[torch.rand(4096, 12)]"))
    (tmp_path / "new.py").write_text(hanging)
    before = left_behind()
    command = [sys.executable, "-m", "ingot.cli", "verify", "--no-timing", "--device", "cpu"]
    verifying = subprocess.Popen(
        [*command, "model.py", "new.py"],
        cwd=tmp_path,
        env=dict(os.environ, TMPDIR=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    verifying.send_signal(signal.SIGTERM)
    assert verifying.wait(timeout=30) in (143, -signal.SIGTERM)
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    wait_for(lambda: not state.exists() or state.read_text().split()[2] == "Z")
    assert left_behind() <= before
    assert {p.name for p in tmp_path.iterdir()} == {"model.py", "new.py", "pid"}


def left_behind() -> set:
    return {p.name for p in Path("/dev/shm").glob("ingot-verify-*")}


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


RESULT = """
    from dataclasses import dataclass
    from typing import NamedTuple

    class Pair(NamedTuple):
        y: torch.Tensor
        z: torch.Tensor

    @dataclass
    class Out:
        logits: torch.Tensor
        more: object = None

    class Opaque:
        def __init__(self, y):
            self.y = y
"""


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        ("y: torch", "w: torch"),
        pytest.param(("* 2)", "* 2.001)"), marks=pytest.mark.thorough),
    ],
)
def test_a_named_tuple_of_the_files_own(tmp_path, wrong):
    original = model("y = self.gemm(x)\nreturn Pair(y, y * 2)", extra=RESULT)
    result = verify(tmp_path, original, wrong and original.replace(*wrong))
    assert result.verified == (wrong is None), why(result)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        pytest.param(("logits:", "scores:"), marks=pytest.mark.thorough),
        ("y * 1", "y * 1.001"),
    ],
)
def test_a_data_class_is_looked_into(tmp_path, wrong):
    body = "y = self.gemm(x)\nreturn [Out(y * 1, {'a': Out(y.tanh())})]"
    original = model(body, extra=RESULT)
    result = verify(tmp_path, original, wrong and original.replace(*wrong))
    assert result.verified == (wrong is None), why(result)
    assert wrong or {row.tensor for row in result.accuracy} >= {"output 0", "output 1"}


def test_what_nobody_looks_into_is_not_verified(tmp_path):
    result = verify(tmp_path, model("return Opaque(self.gemm(x))", extra=RESULT))
    assert not result.verified
    assert "an output is a Opaque, which nobody looks into" in why(result)


@pytest.mark.parametrize("body", ["return self.gemm(x), x", "return self.gemm(x), more[0][0]"])
def test_an_input_given_back_changes_as_inputs_do(tmp_path, body):
    inputs = "[torch.rand(16, 12), [torch.rand(4)]]"
    result = verify(tmp_path, model(body, inputs))
    assert result.verified, why(result)


@dataclasses.dataclass
class Held:
    a: torch.Tensor
    later: torch.Tensor = dataclasses.field(init=False)
    itself: object = None


def test_data_classes_are_looked_into_as_they_are():
    """Unset fields, attributes that are none, and one that holds itself."""
    first, second = (Held(torch.ones(2)) for _ in range(2))
    assert described(first) == described(second)
    first.itself, second.itself = first, second
    assert described(first) == described(second)
    second.hidden = torch.zeros(3)
    assert described(first) != described(second)
    assert described(Held(torch.ones(2))) != described(
        {"Held": {"a": torch.ones(2), "itself": None}}
    )


def described(result: object) -> tuple:
    tensors, said, complaints = outputs_of(result)
    return [t.shape for t in tensors], said, complaints
