"""Every row of the importer's table against PyTorch in double precision."""

import math
from types import SimpleNamespace

import ingot
import pytest
import selection
import torch
from capture_support import check_capture, whole
from ingot.capture.captured import TorchStep
from ingot.capture.cutting import Cut
from ingot.capture.layout import UnfitError, Value
from torch import nn
from torch.nn import functional as F

FEATURES = 24


class Chain(nn.Module):
    """A linear layer and a function behind it; `rows`: inputs [B, rows, K]."""

    def __init__(self, function, features=FEATURES):
        super().__init__()
        self.linear = nn.Linear(8, features)
        self.vector = nn.Parameter(torch.rand(features) + 0.5)
        self.other = nn.Parameter(torch.randn(features))
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x), self)


POINTWISE = {
    "abs": lambda x, m: x.abs(),
    "add": lambda x, m: x + m.vector,
    "add_alpha": lambda x, m: torch.add(x, m.vector, alpha=0.5),
    "add_scalar": lambda x, m: x + 2,
    "addcdiv": lambda x, m: torch.addcdiv(x, x, m.vector, value=0.5),
    "addcmul": lambda x, m: torch.addcmul(x, x, m.vector, value=-2.0),
    "celu": lambda x, m: F.celu(x, 0.7),
    "ceil": lambda x, m: x.ceil(),
    "clamp": lambda x, m: x.clamp(-0.5, 0.5),
    "clamp_max": lambda x, m: torch.clamp_max(x, 0.1),
    "clamp_min": lambda x, m: torch.clamp_min(x, 0.1),
    "clamp_one_side": lambda x, m: x.clamp(max=0.25),
    "clamp_tensors": lambda x, m: torch.clamp(x, m.other, m.vector + 3),
    "clip": lambda x, m: torch.clip(x, -1, 1),
    "cos": lambda x, m: x.cos(),
    "div": lambda x, m: x / m.vector,
    "div_floor": lambda x, m: torch.div(x, m.vector, rounding_mode="floor"),
    "div_scalar": lambda x, m: x / 3.0,
    "div_trunc": lambda x, m: torch.div(x, m.vector, rounding_mode="trunc"),
    "dropout_eval": lambda x, m: F.dropout(x, 0.5, training=False) * 2,
    "elu": lambda x, m: F.elu(x, 0.5),
    "eq_where": lambda x, m: torch.where(x == x, x, m.vector),
    "erf": lambda x, m: x.erf(),
    "exp": lambda x, m: x.exp(),
    "exp2": lambda x, m: torch.exp2(x),
    "expm1": lambda x, m: x.expm1(),
    "floor": lambda x, m: x.floor(),
    "full_like": lambda x, m: torch.maximum(x, torch.full_like(x, 0.25)),
    "gelu": lambda x, m: F.gelu(x),
    "gelu_tanh": lambda x, m: F.gelu(x, approximate="tanh"),
    "ge": lambda x, m: torch.where(x >= 0.1, x, -x),
    "hardshrink": lambda x, m: F.hardshrink(x, 0.3),
    "hardsigmoid": lambda x, m: F.hardsigmoid(x),
    "hardswish": lambda x, m: F.hardswish(x),
    "hardtanh": lambda x, m: F.hardtanh(x, -0.3, 0.7),
    "le": lambda x, m: torch.where(x <= m.other, x, m.vector),
    "leaky_relu": lambda x, m: F.leaky_relu(x, 0.2),
    "lerp": lambda x, m: torch.lerp(x, m.vector.expand_as(x), 0.25),
    "log": lambda x, m: (x.abs() + 1).log(),
    "log10": lambda x, m: (x.abs() + 1).log10(),
    "log1p": lambda x, m: x.abs().log1p(),
    "log2": lambda x, m: (x.abs() + 1).log2(),
    "log_sigmoid": lambda x, m: F.logsigmoid(x),
    "isnan": lambda x, m: torch.where(torch.isnan(x.log()), m.other, x),
    "literal": lambda x, m: (x + torch.tensor(0.5)) * torch.tensor(2),
    "logaddexp": lambda x, m: torch.logaddexp(x, m.other),
    "logaddexp_equal": lambda x, m: torch.logaddexp(x.log().nan_to_num(), x.log().nan_to_num()),
    "made_once": lambda x, m: x * torch.arange(FEATURES) + torch.ones(1, FEATURES).to(x.dtype),
    "nan_to_num": lambda x, m: torch.nan_to_num(x.log() / x.round(), 0.25, 3.0, -4.0),
    "logical": lambda x, m: torch.where((x > 0) & ~(x > 1) | (x < -1), x, m.other),
    "masked_fill": lambda x, m: x.masked_fill(x > 0.5, -1.0),
    "mask_times": lambda x, m: (x > 0) * x,
    "maximum": lambda x, m: torch.maximum(x, m.other),
    "max_other": lambda x, m: torch.max(x, m.other),
    "minimum": lambda x, m: torch.minimum(x, m.other),
    "mish": lambda x, m: F.mish(x),
    "mul": lambda x, m: x * m.vector,
    "ne": lambda x, m: torch.where(x != 0, x, m.vector),
    "neg": lambda x, m: -x,
    "ones_like": lambda x, m: torch.ones_like(x) - x,
    "pow": lambda x, m: (x.abs() + 1) ** 1.7,
    "pow_cube": lambda x, m: x**3,
    "pow_half": lambda x, m: x.abs() ** 0.5,
    "pow_of": lambda x, m: 2.0**x,
    "pow_square": lambda x, m: x**2,
    "pow_tensor": lambda x, m: (x.abs() + 1) ** m.other,
    "prelu": lambda x, m: F.prelu(x, m.vector),
    "prelu_single": lambda x, m: F.prelu(x, m.vector[:1]),
    "reciprocal": lambda x, m: (x.abs() + 1).reciprocal(),
    "relu": lambda x, m: F.relu(x),
    "relu6": lambda x, m: F.relu6(x * 10),
    "relu_inplace": lambda x, m: F.relu(x, inplace=True) + 1,
    "round": lambda x, m: (x * 3).round(),
    "rsqrt": lambda x, m: (x.abs() + 1).rsqrt(),
    "rsub": lambda x, m: 1.0 - x,
    "rsub_alpha": lambda x, m: torch.rsub(x, m.vector, alpha=2),
    "selu": lambda x, m: F.selu(x),
    "sigmoid": lambda x, m: x.sigmoid(),
    "sign": lambda x, m: x.sign(),
    "silu": lambda x, m: F.silu(x),
    "sin": lambda x, m: x.sin(),
    "softplus": lambda x, m: F.softplus(x * 9, 2.0, 5.0),
    "softshrink": lambda x, m: F.softshrink(x, 0.2),
    "softsign": lambda x, m: F.softsign(x),
    "sqrt": lambda x, m: x.abs().sqrt(),
    "square": lambda x, m: x.square(),
    "sub": lambda x, m: x - m.vector,
    "sub_alpha": lambda x, m: torch.sub(x, m.vector, alpha=2),
    "tan": lambda x, m: x.tan(),
    "tanh": lambda x, m: x.tanh(),
    "tanhshrink": lambda x, m: F.tanhshrink(x),
    "threshold": lambda x, m: F.threshold(x, 0.1, -7.0),
    "trunc": lambda x, m: (x * 3).trunc(),
    "where_scalar": lambda x, m: torch.where(x > 0, x, 0.0),
    "where_scalars": lambda x, m: torch.where(x > 0, 1.0, 0.0) * x,
    "zeros_like": lambda x, m: torch.zeros_like(x) + x,
}

# Parts of these are PyTorch's by design (slices of parameters, scalars without a tensor operand,
# division by remainders).
PARTLY = {"prelu_single", "lerp", "where_scalars", "div_floor"}


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_pointwise(name):
    captured = check_capture(Chain(POINTWISE[name]), torch.randn(4, 8))
    if name not in PARTLY:
        assert whole(captured), captured.unsupported


FEATURE_OPERATORS = {
    "amax": lambda x, m: x.amax(dim=1),
    "adaptive_max_pool1d": lambda x, m: F.adaptive_max_pool1d(x.unsqueeze(1), 6).squeeze(1),
    "amin": lambda x, m: x.amin(dim=-1, keepdim=True),
    "aminmax": lambda x, m: tuple(x.aminmax(dim=1)),
    "argmin": lambda x, m: x.argmin(dim=1),
    "argmax": lambda x, m: x.argmax(dim=1),
    "avg_pool1d": lambda x, m: F.avg_pool1d(x.unsqueeze(1), 4).squeeze(1),
    "adaptive_avg_pool1d": lambda x, m: F.adaptive_avg_pool1d(x.unsqueeze(1), 6).squeeze(1),
    "group_norm": lambda x, m: F.group_norm(x, 4, m.vector, m.other),
    "group_norm_plain": lambda x, m: F.group_norm(x, 3, eps=1e-3),
    "instance_norm": lambda x, m: F.instance_norm(x.unsqueeze(1)).squeeze(1),
    "layer_norm": lambda x, m: F.layer_norm(x, (FEATURES,), m.vector, m.other),
    "layer_norm_plain": lambda x, m: F.layer_norm(x, (FEATURES,), eps=1e-3),
    "log_softmax": lambda x, m: F.log_softmax(x, dim=1),
    "logsumexp": lambda x, m: torch.logsumexp(x, dim=1, keepdim=True),
    "max_dim": lambda x, m: x.max(dim=1).values,
    "max_dim_both": lambda x, m: tuple(x.max(dim=1, keepdim=True)),
    "max_all": lambda x, m: x.max(),
    "max_pool1d": lambda x, m: F.max_pool1d(x.unsqueeze(1), 4).squeeze(1),
    "mean": lambda x, m: x.mean(dim=1),
    "mean_all": lambda x, m: x.mean(),
    "mean_batch": lambda x, m: x - x.mean(dim=0),
    "min_dim_both": lambda x, m: tuple(x.min(dim=1)),
    "std_mean": lambda x, m: tuple(torch.std_mean(x, dim=1, unbiased=False)),
    "var_mean": lambda x, m: tuple(torch.var_mean(x, dim=1, keepdim=True)),
    "min_dim": lambda x, m: x.min(dim=1)[0],
    "norm": lambda x, m: x / torch.linalg.vector_norm(x, dim=1, keepdim=True),
    "norm_1": lambda x, m: torch.norm(x, p=1, dim=1),
    "norm_inf": lambda x, m: torch.linalg.vector_norm(x, ord=math.inf, dim=1),
    "normalize": lambda x, m: F.normalize(x, dim=1),
    "rms_norm": lambda x, m: F.rms_norm(x, (FEATURES,), m.vector, 1e-6),
    "rms_norm_eps": lambda x, m: F.rms_norm(x, (FEATURES,)),
    "softmax": lambda x, m: torch.softmax(x, dim=-1),
    "softmax_batch": lambda x, m: torch.softmax(x, dim=0),
    "std": lambda x, m: x.std(dim=1),
    "sum": lambda x, m: x.sum(dim=1, keepdim=True),
    "sum_all": lambda x, m: x.sum(),
    "sum_twice": lambda x, m: x.sum(dim=1, keepdim=True).mean(dim=1),
    "var": lambda x, m: x.var(dim=1, unbiased=False),
    "var_correction": lambda x, m: torch.var(x, dim=1, correction=1, keepdim=True),
}


@pytest.mark.parametrize("name", sorted(FEATURE_OPERATORS))
def test_over_features(name):
    captured = check_capture(Chain(FEATURE_OPERATORS[name]), torch.randn(4, 8))
    assert whole(captured) or name in ("normalize",), captured.unsupported


def _with_zeros(x):
    x[:, :5] = 0.0
    return x


SHAPED = {
    "rows": (lambda x, m: F.relu(x) + m.vector, (4, 6, 8)),
    "rows_softmax": (lambda x, m: torch.softmax(x, dim=1), (4, 6, 8)),
    "rows_mean": (lambda x, m: x.mean(dim=1), (4, 6, 8)),
    "rows_two_axes": (lambda x, m: x.sum(dim=(1, 2)), (4, 6, 8)),
    "rows_layer_norm": (lambda x, m: F.layer_norm(x, (6, FEATURES)), (4, 6, 8)),
    "rows_transpose": (lambda x, m: x.transpose(1, 2) * 2, (4, 6, 8)),
    "rows_transpose_norm": (
        lambda x, m: F.batch_norm(x.transpose(1, 2), None, None, m.vector, m.other, True),
        (4, 6, 8),
    ),
    "rows_flatten": (lambda x, m: torch.softmax(x.flatten(1), dim=1), (4, 6, 8)),
    "rows_merge_batch": (lambda x, m: torch.softmax(x.reshape(-1, FEATURES), 1), (4, 6, 8)),
    "rows_row_operand": (lambda x, m: x * x.mean(dim=2, keepdim=True), (4, 6, 8)),
    "rows_group_norm": (lambda x, m: F.group_norm(x, 3), (4, 6, 8)),
    "rows_instance_norm": (lambda x, m: F.instance_norm(x), (4, 6, 8)),
    "four": (lambda x, m: F.gelu(x) + m.vector, (2, 3, 5, 8)),
    "four_last": (lambda x, m: torch.softmax(x, dim=2), (2, 3, 5, 8)),
    "split": (lambda x, m: x.view(x.shape[0], 4, 6).mean(dim=2), (4, 8)),
    "split_norm": (lambda x, m: F.normalize(x.view(x.shape[0], 4, 6), dim=2).flatten(1), (4, 8)),
    "split_transpose": (lambda x, m: x.view(-1, 4, 6).transpose(1, 2) + 1, (4, 8)),
    "unflatten": (lambda x, m: x.unflatten(1, (4, 6)).amax(dim=1), (4, 8)),
    "unsqueeze_twice": (lambda x, m: x.unsqueeze(1).unsqueeze(1).tanh().squeeze(), (4, 8)),
    "permute": (lambda x, m: x.permute(0, 2, 1).sum(dim=1), (4, 6, 8)),
    "outer_row": (lambda x, m: x.sum(dim=1, keepdim=True) * m.vector, (4, 8)),
    "expand": (lambda x, m: x.mean(dim=1, keepdim=True).expand_as(x) + x, (4, 8)),
    "expanded_outside": (lambda x, m: x.unsqueeze(1).expand(-1, 3, -1).cumsum(1), (4, 8)),
    "expanded_result": (lambda x, m: x.mean(dim=1, keepdim=True).expand(-1, 5), (4, 8)),
    "expanded_reduced": (
        lambda x, m: (lambda y: y - y.amin(-1, keepdim=True))(x[:, None].expand(-1, 3, -1)).sum(1),
        (4, 8),
    ),
    "expanded_sum": (lambda x, m: x.unsqueeze(1).expand(-1, 3, -1).sum(1) * 2, (4, 8)),
    "five_axes": (lambda x, m: F.softmax(F.gelu(x) + m.vector, dim=-1), (2, 3, 2, 4, 8)),
    "four_mean": (lambda x, m: x - x.mean(dim=-1, keepdim=True), (2, 3, 5, 8)),
    "four_middle_operand": (lambda x, m: x * x.mean(dim=(2, 3), keepdim=True), (2, 3, 5, 8)),
    "four_permuted": (lambda x, m: F.relu(x).permute(0, 3, 1, 2) + 1, (2, 3, 5, 8)),
    "literal_for_pytorch": (lambda x, m: x.cumsum(1) * torch.tensor(2.0), (4, 8)),
    "no_batch": (lambda x, m: F.relu(x) * 2, (8,)),
    "overlapping_avg": (lambda x, m: F.avg_pool1d(x.unsqueeze(1), 4, 2).squeeze(1), (4, 8)),
    "overlapping_dilated": (lambda x, m: F.max_pool1d(x.unsqueeze(1), 3, 1, 0, 2), (4, 8)),
    "parts_written": (lambda x, m: _with_zeros(F.relu(x)) * 2, (4, 8)),
    "avg_pool_remainder": (lambda x, m: F.avg_pool1d(x.unsqueeze(1), 7).squeeze(1) * 2, (4, 8)),
    "pool_remainder": (lambda x, m: F.max_pool1d(x.unsqueeze(1), 7).squeeze(1) * 2, (4, 8)),
    "sliced_whole": (lambda x, m: F.relu(x)[:, :, None] + x[:, :, None], (4, 8)),
    "viewed_and_whole": (lambda x, m: (x.relu(), x.relu().view(-1, 4, 6)), (4, 8)),
    "viewed_twice": (lambda x, m: (x.view(-1, 2, 12), x.view(-1, 4, 6)), (4, 8)),
}


class Padded(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, FEATURES), function

    def forward(self, x):
        return self.function(x, self.linear(x))


@pytest.mark.parametrize(
    ("function", "is_copied"),
    [
        (lambda x, y: torch.tanh(F.pad(y.relu(), (0, 0, 0, 0))) * 2, False),
        (lambda x, y: torch.tanh(F.pad(y.relu(), (0, 0), mode="constant", value=3.0)) * 2, False),
        (lambda x, y: torch.tanh(F.pad(y.relu(), (0, 1))) * 2, True),
        (lambda x, y: F.pad(y.relu(), (0, 0)), True),  # a result of its own
        (lambda x, y: (lambda z: (z, F.pad(z, (0, 0)) * 2))(y.relu()), True),
        (lambda x, y: torch.tanh(F.pad(x, (0, 0))) * y.sum(), True),  # the caller may write into x
        (lambda x, y: torch.tanh(F.pad(y.relu()[:, ::2], (0, 0))) * 2, True),  # lies otherwise
    ],
    ids="nothing value something returned beside input strided".split(),
)
def test_padding_by_nothing_is_no_copy(function, is_copied):
    captured = check_capture(Padded(function), torch.randn(4, 8))
    names = [step.what for step in captured.steps if isinstance(step, TorchStep)]
    assert ("pad" in names or "constant_pad_nd" in names) == is_copied


@pytest.mark.parametrize("name", sorted(SHAPED))
def test_shapes(name):
    function, shape = SHAPED[name]
    check_capture(Chain(function), torch.randn(shape))


class Products(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))
        self.second = nn.Parameter(torch.randn(5, 7))
        self.bias = nn.Parameter(torch.randn(5))
        self.column = nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, *tensors):
        return self.function(self, *tensors)


PRODUCTS = {
    "mm": (lambda m, x: x @ m.weight, [(4, 8)]),
    "merged_rows": (
        lambda m, x: torch.relu(x.reshape(-1, 8) @ m.weight).view(-1, 3, 5) * 2,
        [(4, 3, 8)],
    ),
    "merged_rows_norm": (
        lambda m, x: F.layer_norm(x.view(-1, 8), (8,)) @ m.weight,
        [(4, 3, 8)],
    ),
    "mm_method": (lambda m, x: torch.mm(x, m.weight) + m.bias, [(4, 8)]),
    "matmul_rows": (lambda m, x: torch.matmul(x, m.weight), [(4, 3, 8)]),
    "matmul_t": (lambda m, x: x @ m.second.T.T @ m.second.t(), [(4, 5)]),
    "addmm": (lambda m, x: torch.addmm(m.bias, x, m.weight, beta=0.5, alpha=2.0), [(4, 8)]),
    "chain": (lambda m, x: torch.relu(x @ m.weight) @ m.second, [(4, 8)]),
    "bmm": (lambda m, x, y: torch.bmm(x, y).relu(), [(4, 3, 8), (4, 8, 6)]),
    "bmm_one_row": (lambda m, x, y: torch.bmm(x, y).relu(), [(4, 1, 8), (4, 8, 6)]),
    "bmm_t": (lambda m, x, y: torch.softmax(x @ y.transpose(1, 2), -1), [(4, 3, 8), (4, 6, 8)]),
    "attention": (
        lambda m, x, y: torch.softmax(x @ y.transpose(1, 2), -1) @ y,
        [(4, 3, 8), (4, 6, 8)],
    ),
    "vector": (lambda m, x: x @ m.column + 1, [(4, 8)]),
    "folded_weight": (lambda m, x: F.linear(x, m.weight.t() * m.bias[:, None]), [(4, 8)]),
    "no_bias": (lambda m, x: F.linear(x, m.weight.t()).relu(), [(4, 8)]),
    "four_axes": (lambda m, x: F.relu(x @ m.weight), [(2, 3, 4, 8)]),
    "baddbmm": (lambda m, x, y: torch.baddbmm(x, x, y, alpha=0.5), [(4, 3, 3), (4, 3, 3)]),
    "einsum": (lambda m, x: torch.einsum("bk,kn->bn", x, m.weight).relu(), [(4, 8)]),
    "einsum_spread": (lambda m, x: torch.einsum("...k,kn->...n", x, m.weight) + 1, [(4, 3, 8)]),
    "einsum_turned": (lambda m, x: torch.einsum("kn,btk->bnt", m.weight, x) + 1, [(4, 3, 8)]),
    "einsum_batch": (
        lambda m, x, y: torch.einsum("bik,bjk->bij", x, y).softmax(-1),
        [(4, 3, 8), (4, 6, 8)],
    ),
    "einsum_other": (lambda m, x: torch.einsum("bi,bj->bij", x, x).relu(), [(4, 8)]),
    "matrix_times_vector": (
        lambda m, x: torch.tril(m.weight) @ m.bias + x.relu() + torch.mv(m.weight, m.bias),
        [(4, 8)],
    ),
    "weight_norm": (
        lambda m, x: F.linear(x, torch._weight_norm(m.weight, m.bias[None], 1).t()).relu(),
        [(4, 8)],
    ),
    "input_weight": (lambda m, x, w: torch.relu(x @ w), [(4, 8), (8, 9)]),
    "scores_of_batch": (lambda m, x: (x @ x.t()).relu(), [(4, 8)]),
}


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_products(name):
    function, shapes = PRODUCTS[name]
    check_capture(Products(function), *(torch.randn(shape) for shape in shapes))


def test_only_torch_operators_are_named_with_their_line():
    captured = check_capture(
        Chain(lambda x, m: torch.cumsum(F.relu(x) * m.vector, dim=1) + 1), torch.randn(4, 8)
    )
    assert [(item.what, item.where.split(":")[0]) for item in captured.unsupported] == [
        ("cumsum", "test_capture_operators.py")
    ]
    assert len(captured.regions) == 1


def test_both_sides_of_an_unsupported_operator_are_taken():
    def forward(x, m):
        x = torch.cumsum(F.relu(x) * m.vector, dim=1)
        return F.softmax(F.layer_norm(x, (FEATURES,)), dim=1)

    captured = check_capture(Chain(forward), torch.randn(4, 8))
    assert len(captured.regions) == 2


def test_random_numbers_stay_pytorchs():
    module = Chain(lambda x, m: F.dropout(x * 2, 0.5, training=True) + x)
    captured = check_capture_shape_only(module, torch.randn(4, 8))
    assert [item.what for item in captured.unsupported] == ["dropout"]


def check_capture_shape_only(module, *inputs):
    from ingot.model_capture import capture

    return capture(module, inputs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", selection.quick([0.1, None], [0.1, 0.0, 1.0, None]))
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("length", [0, 5])
def test_batch_norm_options(training, momentum, affine, tracking, length):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, length or 6)
            self.bn = nn.BatchNorm1d(
                6, eps=1e-3, momentum=momentum, affine=affine, track_running_stats=tracking
            )

        def forward(self, x):
            return self.bn(self.linear(x)) * 2

    model = Model().train(training)
    if tracking:
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.5, 2)
    shape = (4, 6, 8) if length else (4, 8)
    captured = check_capture(model, torch.randn(shape), batches=(3, 5, 2))
    assert whole(captured), captured.unsupported


@pytest.mark.skipif(
    torch.__version__.startswith("2.4."),
    reason="PyTorch 2.4 shows its running statistics as written, so PyTorch runs it",
)
@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_with_running_statistics(training):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 9)
            self.norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)

        def forward(self, x):
            return self.norm(self.linear(x)) * 2

    check_capture(Model().train(training), torch.randn(4, 6, 8))


@pytest.mark.parametrize(
    "name",
    [
        "gemm_scale_bn",
        "gemm_scale_bn_large",
        "gemm_bn_scale_softmax",
        "linear_gelu",
        "linear_groupnorm_hardtanh",
        "linear_layernorm",
        "linear_logsumexp_mish",
        "linear_relu_linear",
        "linear_residual_rmsnorm",
    ],
)
def test_bundled_models_are_taken_whole(name):
    from pathlib import Path

    from ingot.model_file import constants_of, load_model_file

    path = Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    small = {"batch_size": 6, "in_features": 32, "out_features": 48, "hidden_features": 24}
    known = constants_of(path.read_text())
    file = load_model_file(path, {k: v for k, v in small.items() if k in known})
    captured = check_capture(file.make_module(), *file.make_inputs())
    assert whole(captured), captured.unsupported


def test_a_number_on_another_device_is_pytorchs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 6)
            self.factor = torch.tensor(2.0)  # .to() leaves it where it is

        def forward(self, x):
            return F.relu(self.linear(x)) * self.factor + torch.tensor(0.5)

    captured = check_capture_shape_only(Model().to("meta"), torch.empty(4, 8, device="meta"))
    constants = {i for i, s in enumerate(captured.sources) if s.kind == "constant"}
    assert constants and not any(constants & set(region.leaves) for region in captured.regions)
    assert [item.what for item in captured.unsupported] == ["mul"]


SQUARE = {
    "sum_with_its_transpose": lambda y: y.relu() + y.transpose(1, 2),
    "softmaxes_of_both_sides": lambda y: y.softmax(-1) * y.transpose(1, 2).softmax(-1),
    "means_of_rows_on_columns": lambda y: y + y.mean(2).unsqueeze(1),
    "difference_of_sigmoids": lambda y: torch.sigmoid(y) - torch.sigmoid(y.transpose(1, 2)),
}


@pytest.mark.parametrize("name", SQUARE)
def test_equal_extents_are_not_taken_for_equal_axes(name):
    """Adding y and its transpose moves elements, also where both sides have the same extent."""
    check_capture(Chain(lambda y, m: SQUARE[name](y)), torch.randn(5, FEATURES, 8))


def test_no_two_dimensions_share_an_axis():
    """Whatever a row of the table gives: such a result has no place in memory for each element."""
    cut = SimpleNamespace(feed=SimpleNamespace(static_batch=None))
    value = Value(0, (-1, 1, 1, 4), ((0,), (3,), (3,)), (-1, 4, 4), torch.float32)
    with pytest.raises(UnfitError, match="two dimensions on one axis"):
        Cut._check(cut, value, value.sizes)
    apart = Value(0, (-1, 4, 1, 4), ((0,), (1,), (3,)), value.sizes, value.dtype)
    Cut._check(cut, apart, apart.sizes)


CONSTANTS = {
    "chosen": lambda h: torch.where(h > 0, torch.ones_like(h), torch.zeros_like(h)) + h,
    "chosen alone": lambda h: torch.where(h > 0, torch.full_like(h, 0.25), torch.zeros_like(h)),
    "masked": lambda h: torch.zeros_like(h).masked_fill(h > 0.1, 1.0) * h,
    "added": lambda h: (torch.zeros_like(h) + 1, h.tanh()),
    "a function": lambda h: torch.zeros_like(h).exp() + h.relu(),
    "clamped": lambda h: torch.ones_like(h).clamp(max=0.5) * h.sigmoid(),
    "whole": lambda h: (torch.where(h > 0, 1, -1), torch.where(h > 0, 1, 0) * h),
}


class OfConstants(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(16, 16), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CONSTANTS)
def test_what_constants_alone_make_has_the_dtype_that_they_were_made_for(name, dtype, gradients):
    torch._dynamo.reset()
    module = OfConstants(CONSTANTS[name]).to(dtype)
    x = torch.randn(6, 16).to(dtype)
    with torch.set_grad_enabled(gradients):
        expected = module(x)
        torch.testing.assert_close(ingot.optimize(module)(x), expected, rtol=2e-2, atol=2e-2)
