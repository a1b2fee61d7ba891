"""The GPU suite's bookkeeping; its steps are those of verify and bench."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    import gpu_stages

    named = {t.step.name for t in suite.tasks_of(["correctness"], settings)}
    for path in (ROOT / "examples").glob("*.py"):
        assert f"{path.stem} size 0" in named
        assert gpu_stages.settings_for(path, 0)["batch_size"] == 67


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


def suite_command(*words):
    command = [sys.executable, str(SUITE), "--device", "cpu", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
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
