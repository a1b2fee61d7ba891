"""What the commands do with models' files that raise, end the program, or have odd names."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from ingot.cli import main
from ingot.model_file import load_model_file
from ingot.model_writer import render_model

pytestmark = pytest.mark.usefixtures("one_thread")


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def last_line(result) -> str:
    return result.output.strip().splitlines()[-1]


RAISES = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x{more}):
        {statement}
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.rand(4, {width})]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("command", [["explain"], ["optimize"], ["optimize", "--standalone"]])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"statement": "raise ValueError('never')"}, "model.py:11: {} ValueError: never"),
        ({"more": ", y"}, "{} TypeError: Model.forward() missing 1 required"),
        ({"width": 7}, "model.py:12: {} RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_model_that_raises_is_named_with_its_line(tmp_path, monkeypatch, command, changes, said):
    monkeypatch.chdir(tmp_path)
    shape = {"more": "", "statement": "pass", "width": 8, **changes}
    Path("model.py").write_text(RAISES.format(**shape))
    result = run(*command, "model.py", "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert said.format("Model, called as get_inputs() says, raised") in last_line(result)
    assert os.listdir() == ["model.py"]


CHOOSES = """
import torch

act = None
digits = 3


class Model(torch.nn.Module):
    def forward(self, x):
        assert digits == "256", digits
        return getattr(torch, act)(torch.softmax(x, 1))


def get_inputs():
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""


def test_a_text_is_set_whatever_stood_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(CHOOSES)
    texts = ["--set", "act='tanh'", "--set", 'digits="256"']
    result = run("explain", "model.py", "--device", "cpu", "--no-kernels", *texts)
    assert result.exit_code == 0, result.output
    assert "tanh" in result.output
    result = run("explain", "model.py", "--set", "act=tanh")
    assert result.exit_code == 2 and "a text needs quotes of its own" in result.output


ODD_NAMES = [
    'three"""quotes.py',
    "back\\x.py",
    "two\nimport nothing.py",
    "{{braces}}.py",
    "-dash and space.v2.py",
    "ünï☃[b].py",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_models_file_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shape = {"more": "", "statement": "pass", "width": 8}
    Path(name).write_text(RAISES.format(**shape))
    result = run("optimize", "--standalone", "--device", "cpu", "-o", "new.py", "--", name)
    assert result.exit_code == 0, result.output
    compile(Path("new.py").read_text(encoding="utf-8"), "new.py", "exec")
    loaded = load_model_file(name)
    report = {"operators_replaced": [], "optimisations": [], "unsupported": []}
    render_model(loaded, report, "fp32")  # which compiles it


def test_a_path_that_is_no_text_is_refused(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff.py")
    with open(path, "w") as file:
        file.write("x = 1\n")
    result = run("explain", os.fsdecode(path))
    assert result.exit_code == 2
    assert "its path is not UTF-8 text" in result.output


EXITS = """
import sys
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        if not self.training:
            sys.exit({code})
        return torch.softmax(x, 1)


def get_inputs():
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(("code", "said"), [("", "exit status 0"), ("'no licence'", "no licence")])
def test_a_model_that_ends_the_program_is_named(tmp_path, monkeypatch, code, said):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(EXITS.format(code=code))
    result = run("optimize", "model.py", "--device", "cpu", "--no-timing")
    assert result.exit_code == 2
    assert "model.py:9: the model ended the program (sys.exit, in forward)" in result.output
    assert said in last_line(result)


def test_an_exit_of_our_own_is_no_bad_input(tmp_path):
    from ingot.cli.errors import BadInputError, bad_input_from

    package = Path(inspect.getfile(BadInputError)).parents[1]
    for folder, expected in ((package / "verify", SystemExit), (tmp_path, BadInputError)):
        code = compile("raise SystemExit(3)", str(folder / "some.py"), "exec")
        with pytest.raises(expected), bad_input_from():
            exec(code)
