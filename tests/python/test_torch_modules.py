"""PyTorch's own suites (tools/gpu_checks/torch_suites.py) on the CPU: a sample by SEED.

INGOT_TORCH_SUITES=all runs everything, with INGOT_TORCH_SAMPLES inputs of each; on a GPU that is
`tools/gpu-suite torch`.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import selection

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))

import torch_suites  # noqa: E402

ALL = os.environ.get("INGOT_TORCH_SUITES") == "all"
SEED = 2211
COUNT = None if ALL else 10
SAMPLES = int(os.environ.get("INGOT_TORCH_SAMPLES", "4" if ALL else "2"))

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    *([pytest.mark.thorough] if ALL else []),
]


def _sample(names):
    names = sorted(names)
    return names if COUNT is None else sorted(random.Random(SEED).sample(names, COUNT))


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", selection.every(2, _sample(torch_suites.MODULES)))
def test_module(name, training, record_property):
    taken = torch_suites.check_module(name, training, "cpu", SAMPLES)
    record_property("regions", taken)
    assert taken or name not in torch_suites.TAKEN, "nothing of it was taken"


@pytest.mark.parametrize("name", _sample(torch_suites.OPERATORS))
def test_operator(name, record_property):
    record_property("regions", torch_suites.check_operator(name, "cpu", SAMPLES))
