"""Rows of the table: reductions, softmaxes and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ingot.capture.layout import Leaf, UnfitError, Value
from ingot.capture.nodes import only
from ingot.capture.pointwise import pointwise
from ingot.capture.region import RegionBuilder, axis_names
from ingot.capture.table import FLOATING, TABLE, Call, row
from ingot.runtime.layouts import ResultLayout

# One block of threads has a row: of longer ones there may be too few.
_LONGEST_SCANNED = 1 << 15


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
    """A reduction of the argument `self`, computed in the dtype that is asked for."""
    value = call.value("self")
    asked = call.get("dtype")
    if asked in FLOATING and asked != value.dtype:
        value = call.region.cast(value, asked)
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


@row("aten::any", "aten::all")
def _any(call: Call) -> Value:
    """The largest, or the smallest, of ones and zeros."""
    x = call.region.materialise(call.tensor("self"))
    if x.dtype not in (*FLOATING, torch.bool):
        raise UnfitError(f"{x.dtype} arithmetic")
    flags = x if x.dtype == torch.bool else pointwise(call, "ne", [x, 0.0])
    call.dtype = torch.float32
    call.arguments = {**call.arguments, "self": pointwise(call, "select", [flags, 1.0, 0.0])}
    op = "max" if call["name"] == "aten::any" else "min"
    found = reduced_along(call, op, call.get("dim"))
    call.dtype = torch.bool
    return pointwise(call, "ne", [found, 0.0])


@row("ingot::largest")
def _largest(call: Call) -> Value:
    return _of_exponentials(call, "max_exponent", True)


@row("ingot::log_total")
def _log_total(call: Call) -> Value:
    total = _of_exponentials(call, "sum_exp", False)
    return pointwise(call, "log", [total])


def _of_exponentials(call: Call, finish: str, keepdim: bool) -> Value:
    """Read off one state, the largest of a row and the sum of what lies below it."""
    value = call.value("x")
    axes = axis_names(call.axes(value, [1]))
    identity = call.region.emit("reduce", [value.id], {"axes": axes, "finish": finish})
    return _reduced(value, [1], keepdim, identity, value.dtype)


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


def place_of_extremum(region: RegionBuilder, extreme: Value) -> tuple[int, ResultLayout] | None:
    """Where the largest or smallest elements lie that a region computes along a dimension."""
    made = region.values[extreme.id]
    along = made.get("attributes", {}).get("axes", ())
    if made["op"] not in ("max", "min") or len(along) != 1:
        return None
    (x,) = made["args"]
    if made["op"] == "min":
        x = region.emit("neg", [x])
    place = region.emit("argmax", [x], {"axes": along})
    return place, ResultLayout(extreme.sizes, extreme.dims, extreme.extents, torch.int64)


@row("aten::argmax", "aten::argmin")
def _arg(call: Call) -> Value:
    if call.get("dim") is None:
        raise UnfitError("a position among all elements")
    return _position(call, call["name"].rpartition("arg")[2])


def _position(call: Call, extremum: str) -> Value:
    """Of the first largest or smallest element: NaN, where there is one, either way."""
    value = call.value("self")
    if not value.dims:
        raise UnfitError("a position in a single number")
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


def _along(call: Call, op: str) -> Value:
    """Operators along dimensions that keep the shape."""
    value = call.value("self")
    if call.dtype in FLOATING:
        value = call.region.cast(value, call.dtype)
    axes = call.axes(value, call.dimensions(value, call["dim"]))
    identity = call.region.emit(op, [value.id], {"axes": axis_names(axes)})
    return call.like(value, identity)


for _name in ("softmax", "log_softmax"):
    TABLE[f"aten::{_name}"] = lambda call, op=_name: _along(call, op)


@row("aten::_safe_softmax")
def _safe_softmax(call: Call) -> Value:
    """0 in a row of nothing but -inf, as attention gives what sees nothing."""
    if call.get("dtype") not in (None, call.tensor("self").dtype):
        raise UnfitError("a softmax in another dtype")
    value = call.value("self")
    call.arguments = {**call.arguments, "self": value}
    chosen = call.dimensions(value, call["dim"])
    axes = axis_names(call.axes(value, chosen))
    top = call.region.emit("reduce", [value.id], {"axes": axes, "finish": "max_exponent"})
    largest = _reduced(value, chosen, True, top, value.dtype)
    weights, call.dtype = _along(call, "softmax"), torch.bool
    blind = pointwise(call, "eq", [largest, float("-inf")])
    call.dtype = weights.dtype
    return pointwise(call, "select", [blind, 0.0, weights])


@row("aten::_softmax", "aten::_log_softmax")
def _softmax_again(call: Call) -> Value:
    """In a backward pass. In 16 bits, one sweep may store what it takes the maximum and the sum of,
    and the next one read it rounded: so it is rounded for both."""
    call.arguments = {**call.arguments, "self": call.region.rounded(call.value("self"))}
    return _along(call, call["name"].rpartition(":")[2][1:])


@row("aten::cumsum")
def _cumsum(call: Call) -> Value:
    if call.device_type != "cuda":
        raise UnfitError("on a CPU running sums are PyTorch's")
    value = call.value("self")
    if call.dtype not in FLOATING:
        raise UnfitError(f"running sums of {call.dtype}")
    if call.dimensions(value, call["dim"]) != [len(value.dims) - 1] or value.dims[-1] != (3,):
        raise UnfitError("running sums across rows")
    if value.sizes[-1] > _LONGEST_SCANNED:
        raise UnfitError(f"running sums of more than {_LONGEST_SCANNED} elements")
    value = call.region.cast(value, call.dtype)
    return call.like(value, call.region.emit("cumsum", [value.id]))


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
    kernel = only(call["kernel_size"])
    stride = only(call.get("stride"), kernel)
    if stride != kernel or only(call.get("padding"), 0) or only(call.get("dilation"), 1) != 1:
        raise UnfitError("overlapping, padded or dilated windows")
    return _pool(call, "max_pool" if "max" in call["name"] else "avg_pool", kernel)


@row("aten::adaptive_avg_pool1d")
def _adaptive_pool1d(call: Call) -> Value:
    count, features = only(call["output_size"]), call.tensor("self").sizes[-1]
    if not count or features < 0 or features % count:
        raise UnfitError("windows of different sizes")
    return _pool(call, "avg_pool", features // count)
