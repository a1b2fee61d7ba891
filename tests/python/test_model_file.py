"""Loading model files, overriding their constants, and writing ModelNew."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import ingot
import pytest
import torch
from click.testing import CliRunner
from ingot.cli import main
from ingot.model_file import (
    ModelFileError,
    check_place,
    constants_of,
    load_model_file,
    override_constants,
    write_whole,
)
from ingot.model_writer import render_model
from live import regions_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

GOOD = """
import torch
from torch import nn
batch_size = 4
in_features, out_features = 8, 6
wide: int = out_features * 2
note = '''two
lines'''


class Model(nn.Module):
    def __init__(self, in_features, wide):
        super().__init__()
        self.linear = nn.Linear(in_features, wide)

    def forward(self, x):
        return torch.relu(self.linear(x)) * 2


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, wide]
"""


@pytest.fixture
def write(tmp_path):
    def make(text, name="model.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


def test_overrides_reach_what_is_computed_from_them(write):
    file = load_model_file(write(GOOD), {"batch_size": "7", "out_features": 5})
    assert file.make_inputs()[0].shape == (7, 8)
    assert file.make_module().linear.weight.shape == (10, 8)
    assert file.constants["batch_size"] == 7 and file.constants["out_features"] == 5
    assert "batch_size = 7" in file.source and "in_features, out_features = 8, 5" in file.source


def test_overrides_keep_line_numbers():
    changed = override_constants(GOOD, {"note": "short", "in_features": 123456})
    assert len(changed.splitlines()) == len(GOOD.splitlines())
    assert constants_of(changed)["note"] == "short"
    assert constants_of(changed)["in_features"] == 123456


def test_overrides_with_text_that_is_not_ascii():
    source = 'x = "äöü"; y = 3\nz = "日本"; w = 4\n'
    assert constants_of(override_constants(source, {"y": 5, "w": 6})) == {
        "x": "äöü",
        "y": 5,
        "z": "日本",
        "w": 6,
    }


PROBLEMS = {
    "no class": (GOOD.replace("class Model", "class Other"), {}, "defines no class 'Model'"),
    "no inputs": (GOOD.replace("get_inputs", "inputs"), {}, "defines no function 'get_inputs'"),
    "not a class": (GOOD + "\nModel = 3\n", {}, "'Model' is a int"),
    "raises": (GOOD + "\nundefined_name\n", {}, r"model\.py:27: the file raised NameError"),
    "exits": (GOOD + "\nraise SystemExit(3)\n", {}, r"model\.py:27: the file raised SystemExit"),
    "syntax": (GOOD + "\ndef f(:\n", {}, r"model\.py:27: invalid syntax"),
    "unknown constant": (GOOD, {"batch": "3"}, "no constant 'batch'.*batch_size"),
    "no literal": (GOOD, {"batch_size": "4+"}, "must be a Python literal"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problems_are_named(write, problem):
    text, overrides, message = PROBLEMS[problem]
    with pytest.raises(ModelFileError, match=message):
        load_model_file(write(text), overrides)


def test_problems_of_calls_are_named(write):
    inputs = "return [torch.rand(batch_size, in_features)]"
    file = load_model_file(write(GOOD.replace(inputs, "return 3")))
    with pytest.raises(ModelFileError, match=r"get_inputs\(\) gives a int; it must give a list"):
        file.make_inputs()
    file = load_model_file(write(GOOD.replace("[in_features, wide]", "[in_features]")))
    with pytest.raises(ModelFileError, match=r"Model\(\.\.\.\) raised TypeError"):
        file.make_module()
    file = load_model_file(write(GOOD.replace("torch.rand(batch_size", "torch.rand(1 // 0")))
    with pytest.raises(ModelFileError, match=r"model\.py:21: get_inputs\(\) raised ZeroDivision"):
        file.make_inputs()


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ModelFileError, match="cannot read .*No such file"):
        load_model_file(tmp_path / "absent.py")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFileError, match="not UTF-8"):
        load_model_file(tmp_path / "binary.py")


def test_a_byte_order_mark_is_no_part_of_the_model(tmp_path):
    from ingot.verify.loading import load_file

    path = tmp_path / "model.py"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_model_file(path).source == GOOD
    assert load_file(str(path), {}).batch_size == 4


def test_files_beside_the_model_can_be_imported(write):
    write("width = 9\n", "helper_of_model.py")
    file = load_model_file(write("from helper_of_model import width\n" + GOOD))
    assert file.Model is not None


def small(name):
    path = EXAMPLES / name
    sizes = {"batch_size": 6, "in_features": 32, "out_features": 48, "hidden_features": 24}
    known = constants_of(path.read_text())
    return load_model_file(path, {k: v for k, v in sizes.items() if k in known})


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_written_models_compute_what_the_original_does(name, tmp_path):
    original = small(name)
    torch.manual_seed(0)
    module = original.make_module()
    inputs = original.make_inputs()
    optimised = ingot.optimize(module, inputs)
    path = tmp_path / "model_new.py"
    path.write_text(render_model(original, optimised.ingot_report(), None), encoding="utf-8")
    new = load_model_file(path, class_name="ModelNew")
    torch.manual_seed(0)
    candidate = new.make_module()
    assert candidate.state_dict().keys() == module.state_dict().keys()
    for key, tensor in module.state_dict().items():
        assert torch.equal(candidate.state_dict()[key], tensor)
    with torch.no_grad(), regions_run() as ran:
        torch.testing.assert_close(candidate(*inputs), module(*inputs), rtol=1e-4, atol=1e-4)
    assert ran
    assert "Operators replaced:" in new.Model.__doc__ and "linear" in new.Model.__doc__
    assert new.constants == original.constants


def test_hostile_text_in_a_report_stays_text(write):
    file = load_model_file(write(GOOD))
    item = {"what": 'a"""', "where": "C:\\new\\x.py", "by": "b\nc", "why": '"""\\', "x": 1}
    report = {
        "operators_replaced": [item],
        "optimisations": [{**item, "identity_or_reason": '""" + 1'}],
        "unsupported": [item],
    }
    text = render_model(file, report, "ieee")
    namespace: dict = {}
    exec(compile(text, "model_new.py", "exec"), namespace)
    assert namespace["ModelNew"].ingot_precision == "ieee"


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.py"
    write_whole(path, "a = 1\n")
    assert path.read_text() == "a = 1\n"
    with pytest.raises(ModelFileError, match="cannot write"):
        write_whole(tmp_path / "absent" / "out.py", "a = 2\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFileError, match="cannot write"):
        write_whole(tmp_path / "folder", "a = 2\n")
    assert sorted(os.listdir(tmp_path)) == ["folder", "out.py"]


NEIGHBOURS = """
import os

import torch
from torch import nn

os.chdir("{elsewhere}")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        from beside import WIDTH

        self.linear = nn.Linear(WIDTH, WIDTH)
        self.load = open("weights").read()

    def forward(self, x):
        from beside import SHIFT

        return torch.relu(self.linear(x)) + SHIFT


def get_inputs():
    from beside import WIDTH

    return [torch.rand(4, WIDTH)]


def get_init_inputs():
    return []
"""


@pytest.fixture
def neighbours(tmp_path, monkeypatch):
    """A model that imports from its folder as late as can be, and has gone to another."""
    folder, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("all ones")
    (folder / "beside.py").write_text("WIDTH = 8\nSHIFT = 1.0\n")
    (folder / "model.py").write_text(NEIGHBOURS.format(elsewhere=elsewhere))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return folder


def test_what_code_imports_when_it_runs_is_found_beside_it(neighbours):
    before = list(sys.path)
    file = load_model_file("model.py")
    module, (x,) = file.make_module(), file.make_inputs()
    assert module.load == "all ones"
    assert module(x).shape == (4, 8)
    assert sys.path == [*before, str(neighbours)]


def test_where_a_model_goes_is_not_where_we_are(neighbours):
    file = load_model_file("model.py")
    assert Path.cwd() == neighbours
    file.make_module()
    assert Path.cwd() == neighbours


@pytest.mark.parametrize("options", [["--no-timing"], ["--standalone", "--device", "cpu"]])
def test_a_file_is_written_where_it_was_asked_for(neighbours, options):
    if "--standalone" in options:  # which takes one graph
        text = (neighbours / "model.py").read_text()
        text = text.replace("        from beside import SHIFT\n", "").replace(" + SHIFT", "")
        (neighbours / "model.py").write_text(text)
    arguments = ["optimize", "model.py", *options, "--device", "cpu", "--report", "out.html"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    names = {"model.py", "beside.py", "model_new.py", "out.html"}
    assert set(os.listdir(neighbours)) - {"__pycache__"} == names


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    """As root a rename would put a file in the place of /dev/null, for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for act in (check_place, lambda path: write_whole(path, "a = 1\n")):
        with pytest.raises(ModelFileError, match="no plain file"):
            act(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_one(tmp_path):
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("a = 1\n")
    link.symlink_to(real)
    write_whole(link, "a = 2\n")
    assert link.is_symlink() and real.read_text() == "a = 2\n"


def test_what_could_not_be_written_is_known_before(tmp_path):
    check_place(tmp_path / "out.py")
    with pytest.raises(ModelFileError, match="File name too long"):
        check_place(tmp_path / ("a" * 300 + ".py"))
    longest = tmp_path / ("a" * 252 + ".py")
    write_whole(longest, "a = 1\n")  # a name that the system takes is taken
    assert os.listdir(tmp_path) == [longest.name]


KEYWORDS = GOOD.replace(
    "def forward(self, x):\n        return torch.relu(self.linear(x)) * 2",
    "def forward(self, x, shift=0.0, options=None):\n"
    "        return torch.relu(self.linear(x)) * 2 + shift + options['bias']",
)
X = "torch.rand(batch_size, in_features)"


@pytest.mark.parametrize(
    ("inputs", "init_inputs"),
    [
        (
            f"{{'x': {X}, 'options': {{'bias': torch.ones(wide)}}}}",
            "{'wide': wide, 'in_features': 8}",
        ),
        (
            f"[[{X}], {{'options': {{'bias': torch.ones(wide)}}}}]",
            "[[in_features], {'wide': wide}]",
        ),
        (f"({X}, 0.0, {{'bias': torch.ones(wide)}})", "(in_features, wide)"),
    ],
)
def test_arguments_by_keyword(write, inputs, init_inputs):
    text = KEYWORDS.replace(f"[{X}]", inputs).replace("[in_features, wide]", init_inputs)
    file = load_model_file(write(text))
    x, shift, options = file.make_inputs("meta")
    assert (shift, x.device.type, options["bias"].device.type) == (0.0, "meta", "meta")
    assert file.make_module()(*file.make_inputs()).shape == (4, 12)


def test_a_list_and_a_dict_may_be_two_arguments(write):
    text = KEYWORDS.replace(f"[{X}]", f"[[{X}], {{'bias': 1.0}}]")
    values, options = load_model_file(write(text)).make_inputs()
    assert isinstance(values, list) and options == {"bias": 1.0}


@pytest.mark.parametrize(
    ("inputs", "forward", "message"),
    [
        ("{'y': " + X + "}", "", "does not fit Model.forward: .*missing a required argument: 'x'"),
        ("{'x': " + X + ", 'bias': 1}", "", "does not fit Model.forward: .*'bias'"),
        ("{'x': " + X + ", 'bias': 1}", ", *, bias=0", "takes 'bias' by keyword alone"),
        ("{'x': 3}", "", "gives no tensor"),
        ("torch.rand(3)", "", "gives a Tensor; it must give a list"),
    ],
)
def test_arguments_that_do_not_fit(write, inputs, forward, message):
    text = KEYWORDS.replace(f"[{X}]", inputs).replace("options=None", f"options=None{forward}")
    with pytest.raises(ModelFileError, match=message):
        load_model_file(write(text)).make_inputs()
