"""The GPU suite's bookkeeping; its steps are those of verify and bench."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
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


def test_every_example_is_checked(suite):
    examples = ROOT / "examples"
    steps = suite.steps_of(list(suite.STAGES), examples, half=False)
    named = {step for stage, step, _ in steps if stage == "correctness"}
    for path in examples.glob("*.py"):
        assert f"{path.stem} size 0" in named
        sizes = suite.settings_for(path, 0)
        assert sizes["batch_size"] == 67
    assert {stage for stage, _, _ in steps} == set(suite.STAGES)


def test_unknown_stage_is_refused():
    answer = subprocess.run(
        [sys.executable, str(SUITE), "correctnes"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "unknown stage correctnes" in answer.stderr
