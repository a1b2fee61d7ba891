"""The GPU suite's bookkeeping; its steps are those of verify and bench."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from ingot.runtime.library import find_library

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "tools" / "gpu-suite"


@pytest.fixture(scope="module")
def suite():
    loader = importlib.machinery.SourceFileLoader("gpu_suite", str(SUITE))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_suite", loader))
    sys.modules["gpu_suite"] = module
    loader.exec_module(module)
    return module


def test_step_is_done_once_it_passed_with_these_sources(suite, tmp_path):
    path = tmp_path / "checks" / "gpu.json"
    checks = suite.Checks(path, "one")
    checks.record("bench: a", True, 1.0, "fine")
    checks.record("bench: b", False, 1.0, "not fine")
    again = suite.Checks(path, "one")
    assert again.done("bench: a")
    assert not again.done("bench: b")
    assert again.failed() == ["bench: b"]
    assert not suite.Checks(path, "two").done("bench: a")
    assert set(json.loads(path.read_text())) == {"bench: a", "bench: b"}


@pytest.fixture
def settings(suite, tmp_path):
    return suite.Settings("cpu", "machine", tmp_path, "")


def test_every_example_is_checked(suite, settings):
    from gpu_stages import examples

    named = {t.step.name for t in suite.tasks_of(["correctness"], settings)}
    for path in (ROOT / "examples").glob("*.py"):
        assert f"{path.stem} size 0" in named
        assert examples.settings_for(path, 0)["batch_size"] == 67


def test_steps_that_measure_times_are_alone(suite, settings):
    alone = {t.stage for t in suite.tasks_of(list(suite.STAGES), settings) if t.step.alone}
    assert alone >= {"bench", "products", "sweep", "stress"}
    assert not alone & {"correctness", "sanitizer", "errors"}


def stage_of(suite, do, steps, own_process=False):
    return suite.STAGES["errors"].__class__(lambda s: steps, do, "a test", 1.0, own_process)


def test_a_failing_step_does_not_stop_the_others(suite, settings, monkeypatch, tmp_path):
    def do(subject, settings):
        if subject == "raises":
            raise ValueError("what was wrong")
        return subject == "good", f"it is {subject}"

    steps = [suite.Step(s, s, alone=True) for s in ("good", "raises", "bad", "good too")]
    monkeypatch.setitem(suite.STAGES, "errors", stage_of(suite, do, steps))
    checks = suite.Checks(tmp_path / "checks.json", "hash")
    runner = suite.Runner(suite.tasks_of(["errors"], settings), checks, settings, 1e12)
    runner.run_alone()
    recorded = json.loads(checks.path.read_text())
    assert recorded["errors: good"]["passed"]
    assert "ValueError: what was wrong" in recorded["errors: raises"]["detail"]
    assert checks.failed() == ["errors: raises", "errors: bad", "errors: good too"]


def test_a_step_whose_time_would_not_suffice_is_left(suite, settings, monkeypatch, tmp_path):
    steps = [suite.Step("long", 1, alone=True), suite.Step("short", 2, alone=True)]
    monkeypatch.setitem(suite.STAGES, "errors", stage_of(suite, lambda *_: (True, "done"), steps))
    checks = suite.Checks(tmp_path / "checks.json", "new")
    suite.Checks(checks.path, "old").record("errors: long", True, 500.0, "as it was")
    checks = suite.Checks(checks.path, "new")
    tasks = suite.tasks_of(["errors"], settings)
    runner = suite.Runner(tasks, checks, settings, time.monotonic() + 30)
    runner.run_alone()
    assert [t.name for t in runner.left] == ["errors: long"]
    assert checks.done("errors: short") and not checks.done("errors: long")


def of_this_tree(**more: str) -> dict:
    """An environment for programs of tools/gpu_checks: this tree's Python, and the library."""
    tree = {"PYTHONPATH": str(ROOT / "python"), "INGOT_LIBRARY": str(find_library())}
    return {**os.environ, **tree, **more}


def suite_command(*words):
    command = [sys.executable, str(SUITE), "--device", "cpu", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_steps_run_beside_each_other_and_are_recorded(tmp_path):
    small = ("correctness", "--only", "linear_gelu size 0", "--results", tmp_path, "--jobs", 2)
    answer = suite_command(*small)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "ok   [1/1] correctness: linear_gelu size 0" in answer.stdout
    (recorded,) = tmp_path.glob("checks/*.json")
    assert json.loads(recorded.read_text())["correctness: linear_gelu size 0"]["passed"]
    again = suite_command(*small)
    assert "1 of 1 steps are done" in again.stdout and "all done" in again.stdout
    late = suite_command(*small, "--again", "--minutes", 0.01)
    assert late.returncode == 3
    assert "1 steps are left for another run: correctness: linear_gelu size 0" in late.stdout


def test_unknown_stage_is_refused():
    answer = subprocess.run(
        [sys.executable, str(SUITE), "correctnes"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "unknown stage correctnes" in answer.stderr


# The stage networks ------------------------------------------------------------------------------


def networks_command(out, *words):
    script = ROOT / "tools" / "gpu_checks" / "time_networks.py"
    command = [sys.executable, script, "--device", "cpu", "--small", "--out", out, *words]
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=of_this_tree(),
        check=False,
    )


def test_each_network_is_a_step(suite, settings):
    steps = {t.step.name: t.step.alone for t in suite.tasks_of(["networks"], settings)}
    assert {"autoencoder", "lstm", "unet", "dlrm"} <= steps.keys() and all(steps.values())


@pytest.mark.thorough
def test_networks_are_measured_once_and_goes_on_where_it_ended(tmp_path):
    out = tmp_path / "networks" / "cpu.json"
    asked = ("--networks", "autoencoder,dlrm", "--settings", "fp32", "--row-seconds", 0.1)
    answer = networks_command(out, *asked, "--modes", "eval", "--rounds", 0)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    asked = (*asked, "--rounds", 3)
    answer = networks_command(out, *asked, "--modes", "eval,training")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = json.loads(out.read_text())
    assert [(row["network"], row["mode"]) for row in rows] == [
        (network, mode) for network in ("autoencoder", "dlrm") for mode in ("eval", "training")
    ]
    for row in rows:
        assert row["operators"] > 0 and not row["wrong"] and row["rounds"] == 3
        assert row["ratio_lower"] <= row["ratio"] <= row["ratio_upper"]
    again = networks_command(out, *asked, "--list")
    assert again.stdout.count("2 of 2 rows are done") == 2


def test_a_wrong_gradient_of_a_network_is_noticed():
    sys.path.insert(0, str(ROOT / "tools" / "gpu_checks"))
    import torch
    from network_rows import judge

    truth = {"output 0": torch.ones(8), "gradient of w": torch.ones(4), "buffer n": torch.tensor(1)}
    truth |= {"gradient of b": torch.full((4,), 1e-12)}
    truth = {n: t.double() if t.is_floating_point() else t for n, t in truth.items()}
    eager = {n: t.float() if t.is_floating_point() else t for n, t in truth.items()}
    eager["gradient of w"] = eager["gradient of w"] * (1 + 1e-5)
    assert judge(dict(eager), eager, truth, "fp32")[0] == ""
    assert judge({**eager, "gradient of b": torch.zeros(4)}, eager, truth, "fp32")[0] == ""
    wrong = {
        "gradient of w": torch.ones(4) * 1.001,
        "output 0": torch.ones(8) * float("nan"),
        "buffer n": torch.tensor(2),
    }
    for name, tensor in wrong.items():
        assert judge({**eager, name: tensor}, eager, truth, "fp32")[0].startswith(name)
    missing = {name: tensor for name, tensor in eager.items() if name != "gradient of b"}
    assert "gradient of b" in judge(missing, eager, truth, "fp32")[0]


def test_layers_built_as_zeros_hide_nothing():
    import torch
    from network_rows import fill_zeros

    head = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    body = torch.nn.Linear(4, 4)
    before = body.weight.clone()
    fill_zeros(torch.nn.Sequential(body, head))
    assert head.weight.all() and not head.bias.any() and torch.equal(body.weight, before)


# The stage user ----------------------------------------------------------------------------------


@pytest.fixture
def user(suite, settings, monkeypatch, tmp_path):
    """user_commands, whose environment is this Python's own."""
    from gpu_checks import user_commands

    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(user_commands, "installed", lambda wheel: tmp_path / "venv")
    return user_commands


def test_a_scenario_passes_with_what_it_says(user, settings):
    def scenario(session):
        session.type("python", "-c", "open('x', 'w').write('1'); print('done')", writes=("x",))
        return "all well"

    passed, detail = user.judged(scenario, settings)
    assert passed and detail.startswith("all well; python -c ")


@pytest.mark.parametrize(
    ("code", "asked", "message"),
    [
        ("raise SystemExit(3)", {}, "exit status 3"),
        ("pass", {"status": 2}, "exit status 0"),
        ("pass", {"writes": ("file.py",)}, "file.py was not written"),
        ("open('file.py', 'w')", {"writes": ("file.py",)}, "file.py was not written"),
        ("print('Verified: 3 of 4')", {"says": (r"^Verified: (\d+) of \1",)}, "it does not say"),
        ("print('one')", {"never": ("one",)}, "it says 'one'"),
        ("import traceback as t\ntry: 1/0\nexcept Exception: t.print_exc()", {}, "it says '^Trac"),
    ],
)
def test_a_command_is_judged_by_status_files_and_words(user, settings, code, asked, message):
    passed, detail = user.judged(lambda s: s.type("python", "-c", code, **asked), settings)
    assert not passed
    assert detail.startswith("$ python -c") and message in detail


def test_a_command_that_hangs_ends_its_scenario(suite, user, settings):
    import dataclasses

    short = dataclasses.replace(settings, seconds=1.0)
    code = "import time; time.sleep(60)"
    passed, detail = user.judged(lambda s: s.type("python", "-c", code), short)
    assert not passed and "ran out of time" in detail


def test_commands_see_nothing_of_the_tree(user, settings, monkeypatch):
    for name in ("PYTHONPATH", "INGOT_LIBRARY", "INGOT_LOG", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/tree")
    code = (
        "import os; print([k for k, v in os.environ.items() if v == '/tree'], os.environ['HOME'])"
    )

    def scenario(session):
        home = session.folder / "home"
        session.type("python", "-c", code, says=(rf"^\[\] {home}$",))
        return ""

    assert user.judged(scenario, settings)[0]


def test_a_wheel_of_other_sources_is_refused(user, tmp_path):
    wheel = tmp_path / "ingot-0.1.0-py3-none-any.whl"
    files = {p.relative_to(ROOT / "python"): p for p in (ROOT / "python").rglob("*.py")}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, path in files.items():
            archive.write(path, name.as_posix())
    user._check_sources(wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, path in files.items():
            archive.writestr(name.as_posix(), path.read_bytes() + b"#")
    with pytest.raises(user.WrongError, match="is not of these sources"):
        user._check_sources(wheel)


@pytest.mark.thorough
def test_without_a_wheel_the_stage_is_left_out(monkeypatch):
    monkeypatch.delenv("INGOT_WHEEL", raising=False)
    answer = suite_command("user", "--list")
    assert answer.returncode == 0, answer.stderr
    assert "user is left out: no wheel is given (--wheel or INGOT_WHEEL)" in answer.stdout
    answer = suite_command("user", "--list", "--wheel", "absent.whl")
    assert "absent.whl is no file" in answer.stdout


def test_the_stage_types_each_seed_precision_and_page(suite, settings):
    named = {t.step.name: t.step.alone for t in suite.tasks_of(["user"], settings)}
    for path in (ROOT / "examples").glob("*.py"):
        seeds = {"gemm_scale_bn": "optimize timed", "gemm_bn_scale_softmax": "standalone timed"}
        assert seeds.get(path.stem, f"optimize {path.stem}") in named
    from ingot.cli.options import PRECISIONS

    assert {f"precision {name}" for name in PRECISIONS} <= named.keys()
    assert {"page README", "page tutorial", "page training-loop"} <= named.keys()
    timed = {"tune", "json", "bench"}
    timed |= {f"{what} timed" for what in ("settings", "seeds", "optimize", "standalone")}
    assert {name for name, alone in named.items() if alone} == timed


def test_programs_end_with_their_verdict(tmp_path):
    support = str(ROOT / "tools" / "gpu_checks")
    code = (
        f"import sys; sys.path.insert(0, {support!r})\n"
        "from user_support import Verdicts\n"
        "verdicts = Verdicts()\n"
        "verdicts.attempt('right', lambda: True)\n"
        "verdicts.attempt('wrong', lambda: (False, 'by 3'))\n"
        "verdicts.attempt('raises', lambda: 1 / 0)\n"
        "sys.exit(verdicts.end())\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 1
    lines = answer.stdout.splitlines()
    assert lines[:2] == ["PASS right", "FAIL wrong by 3"]
    assert lines[2].startswith("FAIL raises ZeroDivisionError: division by zero")
    assert lines[3] == "1 passed, 2 failed"


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["user_frozen.py", "user_replay.py", "user_lengths.py"])
def test_programs_pass_on_the_cpu(program):
    path = ROOT / "tools" / "gpu_checks" / program
    answer = subprocess.run(
        [sys.executable, str(path), "--device", "cpu"],
        capture_output=True,
        text=True,
        env=of_this_tree(OMP_NUM_THREADS="1"),
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1].endswith(" passed, 0 failed")
