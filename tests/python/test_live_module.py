"""An optimised module stays the live module it was made from: everything a user may do to one
between calls, each checked against a plain copy to which the same was done."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import re
import threading
import warnings
import weakref

import ingot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ingot.live.backend import IngotWarning
from ingot.live.module import OptimizedModule
from ingot.live.state import intercepted
from ingot.runtime.library import IngotError
from live import agree, no_gradients, programs_of, regions_run, x  # noqa: F401
from torch import nn


class Model(nn.Module):
    def __init__(self, features=12):
        super().__init__()
        self.gemm = nn.Linear(8, features)
        self.scale = nn.Parameter(torch.randn(features))
        self.bn = nn.BatchNorm1d(features)
        self.gain = 1.5

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale) * self.gain


@pytest.fixture
def pair():
    model = Model()
    twin = copy.deepcopy(model)
    return ingot.optimize(model, (torch.randn(4, 8),)), twin


def test_is_a_model_and_shares_everything(pair):
    _, twin = pair
    original = Model()
    shared = ingot.optimize(original, (x(),))
    assert isinstance(shared, Model) and isinstance(shared, OptimizedModule)
    assert shared.state_dict().keys() == twin.state_dict().keys()
    assert all(a is b for a, b in zip(shared.parameters(), original.parameters()))
    shared.eval()
    assert not original.bn.training
    original.train()
    assert shared.training and shared.bn.training
    shared.gain = 7.0
    assert original.gain == 7.0


def test_training_updates_running_statistics(pair):
    optimised, twin = pair
    for batch in (4, 4, 9, 2):
        with regions_run() as ran:
            agree(optimised, twin, x(batch))
        assert len(ran) == 1
    assert optimised.bn.num_batches_tracked == 4


def test_new_batch_sizes_do_not_recompile(pair):
    optimised, twin = pair
    agree(optimised, twin, x(4))
    assert len(programs_of(optimised)) == 1
    for batch in (2, 3, 17, 64):
        agree(optimised, twin, x(batch))
    assert len(optimised._ingot.graphs) == len(programs_of(optimised)) == 1


class Towers(nn.Module):
    """Two inputs of one batch that nothing brings together."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 32), nn.Linear(24, 32)

    def forward(self, x, y):
        return torch.relu(self.left(x)), torch.sigmoid(self.right(y))


def test_inputs_of_one_batch_that_never_meet_do_not_recompile():
    original = Towers()
    optimised = ingot.optimize(original)
    for rows in (8, 9, 17, 2, 40):
        x, y = torch.randn(rows, 16), torch.randn(rows, 24)
        torch.testing.assert_close(optimised(x, y), original(x, y))
    assert len(optimised._ingot.graphs) == 1
    x, y = torch.randn(12, 16), torch.randn(7, 24)
    torch.testing.assert_close(optimised(x, y), original(x, y))


def both(pair, change):
    for module in pair:
        change(module)


CHANGES = {
    "eval": lambda m: m.eval(),
    "bn.eval() alone": lambda m: m.bn.eval(),
    "bn.momentum": lambda m: setattr(m.bn, "momentum", 0.5),
    "bn.momentum None": lambda m: setattr(m.bn, "momentum", None),
    "bn.eps": lambda m: setattr(m.bn, "eps", 0.1),
    "bn.track_running_stats": lambda m: setattr(m.bn, "track_running_stats", False),
    "plain attribute": lambda m: setattr(m, "gain", -2.0),
    "submodule replaced": lambda m: setattr(m, "bn", nn.LayerNorm(12)),
    "submodule of another kind": lambda m: setattr(m, "bn", nn.Identity()),
    "linear replaced": lambda m: setattr(m, "gemm", nn.Linear(8, 12, bias=False)),
    "bias removed": lambda m: setattr(m.gemm, "bias", None),
    "parameter replaced": lambda m: setattr(m, "scale", nn.Parameter(torch.full((12,), 0.3))),
    "parameter of another shape": lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1))),
    "parameter written": lambda m: m.scale.fill_(0.25),
    ".data written": lambda m: m.scale.data.mul_(3.0),
    ".data assigned": lambda m: setattr(m.gemm.weight, "data", torch.full((12, 8), 0.1)),
    ".data transposed": lambda m: setattr(
        m.gemm.weight, "data", torch.arange(96.0).view(8, 12).t()
    ),
    "buffer written": lambda m: m.bn.running_mean.fill_(2.0),
    "buffer replaced": lambda m: setattr(m.bn, "running_var", torch.full((12,), 4.0)),
    "reset": lambda m: m.bn.reset_running_stats(),
    "load_state_dict": lambda m: m.load_state_dict(
        {k: torch.ones_like(v) * 2 for k, v in m.state_dict().items()}
    ),
    "load_state_dict(assign)": lambda m: m.load_state_dict(
        {k: torch.ones_like(v) * 2 for k, v in m.state_dict().items()}, assign=True
    ),
    "double": lambda m: m.double(),
    "requires_grad": lambda m: m.requires_grad_(False),
    "tied": lambda m: setattr(m.bn, "weight", m.scale),
    "method replaced": lambda m: setattr(m.bn, "forward", lambda y: y * 2),
    "forward replaced": lambda m: setattr(m, "forward", lambda y: y * 2),
}


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls(pair, change):
    optimised, twin = pair
    agree(optimised, twin, x())
    agree(optimised, twin, x())
    torch.manual_seed(1)
    CHANGES[change](optimised)
    torch.manual_seed(1)
    CHANGES[change](twin)
    twin.load_state_dict(optimised.state_dict())
    fed = x().to(next(twin.parameters()).dtype)
    agree(optimised, twin, fed)
    agree(optimised, twin, fed)


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(sorted(set(CHANGES) - {"double"})), min_size=1, max_size=4))
def test_sequences_of_changes(changes):
    model = Model()
    twin = copy.deepcopy(model)
    optimised = ingot.optimize(model)
    for change in changes:
        for module in (optimised, twin):
            torch.manual_seed(2)
            # An earlier change may have taken away what this one changes.
            with contextlib.suppress(AttributeError, RuntimeError, TypeError):
                CHANGES[change](module)
        fed = x(5)
        try:
            copy.deepcopy(twin)(fed)
        except RuntimeError as error:  # changes that do not fit together: PyTorch's own error
            with pytest.raises(type(error), match=re.escape(str(error).partition("\n")[0])):
                optimised(fed)
            return
        agree(optimised, twin, fed)


def test_untied_parameters_are_read_apart():
    model = Model()
    model.bn.weight = model.scale
    twin = copy.deepcopy(model)
    optimised = ingot.optimize(model, (x(),))
    agree(optimised, twin, x())
    for module in (optimised, twin):
        module.bn.weight = nn.Parameter(torch.full((12,), 5.0))
    agree(optimised, twin, x())


def test_hooks_of_children_are_called_and_what_they_give_back_counts(pair):
    optimised, twin = pair
    calls = []
    agree(optimised, twin, x())
    for module in pair:
        module.gemm.register_forward_hook(lambda m, i, o: calls.append("gemm") or o * 2)
    for turn in range(2):
        with regions_run() as ran:
            agree(optimised, twin, x())
        assert calls == ["gemm"] * 2 * (turn + 1) and ran


def test_hooks_on_the_root_are_called_once(pair):
    optimised, _ = pair
    calls = []
    optimised.register_forward_hook(lambda m, i, o: calls.append("root"))
    handle = optimised.register_forward_pre_hook(lambda m, i: calls.append("pre"))
    with regions_run() as ran:
        optimised(x())
        optimised(x())
    assert calls == ["pre", "root"] * 2 and len(ran) == 2
    handle.remove()
    optimised(x())
    assert calls == ["pre", "root"] * 2 + ["root"]


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_global_hooks_are_called(pair):
    optimised, _ = pair
    seen = []
    optimised(x())
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(m))
    try:
        optimised(x())
    finally:
        handle.remove()
    assert optimised.bn in seen
    with regions_run() as ran:
        optimised(x())
    assert seen.count(optimised.bn) == 1 and ran


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "old_weight_norm"])
def test_parametrizations(pair, kind):
    optimised, twin = pair
    agree(optimised, twin, x())
    apply = {
        "weight_norm": nn.utils.parametrizations.weight_norm,
        "spectral_norm": nn.utils.parametrizations.spectral_norm,
        "old_weight_norm": nn.utils.weight_norm,
    }[kind]
    for module in (optimised, twin):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply(module.gemm)
    agree(optimised, twin, x())
    agree(optimised, twin, x())
    optimised.eval(), twin.eval()
    agree(optimised, twin, x())


def test_gradients_come_from_regions_without_a_word(pair):
    optimised, twin = pair
    fed = x()
    with torch.enable_grad(), warnings.catch_warnings(), regions_run() as ran:
        warnings.simplefilter("error")
        agree(optimised, twin, fed).square().sum().backward()
        twin.load_state_dict(optimised.state_dict())
        twin(fed).square().sum().backward()
    assert ran
    for (name, found), expected in zip(optimised.named_parameters(), twin.parameters()):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_frozen_modules_run_with_gradients_enabled(pair):
    optimised, twin = pair
    optimised.requires_grad_(False)
    with torch.enable_grad():
        with regions_run() as ran:
            assert not agree(optimised, twin.requires_grad_(False), x()).requires_grad
            agree(optimised, twin, x())
        assert len(ran) == 2
        fed = x().requires_grad_()
        again = fed.detach().clone().requires_grad_()
        assert agree(optimised, twin, fed).requires_grad
        (found,) = torch.autograd.grad(optimised(fed).square().sum(), fed)
        (expected,) = torch.autograd.grad(twin(again).square().sum(), again)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_optimiser_steps_show(pair):
    optimised, twin = pair
    for module in (optimised, twin):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(4)
        with torch.enable_grad():
            module(x()).square().sum().backward()
        optimiser.step()
    agree(optimised, twin, x())


def test_deepcopy_is_independent(pair):
    optimised, twin = pair
    optimised(x())
    twin(x(4))
    twin.load_state_dict(optimised.state_dict())
    other = copy.deepcopy(optimised)
    assert type(other) is type(optimised)
    optimised.scale.fill_(9.0)
    agree(other, twin, x())
    assert other.bn is not optimised.bn


def test_pickle_and_save(pair):
    optimised, twin = pair
    optimised.eval(), twin.eval()
    other = pickle.loads(pickle.dumps(optimised))
    agree(other, twin, x())
    file = io.BytesIO()
    torch.save(optimised, file)
    file.seek(0)
    agree(torch.load(file, weights_only=False), twin, x())


def test_wrong_inputs_give_pytorchs_errors(pair):
    optimised, twin = pair
    optimised(x())
    for bad in (torch.randn(4, 9), torch.randn(4, 8).double(), torch.ones(4, 8, dtype=torch.int64)):
        with pytest.raises(RuntimeError) as expected:
            twin(bad)
        with pytest.raises(RuntimeError) as found:
            optimised(bad)
        assert str(found.value) == str(expected.value)
    for bad in ((), (x(), x()), ("text",)):
        with pytest.raises(TypeError) as expected:
            twin(*bad)
        with pytest.raises(TypeError) as found:
            optimised(*bad)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("warm", [True, False])
def test_training_batch_of_one_is_pytorchs_error(pair, warm):
    optimised, twin = pair
    if warm:
        optimised(x())
    before = copy.deepcopy(optimised.state_dict())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        optimised(x(1))
    torch.testing.assert_close(optimised.state_dict()["bn.running_mean"], before["bn.running_mean"])
    optimised.eval(), twin.eval()
    twin.load_state_dict(optimised.state_dict())
    agree(optimised, twin, x(1))


def test_empty_batch_does_what_pytorch_does(pair):
    optimised, twin = pair
    optimised(x())
    try:
        expected = twin(x(0))
    except (ValueError, RuntimeError) as error:
        with pytest.raises(type(error)):
            optimised(x(0))
    else:
        torch.testing.assert_close(optimised(x(0)), expected)
    optimised.eval(), twin.eval()
    assert optimised(x(0)).shape == (0, 12)


LAYOUTS = {
    "transposed": lambda: torch.randn(8, 5).t(),
    "strided": lambda: torch.randn(10, 16)[::2, ::2],
    "misaligned": lambda: torch.randn(41)[1:].view(5, 8),
    "offset rows": lambda: torch.randn(5, 11)[:, 3:],
    "expanded": lambda: torch.randn(1, 8).expand(5, 8),
    "flipped strides": lambda: torch.randn(5, 8, 2)[..., 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(pair, layout):
    optimised, twin = pair
    for module in pair:
        module.eval()
    agree(optimised, twin, LAYOUTS[layout]())
    agree(optimised, twin, x(5))
    agree(optimised, twin, LAYOUTS[layout]())


def test_negated_views(pair):
    optimised, twin = pair
    fed = torch.conj(torch.randn(4, 8, dtype=torch.complex64)).imag
    assert fed.is_neg()
    for _ in range(2):
        agree(optimised, twin, fed)
        agree(optimised, twin, x())


def test_zeros_without_memory(pair):
    """Autograd's own, which forward-mode derivatives hand out."""
    optimised, twin = pair
    fed = torch._efficientzerotensor((4, 8))
    for _ in range(2):
        agree(optimised, twin, fed)
        agree(optimised, twin, x())


def test_results_are_fresh(pair):
    optimised, _ = pair
    optimised.eval()
    fed = x()
    first = optimised(fed)
    kept = first.clone()
    optimised(x())
    torch.testing.assert_close(first, kept, rtol=0, atol=0)
    assert optimised(fed).data_ptr() != first.data_ptr()


def test_threads(pair):
    optimised, twin = pair
    optimised.eval(), twin.eval()
    inputs = [x(batch) for batch in (2, 3, 4, 5, 6, 7)]
    expected = [twin(fed) for fed in inputs]
    failures = []

    def work(offset):
        with torch.no_grad():
            for turn in range(30):
                index = (turn + offset) % len(inputs)
                try:
                    torch.testing.assert_close(
                        optimised(inputs[index]), expected[index], rtol=1e-5, atol=1e-5
                    )
                except Exception as error:  # reported by the main thread
                    failures.append(error)
                    return

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_watchers_see_the_original(pair):
    optimised, twin = pair
    optimised.eval(), twin.eval()
    optimised(x())
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        optimised(x())
    assert counter.get_total_flops() > 0
    traced = torch.jit.trace(optimised, (x(),), check_trace=False)
    fed = x(6)
    torch.testing.assert_close(traced(fed), twin(fed))
    many = torch.randn(3, 4, 8)
    torch.testing.assert_close(torch.vmap(optimised)(many), torch.vmap(twin)(many))


def test_torch_compile_captures_the_original(pair):
    optimised, twin = pair
    optimised.eval(), twin.eval()
    optimised(x())
    compiled = torch.compile(optimised, backend="eager")
    fed = x()
    torch.testing.assert_close(compiled(fed), twin(fed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_modules(dtype):
    model = Model().to(dtype).eval()
    twin = copy.deepcopy(model)
    optimised = ingot.optimize(model, (x().to(dtype),))
    fed = x().to(dtype)
    found, expected = optimised(fed), twin(fed)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


def test_autocast(pair):
    optimised, twin = pair
    optimised.eval(), twin.eval()
    fed = x()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = optimised(fed), twin(fed)
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
        agree(optimised, twin, fed)


def test_inference_mode():
    with torch.inference_mode():
        model = Model()
        twin = copy.deepcopy(model)
        agree(ingot.optimize(model), twin, x())
    model = Model()
    twin = copy.deepcopy(model)
    optimised = ingot.optimize(model, (x(),))
    with torch.inference_mode():
        found = agree(optimised, twin, x())
    assert found.is_inference()
    agree(optimised, twin, x())


def test_backward_of_a_call_that_pytorch_ran_before_the_statistics_moved(pair):
    optimised, twin = pair
    inputs = x(), x(9)
    with torch.enable_grad():
        by_torch = optimised._ingot.original_forward(optimised, inputs[0])
        (by_torch.sigmoid().sum() + optimised(inputs[1]).sigmoid().sum()).backward()
        (twin(inputs[0]).sigmoid().sum() + twin(inputs[1]).sigmoid().sum()).backward()
    for (name, found), expected in zip(optimised.named_parameters(), twin.parameters()):
        torch.testing.assert_close(found.grad, expected.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_endless_changes_are_right(pair):
    optimised, twin = pair
    for step in range(8):
        optimised.gain = twin.gain = 1.0 + step
        agree(optimised, twin, x())


def test_modules_are_freed_at_once(pair):
    """Without waiting for the garbage collector: a model's memory may be most of a GPU's."""
    model = Model().eval()
    optimised = ingot.optimize(model, (x(),))
    optimised(x())
    weight = weakref.ref(model.gemm.weight)
    gc.collect()
    gc.disable()
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable)
        del model, optimised
        assert weight() is None


def test_memory_is_released():
    model = Model()
    optimised = ingot.optimize(model, (x(),))
    optimised(x())
    program = weakref.ref(programs_of(optimised)[0])
    weight = weakref.ref(model.gemm.weight)
    del model, optimised
    gc.collect()
    assert program() is None and weight() is None


def test_intermediate_steps_are_pytorchs():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 5)

        def forward(self, x):
            y = torch.relu(self.a(x)) * 2
            y = torch.cumsum(y, dim=1)
            return torch.softmax(self.b(y), dim=1), y

    model = Mixed()
    twin = copy.deepcopy(model)
    with pytest.warns(IngotWarning, match=r"cumsum \(test_live_module.py:\d+\)"):
        optimised = ingot.optimize(model, (x(),))
    for batch in (4, 7, 1):
        fed = x(batch)
        for found, expected in zip(optimised(fed), twin(fed)):
            torch.testing.assert_close(found, expected)
    report = optimised.ingot_report()
    assert [item["what"] for item in report["unsupported"]] == ["cumsum"]
    assert {item["what"] for item in report["operators_replaced"]} >= {"linear", "softmax"}


def test_bad_arguments_of_optimize():
    with pytest.raises(TypeError, match="takes an nn"):
        ingot.optimize(lambda x: x)
    with pytest.raises(ValueError, match="precision"):
        ingot.optimize(Model(), precision="fp31")
    with pytest.raises(TypeError, match="TorchScript"):
        ingot.optimize(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="example_inputs"):
        ingot.optimize(Model(), 3)


def test_arguments_that_do_not_fit_are_refused_as_by_pytorch_in_one_message(pair, caplog):
    optimised, twin = pair
    refused = []
    for module in (twin, optimised):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
            module(torch.randn(4, 9))
        refused.append(str(error.value))
    assert refused[0] == refused[1]
    assert not [r for r in caplog.records if r.exc_info]
    agree(optimised, twin, torch.randn(4, 8))


def test_optimising_twice(pair):
    optimised, twin = pair
    again = ingot.optimize(optimised, (x(),), precision="ieee")
    assert type(again) is type(optimised)
    agree(again, twin, x())


def test_a_class_of_its_own():
    class ModelNew(ingot.OptimizedModule, Model):
        ingot_precision = "ieee"

    torch.manual_seed(5)
    new = ModelNew(10)
    torch.manual_seed(5)
    old = Model(10)
    with regions_run() as ran:
        agree(new, old, x())
    assert ran and programs_of(new)[0].precision == "ieee"
    agree(copy.deepcopy(new), old.eval(), x()) if not new.eval().training else None


def test_an_export_in_another_thread_does_not_divert_a_call(monkeypatch):
    # torch.export raises this flag for all threads; what it traces itself runs under modes.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    assert not intercepted()


class Broken(nn.Module):
    """Of which nothing is captured: Python runs it, and calls its parts."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Dropout()

    def forward(self, x):
        y = self.norm(x)
        if float(y.detach().sum()) > 1e9:
            y = -y
        return self.dropout(torch.relu(self.linear(y)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (5, 3, 8)),
        (lambda: nn.Sequential(nn.Embedding(4, 2), nn.Dropout(), nn.BatchNorm1d(2)), (5,)),
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU()), (5, 8)),
        (Broken, (5, 8)),
    ],
)
def test_preparing_runs_nothing(make, shape):
    model = make().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example = torch.randn(shape) if len(shape) > 1 else torch.randint(0, 4, shape)
    generator = torch.get_rng_state()
    with torch.enable_grad():
        optimised = ingot.optimize(model, (example,))
        with contextlib.suppress(IngotError):
            optimised.ingot_prepare(example)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_dynamo_is_freeing_is_not_freed_again():
    from ingot.live import dynamo

    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    module = ingot.optimize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    module(torch.rand(4, 8))
    code = next(
        c for w in torch._dynamo.convert_frame.input_codes.seen if (c := w()) and entries(c)
    )
    with torch._dynamo.convert_frame.compile_lock:  # as in torch._dynamo.reset()
        dynamo.forget(code)
        assert entries(code)
    ingot.optimize(nn.Linear(2, 2))
    assert not entries(code)
