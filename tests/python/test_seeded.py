"""The errors of tests/seeded can be put in: each names one place of a file that is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "seeded"))

from bugs import BUGS  # noqa: E402


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_error_has_its_place(bug):
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    assert text.count(bug.old) == 1
    assert bug.new != bug.old
    kind, _, what = bug.seen_by.partition(" ")
    assert kind in ("asan", "python", "stage")
    if kind == "python":
        assert all((ROOT / path.partition("::")[0]).is_file() for path in what.split())
