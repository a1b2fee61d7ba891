"""Gradients through regions: as near to fp64 as eager's, by whatever way they are asked for."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import ingot
import pytest
import selection
import torch
from ingot.capture.backward_operators import BACKWARD_OPERATORS
from ingot.live import backward, products
from ingot.live.backward import Backward
from ingot.live.gradients import RegionCall
from ingot.model_file import load_model_file
from torch import nn
from torch.utils import _pytree as pytree

FOLDER = Path(__file__).resolve().parents[1] / "models"
# Eager has no gradients of in_place: it writes into what its backward pass reads.
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "in_place")
# Whose backward pass runs by PyTorch's operators.
BY_OPERATORS = {"maxpool_sum_scale"}


class Model(nn.Module):
    def __init__(self, features=24):
        super().__init__()
        self.gemm = nn.Linear(16, features)
        self.scale = nn.Parameter(torch.rand(features) + 0.5)
        self.bn = nn.BatchNorm1d(features)

    def forward(self, x):
        return torch.tanh(self.bn(self.gemm(x) * self.scale))


class Two(Model):
    def forward(self, x):
        y = self.gemm(x) * self.scale
        return torch.relu(y), torch.softmax(self.bn(y), dim=1)


class Detached(Model):
    def forward(self, x):
        y = self.gemm(x)
        return self.bn(y * torch.sigmoid(y.detach())) * self.scale


def three_of(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Optimised, eager, and in double precision."""
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ingot.optimize(model), twin, exact


def calls_of(module: nn.Module) -> list[RegionCall]:
    compiled = [graph.compiled for graph in module._ingot.graphs if graph.compiled]
    return [call for one in compiled for call in one.calls if call is not None]


def backwards_of(module: nn.Module) -> list:
    return [way for call in calls_of(module) for way in call._backwards.values()]


def gradients_of(module: nn.Module, inputs: list, seed: int = 0) -> list:
    """Of the inputs and the parameters, for random gradients of all results."""
    parameters = list(module.parameters())
    wide = any(p.dtype == torch.float64 for p in parameters)
    own = [
        (t.double() if wide else t.clone()).requires_grad_() if t.is_floating_point() else t
        for t in inputs
    ]
    torch.manual_seed(seed)  # for what draws random numbers
    results = [r for r in pytree.tree_leaves(module(*own)) if r.requires_grad]
    torch.manual_seed(seed)
    given = [torch.rand(r.shape).to(r.dtype) for r in results]
    torch.autograd.backward(results, given)
    found = [t.grad for t in (*own, *parameters) if t.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    return found


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def check_against_fp64(module, twin, exact, inputs: list) -> None:
    found, eager, truth = (gradients_of(m, inputs) for m in (module, twin, exact))
    for own, other, exactly in zip(found, eager, truth):
        assert (own is None) == (exactly is None)
        if own is not None and exactly.norm() > 1e-12:
            eager_error = error(other, exactly)
            # Two rows in a batch norm cancel but for rounding: one draw of it against another.
            factor = 2 if eager_error < 1e-5 else 4
            assert error(own, exactly) <= max(2e-6, factor * eager_error)


@pytest.mark.parametrize("mode", selection.quick(["training"], ["training", "eval"]))
@pytest.mark.parametrize("name", selection.quick(set(selection.MODELS) & set(NAMES), NAMES))
def test_models(name, mode):
    torch.manual_seed(1)
    loaded = load_model_file(FOLDER / f"{name}.py")
    inputs = loaded.make_inputs()
    module, twin, exact = three_of(loaded.make_module().train(mode == "training"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_against_fp64(module, twin, exact, inputs)
    for way in backwards_of(module):
        assert bool(way.programs) == (name not in BY_OPERATORS)


@pytest.fixture
def three():
    torch.manual_seed(0)
    return three_of(Model())


def test_batches_one_apart_share_their_programs(three):
    for rows in (2, 7, 8, 9, 33):
        check_against_fp64(*three, [torch.randn(rows, 16)])
    (way,) = backwards_of(three[0])
    assert way.programs and way.derivative.batch is None


@pytest.mark.parametrize("model", [Model, Two, Detached])
def test_forms(model):
    torch.manual_seed(0)
    module, twin, exact = three_of(model())
    check_against_fp64(module, twin, exact, [torch.randn(11, 16)])
    assert backwards_of(module)


def test_one_of_two_results():
    torch.manual_seed(0)
    module, twin, _ = three_of(Two())
    x = torch.randn(11, 16)
    for place in (0, 1):
        found = torch.autograd.grad(module(x)[place].sum(), module.gemm.weight)
        expected = torch.autograd.grad(twin(x)[place].sum(), twin.gemm.weight)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_no_result_with_a_gradient_reaches_has_none():
    module, twin, _ = three_of(Two())
    x = torch.randn(11, 16)
    for m in (module, twin):  # the norm is in the second result alone
        m(x)[0].sum().backward()
        assert m.gemm.weight.grad is not None
        assert m.bn.weight.grad is None and m.bn.bias.grad is None


@pytest.mark.parametrize("step", [torch.round, torch.floor, torch.sign])
def test_derivatives_that_are_zero_everywhere_are_zeros(step):
    """Not none, as behind what was detached."""

    class Stepwise(Model):
        def forward(self, x):
            y = torch.tanh(self.gemm(x))
            return y * self.scale, step(y * 4), y.detach() * self.bn.weight

    module, twin, _ = three_of(Stepwise())
    x = torch.randn(11, 16)
    for places in ([0], [1], [2], [1, 2]):
        for m in (module, twin):
            m.zero_grad()
            results = m(x)
            sum(results[place].sum() for place in places).backward()
        for own, other in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert calls_of(module)


class Decided(Model):
    """Results without a derivative beside one that has it."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(16, 24)

    def forward(self, x):
        y = torch.tanh(self.gemm(x) * self.scale)
        return y, y.argmax(1), y > 0.5, self.other(x).argmax(1)


def test_results_without_a_derivative_take_no_longer_way(monkeypatch):
    torch.manual_seed(0)
    module, twin, exact = three_of(Decided())
    longer = []
    some = Backward.of_some
    monkeypatch.setattr(Backward, "of_some", lambda *given: longer.append(given) or some(*given))
    check_against_fp64(module, twin, exact, [torch.randn(11, 16)])
    ways = backwards_of(module)
    assert not longer and not all(way.all_differentiable for way in ways)
    for m in (module, twin):
        results = m(torch.randn(11, 16))
        assert [r.requires_grad for r in results] == [True, False, False, False]
        results[0].sum().backward()
        assert m.gemm.weight.grad is not None and m.other.weight.grad is None


def test_a_gradient_of_zeros_is_one():
    """Of a sign, where the other result's gradient is not asked for."""

    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x):
            h = self.linear(x)
            return torch.tanh(h.sgn()), h.long()

    module, x = Signed(), torch.ones(2, 6, requires_grad=True)
    optimised = ingot.optimize(module)
    leaves = [x, *module.parameters()]
    found = torch.autograd.grad(optimised(x)[0].sum(), leaves)
    assert calls_of(optimised)
    assert [g.abs().sum() for g in found] == [0, 0, 0]


def test_without_a_derivative_pytorchs_operators_run(three, monkeypatch):
    def fails(*given):
        raise RuntimeError("no such formula")

    monkeypatch.setattr(backward, "derivative_of", fails)
    module, twin, exact = three
    x = torch.randn(11, 16)
    with pytest.warns(ingot.IngotWarning, match="PyTorch runs .*no such formula"):
        check_against_fp64(module, twin, exact, [x])
    for _ in range(2):
        for each in (module, twin):
            each.zero_grad()
            each(x).sum().backward()
    torch.testing.assert_close(module.state_dict(), twin.state_dict())
    torch.testing.assert_close(module.gemm.weight.grad, twin.gemm.weight.grad)


class Bounded(Model):
    """Bounds of a result, for a log: PyTorch has no derivative of them."""

    def forward(self, x):
        y = super().forward(x)
        low, high = torch.aminmax(y)
        return y, low, high, torch.aminmax(y, dim=1).max


def test_bounds_that_no_loss_reads_stop_no_training():
    torch.manual_seed(0)
    module, twin, _ = three_of(Bounded())
    x = torch.randn(11, 16)
    results = [each(x) for each in (module, twin)]
    torch.testing.assert_close(*results)
    for y, *_ in results:
        y.square().sum().backward()
    assert calls_of(module)
    torch.testing.assert_close(module.gemm.weight.grad, twin.gemm.weight.grad)


def test_unused_parameters_have_none(three):
    module = three[0]
    loss = module(torch.randn(5, 16)).sum()
    other = torch.zeros(3, requires_grad=True)
    found = torch.autograd.grad(loss, [module.scale, other], allow_unused=True)
    assert found[0] is not None and found[1] is None


def test_frozen_parameters(three):
    module, twin, _ = three
    for m in (module, twin):
        m.gemm.weight.requires_grad_(False)
    x = torch.randn(9, 16, requires_grad=True)
    found = torch.autograd.grad(module(x).square().sum(), [x, module.gemm.bias, module.bn.weight])
    expected = torch.autograd.grad(twin(x).square().sum(), [x, twin.gemm.bias, twin.bn.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_accumulation(three):
    module, twin, _ = three
    for rows in (4, 6):
        x = torch.randn(rows, 16)
        module(x).square().sum().backward()
        twin(x).square().sum().backward()
    for own, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_retained_graph_and_its_end(three):
    module = three[0]
    loss = module(torch.randn(6, 16)).square().sum()
    first = torch.autograd.grad(loss, module.gemm.weight, retain_graph=True)
    again = torch.autograd.grad(loss, module.gemm.weight)
    assert torch.equal(first[0], again[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, module.gemm.weight)


def test_second_derivatives(three):
    module, twin, _ = three
    x = torch.randn(6, 16, requires_grad=True)
    found = []
    for m in (module, twin):
        (slope,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, m.gemm.weight, m.scale]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "shaped",
    [
        lambda y: y.sum(),
        lambda y: y.t().contiguous().t().mul(2).sum(),
        lambda y: (y.t() @ torch.ones(y.shape[0], 3)).square().sum(),
        lambda y: y[::2, 1::3].sum() + y[:, :1].expand_as(y).sum(),
        lambda y: (y.unsqueeze(0).expand(3, *y.shape) * 2).sum(),
    ],
)
def test_gradients_of_any_strides(three, shaped):
    module, twin, _ = three
    x = torch.randn(10, 16, requires_grad=True)
    found, expected = (
        torch.autograd.grad(shaped(m(x)) + m.bn.weight.sum(), [x, *m.parameters()])
        for m in (module, twin)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_transposed_and_expanded_gradients_given():
    torch.manual_seed(0)
    module, twin, _ = three_of(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)))
    x = torch.randn(10, 16, requires_grad=True)
    for given in (
        torch.rand(8, 10).t(),
        torch.rand(10, 1).expand(10, 8),
        torch.rand(8).expand(10, 8),
    ):
        found, expected = (
            torch.autograd.grad(m(x), [x, *m.parameters()], given) for m in (module, twin)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


class Activations(nn.Module):
    """All of torch.nn's that act on each element, side by side."""

    KINDS = (
        *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
        *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid),
        *(nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
    )

    def __init__(self):
        super().__init__()
        self.gemm, self.activations = nn.Linear(12, 16), nn.ModuleList(k() for k in self.KINDS)

    def forward(self, x):
        made = 3 * self.gemm(x)
        return tuple(activation(made) for activation in self.activations)


@pytest.mark.parametrize("autocast", [False, True])
def test_activations(autocast):
    torch.manual_seed(1)
    three, x = three_of(Activations()), torch.randn(9, 12)
    if autocast:
        near_under_autocast(three, x, 1e-6)
    else:
        check_against_fp64(*three, [x])
    assert backwards_of(three[0]) and all(way.programs for way in backwards_of(three[0]))


@pytest.mark.parametrize("at", selection.quick([8], range(len(Activations.KINDS))))
def test_an_activation(at):
    """Alone: an error of one is not small beside all others' gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), Activations.KINDS[at](), nn.Linear(16, 4))
    three = three_of(model)
    check_against_fp64(*three, [2 * torch.randn(9, 12)])
    assert all(way.programs for way in backwards_of(three[0]))


def near_under_autocast(three, x: torch.Tensor, least: float) -> None:
    """Gradients under autocast as near to fp64's as eager's; of those whose norm is `least`."""
    module, twin, exact = three
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = gradients_of(module, [x]), gradients_of(twin, [x])
    truth = gradients_of(exact, [x])
    for own, other, exactly in zip(found, eager, truth):
        assert own.dtype == other.dtype
        if exactly.norm() > least:
            assert error(own, exactly) <= max(0.02, 1.5 * error(other, exactly))


def test_autocast(three):
    near_under_autocast(three, torch.randn(12, 16), 1e-6)


class Softmax(Model):
    def forward(self, x):
        return torch.softmax(self.scale * self.bn(self.gemm(x)), dim=1)


class Block(nn.Module):
    def __init__(self, features, between=nn.functional.gelu):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, features), nn.Linear(features, 16)
        self.between = between

    def forward(self, x):
        return x + self.down(self.between(self.up(self.norm(x))))


class ReluBlock(Block):
    def __init__(self, features):
        super().__init__(features, torch.relu)


@pytest.mark.parametrize(
    ("model", "of_input"),
    [(m, of_input) for m in (Model, Softmax, Block, ReluBlock) for of_input in (False, True)],
)
def test_peak_memory_of_a_training_step(model, of_input):
    """Not above eager's: what backward read last is freed while it runs."""
    torch.manual_seed(0)
    module, twin, _ = three_of(model(256))
    x = torch.randn(2048, 16, requires_grad=of_input)
    given = torch.randn_like(twin(x).detach())

    def step(m):
        m.zero_grad()
        x.grad = None
        m(x).backward(given)

    peaks = []
    for m in (module, twin):
        step(m), step(m)
        peaks.append(peak_of(lambda m=m: step(m)))
    assert peaks[0] <= peaks[1]


STATISTICS = ["layer_norm_mean", "layer_norm_rstd"]


@pytest.mark.parametrize(
    ("between", "kept"),
    [
        (nn.functional.gelu, ["linear", "layer_norm", "gelu", *STATISTICS]),
        # As PyTorch does: what relu makes, which the next product's weight wants, decides alone.
        (torch.relu, ["relu", "layer_norm", *STATISTICS]),
    ],
)
def test_forward_keeps_operands_that_it_writes_and_no_product_that_nobody_reads(between, kept):
    module, _, _ = three_of(Block(24, between))
    x = torch.randn(32, 16)
    module(x).sum().backward()
    (call,) = calls_of(module)
    assert [result["name"] for result in call.region.graph["results"]] == ["add", *kept]
    (backward,) = call._backwards.values()
    derivative = backward.derivative
    assert torch.ops.aten.gelu.default not in {n.target for n in derivative.graph.graph.nodes}
    leaves = len(call.region.leaves)
    assert all(derivative.reads[leaves : leaves + len(derivative.stored)])


def peak_of(step) -> int:
    """Bytes of host memory beyond what was taken before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(60, 45, 37), (1, 8, 300), (24, 1, 2), (130, 70, 1)])
def test_products_that_contract_the_batch(m, n, k, transposed):
    """By a program, as on a GPU, from operands as they lie."""
    torch.manual_seed(0)
    gradient, x = torch.randn(k, m), torch.randn(k, n)
    if transposed:
        x = x.t().contiguous().t()
    program = products.program_of("fp32", gradient.t(), x)
    for g in (gradient, gradient[:1].expand(k, m), gradient.repeat(1, 2)[:, m:]):
        found = products.run(program, g.t(), x)
        torch.testing.assert_close(found, g.t() @ x, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()


def test_batch_norms_of_both_libraries_are_taken_apart_alike():
    """cuDNN's, which PyTorch chooses on a GPU, hands on the same statistics."""
    aten = torch.ops.aten
    x, gradient = torch.randn(9, 5, 3), torch.randn(9, 5, 3)
    weight, bias = torch.rand(5) + 0.5, torch.randn(5)
    norm = BACKWARD_OPERATORS[aten.cudnn_batch_norm.default]
    y, mean, rstd, reserve = norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    expected = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    torch.testing.assert_close((y, mean, rstd), expected, rtol=1e-5, atol=1e-5)
    backward = BACKWARD_OPERATORS[aten.cudnn_batch_norm_backward.default]
    found = backward(x, gradient, weight, None, None, mean, rstd, 1e-5, reserve)
    given = (gradient, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3)
    expected = aten.native_batch_norm_backward(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Started(nn.Module):
    """Zeros of the shape of a tensor that the region of the product does not read."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        other, steps = torch.cumsum(torch.tanh(self.first(x)), 1), torch.cumsum(x, 1)
        state = torch.zeros_like(other)
        for _ in range(2):
            state = torch.full_like(other, 0.5) * state + steps
        return torch.sigmoid(self.last(state)), other


@pytest.mark.parametrize("gradients", [False, True])
def test_a_start_of_zeros_needs_no_tensor_of_another_region(gradients):
    torch.manual_seed(0)
    optimised, twin, _ = three_of(Started())
    for batch in (6, 9):
        x = torch.randn(batch, 16)
        with torch.set_grad_enabled(gradients):
            found, expected = optimised(x), twin(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if gradients:
            ours, eagers = gradients_of(optimised, [x]), gradients_of(twin, [x])
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
    assert len(calls_of(optimised)) >= 2
    assert not any(graph.problem for graph in optimised._ingot.graphs)


@pytest.mark.parametrize("plane", [(3, 3), (3, 4)])
def test_a_norm_before_a_mean_over_planes(plane):
    """Its backward pass reads x twice beside a gradient that is the same all over a plane; where
    planes are square, sizes do not tell their sides apart."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(6, 8, 1, bias=False)
            self.bn = nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, 5)

        def forward(self, x, y):
            h = torch.relu(self.bn(self.conv(x)) + y)
            return self.fc(h.mean((2, 3)))

    torch.manual_seed(3)
    made, twin, exact = three_of(Head().train())
    inputs = [torch.randn(4, 6, *plane), torch.randn(4, 8, *plane)]
    own, eager, truth = (gradients_of(m, inputs) for m in (made, twin, exact))
    assert backwards_of(made)
    for found, plain, wanted in zip(own, eager, truth):
        allowed = 4 * (plain.double() - wanted).norm() + 1e-6 * wanted.norm()
        assert (found.double() - wanted).norm() <= allowed


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.ReLU])
def test_what_an_activation_made_is_stored_where_it_is_multiplied_next(activation):
    """Backward reads it for the next weight's gradient, and derives from it: none is made again."""
    layers = (nn.Linear(12, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 4))
    module, _, _ = three_of(nn.Sequential(*layers))
    module(torch.randn(8, 12)).sum().backward()
    (call,) = calls_of(module)
    name = activation.__name__.lower()
    first, *kept = [result["name"] for result in call.region.graph["results"]]
    assert (first, [each.partition("_")[0] for each in kept]) == ("linear_2", [name, name])
    (backward,) = call._backwards.values()
    computed = {n.target for n in backward.derivative.graph.graph.nodes}
    assert getattr(torch.ops.aten, name).default not in computed


@pytest.mark.parametrize(("rows", "expected"), [(64, 2), (1 << 17, 3)])
def test_a_stage_of_backward_is_shorter_where_what_it_makes_is_large(rows, expected):
    """What a stage makes lies in memory until its end: 32 MB count more than one more call."""
    widths = (8, 64, 64, 64, 4)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:])]
    module, _, _ = three_of(nn.Sequential(*layers))
    module(torch.randn(rows, 8)).sum().backward()
    (call,) = calls_of(module)
    (backward,) = call._backwards.values()
    assert sum("matmul" in str(p.graph["values"]) for p in backward.programs) == expected
