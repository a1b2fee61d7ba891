"""Frozen weights: when they are packed, when they are out of date, and where there are none.

What a GPU makes of them is checked by tools/gpu_checks/frozen.py; here the library's part is
replaced by a record of its calls.
"""

from __future__ import annotations

import ingot
import pytest
import torch
from ingot.runtime import host_product
from ingot.runtime.frozen import FrozenWeights
from ingot.runtime.library import Call, IngotError, library
from ingot.runtime.program import Program, description
from torch import nn


class Model(nn.Module):
    def __init__(self, features: int = 24):
        super().__init__()
        self.gemm, self.bn = nn.Linear(features, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.bn(self.gemm(x))


def _frozen(parameter):
    layouts = description([torch.empty(3), parameter])
    return FrozenWeights(torch.empty(8, dtype=torch.uint8), [(1, parameter)], layouts)


def _holds(frozen, parameter, x_shape=3):
    x = torch.empty(x_shape)
    return frozen.holds([x, parameter], description([x, parameter]))


def _in_place(p):
    with torch.no_grad():
        p.add_(1)
    return p


def _optimiser(p):
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p]).step()
    return p


def _loaded(p):
    holder = nn.Module()
    holder.p = p
    holder.load_state_dict({"p": torch.zeros_like(p)})
    return p


def _assigned(p):
    p.data = p.data.clone()
    return p


def _through_an_alias(p):
    p.detach().zero_()
    return p


def _swapped_twice(p):
    """The old memory must not come back under another tensor while it is remembered."""
    p.data = torch.empty(0)
    p.data = torch.zeros(16, 24)
    return p


@pytest.mark.parametrize(
    "change",
    [
        _in_place,
        _optimiser,
        _loaded,
        _assigned,
        _through_an_alias,
        _swapped_twice,
        lambda p: nn.Parameter(p.detach()),
    ],
)
def test_every_counted_change_of_a_parameter_is_seen(change):
    parameter = nn.Parameter(torch.randn(16, 24))
    frozen = _frozen(parameter)
    assert _holds(frozen, parameter)
    assert not _holds(frozen, change(parameter))


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),  # strides
        lambda w: w.view(8, 32),
        lambda w: w[:8],  # shape alone
        lambda w: w.view(torch.int32),
        lambda w: w.as_strided((16, 16), (0, 1)),
    ],
)
def test_another_view_of_the_same_memory_is_seen(view):
    """Same tensor, address and count of writes."""
    parameter = nn.Parameter(torch.randn(16, 16), requires_grad=False)
    frozen = _frozen(parameter)
    parameter.data = view(parameter.data)
    assert not _holds(frozen, parameter)


def test_inputs_in_another_layout_change_nothing():
    parameter = nn.Parameter(torch.randn(16, 24))
    assert _holds(_frozen(parameter), parameter, x_shape=(7, 2))


def test_reading_a_parameter_changes_nothing():
    parameter = nn.Parameter(torch.randn(16, 24))
    frozen = _frozen(parameter)
    nn.functional.linear(torch.randn(3, 24), parameter).sum().backward()
    assert _holds(frozen, parameter)


class Recorder:
    """Stands for the library's frozen weights on the CPU: a run with them is a plain run."""

    def __init__(self, monkeypatch):
        self.packed, self.with_frozen = 0, 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr("ingot.runtime.program._current_stream", lambda device: None)
        create = Program.__init__

        def attached(program, *args, **kwargs):
            create(program, *args, **kwargs)
            self.attach(program)

        monkeypatch.setattr(Program, "__init__", attached)

    def attach(self, program):
        run = program._run

        def freeze():
            program._frozen_size, program._frozen, program._keeps_weights = 512, None, True

        def pack(handle, batch, tensors, count, frozen, size, stream):
            assert frozen and size == 512
            self.packed += 1
            return 0

        def record(address):
            call = Call.from_address(address)
            if call.frozen:
                assert call.frozen_bytes == 512
                self.with_frozen += 1
                call.frozen = None
            return run(address)

        class Library:
            def __getattr__(self, name, real=program._library):
                return getattr(real, name)

        program._library = Library()
        program._library.ingot_program_freeze = pack
        program.freeze, program._run = freeze, record


@pytest.fixture
def recorded(monkeypatch):
    return _recorded(monkeypatch, 24)


@pytest.fixture
def recorded_square(monkeypatch):
    return _recorded(monkeypatch, 16)


def _recorded(monkeypatch, features: int):
    recorder = Recorder(monkeypatch)
    with torch.no_grad():
        optimised = ingot.optimize(Model(features).eval(), (torch.randn(8, features),))
    return optimised, recorder


def test_weights_are_packed_once_and_again_after_a_change(recorded):
    optimised, recorder = recorded
    x = torch.randn(8, 24)
    with torch.no_grad():
        optimised(x)
        assert (recorder.packed, recorder.with_frozen) == (0, 0)
        optimised.ingot_freeze()
        for _ in range(3):
            optimised(x)
        assert (recorder.packed, recorder.with_frozen) == (1, 3)
        assert optimised.ingot_report()["programs"][0]["frozen_bytes"] == 512
        optimised.gemm.weight.mul_(2)
        assert torch.allclose(optimised(x), Model.forward(optimised, x), atol=1e-5)
        optimised(torch.randn(5, 24))
        assert (recorder.packed, recorder.with_frozen) == (2, 5)
        optimised.ingot_freeze()  # what PyTorch does not count asks for this
        optimised(x)
        assert recorder.packed == 3


def test_a_weight_that_becomes_its_own_transpose_is_packed_again(recorded_square):
    optimised, recorder = recorded_square
    x = torch.randn(8, 16)
    with torch.no_grad():
        optimised.ingot_freeze()
        before = optimised(x)
        optimised.gemm.weight.data = optimised.gemm.weight.data.t()
        after = optimised(x)
        assert not torch.allclose(before, after)
        assert torch.allclose(after, Model.forward(optimised, x), atol=1e-5)
        assert (recorder.packed, recorder.with_frozen) == (2, 2)


def test_unfreezing_gives_the_memory_back(recorded):
    optimised, recorder = recorded
    x = torch.randn(8, 24)
    with torch.no_grad():
        optimised.ingot_freeze()
        optimised(x)
        optimised.ingot_unfreeze()
        optimised(x)
    assert (recorder.packed, recorder.with_frozen) == (1, 1)
    assert optimised.ingot_report()["programs"][0]["frozen_bytes"] == 0


def test_a_capture_never_packs(recorded, monkeypatch):
    optimised, recorder = recorded
    x = torch.randn(8, 24)
    monkeypatch.setattr("ingot.runtime.program._is_capturing", lambda device: True)
    with torch.no_grad():
        optimised.ingot_freeze()
        optimised(x)
    assert (recorder.packed, recorder.with_frozen) == (0, 0)


def test_training_is_never_frozen(recorded):
    optimised, recorder = recorded
    with torch.no_grad():
        optimised.ingot_freeze()
        optimised.train()
        optimised(torch.randn(8, 24))
        assert recorder.with_frozen == 0
        with pytest.raises(IngotError, match="eval"):
            optimised.ingot_freeze()


def test_parameters_made_in_inference_mode_are_refused(recorded):
    optimised, recorder = recorded
    with torch.inference_mode():
        optimised.gemm.weight = nn.Parameter(torch.randn(16, 24), requires_grad=False)
        optimised.ingot_freeze()
        with pytest.raises(IngotError, match="inference mode"):
            optimised(torch.randn(8, 24))
    assert recorder.packed == 0


def _stale_after_a_change(optimised, x) -> int:
    """Bytes kept, after checks that results are those of the weights as they are."""
    with torch.no_grad():
        before = optimised(x)
        optimised.ingot_freeze()
        assert torch.equal(before, optimised(x))
        assert torch.equal(before, optimised(x))
        kept = optimised.ingot_report()["programs"][0]["frozen_bytes"]
        optimised.gemm.weight.mul_(2)
        after = optimised(x)
        assert not torch.equal(before, after)
        optimised.ingot_unfreeze()
        assert torch.equal(after, optimised(x))
        assert optimised.ingot_report()["programs"][0]["frozen_bytes"] == 0
    return kept


def test_with_a_librarys_product_there_is_nothing_to_keep():
    with torch.no_grad():
        optimised = ingot.optimize(
            Model().eval(), (torch.randn(8, 24),), options={"capabilities": {"avx2": False}}
        )
    assert _stale_after_a_change(optimised, torch.randn(8, 24)) == 0


def test_on_the_cpu_our_own_product_reads_packed_weights():
    """In a process without PyTorch's BLAS registered, our own product has every call."""
    loaded = library()
    loaded.check(loaded.ingot_set_host_product(b"", None, None))
    try:
        with torch.no_grad():
            optimised = ingot.optimize(Model().eval(), (torch.randn(300, 24),))
        products = [s.get("product") for s in _sweeps(optimised, 300)]
        kept = _stale_after_a_change(optimised, torch.randn(300, 24))
        own = any(product and product.startswith("ingot product") for product in products)
        assert (kept >= 16 * 24 * 4) == own
    finally:
        host_product.register(loaded)


def _sweeps(optimised, batch):
    return optimised.ingot_report(batch)["programs"][0]["explain"]["executable"]["sweeps"]


def test_what_is_captured_later_is_frozen_too(monkeypatch):
    frozen = []
    monkeypatch.setattr(ingot.runtime.program.Program, "freeze", lambda self: frozen.append(self))
    optimised = ingot.optimize(Model().eval())
    optimised.ingot_freeze()
    assert not frozen
    with torch.no_grad():
        optimised(torch.randn(8, 24))
    assert len(frozen) == 1
