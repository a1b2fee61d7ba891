"""The operators of ATen that Ingot takes over: one row each.

A row gives the function that appends the operator to a region. It receives a `Call` with the
operator's arguments by their schema's names and returns a `Value` (or a relabelled `Leaf`), or a
tuple of these for operators with several results; or it raises `UnfitError` with the reason why
PyTorch runs the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.layout import (
    Leaf,
    UnfitError,
    Value,
    regroup,
    relabel_drop,
    relabel_expand,
    relabel_insert,
    relabel_permute,
)
from ingot.capture.region import Operand, RegionBuilder, axis_names

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Call:
    """One operator's arguments, with the region that takes it."""

    def __init__(
        self,
        region: RegionBuilder,
        arguments: dict[str, Any],
        dtype: torch.dtype | None,
        sizes: tuple[int, ...] | None,
        autocast: bool,
        used: frozenset,
    ):
        self.region, self.arguments = region, arguments
        self.dtype, self.sizes = dtype, sizes
        self.autocast = autocast
        self.used = used  # which results of a tuple have users

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name, default)
        return default if value is None else value

    def tensor(self, name: str) -> Operand:
        value = self.arguments[name]
        if not isinstance(value, (Value, Leaf)):
            raise UnfitError(f"its argument '{name}' is not a tensor")
        return value

    def number(self, name: str, default: float | None = None) -> int | float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnfitError(f"its argument '{name}' is not a plain number")
        return value

    def value(self, name: str) -> Value:
        """A floating tensor on its natural axes, in the dtype in which PyTorch computes."""
        value = self.region.materialise(self.tensor(name))
        if value.dtype not in FLOATING:
            raise UnfitError(f"{value.dtype} arithmetic")
        if self.autocast and self.dtype in FLOATING:
            value = self.region.cast(value, self.dtype)
        return value

    def dimensions(self, value: Value, dims: Any) -> list[int]:
        rank = len(value.sizes)
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            return list(range(rank))
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        return sorted(d % rank for d in dims) if rank else []

    def axes(self, value: Value, dims: Sequence[int]) -> list[int]:
        axes = [axis for d in dims for axis in value.dims[d]]
        for d in dims:
            if not value.dims[d] and value.sizes[d] != 1:
                raise UnfitError("an expanded tensor")
        if not axes:
            # All those dimensions have extent 1: any axis that nothing runs along will do.
            used = {axis for run in value.dims for axis in run}
            free = [axis for axis in (3, 1, 2) if axis not in used]
            if not free:
                raise UnfitError("more than the four axes")
            axes = [free[0]]
        return axes

    def like(self, value: Value, identity: int, dtype: torch.dtype | None = None) -> Value:
        return Value(identity, value.extents, value.dims, value.sizes, dtype or value.dtype)


Row = Callable[[Call], Any]
TABLE: dict[str, Row] = {}
# What computes nothing: it may be left to PyTorch without being called unsupported. Those named
# here have no row: a part of a tensor is a view, which the regions behind it read where it lies.
SHAPE_OPERATORS: set[str] = {
    "getitem",
    *(
        f"aten::{name}"
        for name in "slice narrow select chunk split split_with_sizes tensor_split unbind".split()
    ),
}


def row(*names: str, shape_only: bool = False) -> Callable[[Row], Row]:
    def register(function: Row) -> Row:
        for name in names:
            TABLE[name] = function
            if shape_only:
                SHAPE_OPERATORS.add(name)
        return function

    return register


# Pointwise --------------------------------------------------------------------------------------


def pointwise(call: Call, op: str, operands: Sequence[Any], attributes=None) -> Value:
    """Tensors and numbers, broadcast as PyTorch does."""
    tensors = [o for o in operands if isinstance(o, (Value, Leaf))]
    if not tensors:
        raise UnfitError("it has no tensor operand")
    region = call.region
    in_result = call.dtype in FLOATING and op != "select"
    compute = call.dtype if in_result else _promoted(tensors)
    ids, extents, dims, sizes = region.align(tensors)
    prepared = []
    feed = iter(zip(ids, tensors))
    for index, operand in enumerate(operands):
        if isinstance(operand, (Value, Leaf)):
            identity, tensor = next(feed)
            condition = op == "select" and index == 0
            if not condition and tensor.dtype != compute:
                aligned = Value(identity, extents, dims, sizes, tensor.dtype)
                identity = region.cast(aligned, compute).id
            prepared.append(identity)
        elif isinstance(operand, (bool, int, float)):
            prepared.append(region.constant(operand))
        else:
            raise UnfitError("an operand that depends on the batch size")
    identity = region.emit(op, prepared, attributes)
    return Value(identity, extents, dims, sizes, call.dtype or compute)


def _promoted(tensors: Sequence[Operand]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if dtype not in (*FLOATING, torch.bool):
        raise UnfitError(f"{dtype} arithmetic")
    return dtype


def _unary(op: str, **attributes: tuple[str, Any]) -> Row:
    """attributes: the graph's name for an attribute = (schema name, default)."""

    def take(call: Call) -> Value:
        given = {
            name: call.number(schema, default) for name, (schema, default) in attributes.items()
        }
        if call.tensor("self").dtype not in FLOATING:
            raise UnfitError(f"{call.tensor('self').dtype} arithmetic")
        return pointwise(call, op, [call["self"]], given)

    return take


def _binary(op: str) -> Row:
    return lambda call: pointwise(call, op, [call["self"], call["other"]])


_UNARY = (
    "neg abs square sqrt rsqrt reciprocal exp expm1 log log1p sin cos tanh erf sigmoid floor ceil "
    "trunc round relu relu6 silu mish selu hardsigmoid hardswish exp2 log2 log10 tan"
)
for _name in _UNARY.split():
    TABLE[f"aten::{_name}"] = _unary(_name)
for _name, _op in (
    ("sgn", "sign"),
    ("sign", "sign"),
    ("log_sigmoid", "logsigmoid"),
    ("negative", "neg"),
):
    TABLE[f"aten::{_name}"] = _unary(_op)
for _name, _op in (
    ("mul", "mul"),
    ("multiply", "mul"),
    ("maximum", "maximum"),
    ("minimum", "minimum"),
    ("lt", "lt"),
    ("le", "le"),
    ("gt", "gt"),
    ("ge", "ge"),
    ("eq", "eq"),
    ("ne", "ne"),
    ("logical_and", "logical_and"),
    ("logical_or", "logical_or"),
):
    TABLE[f"aten::{_name}"] = _binary(_op)
TABLE["aten::logical_not"] = lambda call: pointwise(call, "logical_not", [call["self"]])
TABLE["aten::isnan"] = lambda call: pointwise(call, "ne", [call["self"], call["self"]])


def _bitwise(op: str) -> Row:
    """On flags, the bitwise operators are the logical ones."""

    def take(call: Call) -> Value:
        if call.dtype != torch.bool:
            raise UnfitError(f"{call.dtype} arithmetic")
        operands = [call[name] for name in ("self", "other") if name in call.arguments]
        return pointwise(call, op, operands)

    return take


for _name, _op in (("and", "logical_and"), ("or", "logical_or"), ("not", "logical_not")):
    TABLE[f"aten::bitwise_{_name}"] = TABLE[f"aten::__{_name}__"] = _bitwise(_op)
TABLE["aten::hardtanh"] = _unary("hardtanh", min=("min_val", -1), max=("max_val", 1))
TABLE["aten::leaky_relu"] = _unary("leaky_relu", negative_slope=("negative_slope", 0.01))
TABLE["aten::celu"] = _unary("celu", alpha=("alpha", 1))
TABLE["aten::softplus"] = _unary("softplus", beta=("beta", 1), threshold=("threshold", 20))
TABLE["aten::hardshrink"] = _unary("hardshrink", **{"lambda": ("lambd", 0.5)})
TABLE["aten::softshrink"] = _unary("softshrink", **{"lambda": ("lambd", 0.5)})
TABLE["aten::threshold"] = _unary("threshold", threshold=("threshold", None), value=("value", None))


@row("aten::add", "aten::sub", "aten::subtract", "aten::rsub")
def _add(call: Call) -> Value:
    a, b = call["self"], call["other"]
    if "alpha" in call.arguments and call.number("alpha", 1) != 1:
        scale = call.number("alpha")
        b = pointwise(call, "mul", [b, scale]) if isinstance(b, (Value, Leaf)) else b * scale
    name = call["name"]
    if name == "aten::add":
        return pointwise(call, "add", [a, b])
    return pointwise(call, "sub", [b, a] if name == "aten::rsub" else [a, b])


@row("aten::div", "aten::divide", "aten::true_divide")
def _div(call: Call) -> Value:
    quotient = pointwise(call, "div", [call["self"], call["other"]])
    mode = call.get("rounding_mode")
    return quotient if mode is None else pointwise(call, mode, [quotient])


@row("aten::pow")
def _pow(call: Call) -> Value:
    exponent = call["exponent"]
    # The exponents for which PyTorch, too, uses another function than pow.
    special = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if isinstance(exponent, (int, float)) and exponent in special:
        return pointwise(call, special[exponent], [call["self"]])
    return pointwise(call, "pow", [call["self"], exponent])


@row("aten::gelu")
def _gelu(call: Call) -> Value:
    return pointwise(call, "gelu", [call["self"]], {"approximate": call.get("approximate", "none")})


@row("aten::elu")
def _elu(call: Call) -> Value:
    if call.number("scale", 1) != 1 or call.number("input_scale", 1) != 1:
        raise UnfitError("elu with other scales than 1")
    return pointwise(call, "elu", [call["self"]], {"alpha": call.number("alpha", 1)})


@row("aten::prelu", "aten::_prelu_kernel")
def _prelu(call: Call) -> Value:
    x, weight = call.region.materialise(call.tensor("self")), call.tensor("weight")
    # One slope per channel, the second dimension.
    if weight.sizes != (1,) and len(weight.sizes) == 1:
        for _ in range(len(x.sizes) - 2):
            weight = relabel_insert(weight, len(weight.sizes))
    return pointwise(call, "prelu", [x, weight])


@row("aten::clamp", "aten::clip", "aten::clamp_min", "aten::clamp_max")
def _clamp(call: Call) -> Value:
    x, low, high = call["self"], call.get("min"), call.get("max")
    numbers = [b for b in (low, high) if b is not None]
    if all(isinstance(b, (int, float)) for b in numbers):
        attributes = {"min": low, "max": high}
        return pointwise(call, "clamp", [x], {k: v for k, v in attributes.items() if v is not None})
    if low is not None:
        x = pointwise(call, "maximum", [x, low])
    return x if high is None else pointwise(call, "minimum", [x, high])


@row("aten::nan_to_num")
def _nan_to_num(call: Call) -> Value:
    x = call.tensor("self")
    if x.dtype not in FLOATING:
        raise UnfitError(f"{x.dtype} arithmetic")
    limits = torch.finfo(x.dtype)
    for infinity, number in (
        (float("inf"), call.get("posinf", limits.max)),
        (float("-inf"), call.get("neginf", limits.min)),
    ):
        x = _chosen(call, "eq", [x, infinity], number, x)
    return _chosen(call, "ne", [x, x], call.get("nan", 0.0), x)


def _chosen(call: Call, comparison: str, operands: list, yes: Any, no: Value) -> Value:
    """`yes` where the comparison holds, else `no`."""
    dtype, call.dtype = call.dtype, torch.bool
    condition = pointwise(call, comparison, operands)
    call.dtype = dtype
    return pointwise(call, "select", [condition, yes, no])


@row("aten::logaddexp")
def _logaddexp(call: Call) -> Value:
    """max + log(1 + exp(-|a - b|)); of equal numbers a + log 2, infinite ones included."""
    a, b = call["self"], call["other"]
    distance = pointwise(call, "abs", [pointwise(call, "sub", [a, b])])
    spread = pointwise(call, "exp", [pointwise(call, "neg", [distance])])
    largest = pointwise(call, "maximum", [a, b])
    total = pointwise(call, "add", [largest, pointwise(call, "log1p", [spread])])
    return _chosen(call, "eq", [a, b], pointwise(call, "add", [largest, math.log(2)]), total)


@row("aten::where")
def _where(call: Call) -> Value:
    return pointwise(call, "select", [call["condition"], call["self"], call["other"]])


@row("aten::masked_fill")
def _masked_fill(call: Call) -> Value:
    return pointwise(call, "select", [call["mask"], call["value"], call["self"]])


@row("aten::addcmul", "aten::addcdiv")
def _addc(call: Call) -> Value:
    op = "mul" if call["name"] == "aten::addcmul" else "div"
    term = pointwise(call, op, [call["tensor1"], call["tensor2"]])
    if call.number("value", 1) != 1:
        term = pointwise(call, "mul", [term, call.number("value")])
    return pointwise(call, "add", [call["self"], term])


@row("aten::lerp")
def _lerp(call: Call) -> Value:
    start, end = call.tensor("self"), call.tensor("end")
    difference = pointwise(call, "sub", [end, start])
    return pointwise(call, "add", [start, pointwise(call, "mul", [difference, call["weight"]])])


@row("aten::full_like", "aten::zeros_like", "aten::ones_like")
def _full_like(call: Call) -> Value:
    value = {"aten::zeros_like": 0.0, "aten::ones_like": 1.0}.get(call["name"])
    if value is None:
        value = call.number("fill_value")
    if call.dtype not in FLOATING:
        raise UnfitError(f"{call.dtype} arithmetic")
    sizes = call.tensor("self").sizes
    identity = call.region.constant(value)
    return Value(identity, (1, 1, 1, 1), ((),) * len(sizes), sizes, call.dtype)


# Reductions -------------------------------------------------------------------------------------


def _reduced(value: Value, dims: Sequence[int], keepdim: bool, identity: int, dtype) -> Value:
    axes = {axis for d in dims for axis in value.dims[d]}
    extents = tuple(1 if axis in axes else e for axis, e in enumerate(value.extents))
    new_dims, sizes = [], []
    for d, (run, size) in enumerate(zip(value.dims, value.sizes)):
        if d not in dims:
            new_dims.append(run)
            sizes.append(size)
        elif keepdim:
            new_dims.append(())
            sizes.append(1)
    return Value(identity, extents, tuple(new_dims), tuple(sizes), dtype)


def reduced_along(call: Call, op: str, dims: Any, attributes: dict | None = None) -> Value:
    """A reduction of the argument `self`."""
    value = call.value("self")
    chosen = call.dimensions(value, dims)
    axes = call.axes(value, chosen)
    identity = call.region.emit(op, [value.id], {"axes": axis_names(axes), **(attributes or {})})
    dtype = call.dtype if op == "argmax" else value.dtype
    reduced = _reduced(value, chosen, bool(call.get("keepdim", False)), identity, dtype)
    if op != "argmax" and call.dtype in FLOATING:
        reduced = call.region.cast(reduced, call.dtype)
    return reduced


for _name, _op in (
    ("sum", "sum"),
    ("mean", "mean"),
    ("amax", "max"),
    ("amin", "min"),
    ("logsumexp", "logsumexp"),
):
    TABLE[f"aten::{_name}"] = lambda call, op=_op: reduced_along(call, op, call.get("dim"))


@row("aten::max", "aten::min")
def _max(call: Call) -> Any:
    name = call["name"].rpartition(":")[2]
    if isinstance(call.get("other"), (Value, Leaf)):
        return pointwise(call, name + "imum", [call["self"], call["other"]])
    if "dim" not in call.arguments:
        return reduced_along(call, name, None)
    call.dtype = None
    values = reduced_along(call, name, call["dim"])
    if 1 not in call.used:
        return values, None
    return values, _position(call, name)


@row("aten::argmax", "aten::argmin")
def _arg(call: Call) -> Value:
    if call.get("dim") is None:
        raise UnfitError("a position among all elements")
    return _position(call, call["name"].rpartition("arg")[2])


def _position(call: Call, extremum: str) -> Value:
    """Of the first largest or smallest element: NaN, where there is one, either way."""
    value = call.value("self")
    if len(value.dims[call["dim"]]) > 1:
        raise UnfitError("a position along merged dimensions")
    if extremum == "min":
        value = call.like(value, call.region.emit("neg", [value.id]))
    call.arguments = {**call.arguments, "self": value}
    call.dtype = torch.int64
    return reduced_along(call, "argmax", call["dim"])


@row("aten::aminmax")
def _aminmax(call: Call) -> tuple[Value, Value]:
    return reduced_along(call, "min", call.get("dim")), reduced_along(call, "max", call.get("dim"))


@row("aten::var", "aten::std", "aten::var_mean", "aten::std_mean")
def _var(call: Call) -> Any:
    correction = call.get("correction")
    if correction is None:
        correction = int(bool(call.get("unbiased", True)))
    if correction not in (0, 1):
        raise UnfitError(f"a correction of {correction}")
    op, _, mean = call["name"].rpartition(":")[2].partition("_")
    spread = reduced_along(call, op, call.get("dim"), {"unbiased": correction == 1})
    return (spread, reduced_along(call, "mean", call.get("dim"))) if mean else spread


@row("aten::linalg_vector_norm", "aten::norm")
def _norm(call: Call) -> Value:
    order = call.get("ord", call.get("p", 2))
    if order not in (1, 2, float("inf")):
        raise UnfitError(f"the norm of order {order}")
    order = "inf" if order == float("inf") else order
    return reduced_along(call, "norm", call.get("dim"), {"p": order})


def _along(call: Call, op: str, x: str, dim: Any, attributes: dict | None = None) -> Value:
    """Operators along dimensions that keep the shape."""
    value = call.value(x)
    if call.dtype in FLOATING:
        value = call.region.cast(value, call.dtype)
    axes = call.axes(value, call.dimensions(value, dim))
    identity = call.region.emit(op, [value.id], {"axes": axis_names(axes), **(attributes or {})})
    return call.like(value, identity)


TABLE["aten::softmax"] = TABLE["aten::_softmax"] = lambda call: _along(
    call, "softmax", "self", call["dim"]
)
TABLE["aten::log_softmax"] = TABLE["aten::_log_softmax"] = lambda call: _along(
    call, "log_softmax", "self", call["dim"]
)


# Normalisations ---------------------------------------------------------------------------------


def _flat_parameter(call: Call, name: str, x: Value) -> int:
    """A parameter, or -1; the operator fits it to the statistics' shape itself."""
    operand = call.get(name)
    if operand is None:
        return -1
    half = x.dtype in (torch.float16, torch.bfloat16) and operand.dtype == torch.float32
    if operand.dtype not in (x.dtype, torch.int64) and not half and not call.autocast:
        raise UnfitError("parameters of another dtype than its input's")
    return call.region.materialise(operand).id


def _channel_axis(value: Value) -> tuple[int, ...]:
    if len(value.sizes) < 2:
        raise UnfitError("a tensor without channels")
    return value.dims[1]


@row("ingot::batch_norm")
def _batch_norm(call: Call) -> Value:
    value = call.value("x")
    if len(value.sizes) == 2 and value.extents[2] != 1 and value.dims[1] == (2, 3):
        value = call.like(value, call.region.view(value, (value.extents[0], 1, 1, value.sizes[1])))
        value = Value(
            value.id,
            (value.extents[0], 1, 1, value.sizes[1]),
            (value.dims[0], (3,)),
            value.sizes,
            value.dtype,
        )
    channels = _channel_axis(value)
    if len(channels) > 1:
        raise UnfitError("channels on merged dimensions")
    axes = [
        axis
        for axis in range(4)
        if axis not in channels and (axis == 0 or value.extents[axis] != 1)
    ]
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    args = [value.id, *(_flat_parameter(call, name, value) for name in names)]
    attributes = {
        "training": bool(call["training"]),
        "momentum": call["momentum"],
        "eps": call["eps"],
        "axes": axis_names(axes),
    }
    identity = call.region.emit("batch_norm", args, attributes)
    return call.like(value, identity)


@row("aten::batch_norm", "aten::_native_batch_norm_legit_no_training")
def _aten_batch_norm(call: Call) -> Any:
    training = bool(call.get("training", False))
    call.arguments = {
        "x": call["input"],
        "weight": call.get("weight"),
        "bias": call.get("bias"),
        "running_mean": call.get("running_mean"),
        "running_var": call.get("running_var"),
        "num_batches_tracked": None,
        "training": training,
        "momentum": call["momentum"],
        "eps": call["eps"],
        "name": call["name"],
    }
    value = _batch_norm(call)
    return (value, None, None) if call["name"].startswith("aten::_native") else value


def _affine(call: Call, op: str, x: str, axes: Sequence[int], names, attributes) -> Value:
    value = call.value(x)
    args = [value.id, *(_flat_parameter(call, name, value) for name in names)]
    if axes:
        attributes = {"axes": axis_names(axes), **attributes}
    return call.like(value, call.region.emit(op, args, attributes))


@row("aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm")
def _layer_norm(call: Call) -> Any:
    value = call.value("input")
    count = len(call["normalized_shape"])
    axes = call.axes(value, range(len(value.sizes) - count, len(value.sizes)))
    flat = [axis for run in value.dims[len(value.sizes) - count :] for axis in run]
    if flat != sorted(flat):
        raise UnfitError("a norm over transposed dimensions")
    name = call["name"].rpartition(":")[2]
    if name == "rms_norm":
        eps = {"eps": call["eps"]} if call.get("eps") is not None else {}
        return _affine(call, "rms_norm", "input", axes, ("weight",), eps)
    value = _affine(call, "layer_norm", "input", axes, ("weight", "bias"), {"eps": call["eps"]})
    return (value, None, None) if name == "native_layer_norm" else value


@row("aten::group_norm", "aten::native_group_norm")
def _group_norm(call: Call) -> Any:
    value = call.value("input")
    channels = list(_channel_axis(value))
    others = [axis for axis in (1, 2, 3) if axis not in channels and value.extents[axis] != 1]
    groups = call.get("num_groups", call.get("group"))
    if channels == [3] and not others:
        place = "features"
    elif channels == [1]:
        place = "rows"
    else:
        raise UnfitError("channels on other axes than the rows or the features")
    flat = [axis for run in value.dims for axis in run]
    if flat != sorted(flat):
        raise UnfitError("a norm over transposed dimensions")
    args = [value.id, _flat_parameter(call, "weight", value), _flat_parameter(call, "bias", value)]
    attributes = {"groups": groups, "channels": place, "eps": call["eps"]}
    result = call.like(value, call.region.emit("group_norm", args, attributes))
    return (result, None, None) if call["name"].endswith("native_group_norm") else result


@row("aten::instance_norm")
def _instance_norm(call: Call) -> Value:
    value = call.value("input")
    if len(value.sizes) < 3 or value.dims[1] not in ((1,), ()):
        raise UnfitError("channels on other axes than the rows")
    rest = [axis for run in value.dims[2:] for axis in run]
    if rest not in ([3], []) or value.extents[2] != 1:
        raise UnfitError("an instance norm over other than the features")
    names = ("weight", "bias", "running_mean", "running_var")
    attributes = {
        "training": bool(call["use_input_stats"]),
        "momentum": call["momentum"],
        "eps": call["eps"],
    }
    args = [value.id, *(_flat_parameter(call, name, value) for name in names)]
    return call.like(value, call.region.emit("instance_norm", args, attributes))


# Pooling ----------------------------------------------------------------------------------------


def _only(argument: Any, default: int | None = None) -> int | None:
    if isinstance(argument, (list, tuple)):
        argument = argument[0] if argument else None
    return default if argument is None else argument


def _pool(call: Call, op: str, kernel: int) -> Value:
    value = call.value("self")
    if value.dims[-1] != (3,) or kernel < 1 or value.sizes[-1] % kernel:
        raise UnfitError("windows that do not tile the features")
    identity = call.region.emit(op, [value.id], {"kernel": kernel})
    count = value.sizes[-1] // kernel
    extents = (*value.extents[:3], count)
    dims = (*value.dims[:-1], (3,) if count != 1 else ())
    return Value(identity, extents, dims, (*value.sizes[:-1], count), value.dtype)


@row("aten::max_pool1d", "aten::avg_pool1d")
def _pool1d(call: Call) -> Value:
    kernel = _only(call["kernel_size"])
    stride = _only(call.get("stride"), kernel)
    if stride != kernel or _only(call.get("padding"), 0) or _only(call.get("dilation"), 1) != 1:
        raise UnfitError("overlapping, padded or dilated windows")
    return _pool(call, "max_pool" if "max" in call["name"] else "avg_pool", kernel)


@row("aten::adaptive_avg_pool1d")
def _adaptive_pool1d(call: Call) -> Value:
    count, features = _only(call["output_size"]), call.tensor("self").sizes[-1]
    if not count or features < 0 or features % count:
        raise UnfitError("windows of different sizes")
    return _pool(call, "avg_pool", features // count)


# Identities, casts, views -----------------------------------------------------------------------


@row("aten::dropout", "aten::native_dropout", "aten::feature_dropout", "aten::alpha_dropout")
def _dropout(call: Call) -> Any:
    if call.get("train", False) and call.number("p", 0.5) != 0:
        raise UnfitError("it draws random numbers")
    return call.tensor("input")


@row(
    "aten::alias",
    "aten::detach",
    "aten::contiguous",
    "aten::lift_fresh_copy",
    "aten::clone",
    shape_only=True,
)
def _identity(call: Call) -> Operand | int | float:
    if isinstance(call["self"], (bool, int, float)):
        return call["self"]
    value = call.tensor("self")
    if isinstance(value, Leaf) and call["name"] in ("aten::clone", "aten::lift_fresh_copy"):
        return call.region.materialise(value)
    return value


@row("aten::to", "aten::_to_copy", "aten::type_as")
def _to(call: Call) -> Operand:
    value = call.tensor("self")
    if call.get("device") is not None:
        raise UnfitError("a move to another device")
    if call.dtype == value.dtype:
        return value
    if call.dtype not in FLOATING or value.dtype not in (*FLOATING, torch.bool):
        raise UnfitError(f"a cast from {value.dtype} to {call.dtype}")
    return call.region.cast(call.region.materialise(value), call.dtype)


@row("aten::t", "aten::numpy_T", "aten::mT", "aten::adjoint", shape_only=True)
def _t(call: Call) -> Operand:
    value = call.tensor("self")
    rank = len(value.sizes)
    if rank < 2:
        return value
    return relabel_permute(value, [*range(rank - 2), rank - 1, rank - 2])


@row("aten::transpose", "aten::swapaxes", "aten::swapdims", shape_only=True)
def _transpose(call: Call) -> Operand:
    value = call.tensor("self")
    rank = len(value.sizes)
    first = call.get("dim0", call.get("axis0"))
    second = call.get("dim1", call.get("axis1"))
    order = list(range(rank))
    order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    return relabel_permute(value, order)


@row("aten::permute", shape_only=True)
def _permute(call: Call) -> Operand:
    return relabel_permute(call.tensor("self"), call["dims"])


@row("aten::unsqueeze", shape_only=True)
def _unsqueeze(call: Call) -> Operand:
    return relabel_insert(call.tensor("self"), call["dim"])


@row("aten::squeeze", shape_only=True)
def _squeeze(call: Call) -> Operand:
    value = call.tensor("self")
    dims = call.get("dim")
    if dims is None:
        dims = range(len(value.sizes))
    return relabel_drop(value, list(dims) if isinstance(dims, (list, tuple, range)) else [dims])


@row("aten::expand", "aten::expand_as", "aten::broadcast_to", shape_only=True)
def _expand(call: Call) -> Operand:
    return relabel_expand(call.tensor("self"), _target_sizes(call))


@row(
    "aten::view",
    "aten::reshape",
    "aten::_unsafe_view",
    "aten::flatten",
    "aten::unflatten",
    "aten::view_as",
    "aten::reshape_as",
    shape_only=True,
)
def _view(call: Call) -> Operand:
    value = call.tensor("self")
    sizes = _target_sizes(call)
    if [s for s in sizes if s != 1] == [s for s in value.sizes if s != 1]:
        # Only dimensions of extent 1 come or go.
        dropped = relabel_drop(value, range(len(value.sizes)))
        for index, size in enumerate(sizes):
            if size == 1:
                dropped = relabel_insert(dropped, index)
        return dropped
    if isinstance(value, Leaf):
        raise UnfitError("a view of a tensor that comes from outside")
    extents, dims = regroup(value, sizes)
    return Value(call.region.view(value, extents), extents, dims, sizes, value.dtype)


def _target_sizes(call: Call) -> tuple[int, ...]:
    if call.sizes is None:
        raise UnfitError("a shape that depends on the batch size in another way than by a factor")
    return call.sizes
