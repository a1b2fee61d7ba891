"""The command line: exit statuses, messages, files written whole or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

import verify_pairs as pairs
from ingot.cli import main
from ingot.runtime.library import IngotError, library

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--set", "batch_size=24", "--set", "in_features=40", "--set", "out_features=36"]
pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def last_line(result) -> str:
    return result.output.strip().splitlines()[-1]


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "model.py").write_text(pairs.ORIGINAL)
    honest = pairs.candidate(pairs.HONEST["operator by operator"])
    (tmp_path / "honest.py").write_text(honest)
    wrong = pairs.candidate(pairs.DISHONEST["multiplies in bfloat16"][0])
    (tmp_path / "wrong.py").write_text(wrong)
    return tmp_path


def backend(device: str) -> bool:
    """Whether the library that is here can compile for the device."""
    graph = {
        "ingot_graph": 1,
        "name": "relu",
        "values": [
            {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 4]},
            {"op": "relu", "args": [0]},
        ],
        "results": [{"value": 1, "name": "y"}],
        "updates": [],
    }
    try:
        import ctypes

        program = ctypes.c_void_p()
        found = library()
        found.check(
            found.ingot_program_create(
                json.dumps(graph).encode(),
                json.dumps({"device": device}).encode(),
                ctypes.byref(program),
            )
        )
        found.ingot_program_destroy(program)
    except IngotError:
        return False
    return True


needs_cpu = pytest.mark.skipif(not backend("cpu"), reason="the library has no CPU backend")
needs_cuda_planning = pytest.mark.skipif(
    not backend("cuda"), reason="the library cannot plan for CUDA"
)


@pytest.mark.parametrize("command", ["optimize", "verify", "explain", "bench", "doctor"])
def test_help_of_each_command(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.output
    assert command in run("--help").output


@pytest.mark.parametrize("module", ["ingot", "ingot.cli"])
def test_python_m_ingot(module):
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"))
    answer = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert answer.returncode == 0
    assert answer.stdout.startswith("ingot")


@pytest.mark.thorough
def test_verify_exit_statuses(pair):
    model = str(pair / "model.py")
    options = ["--device", "cpu", "--no-timing", "--json"]
    good = run("verify", model, str(pair / "honest.py"), *options)
    assert good.exit_code == 0, good.output
    assert json.loads(good.stdout)["verified"] is True
    bad = run("verify", model, str(pair / "wrong.py"), *options)
    assert bad.exit_code == 1
    found = json.loads(bad.stdout)
    assert found["verified"] is False
    assert found["tricks"][0] == "lower precision"


@pytest.mark.thorough
def test_verify_prints_accuracy_and_verdict(pair):
    result = run(
        "verify", str(pair / "model.py"), str(pair / "honest.py"), "--device=cpu", "--no-timing"
    )
    assert result.exit_code == 0
    assert "Accuracy against fp64" in result.output
    assert "2^±60 within rows" in result.output
    assert "Verified:" in last_line(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "absent.py", "honest.py"], "absent.py"),
        (["verify", "raises.py", "honest.py"], "ZeroDivisionError"),
        (["verify", "empty.py", "honest.py"], "no class 'Model'"),
        (["verify", "model.py", "honest.py", "--set", "batch_size"], "name=value"),
        (["verify", "model.py", "honest.py", "--set", "depth=3"], "no constant 'depth'"),
        (["optimize", "empty.py"], "no class 'Model'"),
        (["optimize", "model.py", "-o", "no/such/folder/new.py"], "no/such/folder"),
        (["optimize", "model.py", "-o", "model.py"], "the model itself"),
        (["optimize", "model.py", "-o", "-"], "give a file's name"),
        (["optimize", "model.py", "-o", ""], "give a file's name"),
        (["optimize", "model.py", "-o", "a" * 300], "File name too long"),
        (["optimize", "model.py", "--report", "model.py"], "the model itself"),
        (["optimize", "model.py", "-o", "a.py", "--report", "./a.py"], "what -o names"),
        (["explain", "model.py", "--report", "model.py"], "the model itself"),
        (["verify", "model.py", "honest.py", "--report", "model.py"], "the original"),
        (["verify", "model.py", "honest.py", "--report", "honest.py"], "the candidate"),
        (["explain", "raises.py"], "ZeroDivisionError"),
        (["bench", "--model", "unheard_of"], "no bundled case"),
        (["bench", "--shape", "12x"], "not of the form"),
        (["bench", "--products", "--rows", "999"], "no product has so many rows"),
        (["bench", "--picture", "a.svg"], "give both"),
        (["bench", "--precision", "all", "--picture", "a.svg"], "one case, not 6"),
        (["bench", "--precision", "all", "--picture", "no/a.svg"], "no is no folder"),
        (["bench", "--precision", "all", "--report", "a.html"], "--picture or --json"),
        (["bench", "--precision", "tf32", "--half"], "exclude each other"),
        (["bench", "--shape", "99999999x9999999x99999999", "--device", "cpu"], "too large for cpu"),
        (["bench", "--rounds", "0"], "0 is too few"),
        (["bench", "--budget", "nan"], "no number of seconds"),
        (["bench", "--rows", "-1"], "-1 is too few"),
        (["bench", "--examples", "no/models"], "are not in no/models"),
        (["verify", "model.py", "honest.py", "--budget", "-1"], "-1 is no number of seconds"),
        (["verify", "model.py", "honest.py", "--time-limit", "nan"], "no number of seconds"),
        (["verify", "model.py", "honest.py", "--time-limit", "inf"], "inf is no number of seconds"),
        (["verify", "model.py", "honest.py", "--memory-limit", "0"], "0 is too few"),
        (["bench", "--results", "/proc/no"], "--results: cannot write to /proc/no"),
        (["explain", "model.py", "--kernels-out", "/proc/no"], "cannot write to /proc/no"),
    ],
)
def test_bad_input_is_one_message_and_status_2(pair, monkeypatch, arguments, message):
    monkeypatch.chdir(pair)
    Path("raises.py").write_text("x = 1 / 0\n")
    Path("empty.py").write_text("")
    before = {p: p.read_bytes() for p in pair.iterdir()}
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert {p: p.read_bytes() for p in pair.iterdir()} == before


BY_KEYWORD = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features, *, bias):
        super().__init__()
        self.gemm = nn.Linear(features, features, bias=bias)

    def forward(self, x, shift, scale=1.0):
        return torch.relu(self.gemm(x)) * scale + shift["by"]


def get_inputs():
    return {"shift": {"by": torch.rand(24)}, "x": torch.rand(16, 24)}


def get_init_inputs():
    return [[24], {"bias": True}]
"""


@needs_cpu
@pytest.mark.thorough
def test_arguments_by_keyword_and_in_dicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(BY_KEYWORD)
    made = run("optimize", "model.py", "--device", "cpu", "--no-timing", "--json")
    assert made.exit_code == 0, made.output
    replaced = json.loads(made.stdout)["report"]["operators_replaced"]
    assert {item["what"] for item in replaced} >= {"linear", "relu", "add"}
    checked = run("verify", "model.py", "model_new.py", "--device", "cpu", "--no-timing")
    assert checked.exit_code == 0, checked.output
    explained = run("explain", "model.py", "--device", "cpu", "--no-kernels")
    assert "relu" in explained.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_device_is_bad_input(pair):
    result = run("verify", str(pair / "model.py"), str(pair / "honest.py"), "--device", "cuda")
    assert result.exit_code == 2
    assert "no GPU" in result.output


def test_doctor_reports_what_is_here():
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["facts"]["PyTorch"] == torch.__version__
    assert found["usable"] == (result.exit_code == 0)


def test_doctor_without_the_library(monkeypatch):
    monkeypatch.setenv("INGOT_LIBRARY", "/nowhere/libingot.so")
    monkeypatch.setattr("ingot.runtime.library._library", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "/nowhere/libingot.so" in result.output


@pytest.mark.thorough
@needs_cpu
def test_optimize_writes_a_verified_file(tmp_path):
    target = tmp_path / "new.py"
    model = str(ROOT / "examples" / "gemm_scale_bn.py")
    arguments = ["--device", "cpu", "--no-timing", "-o", str(target), *SMALL]
    result = run("optimize", model, *arguments)
    assert result.exit_code == 0, result.output
    for title in ("Operators replaced", "Optimisations made", "Plan of", "Accuracy against fp64"):
        assert title in result.output
    assert "class ModelNew" in target.read_text()
    again = run("verify", model, str(target), "--device", "cpu", "--no-timing", "--json", *SMALL)
    assert json.loads(again.stdout)["verified"] is True


@needs_cpu
def test_optimize_writes_nothing_that_is_not_verified(tmp_path, monkeypatch):
    import ingot.model_writer

    honest = ingot.model_writer.render_model

    def wrong(*arguments):
        return honest(*arguments) + (
            "\n    def forward(self, *x):\n        return super().forward(*x) * 1.001\n"
        )

    monkeypatch.setattr(ingot.model_writer, "render_model", wrong)
    target = tmp_path / "new.py"
    model = str(ROOT / "examples" / "gemm_scale_bn.py")
    arguments = ["--device", "cpu", "--no-timing", "-o", str(target), *SMALL]
    result = run("optimize", model, *arguments)
    assert result.exit_code == 1, result.output
    assert "was not written" in last_line(result)
    assert not target.exists()


@needs_cuda_planning
def test_explain_needs_no_gpu_and_writes_kernels(tmp_path):
    model = str(ROOT / "examples" / "gemm_bn_scale_softmax.py")
    folder = tmp_path / "kernels"
    result = run("explain", model, "--device", "cuda", "--kernels-out", str(folder), *SMALL)
    assert result.exit_code == 0, result.output
    for title in ("Graph before rewriting", "Rewrites", "Graph after rewriting", "Plan of"):
        assert title in result.output
    kernels = list(folder.glob("*.cu"))
    assert any(k.stem.startswith("fused_") for k in kernels)
    assert all("#include" in k.read_text() for k in kernels)
    assert f"Wrote {len(kernels)} kernels" in result.output


BROKEN = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x = self.linear(x).relu()
        if x.sum() > 0:
            x = x + 1
        return self.linear(x).sigmoid()


def get_inputs():
    return [torch.rand(4, 16)]


def get_init_inputs():
    return []
"""


def explained(folder: Path, source: str, *how: str) -> dict:
    """What explain says as JSON of a model of this text."""
    (folder / "model.py").write_text(source)
    return json.loads(run("explain", str(folder / "model.py"), *how, "--json").stdout)


def test_explain_shows_every_graph_of_a_broken_forward(tmp_path):
    found = explained(tmp_path, BROKEN, "--device", "cpu")
    (left,) = found["unsupported"]
    assert left["what"] == "what stands between its graphs" and "model.py:13" in left["why"]
    replaced = [item["what"] for item in found["operators_replaced"]]
    assert replaced.count("linear") == 2 and {"relu", "sigmoid"} <= set(replaced)


COUNTING = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return torch.sigmoid(self.linear(x)) * self.steps


def get_inputs():
    return [torch.rand(4, 16)]


def get_init_inputs():
    return []
"""


def test_explain_shows_what_runs_of_a_forward_that_no_file_would_repeat(tmp_path):
    found = explained(tmp_path, COUNTING, "--device", "cpu")
    assert any("changes 'steps' of the module itself" in i["why"] for i in found["unsupported"])
    assert {"linear", "sigmoid", "mul"} <= {i["what"] for i in found["operators_replaced"]}


ALONE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(32, 64)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.rand(rows, 64, 128, 128)]


def get_init_inputs():
    return []


rows = 64
"""


@needs_cuda_planning
@pytest.mark.parametrize("device, rows, taken", [("cuda", 64, 1), ("cuda", 2, 0), ("cpu", 64, 0)])
def test_explain_decides_as_on_the_device_and_for_the_batch(tmp_path, device, rows, taken):
    how = ("--device", device, "--set", f"rows={rows}")
    found = explained(tmp_path, ALONE, *how)
    assert len(found["programs"]) == taken
    assert [left["what"] for left in found["unsupported"]] == ([] if taken else ["the module"])
    said = run("explain", str(tmp_path / "model.py"), *how).output
    assert ("Plan of" in said, "nothing that Ingot" in said) == (bool(taken), not taken)


RECURRENT = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.linear(self.lstm(x)[0][:, -1]))


def get_inputs():
    return [torch.rand(16, 5, 32)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda_planning)])
def test_explain_shows_what_is_beside_an_lstm(tmp_path, device):
    found = explained(tmp_path, RECURRENT, "--device", device)
    assert {"linear", "relu"} <= {item["what"] for item in found["operators_replaced"]}
    assert "recurrent" in {item["what"] for item in found["unsupported"]}
