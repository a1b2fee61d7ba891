"""The comparison of two builds: with itself a build agrees, and what differs is seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ingot.runtime.library import find_library

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "golden.py"


def compare(old: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), str(old), str(find_library()), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def altered(tmp_path_factory) -> Path:
    """A build whose kernels have another text."""
    path = tmp_path_factory.mktemp("altered") / "libingot.so"
    built = find_library().read_bytes()
    text = b"float (&statistic)["
    assert text in built
    path.write_bytes(built.replace(text, text.replace(b"&statistic", b"&Statistic")))
    return path


@pytest.fixture(scope="module")
def same(tmp_path_factory) -> Path:
    return Path(shutil.copy(find_library(), tmp_path_factory.mktemp("same")))


@pytest.mark.thorough
def test_outputs_of_one_build_agree(same):
    answer = compare(same, "--only", "linear_groupnorm_hardtanh")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout == "6 compared, 0 differ\n"


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_launches_of_one_build_agree_and_others_are_told(same, altered):
    chosen = ("--launches", "--only", "batchnorm_first")
    answer = compare(same, *chosen)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.endswith(" compared, 0 differ\n")
    answer = compare(altered, *chosen)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "batchnorm_first eval, fp32, batch 67, dense" in answer.stdout
    # A library's product has none of those texts.
    assert "batchnorm_first eval, ieee" not in answer.stdout


def test_differences_are_seen_and_smaller_memory_is_none():
    sys.path.insert(0, str(TOOL.parent))
    import golden
    import torch

    before = {"run": golden.digest([torch.zeros(3)]), "bytes": 512}
    assert golden.differences(before, {**before, "bytes": 256}) == []
    assert golden.differences(before, {**before, "bytes": 768}) != []
    after = golden.digest([torch.tensor([0.0, -0.0, 0.0])])
    assert golden.differences(before, {**before, "run": after}) != []
    assert golden.differences(before, {"error": "out of memory"}) != []


@pytest.mark.thorough
def test_nothing_compared_is_a_failure(same):
    assert compare(same, "--only", "no such model").returncode == 1
