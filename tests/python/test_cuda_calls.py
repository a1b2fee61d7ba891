"""What a call on a GPU asks of the driver, which is most of its host time: launches, and next to
nothing beside them. The GPU is one that does nothing; a real one is timed by
tools/gpu_checks/check_latency.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ingot.runtime.library import find_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Split of the input, product, merging of its statistics, finishing sweep; in eval mode there are no
# statistics, and the product's epilogue does all but the softmax.
LAUNCHES = {
    "gemm_scale_bn.py training": 4,
    "gemm_scale_bn.py eval": 2,
    "gemm_bn_scale_softmax.py training": 4,
    "gemm_bn_scale_softmax.py eval": 3,
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> dict:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    fake = folder / "fake_cuda.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", fake, HERE / "fake_cuda.c"], check=True
    )
    models = [ROOT / "examples" / name for name in ("gemm_scale_bn.py", "gemm_bn_scale_softmax.py")]
    answer = subprocess.run(
        [sys.executable, HERE / "cuda_calls.py", *models],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "INGOT_LIBRARY": str(find_library()),
            "INGOT_LIBCUDA": str(fake),
            "INGOT_NVRTC": str(fake),
            "INGOT_CACHE_DIR": str(folder / "cache"),
        },
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", LAUNCHES)
def test_a_call_is_its_launches(asked, model):
    steady = {"cuCtxGetCurrent": 1, "cuLaunchKernelEx": LAUNCHES[model]}
    first = asked[model]["first"]
    assert first.pop("cuTensorMapEncodeTiled", 0) <= 3
    assert first == steady  # all else was prepared
    assert asked[model]["second"] == steady


@pytest.mark.parametrize("model", LAUNCHES)
@pytest.mark.parametrize("change", ["result elsewhere", "another batch"])
def test_what_changes_is_described_anew_and_nothing_else(asked, model, change):
    changed = asked[model][change]
    assert changed.pop("cuTensorMapEncodeTiled", 0) <= 3
    assert changed == {"cuCtxGetCurrent": 1, "cuLaunchKernelEx": LAUNCHES[model]}


def test_kept_tensor_maps_follow_the_tensors(asked):
    assert asked["gemm_scale_bn.py eval"]["addresses followed"]


def launched(calls: list[dict]) -> set[tuple[int, int]]:
    """(kernels, graphs) that the calls launched."""
    return {(call.get("cuLaunchKernelEx", 0), call.get("cuGraphLaunch", 0)) for call in calls}


def test_calls_that_repeat_are_replayed(asked):
    steady = asked["replays"]["steady"]
    assert launched(steady[:7]) == {(2, 0)}
    assert steady[7]["cuGraphInstantiateWithFlags"] == 1 and launched([steady[7]]) == {(0, 1)}
    replay = {"cuCtxGetCurrent": 1, "cuStreamIsCapturing": 1, "cuGraphLaunch": 1}
    assert all(call == replay for call in steady[8:])


def test_calls_that_alternate_are_replayed(asked):
    assert launched(asked["replays"]["alternating"][-10:]) == {(0, 1)}
    assert asked["replays"]["followed"]


def test_calls_that_vary_are_not_captured(asked):
    varied = asked["replays"]["varied"]
    assert launched(varied) == {(2, 0)}
    assert not any("cuStreamBeginCapture" in call for call in varied)
    assert sum(call.get("cuGraphExecDestroy", 0) for call in varied) > 0


def test_captures_of_the_caller_see_the_kernels(asked):
    assert launched([asked["replays"]["captured"]]) == {(2, 0)}
    assert launched([asked["replays"]["after"]]) == {(0, 1)}
