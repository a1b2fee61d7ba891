"""What the commands print under --json has the documented form, and names it."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

import verify_pairs as pairs
from ingot.cli import main
from ingot.cli.console import JSON_FORMAT
from report_samples import REPORT, verification

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--set", "batch_size=24", "--set", "in_features=40", "--set", "out_features=36"]
pytestmark = pytest.mark.usefixtures("one_thread")
SCHEMA = json.loads(resources.files("ingot").joinpath("schemas/output.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def run(command: str, *arguments: object) -> tuple[dict, int]:
    result = CliRunner().invoke(main, [command, *map(str, arguments), "--json"])
    found = json.loads(result.stdout)
    VALIDATOR.validate(found)
    jsonschema.validate(found, {**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{command}"}]})
    assert found["ingot_json"] == JSON_FORMAT
    assert found["command"] == command
    return found, result.exit_code


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.thorough
def test_optimize(tmp_path):
    model = ROOT / "examples/gemm_scale_bn.py"
    target = tmp_path / "new.py"
    found, status = run(
        "optimize", model, "-o", target, "--device", "cpu", "--budget", "1", "--no-compile", *SMALL
    )
    assert found["verification"]["timing"] is None or (
        len(found["verification"]["timing"]["subjects"]["candidate"]["samples_ms"]) >= 7
    )
    assert found["written"] == (status == 0) == target.exists()


def test_optimize_of_what_stays_with_pytorch(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
        "    def forward(self, x):\n        return torch.linalg.inv(x)\n\n\n"
        "def get_inputs():\n    return [torch.eye(4)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    )
    found, status = run("optimize", model, "--device", "cpu")
    assert (found["verification"], found["written"], status) == (None, False, 1)
    assert found["report"]["unsupported"]


PRINTS = """
import os
import sys

import torch

print("loaded")
os.system("echo by a program")


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1)


def get_inputs():
    print("asked")
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""


@pytest.mark.thorough
def test_what_a_model_prints_is_not_among_it(tmp_path):
    (tmp_path / "model.py").write_text(PRINTS)
    answer = subprocess.run(
        [sys.executable, "-m", "ingot", "explain", "model.py", "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    VALIDATOR.validate(json.loads(answer.stdout))
    assert {"loaded", "by a program", "asked"} <= set(answer.stderr.splitlines())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["explain", "absent.py"], "absent.py"),
        (["verify", "raises.py", "raises.py"], "raises.py:1"),
        (["optimize", "raises.py", "--device", "cpu"], "ZeroDivisionError"),
        (["bench", "--rounds", "many"], "many"),
        (["tune", "raises.py", "--unknown"], "--unknown"),
    ],
)
def test_bad_input_is_an_object_too(tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text("1 / 0\n")
    result = CliRunner().invoke(main, [*command, "--json"])
    found = json.loads(result.stdout)
    VALIDATOR.validate(found)
    assert result.exit_code == 2
    assert (found["command"], set(found)) == (command[0], {"ingot_json", "command", "error"})
    assert words in found["error"] and found["error"] in result.stderr


def test_another_programs_json_option_is_its_own():
    answer = CliRunner().invoke(main, ["run", "--nothing", "--json"])
    assert answer.stdout == ""


@pytest.mark.thorough
def test_verify_of_a_wrong_candidate(tmp_path):
    (tmp_path / "model.py").write_text(pairs.ORIGINAL)
    wrong = pairs.candidate(pairs.DISHONEST["multiplies in bfloat16"][0])
    (tmp_path / "wrong.py").write_text(wrong)
    options = ["--device", "cpu", "--no-timing"]
    found, status = run("verify", tmp_path / "model.py", tmp_path / "wrong.py", *options)
    assert (found["verified"], status) == (False, 1)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_explain(device):
    model = ROOT / "examples/gemm_bn_scale_softmax.py"
    found, status = run("explain", model, "--device", device, "--mode", "both", *SMALL)
    assert status == 0
    assert {program["mode"] for program in found["programs"]} == {"training", "eval"}


def test_bench():
    options = [
        "--device",
        "cpu",
        "--no-compile",
        "--rounds",
        "2",
        "--budget",
        "1",
        "--mode",
        "eval",
    ]
    found, status = run("bench", *options, "--model", "gemm_bn_scale_softmax", *SMALL)
    assert status == 0 and len(found["cases"]) == 1
    found, status = run("bench", *options, "--shape", "5x9x3", "--precision", "all")
    assert status == 0 and [ladder["shape"] for ladder in found["ladders"]] == ["5×9→3"]


def test_doctor():
    found, _ = run("doctor")
    assert found["facts"]["Ingot"]


def test_tune(monkeypatch, tmp_path):
    """Without a GPU: the command's own part, on products as `ingot.tune` gives them."""
    from ingot.tuning import TunedProduct

    product = TunedProduct("h200 | m 1024", "library", "a", {"a": 0.5, "library": 0.4})
    monkeypatch.setattr("ingot.tune", lambda *arguments, **options: [product], raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.nn.Module.cuda", lambda module: module)
    monkeypatch.setattr("torch.Tensor.to", lambda tensor, device: tensor)
    found, status = run("tune", ROOT / "examples/linear_gelu.py", *SMALL)
    assert status == 0
    assert found["products"][0]["gain"] == pytest.approx(1.25)


def test_the_schema_refuses_what_is_wrong():
    whole = {
        "ingot_json": 1,
        "command": "optimize",
        "report": copy.deepcopy(REPORT),
        "verification": verification(),
        "written": True,
    }
    for key in ("ingot_json", "command"):
        whole["report"].pop(key, None)
    VALIDATOR.validate(whole)
    changes = [
        lambda w: w.pop("written"),
        lambda w: w.update(command="verify"),
        lambda w: w["report"]["programs"][0].update(mode="testing"),
        lambda w: w["report"]["programs"][0]["explain"]["sweeps"][0].pop("flops"),
        lambda w: w["verification"]["checks"][0].update(outcome="maybe"),
        lambda w: w["verification"]["timing"]["subjects"].pop("eager"),
        lambda w: w["verification"]["accuracy"][0]["candidate"].update(relative_error="tiny"),
    ]
    for change in changes:
        wrong = copy.deepcopy(whole)
        change(wrong)
        assert not VALIDATOR.is_valid(wrong)


def test_every_command_with_json_is_in_the_schema_and_documented():
    document = (ROOT / "docs/json-format.md").read_text(encoding="utf-8")
    commands = {ref["$ref"].rpartition("/")[2] for ref in SCHEMA["oneOf"]}
    for name in main.list_commands(None):
        command = main.get_command(None, name)
        takes_json = any("--json" in option.opts for option in command.params)
        assert takes_json == (name in commands), name
        assert takes_json == bool(re.search(rf"^## `ingot {name}`", document, re.M)), name
