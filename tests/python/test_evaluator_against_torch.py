"""The fp64 evaluator and the operators' definitions against PyTorch in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from evaluator import GraphUnderTest, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from ingot.runtime.library import IngotError
from torch import nn

INF, NAN = math.inf, math.nan
HOSTILE = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 1e-45, 3e38, -3e38, 88.9, -104.0]
HOSTILE += [0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 6.0, 20.0, 20.1, 2.0**60, 2.0**-60, 5e-324]

# Values that an fp32 model meets, with the hostile ones often.
elements = st.one_of(
    st.sampled_from(HOSTILE), st.floats(width=32, allow_nan=False), st.floats(-10, 10)
)
finite_elements = st.one_of(
    st.sampled_from([x for x in HOSTILE if math.isfinite(x)]),
    st.floats(-1e30, 1e30, width=64),
    st.floats(-10, 10),
)
fast = settings(max_examples=40, deadline=None)


@st.composite
def matrices(draw, element=elements, dims=2):
    shape = [draw(st.integers(1, 5)) for _ in range(dims)]
    count = math.prod(shape)
    values = draw(st.lists(element, min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def large_mean(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return 1e4 + 1e-3 * noise


def row_scale(x: torch.Tensor) -> torch.Tensor | float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 1.0


def check_unary(name: str, truth, x: torch.Tensor, scale=1.0, **attributes) -> None:
    graph = GraphUnderTest()
    y = graph.op(name, graph.leaf(x), **attributes)
    expected = truth(x)
    # Rounding errors of the formulas are relative to x where they cancel.
    magnitude = torch.where(x.isfinite(), x.abs(), torch.ones_like(x))
    assert_same(graph.evaluate(y, expected), expected, scale=scale * (1 + magnitude))


PRIMITIVES = {
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "sign": torch.sign,
    "relu": torch.relu,
    "logical_not": torch.logical_not,
}

# (operator, attributes, PyTorch's function)
ACTIVATIONS = [
    ("gelu", {}, F.gelu),
    ("gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("silu", {}, F.silu),
    ("mish", {}, F.mish),
    ("softplus", {}, F.softplus),
    ("softplus", {"beta": 0.5, "threshold": 3}, lambda x: F.softplus(x, 0.5, 3)),
    ("elu", {}, F.elu),
    ("elu", {"alpha": 0.3}, lambda x: F.elu(x, 0.3)),
    ("selu", {}, F.selu),
    ("celu", {"alpha": 1.7}, lambda x: F.celu(x, 1.7)),
    ("leaky_relu", {}, F.leaky_relu),
    ("leaky_relu", {"negative_slope": -0.5}, lambda x: F.leaky_relu(x, -0.5)),
    ("hardtanh", {}, F.hardtanh),
    ("hardtanh", {"min": -0.25, "max": 2}, lambda x: F.hardtanh(x, -0.25, 2)),
    ("relu6", {}, F.relu6),
    ("clamp", {"min": -0.5}, lambda x: torch.clamp(x, min=-0.5)),
    ("clamp", {"max": 0.5}, lambda x: torch.clamp(x, max=0.5)),
    ("clamp", {"min": 1, "max": -1}, lambda x: torch.clamp(x, 1, -1)),
    ("clamp", {}, lambda x: x),
    ("hardswish", {}, F.hardswish),
    ("hardsigmoid", {}, F.hardsigmoid),
    ("hardshrink", {}, F.hardshrink),
    ("hardshrink", {"lambda": 2}, lambda x: F.hardshrink(x, 2)),
    ("softshrink", {}, F.softshrink),
    ("softshrink", {"lambda": 2}, lambda x: F.softshrink(x, 2)),
    ("softsign", {}, F.softsign),
    ("tanhshrink", {}, F.tanhshrink),
    ("logsigmoid", {}, F.logsigmoid),
    ("threshold", {"threshold": 0.5, "value": 20}, lambda x: F.threshold(x, 0.5, 20)),
    ("exp2", {}, torch.exp2),
    ("log2", {}, torch.log2),
    ("log10", {}, torch.log10),
    ("dropout", {"p": 0.5}, lambda x: F.dropout(x, 0.5, training=False)),
]


def short(value: object) -> str:
    """The same in every process: no address of a function."""
    return getattr(value, "__name__", str(value)[:40])


@pytest.mark.parametrize("name", PRIMITIVES)
@given(x=matrices())
@fast
def test_unary_primitives(name, x):
    check_unary(name, PRIMITIVES[name], x, scale=0 if name in ("neg", "abs", "sign") else 1e-4)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_unary_primitives_on_every_hostile_value(name):
    check_unary(name, PRIMITIVES[name], torch.tensor([HOSTILE], dtype=torch.float64), scale=1e-4)


@pytest.mark.parametrize(("name", "attributes", "truth"), ACTIVATIONS, ids=short)
@given(x=matrices())
@fast
def test_activations(name, attributes, truth, x):
    check_unary(name, truth, x, **attributes)


@pytest.mark.parametrize(("name", "attributes", "truth"), ACTIVATIONS, ids=short)
def test_activations_on_every_hostile_value(name, attributes, truth):
    check_unary(name, truth, torch.tensor([HOSTILE], dtype=torch.float64), **attributes)


def test_tan_away_from_its_poles():
    check_unary("tan", torch.tan, torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)[None])


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
}


@pytest.mark.parametrize("name", BINARY)
@given(data=st.data())
@fast
def test_binary_primitives_broadcast(name, data):
    x = data.draw(matrices())
    row = data.draw(st.lists(elements, min_size=x.shape[1], max_size=x.shape[1]))
    b = torch.tensor(row, dtype=torch.float64)
    for left, right in ((x, b), (b, x), (x, x[:, :1])):
        graph = GraphUnderTest()
        y = graph.op(name, graph.leaf(left), graph.leaf(right))
        expected = BINARY[name](left, right)
        assert_same(graph.evaluate(y, expected), expected, scale=0)


@given(x=matrices())
@fast
def test_select_takes_nan_as_true(x):
    graph = GraphUnderTest()
    leaf = graph.leaf(x)
    y = graph.op("select", leaf, graph.op("neg", leaf), graph.constant(7.0))
    expected = torch.where(x != 0, -x, 7.0)
    assert_same(graph.evaluate(y, expected), expected, scale=0)


@given(x=matrices(), slope=elements)
@fast
def test_prelu(x, slope):
    weight = torch.linspace(-1, 1, x.shape[1], dtype=torch.float64)
    weight[0] = slope
    graph = GraphUnderTest()
    y = graph.op("prelu", graph.leaf(x), graph.leaf(weight))
    expected = F.prelu(x, weight)
    assert_same(graph.evaluate(y, expected), expected, scale=0)


# ---- products ----


@given(data=st.data())
@fast
def test_linear(data):
    x = data.draw(matrices(finite_elements))
    rows = data.draw(st.integers(1, 4))
    weight = torch.randn(rows, x.shape[1], dtype=torch.float64)
    bias = torch.randn(rows, dtype=torch.float64)
    graph = GraphUnderTest()
    w = graph.leaf(weight[None, :, None, :], "parameter", batched=False)
    y = graph.op("linear", graph.leaf(x), w, graph.leaf(bias, "parameter"))
    expected = F.linear(x, weight, bias)
    scale = F.linear(x.abs(), weight.abs())
    assert_same(graph.evaluate(y, expected), expected, scale=scale, tolerance=1e-13)


def test_linear_spreads_nan_and_inf_as_pytorch():
    x = torch.tensor([[1.0, INF], [NAN, 2.0], [0.0, 3.0], [-INF, INF]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [INF, 1.0]], dtype=torch.float64)
    graph = GraphUnderTest()
    w = graph.leaf(weight[None, :, None, :], "parameter", batched=False)
    expected = F.linear(x, weight)
    assert_same(graph.evaluate(graph.op("linear", graph.leaf(x), w), expected), expected)


@pytest.mark.parametrize("batched", [True, False])
def test_matmul_of_three_axes(batched):
    a = torch.randn(3, 4, 5, dtype=torch.float64)
    b = torch.randn(3 if batched else 1, 5, 6, dtype=torch.float64)
    graph = GraphUnderTest()
    left = graph.leaf(a)
    y = graph.op("matmul", left, graph.leaf(b, batched=batched))
    expected = a @ b
    assert_same(graph.evaluate(y, expected), expected)


# ---- reductions ----

AXES = {"batch": 0, "rows": 1, "features": 2}
AXIS_SETS = [
    ["features"],
    ["batch"],
    ["rows"],
    ["batch", "features"],
    ["batch", "rows", "features"],
]


def dims_of(axes):
    return tuple(AXES[axis] for axis in axes)


REDUCTIONS = [
    ("sum", {}, lambda x, dim: x.sum(dim, keepdim=True)),
    ("mean", {}, lambda x, dim: x.mean(dim, keepdim=True)),
    ("max", {}, lambda x, dim: x.amax(dim, keepdim=True)),
    ("min", {}, lambda x, dim: x.amin(dim, keepdim=True)),
    ("var", {}, lambda x, dim: x.var(dim, keepdim=True)),
    ("var", {"unbiased": False}, lambda x, dim: x.var(dim, unbiased=False, keepdim=True)),
    ("std", {}, lambda x, dim: x.std(dim, keepdim=True)),
    ("logsumexp", {}, lambda x, dim: x.logsumexp(dim, keepdim=True)),
    ("norm", {}, lambda x, dim: torch.linalg.vector_norm(x, 2, dim, keepdim=True)),
    ("norm", {"p": 1}, lambda x, dim: torch.linalg.vector_norm(x, 1, dim, keepdim=True)),
    ("norm", {"p": "inf"}, lambda x, dim: torch.linalg.vector_norm(x, INF, dim, keepdim=True)),
]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("axes", AXIS_SETS, ids="-".join)
@pytest.mark.parametrize(("name", "attributes", "truth"), REDUCTIONS, ids=short)
@given(x=matrices(dims=3))
@settings(max_examples=25, deadline=None)
def test_reductions(name, attributes, truth, axes, x):
    if name == "norm":  # of a single element PyTorch takes |x|, whose square may underflow
        x = torch.where(x.abs() < 1e-150, 0.0, x)
    graph = GraphUnderTest()
    y = graph.op(name, graph.leaf(x), axes=axes, **attributes)
    expected = truth(x, dims_of(axes))
    scale = row_scale(x) ** (2 if name == "var" else 1)
    assert_same(graph.evaluate(y, expected), expected, scale=scale)


@pytest.mark.parametrize("axes", AXIS_SETS, ids="-".join)
@pytest.mark.parametrize(("name", "attributes", "truth"), REDUCTIONS, ids=short)
def test_reductions_under_a_large_mean(name, attributes, truth, axes):
    x = large_mean(4, 5, 6)
    graph = GraphUnderTest()
    y = graph.op(name, graph.leaf(x), axes=axes, **attributes)
    expected = truth(x, dims_of(axes))
    assert_same(graph.evaluate(y, expected), expected, scale=0, tolerance=1e-7)


@given(x=matrices())
@fast
def test_argmax(x):
    graph = GraphUnderTest()
    y = graph.op("argmax", graph.leaf(x))
    expected = x.argmax(1, keepdim=True)
    assert_same(graph.evaluate(y, expected), expected, scale=0)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    ("name", "truth"), [("softmax", F.softmax), ("log_softmax", F.log_softmax)]
)
@given(x=matrices(dims=3))
@fast
def test_softmax(name, truth, axis, x):
    graph = GraphUnderTest()
    y = graph.op(name, graph.leaf(x), axes=[axis])
    expected = truth(x, dim=AXES[axis])
    assert_same(graph.evaluate(y, expected), expected, scale=1)


@given(x=matrices(finite_elements))
@fast
def test_normalize(x):
    graph = GraphUnderTest()
    y = graph.op("normalize", graph.leaf(x))
    expected = F.normalize(x, dim=1)
    assert_same(graph.evaluate(y, expected), expected, scale=1)


# ---- normalisations ----


def parameter_pair(count: int):
    generator = torch.Generator().manual_seed(count)
    pair = torch.randn(2, count, dtype=torch.float64, generator=generator)
    return pair[0].contiguous(), pair[1].contiguous()


@pytest.mark.parametrize("affine", [True, False])
@given(data=st.data())
@fast
def test_layer_norm(affine, data):
    x = data.draw(st.one_of(matrices(st.floats(-10, 10)), st.just(large_mean(4, 64))))
    weight, bias = parameter_pair(x.shape[1]) if affine else (None, None)
    graph = GraphUnderTest()
    args = [graph.leaf(x)] + ([graph.leaf(weight), graph.leaf(bias)] if affine else [])
    expected = F.layer_norm(x, x.shape[1:], weight, bias, 1e-5)
    assert_same(graph.evaluate(graph.op("layer_norm", *args), expected), expected, 1, 1e-9)


def test_layer_norm_over_rows_and_features():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    weight, bias = (p.reshape(4, 5) for p in parameter_pair(20))
    graph = GraphUnderTest()
    leaves = [graph.leaf(p[None, :, None, :], batched=False) for p in (weight, bias)]
    y = graph.op("layer_norm", graph.leaf(x), *leaves, axes=["rows", "features"], eps=1e-3)
    expected = F.layer_norm(x, (4, 5), weight, bias, 1e-3)
    assert_same(graph.evaluate(y, expected), expected)


@pytest.mark.parametrize("eps", [None, 1e-3])
@given(x=matrices(st.floats(-100, 100)))
@fast
def test_rms_norm(eps, x):
    weight, _ = parameter_pair(x.shape[1])
    graph = GraphUnderTest()
    y = graph.op("rms_norm", graph.leaf(x), graph.leaf(weight), eps=eps)
    expected = F.rms_norm(x, x.shape[1:], weight, eps)
    assert_same(graph.evaluate(y, expected), expected)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(groups, length, affine):
    shape = (4, 6) if length is None else (4, 6, length)
    # [N, C] with one channel a group has a variance of 0: rounding alone would be compared.
    x = large_mean(*shape) if groups < 6 or length else torch.zeros(shape, dtype=torch.float64)
    weight, bias = parameter_pair(6) if affine else (None, None)
    graph = GraphUnderTest()
    args = [graph.leaf(x)] + ([graph.leaf(weight), graph.leaf(bias)] if affine else [])
    channels = "features" if length is None else "rows"
    y = graph.op("group_norm", *args, groups=groups, channels=channels, eps=1e-8)
    expected = F.group_norm(x, groups, weight, bias, 1e-8)
    assert_same(graph.evaluate(y, expected), expected, 1, 1e-7)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_instance_norm(training, tracked):
    module = nn.InstanceNorm1d(3, affine=True, track_running_stats=tracked, momentum=0.3)
    module = module.double().train(training)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    buffers = [b.clone() for b in (module.running_mean, module.running_var)] if tracked else []
    for step in range(2):
        x = torch.randn(4, 3, 5, dtype=torch.float64) + step
        graph = GraphUnderTest()
        args = [graph.leaf(p.detach()) for p in (module.weight, module.bias)]
        args += [graph.leaf(b, "buffer") for b in buffers]
        y = graph.op(
            "instance_norm", graph.leaf(x), *args, momentum=0.3, training=training or not tracked
        )
        expected = module(x).detach()
        assert_same(graph.evaluate(y, expected), expected)
        if tracked:
            assert_same(buffers[0], module.running_mean)
            assert_same(buffers[1], module.running_var)


class BatchNormPair:
    """A PyTorch batch norm and the arguments of ours, stepped side by side."""

    def __init__(self, **options):
        self.module = nn.BatchNorm1d(4, **options).double()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn_like(parameter))
        names = ("running_mean", "running_var", "num_batches_tracked")
        self.buffers = {
            name: None if getattr(self.module, name) is None else getattr(self.module, name).clone()
            for name in names
        }

    def step(self, x: torch.Tensor) -> None:
        graph = GraphUnderTest()
        args = [graph.leaf(x)]
        for parameter in (self.module.weight, self.module.bias):
            args.append(-1 if parameter is None else graph.leaf(parameter.detach(), "parameter"))
        for buffer in self.buffers.values():
            args.append(-1 if buffer is None else graph.leaf(buffer.reshape(-1), "buffer"))
        y = graph.op(
            "batch_norm",
            *args,
            training=self.module.training,
            momentum=self.module.momentum,
            eps=self.module.eps,
            axes=["batch"] if x.dim() == 2 else ["batch", "features"],
        )
        expected = self.module(x).detach()
        assert_same(graph.evaluate(y, expected), expected, scale=1, tolerance=1e-8)
        for name, buffer in self.buffers.items():
            if buffer is not None:
                assert_same(buffer, getattr(self.module, name), scale=0, tolerance=1e-7)


@pytest.mark.parametrize("length", [None, 3])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0])
def test_batch_norm_options(momentum, affine, tracked, length):
    torch.manual_seed(5)
    pair = BatchNormPair(momentum=momentum, affine=affine, track_running_stats=tracked, eps=1e-6)
    shape = (6, 4) if length is None else (6, 4, length)
    for training in (True, True, False, True):
        pair.module.train(training)
        pair.step(torch.randn(shape, dtype=torch.float64))
        pair.step(large_mean(*shape))


def test_batch_norm_of_nan_and_inf_spoils_only_its_columns():
    x = torch.randn(6, 4, dtype=torch.float64)
    x[1, 1], x[2, 2] = NAN, INF
    pair = BatchNormPair()
    graph = GraphUnderTest()
    y = graph.op("batch_norm", graph.leaf(x), training=True)
    expected = F.batch_norm(x, None, None, training=True)
    assert_same(graph.evaluate(y, expected), expected)
    pair.step(x)


# ---- pooling and views ----


@pytest.mark.parametrize("kernel", [1, 2, 3, 6])
@pytest.mark.parametrize("dims", [2, 3])
def test_pooling(kernel, dims):
    x = torch.randn((4, 6) if dims == 2 else (4, 3, 6), dtype=torch.float64)
    planes = x[:, None, :] if dims == 2 else x
    for name, truth in (("max_pool", F.max_pool1d), ("avg_pool", F.avg_pool1d)):
        graph = GraphUnderTest()
        y = graph.op(name, graph.leaf(x), kernel=kernel)
        expected = truth(planes, kernel)
        expected = expected[:, 0] if dims == 2 else expected
        assert_same(graph.evaluate(y, expected), expected)


def test_pooling_that_leaves_a_rest_is_unsupported():
    graph = GraphUnderTest()
    x = torch.zeros(2, 7, dtype=torch.float64)
    with pytest.raises(IngotError, match="leave a rest of 1 features"):
        graph.evaluate(graph.op("max_pool", graph.leaf(x), kernel=3), x)


# ---- dtypes and layouts ----

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ALL_DTYPES = [*FLOATS, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_leaves_of_every_dtype_and_layout(dtype):
    base = torch.tensor([HOSTILE[:12]] * 4, dtype=torch.float64)
    base = torch.nan_to_num(base, 0, 7, -7) if dtype in (torch.int64, torch.bool) else base
    base = base.clamp(-1e4, 1e4).to(dtype)
    for x in (base, base.t().contiguous().t(), base[::2, 1::3], base[:1].expand(5, 12)):
        graph = GraphUnderTest()
        y = graph.op("cast", graph.leaf(x), dtype=None)
        graph.values[y]["attributes"] = {"dtype": "f64"}
        assert_same(graph.evaluate(y, x), x, scale=0, tolerance=0)


@pytest.mark.parametrize("left", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("right", [*ALL_DTYPES, 2.0, 0.5], ids=str)
@pytest.mark.parametrize("name", ["mul", "div", "maximum", "lt", "add"])
def test_result_dtypes_are_pytorchs(name, left, right):
    if name == "add" and {left, right} <= {torch.bool}:
        pytest.skip("add of booleans is refused, with its reason")
    if right == 2.0 and left not in FLOATS and name != "div":
        right = 2  # a whole number beside integers is one of them
    if name == "maximum" and not isinstance(right, torch.dtype):
        pytest.skip("torch.maximum takes tensors only")
    x = torch.ones(2, 3, dtype=left)
    graph = GraphUnderTest()
    a = graph.leaf(x)
    if isinstance(right, torch.dtype):
        other = torch.ones(3, dtype=right)
        b = graph.leaf(other)
    else:
        other, b = right, graph.constant(right)
    expected = BINARY[name](x, other)
    y = graph.op(name, a, b, dtype=expected.dtype)  # a wrong declaration is an error
    assert_same(graph.evaluate(y, expected), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("gelu", F.gelu),
        ("softmax", lambda x: F.softmax(x, -1)),
        ("layer_norm", lambda x: F.layer_norm(x, x.shape[1:])),
        ("mean", lambda x: x.mean(1, keepdim=True)),
        ("argmax", lambda x: x.argmax(1, keepdim=True)),
        ("exp", torch.exp),
        ("logsumexp", lambda x: x.logsumexp(1, keepdim=True)),
    ],
)
def test_high_level_operators_keep_pytorchs_dtype(name, truth, dtype):
    x = torch.linspace(-2, 2, 12).reshape(3, 4).to(dtype)
    graph = GraphUnderTest()
    y = graph.op(name, graph.leaf(x), dtype=truth(x).dtype)
    expected = truth(x.double())
    assert_same(graph.evaluate(y, expected), expected, 1, 1e-9)
