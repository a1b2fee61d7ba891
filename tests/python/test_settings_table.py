"""The table of docs/settings.md is what is measured, for a sample of models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import selection

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location(
        "settings_table", ROOT / "tools" / "settings_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_model_has_a_row(table):
    rows = table.committed(table.DOCUMENT.read_text(encoding="utf-8"))
    assert sorted(rows) == sorted(path.stem for path in table.MODELS.glob("*.py"))
    for line in rows.values():
        _, _, *counts, note, _ = (cell.strip() for cell in line.split("|"))
        by_setting = dict(zip(table.SETTINGS, map(int, counts), strict=True))
        less = [s for s, n in by_setting.items() if n < by_setting["plain"]]
        assert all(s in table.STEPS_ASIDE or s in note for s in less), line


SAMPLE = ["half_inside", "addmm_log_softmax", "global_mean_over_all"]


@pytest.mark.parametrize("model", selection.quick([SAMPLE[0]], SAMPLE))
def test_a_sample_is_current(table, model):
    rows = table.committed(table.DOCUMENT.read_text(encoding="utf-8"))
    assert rows[model] == table.row(model)
