"""verify's parts for what a candidate leaves changed in its process, and for how it is called."""

from __future__ import annotations

import warnings

import pytest
import torch
from ingot.verify import VerifyOptions, verify_pair
from ingot.verify.arguments import by_name, left_out, parameters_of
from ingot.verify.settings import differences, process_settings, without_own


def parameters_in(forward) -> list:
    return parameters_of(type("Model", (torch.nn.Module,), {"forward": forward})())


def test_arguments_by_name_and_left_out():
    x, m = torch.rand(2), torch.rand(2)
    found = parameters_in(lambda self, x, mask=None, scale=1.0: x)
    assert by_name(found, [x]) == ([x, None, 1.0], ["x", "mask", "scale"])
    assert left_out(found, [x, m]) == [x]
    assert left_out(found, [x, None]) is None
    assert by_name(parameters_in(lambda self, x, /, y: x), [x, m]) == ([x, m], ["y"])
    assert by_name(parameters_in(lambda self, *args: x), [x, m]) == ([x, m], [])
    module = torch.nn.Linear(2, 2)
    assert by_name(parameters_of(module), [x]) == ([x], ["input"])
    module.register_forward_pre_hook(lambda *args: None)
    assert parameters_of(module) == []


backends = torch.backends
SWITCHES = {
    "mkldnn": (lambda: backends.mkldnn.set_flags(False), lambda: backends.mkldnn.set_flags(True)),
    "anomaly detection": (
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
    "attention": (
        lambda: backends.cuda.enable_flash_sdp(False),
        lambda: backends.cuda.enable_flash_sdp(True),
    ),
    "print options": (
        lambda: torch.set_printoptions(precision=2),
        lambda: torch.set_printoptions(profile="default"),
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
}
if hasattr(backends.cuda.matmul, "fp32_precision"):

    def set_precision(value: str) -> None:
        backends.cuda.matmul.fp32_precision = value

    SWITCHES["fp32_precision"] = lambda: set_precision("tf32"), lambda: set_precision("none")


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_left_changed_is_seen(name):
    change, restore = SWITCHES[name]
    before = process_settings()
    try:
        change()
        after = process_settings()
    finally:
        restore()
    found = differences(before, after)
    assert any(change.startswith(name) for change in found)
    assert without_own(found, before) == found
    assert without_own(found, after) == []
    assert differences(before, process_settings()) == []


def test_hooks_of_all_modules_are_seen():
    before = process_settings()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    after = process_settings()
    hook.remove()
    assert "hooks of all modules" in differences(before, after)[0]


MODEL = """
import warnings
import torch

warnings.simplefilter("ignore")
torch.utils.deterministic.fill_uninitialized_memory = False
torch.set_printoptions(precision=3)

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

def get_inputs():
    return [torch.rand(8, 4)]

def get_init_inputs():
    return []
"""


@pytest.mark.usefixtures("one_thread")
def test_what_the_original_changes_the_candidate_may(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "new.py").write_text(MODEL.replace("precision=3", "precision=2"))
    results = {}
    try:
        with warnings.catch_warnings():
            for name in ("model.py", "new.py"):
                files = str(tmp_path / "model.py"), str(tmp_path / name)
                options = VerifyOptions(seed=3, hostile=False, time_limit_s=60)
                results[name] = verify_pair(*files, options)
    finally:
        torch.set_printoptions(profile="default")
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert results["model.py"].verified
    failures = [check.message for check in results["new.py"].failures]
    assert failures == ["loading it changes print options precision: 4 → 2"]


def test_tf32_turned_on_and_off_again_changes_nothing():
    before = process_settings()
    backends.cuda.matmul.allow_tf32 = True
    assert differences(before, process_settings())
    backends.cuda.matmul.allow_tf32 = False
    assert differences(before, process_settings()) == []
