"""What holds for all tests: a graph that one of them runs on the CPU is planned for GPUs as well.

Planning, writing the kernels' text and laying out the launches need no GPU, and the graphs of all
tests between them are more than a list of cases would have.
"""

from __future__ import annotations

import gc
import json
import os

import pytest
import torch
from ingot.capture import host_time
from ingot.runtime.program import Program

COMPUTE_CAPABILITIES = (80, 90)
# Whether their sweeps are also run, by the host (emulation.py): a second or two a graph.
EMULATES = os.environ.get("INGOT_EMULATE") == "1"

# Training steps of the tests' models are too small to gain on a CPU. Second: in their processes.
host_time.takes_small_steps = True
os.environ["INGOT_TAKE"] = "all"

_YOUNG = 20_000  # objects, of which garbage is looked for

_planned: set[int] = set()
_failed: list[str] = []


def _plan_for_gpus(program: Program, batch: int) -> None:
    key = hash(json.dumps([program.graph, program.precision, batch]))
    if key in _planned:
        return
    _planned.add(key)
    for sm in COMPUTE_CAPABILITIES:
        try:
            Program(
                program.graph,
                device="cuda",
                precision=program.precision,
                options={**program.options, "sm": sm},
            ).explain(batch)
        except Exception as error:
            graph = json.dumps(program.graph)[:2000]
            _failed.append(f"for compute capability {sm}, batch {batch}: {error}\n{graph}")
    if EMULATES and not _failed:
        _emulate(program, batch)


def _emulate(program: Program, batch: int) -> None:
    import emulation

    try:
        emulation.check(program.graph, batch)
    except Exception as error:
        graph = json.dumps(program.graph)[:2000]
        _failed.append(f"emulated, batch {batch}: {error!r}\n{graph}")


@pytest.fixture(autouse=True, scope="session")
def _gpu_plans():
    bind = Program._make_binding

    def bind_and_plan(self, tensors, key):
        binding = bind(self, tensors, key)
        if not self.on_cuda:
            _plan_for_gpus(self, binding.batch)
        return binding

    Program._make_binding = bind_and_plan
    yield
    Program._make_binding = bind


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed():
    """TorchDynamo empties the caches to time each new guard tree: 20 ms a capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_looked_through():
    """All that PyTorch's modules hold: to do so again and again was a tenth of the tests' time."""
    gc.set_threshold(_YOUNG)
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_gpu_plan_failed():
    yield
    failed, _failed[:] = list(_failed), []
    assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def one_thread():
    """For models so tiny that a second thread would only wait for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def chains_alone(monkeypatch):
    """What stands between products is taken, and the products are PyTorch's."""
    from ingot.capture import token_chains, weighing

    monkeypatch.setattr(token_chains, "takes_everything", True)
    monkeypatch.setattr(weighing, "_pays", lambda cut, computing: False)
