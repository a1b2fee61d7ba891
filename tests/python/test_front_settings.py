"""What stands around a call: transforms, modes, training loops, threads, processes. Each against a
copy run by PyTorch alone."""

from __future__ import annotations

import copy
import multiprocessing
import threading
import warnings

import ingot
import pytest
import selection
import torch
from live import compare, regions_run, x
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def pair(make=Model):
    torch.manual_seed(0)
    module = make()
    return ingot.optimize(module), copy.deepcopy(module)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# Transforms -------------------------------------------------------------------------------------


def _functional_call(m, fed):
    weights = {name: p.detach() * 2 for name, p in m.named_parameters()}
    return torch.func.functional_call(m, weights, (fed,))


def _grad_of_functional_call(m, fed):
    weights = {name: p.detach() for name, p in m.named_parameters()}
    return torch.func.grad(lambda w: torch.func.functional_call(m, w, (fed,)).sum())(weights)


def _dual(m, fed):
    with forward_ad.dual_level():
        made = m(forward_ad.make_dual(fed, torch.ones_like(fed)))
        return tuple(forward_ad.unpack_dual(made))


TRANSFORMS = {
    "vmap": lambda m, fed: torch.vmap(m)(fed.expand(3, 4, 8)),
    "grad": lambda m, fed: torch.func.grad(lambda y: m(y).square().sum())(fed),
    "jvp": lambda m, fed: torch.func.jvp(m, (fed,), (torch.ones_like(fed),)),
    "vjp": lambda m, fed: torch.func.vjp(m, fed)[1](torch.ones(4, 8)),
    "jacrev": lambda m, fed: torch.func.jacrev(m)(fed[0]),
    "hessian": lambda m, fed: torch.func.hessian(lambda y: m(y).square().sum())(fed[0]),
    "functional_call": _functional_call,
    "grad of functional_call": _grad_of_functional_call,
    "forward-mode": _dual,
    "autograd.functional": lambda m, fed: torch.autograd.functional.jacobian(m, fed),
    "compile by eager": lambda m, fed: torch.compile(m, backend="eager")(fed),
    "compile by aot_eager": lambda m, fed: torch.compile(m, backend="aot_eager")(fed),
    "export": lambda m, fed: torch.export.export(m, (fed,)).module()(fed),
    "jit.trace": lambda m, fed: torch.jit.trace(m, (fed,), check_trace=False)(fed + 1),
    "fx": lambda m, fed: torch.fx.experimental.proxy_tensor.make_fx(m)(fed)(fed + 1),
}


@pytest.mark.parametrize("warm", selection.quick([True], [False, True]))
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_see_the_original(transform, warm):
    optimised, twin = pair()
    fed = x()
    if warm:
        optimised(fed)
    close(TRANSFORMS[transform](optimised, fed), TRANSFORMS[transform](twin, fed), 1e-4)
    with regions_run() as ran:
        close(optimised(fed), twin(fed))
    assert ran


def test_the_backend_by_name_under_a_users_own_compile():
    torch._dynamo.reset()
    module = Model()
    compiled = torch.compile(module, backend="ingot")
    with regions_run() as ran:
        for batch in (4, 4, 7, 9, 1):
            fed = x(batch)
            close(compiled(fed), module(fed))
    assert len(ran) == 5


@pytest.mark.parametrize("gradients", (True, False))
def test_derivatives_forwards_under_a_users_own_compile(gradients):
    torch._dynamo.reset()
    module, fed, found = Model().eval(), x(4), []
    compiled = torch.compile(module, backend="ingot")
    with torch.set_grad_enabled(gradients):
        compiled(fed)
        for called in (compiled, module):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(fed, torch.ones_like(fed))
                found.append([*torch.autograd.forward_ad.unpack_dual(called(dual))])
        assert found[1][1] is not None
        close(*found)
        with regions_run() as ran:
            compiled(fed)
    assert ran


# Gradients --------------------------------------------------------------------------------------


def gradients(module, *inputs):
    return [t.grad for t in [*inputs, *module.parameters()]]


@pytest.mark.parametrize("own_compile", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, own_compile):
    """At its first call, which is captured while the checkpoint counts what is saved."""
    optimised, twin = pair()
    if own_compile:
        torch._dynamo.reset()
        optimised = torch.compile(copy.deepcopy(twin), backend="ingot")
    found = []
    for module in (optimised, twin):
        torch.manual_seed(1)
        fed = x().requires_grad_()
        with regions_run() as ran:
            checkpoint(module, fed, use_reentrant=reentrant).square().sum().backward()
        assert ran or module is twin
        found.append(gradients(module, fed))
    close(*found, 1e-4)


def test_accumulated_gradients_retained_graphs_and_second_calls():
    def script(m):
        for batch in (4, 6):
            y = m(x(batch))
            if torch.is_grad_enabled():
                y.sum().backward(retain_graph=True)
                y.square().sum().backward(retain_graph=True)
            yield y

    compare(Model, script, tolerance=1e-4)


def test_second_derivatives():
    def script(m):
        fed = x().requires_grad_()
        y = m(fed)
        if not torch.is_grad_enabled():
            yield y
            return
        (first,) = torch.autograd.grad(y.square().sum(), fed, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), list(m.parameters()), allow_unused=True)
        yield first.detach()
        yield second[:2]

    compare(Model, script, tolerance=1e-4)


def test_a_gradient_penalty_reaches_parameters():
    def script(m):
        fed = x().requires_grad_()
        (first,) = torch.autograd.grad(m(fed).sum(), fed, create_graph=True)
        penalty = (first.norm(dim=1) - 1).square().mean()
        penalty.backward()
        yield penalty.detach()

    compare(Model, script, tolerance=1e-4, gradients=(True,))


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_training_loops(optimiser, set_to_none):
    def script(m):
        steps = OPTIMISERS[optimiser](m.parameters())
        for _ in range(4):
            steps.zero_grad(set_to_none=set_to_none)
            loss = (m(x()) - 1).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            steps.step()
            yield loss.detach()

    compare(Model, script, gradients=(True,), tolerance=1e-4)


def test_a_gradient_scaler():
    def script(m):
        steps = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            steps.zero_grad()
            scaler.scale(m(x()).square().mean()).backward()
            scaler.unscale_(steps)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(steps)
            scaler.update()
            yield scaler.get_scale()

    compare(Model, script, gradients=(True,), tolerance=1e-4)


# Modes ------------------------------------------------------------------------------------------


def test_autocast_on_and_off_in_turn():
    def script(m):
        for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                y = m(x())
            yield y.dtype
            yield y.float()

    compare(Model, script, tolerance=5e-2)


@pytest.mark.parametrize("around", [False, True])
def test_autocast_switched_by_the_forward(around):
    class Switching(Model):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=not around):
                h = self.up(x).relu()
            return h, self.down(h.float())

    def script(m):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            results = m(x())
        yield [y.dtype for y in results]
        yield from (y.float() for y in results)

    compare(Switching, script, taken=False, tolerance=5e-2 if around else 3e-5)


def test_inference_mode_switched_by_the_forward():
    class Switching(Model):
        def forward(self, x):
            with torch.inference_mode():
                h = self.up(x).relu()
            return h, x + 1

    def script(m):
        h, y = m(x())
        yield h.is_inference(), h.requires_grad, y.is_inference()
        yield h

    compare(Switching, script, taken=False)


def test_inference_mode_and_then_training():
    def script(m):
        for _ in range(2):
            with torch.inference_mode():
                y = m(x())
                total = y.sum().item()
            yield y.is_inference(), total
            y = m(x())
            yield y.is_inference()
            yield y

    compare(Model, script, tolerance=1e-4)


def test_parameters_that_are_converted_under_torch_compile_are_pytorchs():
    """Where no input tells: by its defaults Dynamo looks at parameters no more."""
    torch._dynamo.reset()
    twin = nn.Sequential(nn.Embedding(20, 8), Model())
    compiled, tokens = torch.compile(copy.deepcopy(twin), backend="ingot"), torch.arange(12) % 5
    for dtype, taken in ((torch.float32, True), (torch.bfloat16, False), (torch.float32, True)):
        compiled.to(dtype), twin.to(dtype)
        with regions_run() as ran, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = compiled(tokens)
        assert found.dtype is dtype and bool(ran) == taken
        assert taken or any("another dtype" in str(each.message) for each in told)
        close(found, twin(tokens), 1e-5 if taken else 2e-2)


def test_a_default_device():
    def script(m):
        torch.set_default_device("cpu")
        try:
            for _ in range(2):
                yield m(x())
        finally:
            torch.set_default_device(None)
        yield m(x())
        with torch.device("cpu"):
            yield m(x())

    compare(Model, script)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_under_a_default_device_regions_run(default, captured):
    """Of another one, too: while a second model is built on it."""
    optimised, twin = pair()
    fed = x()
    if captured:
        optimised(fed)
        twin(fed)
    torch.set_default_device(default)
    try:
        with regions_run() as ran:
            result = optimised(fed)
            result.sum().backward()
    finally:
        torch.set_default_device(None)
    expected = twin(fed)
    expected.sum().backward()
    close(result, expected)
    close(optimised.up.weight.grad, twin.up.weight.grad)
    assert ran


def test_a_default_dtype():
    class Scaled(Model):
        def forward(self, x):
            return super().forward(x) * torch.tensor(1.5) + torch.ones(8)

    def script(m):
        fed = x()
        yield m(fed)
        torch.set_default_dtype(torch.float64)
        try:
            yield m(fed)
        finally:
            torch.set_default_dtype(torch.float32)
        yield m(fed)

    compare(Scaled, script)


def test_deterministic_mode():
    def script(m):
        torch.use_deterministic_algorithms(True)
        try:
            yield m(x())
        finally:
            torch.use_deterministic_algorithms(False)
        yield m(x())

    compare(Model, script)


def test_matmul_precision_switches():
    def script(m):
        yield m(x())
        torch.set_float32_matmul_precision("high")
        try:
            yield m(x())
        finally:
            torch.set_float32_matmul_precision("highest")
        yield m(x())

    compare(Model, script, tolerance=1e-4)


def test_dtypes_in_turn():
    def script(m):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32):
            m.to(dtype)
            y = m(x().to(dtype))
            yield y.dtype
            yield y.detach().float()

    compare(Model, script, tolerance=5e-2)


def test_anomalies_are_looked_for():
    def script(m):
        with torch.autograd.set_detect_anomaly(True):
            y = m(x())
            y.square().sum().backward()
            yield y.detach()
            broken = m(x())
            with pytest.raises(RuntimeError, match="returned nan values"):
                (broken * torch.tensor(float("nan"))).sum().backward()
        yield torch.is_anomaly_enabled()

    compare(Model, script, gradients=(True,))


def test_a_stance_of_eager_before_and_after_the_first_call():
    optimised, twin = pair()
    fed = x()
    for _ in range(2):
        with torch.compiler.set_stance("force_eager"), regions_run() as ran:
            close(optimised(fed), twin(fed))
        assert not ran
        with regions_run() as ran:
            close(optimised(fed), twin(fed))
        assert ran


@pytest.mark.parametrize("by_variable", [False, True])
def test_dynamo_switched_off_is_told(by_variable, monkeypatch):
    if by_variable:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with torch._dynamo.config.patch(disable=not by_variable):
        with pytest.warns(ingot.IngotWarning, match="TorchDynamo is switched off"):
            optimised, twin = pair()
        fed = x()
        close(optimised(fed), twin(fed))


# Threads, processes, replicas -------------------------------------------------------------------


def test_threads_that_train_and_infer_at_once():
    optimised, twin = pair()
    inputs = [x(batch) for batch in (2, 3, 4, 5)]
    with torch.no_grad():
        expected = [twin(fed) for fed in inputs]
    failures = []

    def work(offset):
        try:
            for turn in range(6):
                index = (turn + offset) % len(inputs)
                with torch.set_grad_enabled(offset % 2 == 0):
                    found = optimised(inputs[index])
                assert found.requires_grad == (offset % 2 == 0)
                close(found.detach(), expected[index])
        except Exception as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def _in_child(module, fed, expected, queue):
    torch.set_num_threads(1)
    with torch.no_grad():
        queue.put(torch.allclose(module(fed), expected, atol=1e-5))


def test_a_forked_process():
    optimised, twin = pair()
    fed = x()
    with torch.no_grad():
        optimised(fed)
        expected = twin(fed)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(optimised, fed, expected, queue))
    child.start()
    child.join(120)
    alive = child.is_alive()
    if alive:
        child.kill()
    assert not alive and child.exitcode == 0 and queue.get()


def _replica(module):
    """One of nn.DataParallel's, as torch.nn.parallel.replicate makes them."""
    made = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for original, replica in made.items():
        for name, child in original._modules.items():
            replica._modules[name] = made.get(child)
        for name, parameter in original._parameters.items():
            setattr(replica, name, None if parameter is None else parameter * 2)
    return made[module]


def test_replicas_of_data_parallel():
    optimised, twin = pair()
    again = ingot.optimize(optimised, precision="ieee")
    again(x())
    fed = x()
    replica, expected = _replica(again), _replica(twin)
    for _ in range(2):
        found = replica(fed)
        close(found, expected(fed), 1e-4)
    assert replica._ingot.precision == "ieee"
    found.sum().backward()
    expected(fed).sum().backward()
    close(gradients(optimised), gradients(twin), 1e-4)


def test_synchronised_batch_norm_in_one_process():
    def make():
        plain = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        return nn.SyncBatchNorm.convert_sync_batchnorm(plain)

    def script(m):
        for _ in range(2):
            yield m(x())
        m.eval()
        yield m(x())

    compare(make, script)


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_copies_go_their_own_way(kind):
    import pickle

    optimised, twin = pair()
    optimised(x())
    copied = (
        copy.deepcopy(optimised) if kind == "deepcopy" else pickle.loads(pickle.dumps(optimised))
    )
    with torch.no_grad():
        optimised.up.weight.zero_()
    fed = x()
    with regions_run() as ran:
        close(copied(fed), twin(fed))
    assert ran
    copied(fed).sum().backward()
    assert optimised.up.weight.grad is None


@pytest.mark.parametrize("value", ["off", "OFF", "on", "", "of", "0"])
def test_the_switch_in_the_environment(value, monkeypatch):
    monkeypatch.setenv("INGOT", value)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimised = ingot.optimize(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    told = [str(w.message) for w in said if "environment" in str(w.message)]
    assert bool(told) == (value in ("of", "0")), told
    with torch.no_grad(), regions_run() as ran:
        optimised(torch.randn(4, 8))
    assert bool(ran) == (value.lower() != "off")
