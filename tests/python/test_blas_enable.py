"""ingot.enable(), disable() and fast_products() in a process that already runs; as in test_blas.py,
what stands for cuBLAS, and for Ingot's programs, computes on the host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fake_cublas
import pytest
from blas_enabled import LIBRARY, LINKED, TAKEN

HERE = Path(__file__).resolve().parent
SWITCHED = [LIBRARY, TAKEN, LIBRARY, TAKEN]


@pytest.fixture(scope="module")
def fakes(tmp_path_factory) -> fake_cublas.Fakes:
    return fake_cublas.built_or_skipped(tmp_path_factory.mktemp("enabled"))


def call(fakes, name: str, preload: bool = False, **environment):
    command = [sys.executable, HERE / "blas_enabled.py", name]
    answer = fakes.run(command, preload=preload, **environment)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_libraries_that_are_loaded(fakes):
    assert call(fakes, "loaded_before") == dict.fromkeys(LINKED, SWITCHED)


def test_libraries_that_have_multiplied(fakes):
    found = call(fakes, "called_before")
    assert found.pop("first") == [LIBRARY] * 3
    assert found == dict.fromkeys(LINKED, SWITCHED)


def test_libraries_that_are_loaded_later(fakes):
    found = call(fakes, "loaded_after")
    assert set(found["on"].values()) == {TAKEN}
    assert set(found["off"].values()) == {LIBRARY}
    assert len(found["on"]) == 4


def test_what_was_asked_for_before_stays(fakes):
    assert call(fakes, "asked_before") == [LIBRARY] * 4


def test_disable_leaves_tables_as_they_were(fakes):
    assert call(fakes, "tables_as_they_were") == {
        "changed": True, "parts": True, "restored": True}  # fmt: skip


def test_libraries_that_go(fakes):
    assert call(fakes, "unloaded") == [TAKEN, TAKEN]


def test_a_second_copy_of_cublas_is_named(fakes):
    found = call(fakes, "two_copies")
    assert found["found"] == [TAKEN, LIBRARY]
    (said,) = found["said"]
    assert "libold.so are not reached: they go to a second copy of cuBLAS" in said


def test_too_late_is_said_once(fakes):
    (said,) = call(fakes, "came_too_late")
    assert said.startswith("ingot: JAX was imported before ingot.enable()")


def test_blocks_give_back_what_was(fakes):
    assert call(fakes, "blocks") == [
        LIBRARY, TAKEN, TAKEN, TAKEN, LIBRARY, TAKEN, LIBRARY, LIBRARY]  # fmt: skip


def test_threads_may_multiply_switch_and_load(fakes):
    assert call(fakes, "threads") == {"wrong": [], "after": LIBRARY}


def test_nothing_is_paid_before_the_first_product(fakes):
    assert call(fakes, "idle") == []


def test_ingots_own_calls_go_below(fakes):
    assert call(fakes, "ingots_own") == 1


def test_pytorch_is_reached(fakes):
    """PyTorch built for CUDA imports products of cuBLAS, whether there is a GPU or not."""
    built_for_cuda, reached = call(fakes, "pytorch", LD_LIBRARY_PATH="")
    if not built_for_cuda:
        pytest.skip("this PyTorch is built without CUDA")
    assert reached >= 4


@pytest.mark.parametrize("switch", ["INGOT", "INGOT_BLAS"])
def test_the_environment_has_the_last_word(fakes, switch):
    assert call(fakes, "asked_before", **{switch: "off"}) == [LIBRARY] * 4
    found = call(fakes, "loaded_before", **{switch: "off"})
    assert found == {name: [LIBRARY] * 4 for name in LINKED}


def test_under_ingot_run_it_is_a_switch(fakes):
    switched = [TAKEN, TAKEN, LIBRARY, TAKEN]  # it begins on
    assert call(fakes, "asked_before", preload=True) == switched
    found = call(fakes, "loaded_before", preload=True)
    assert found == {LINKED[0]: switched, LINKED[1]: SWITCHED, LINKED[2]: SWITCHED}
