"""Rows of the table: normalisations with their parameters and statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ingot.capture.layout import UnfitError, Value, hint
from ingot.capture.nodes import is_group_norm
from ingot.capture.region import RegionBuilder, axis_names, in_memory, json_shape
from ingot.capture.table import HALVES, Call, row
from ingot.runtime.layouts import ResultLayout
from ingot.runtime.library import AXES
from ingot.runtime.signature import DTYPE_NAMES

# Of a sample that one thread block reads for all its groups, the innermost in memory: of 23040
# elements in 240 groups it takes 1.2 of PyTorch's time behind a product of 16 bits.
_MOST_OF_A_BLOCK = 1 << 13
# Of larger samples, tokens of which one block takes a channel's statistics: enough that these are
# a small part of what is read.
_LEAST_OF_A_PART, _MOST_PARTS = 128, 16


@dataclass(frozen=True)
class Grouped:
    """What a group norm takes its statistics of: x, whose axes are those of its memory, cut along
    `extents`, of which `axis` runs over the groups; in_parts: those of each channel first."""

    x: Value
    extents: tuple[int, int, int, int]
    axis: int
    eps: float
    in_parts: bool = False


def _flat_parameter(call: Call, name: str, x: Value) -> int:
    """A parameter, or -1; the operator fits it to the statistics' shape itself."""
    operand = call.get(name)
    if operand is None:
        return -1
    half = x.dtype in HALVES and operand.dtype == torch.float32
    if operand.dtype not in (x.dtype, torch.int64) and not half and not call.autocast:
        raise UnfitError("parameters of another dtype than its input's")
    parameter = call.region.materialise(operand)
    flat = [axis for run in parameter.dims for axis in run]
    if flat != sorted(flat) or _is_expanded(parameter):
        raise UnfitError("parameters that would have to move in memory")
    return parameter.id


def _check_counts(call: Call, value: Value, training: bool) -> None:
    """An unbiased variance depends on how many elements there are, equal ones too."""
    if training and _is_expanded(value) and call.get("running_var") is not None:
        raise UnfitError("running statistics of an expanded tensor")


def _is_expanded(value: Value) -> bool:
    return any(run == () and size != 1 for run, size in zip(value.dims, value.sizes))


def _channel_axis(value: Value) -> tuple[int, ...]:
    if len(value.sizes) < 2:
        raise UnfitError("a tensor without channels")
    return value.dims[1]


def _affine(call: Call, op: str, value: Value, names: Sequence[str], attributes: dict) -> Value:
    """names: of the parameters and statistics, in the operator's order."""
    args = [value.id, *(_flat_parameter(call, name, value) for name in names)]
    return call.like(value, call.region.emit(op, args, attributes))


@row("ingot::batch_norm")
def _batch_norm(call: Call) -> Value:
    value = call.value("x")
    if len(value.sizes) == 2 and value.extents[2] != 1 and value.dims[1] == (2, 3):
        extents = (value.extents[0], 1, 1, value.sizes[1])
        flat = call.region.view(value, extents)
        value = Value(flat, extents, (value.dims[0], (3,)), value.sizes, value.dtype)
    channels = _channel_axis(value)
    if len(channels) > 1:
        raise UnfitError("channels on merged dimensions")
    _check_counts(call, value, bool(call["training"]))
    axes = [
        axis
        for axis in range(4)
        if axis not in channels and (axis == 0 or value.extents[axis] != 1)
    ]
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    attributes = {
        "training": bool(call["training"]),
        "momentum": call["momentum"],
        "eps": call["eps"],
        "axes": axis_names(axes),
    }
    return _affine(call, "batch_norm", value, names, attributes)


def batch_statistics(
    region: RegionBuilder, norm: Value, with_scale: bool
) -> dict[str, tuple[int, ResultLayout]]:
    """Of a batch norm in training, what backward reads, as values and their layouts: the mean that
    it normalises by, and the variance; or, with_scale, rstd and the scale that it has of it."""
    made = region.values[norm.id]
    channels = norm.dims[1] if made["op"] == "batch_norm" and len(norm.dims) > 1 else ()
    if len(channels) != 1:
        return {}
    x, dtype = made["args"][0], norm.dtype
    if dtype in HALVES:
        # As the norm itself reads it.
        dtype = torch.float32
        x = region.emit("cast", [x], {"dtype": DTYPE_NAMES[dtype]})
    axes, extents = made["attributes"]["axes"], [1] * AXES
    extents[channels[0]] = norm.extents[channels[0]]
    layout = ResultLayout((norm.sizes[1],), (tuple(channels),), tuple(extents), dtype)
    mean = region.emit("mean", [x], {"axes": axes})
    variance = region.emit("var", [x], {"axes": axes, "unbiased": False})
    if not with_scale:
        return {"mean": (mean, layout), "variance": (variance, layout)}
    rstd = _rstd(region, variance, made["attributes"]["eps"])
    found = {"mean": (mean, layout), "rstd": (rstd, layout)}
    weight = made["args"][1]
    if weight >= 0:
        weight = region.emit("view", [weight], {"shape": json_shape(extents)})
        weight = region.emit("cast", [weight], {"dtype": DTYPE_NAMES[dtype]})
        found["scale"] = (region.emit("mul", [rstd, weight]), layout)
    return found


def _rstd(region: RegionBuilder, variance: int, eps: float) -> int:
    return region.emit("rsqrt", [region.emit("add", [variance, region.constant(eps)])])


def group_statistics(region: RegionBuilder, norm: Value) -> dict[str, tuple[int, ResultLayout]]:
    """Of a group norm, what backward reads: mean and rstd of [sample, group]."""
    of = region.grouped.get(norm.id)
    if of is None:
        return {}
    mean, rstd = _moments(region, of)
    extents = [1] * AXES
    extents[0], extents[of.axis] = of.extents[0], of.extents[of.axis]
    sizes, axes = (extents[0], extents[of.axis]), ((0,), (of.axis,))
    layout = ResultLayout(sizes, axes, tuple(extents), _computed_in(of.x))
    return {"mean": (mean, layout), "rstd": (rstd, layout)}


def row_statistics(
    region: RegionBuilder, norm: Value, count: int
) -> dict[str, tuple[int, ResultLayout]]:
    """Of a layer or an RMS norm over the last `count` dimensions, what backward reads: rstd of each
    row, and a layer norm's mean."""
    made = region.values[norm.id]
    if made["op"] not in ("layer_norm", "rms_norm"):
        return {}
    x, dtype = made["args"][0], norm.dtype
    if dtype in HALVES:
        dtype = torch.float32
        x = region.emit("cast", [x], {"dtype": DTYPE_NAMES[dtype]})
    extents, rows = list(norm.extents), len(norm.sizes) - count
    for run in norm.dims[rows:]:
        for axis in run:
            extents[axis] = 1
    sizes = (*norm.sizes[:rows], *[1] * count)
    layout = ResultLayout(sizes, (*norm.dims[:rows], *[()] * count), tuple(extents), dtype)
    along = {"axes": made["attributes"]["axes"]}
    found = {}
    if made["op"] == "layer_norm":
        found["mean"] = (region.emit("mean", [x], along), layout)
        spread = region.emit("var", [x], {**along, "unbiased": False})
    else:
        spread = region.emit("mean", [region.emit("mul", [x, x])], along)
    found["rstd"] = (_rstd(region, spread, made["attributes"]["eps"]), layout)
    return found


@row("aten::batch_norm", "aten::_native_batch_norm_legit_no_training")
def _aten_batch_norm(call: Call) -> Any:
    training = bool(call.get("training", False))
    call.arguments = {**call.arguments, "x": call["input"], "training": training}
    value = _batch_norm(call)
    return (value, None, None) if call["name"].startswith("aten::_native") else value


@row("aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm")
def _layer_norm(call: Call) -> Any:
    value = call.value("input")
    count = len(call["normalized_shape"])
    axes = call.axes(value, range(len(value.sizes) - count, len(value.sizes)))
    flat = [axis for run in value.dims[len(value.sizes) - count :] for axis in run]
    if flat != sorted(flat):
        raise UnfitError("a norm over transposed dimensions")
    along = {"axes": axis_names(axes)}
    name = call["name"].rpartition(":")[2]
    if name == "rms_norm":
        eps = call.get("eps")
        eps = _default_eps(value.dtype) if eps is None else eps
        return _affine(call, "rms_norm", value, ("weight",), {**along, "eps": eps})
    attributes = {**along, "eps": call["eps"]}
    value = _affine(call, "layer_norm", value, ("weight", "bias"), attributes)
    return (value, None, None) if name == "native_layer_norm" else value


@lru_cache
def _default_eps(dtype: torch.dtype) -> float:
    """An RMS norm's that names none: of 16-bit numbers, releases of PyTorch take that of the dtype,
    others that of the fp32 in which they compute."""
    if dtype not in HALVES:
        return torch.finfo(dtype).eps
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        small = torch.full((1,), 1e-3, dtype=dtype, device="cpu")
        is_small = torch.nn.functional.rms_norm(small, (1,)).item() < 0.5
    return torch.finfo(dtype if is_small else torch.float32).eps


@row("aten::group_norm", "aten::native_group_norm")
def _group_norm(call: Call) -> Any:
    result = _group_normalised(call)
    return (result, None, None) if call["name"].endswith("native_group_norm") else result


def _group_normalised(call: Call) -> Value:
    value = call.value("input")
    channels = list(_channel_axis(value))
    others = [axis for axis in (1, 2, 3) if axis not in channels and value.extents[axis] != 1]
    groups = call.get("num_groups", call.get("group"))
    tokens = channels == [3] and others and value.dims[0] == (0,)
    if tokens and norms_tokens(call.device_type):
        return _group_norm_of_tokens(call, value, groups)
    if channels == [3] and not others:
        place = "features"
    elif channels == [1]:
        place = "rows"
    else:
        raise UnfitError("channels on other axes than the rows or the features")
    flat = [axis for run in value.dims for axis in run]
    if flat != sorted(flat):
        raise UnfitError("a norm over transposed dimensions")
    attributes = {"groups": groups, "channels": place, "eps": call["eps"]}
    made = _affine(call, "group_norm", value, ("weight", "bias"), attributes)
    if place == "rows":
        samples, count, *rest = value.extents
        extents = (samples, groups, 1, count // groups * math.prod(rest))
        call.region.grouped[made.id] = Grouped(value, extents, 1, call["eps"])
    return made


def norms_tokens(device_type: str) -> bool:
    """Whether group norms are taken whose channels are the innermost in memory: on one thread of a
    CPU such a sweep takes up to 34 times PyTorch's time."""
    return device_type != "cpu"


def is_norm_in_parts(node: torch.fx.Node) -> bool:
    """Whether it is a group norm whose channels are innermost, in samples of which several blocks
    take the statistics."""
    if not is_group_norm(node):
        return False
    value, groups = node.args[0].meta["val"], node.args[1]
    # By hints: to ask of a symbolic size would bind it.
    is_turned = value.dim() > 2 and hint(value.stride(1)) == 1
    return is_turned and _in_parts([hint(size) for size in value.shape[1:]], groups)


def _in_parts(sample: Sequence[int], groups: int) -> bool:
    return groups > 1 and math.prod(sample) > _MOST_OF_A_BLOCK


def _group_norm_of_tokens(call: Call, value: Value, groups: int) -> Value:
    """Where channels are the innermost in memory."""
    region, eps = call.region, call["eps"]
    samples, *others, channels = value.extents
    parameters = [_flat_parameter(call, name, value) for name in ("weight", "bias")]
    half = value.dtype in HALVES
    x = region.cast(value, _computed_in(value))
    plain = in_memory(x)
    grouped = (samples, math.prod(others), groups, channels // groups)
    of = Grouped(plain, grouped, 2, eps, _in_parts(value.extents[1:], groups))
    split = region.view(plain, grouped)
    if of.in_parts:
        mean, rstd = _moments(region, of)
        made = region.emit("mul", [region.emit("sub", [split, mean]), rstd])
    else:
        made = region.emit("layer_norm", [split, -1, -1], {"axes": axis_names((1, 3)), "eps": eps})
    made = Value(made, grouped, plain.dims, grouped, x.dtype)
    identity = region.view(made, value.extents)
    for op, parameter in zip(("mul", "add"), parameters):
        if parameter >= 0:
            if half:
                parameter = region.emit("cast", [parameter], {"dtype": DTYPE_NAMES[x.dtype]})
            identity = region.emit(op, [identity, parameter])
    made = region.cast(call.like(x, identity), value.dtype)
    region.grouped[made.id] = of
    return made


def _computed_in(value: Value) -> torch.dtype:
    return torch.float32 if value.dtype in HALVES else value.dtype


def _moments(region: RegionBuilder, of: Grouped) -> tuple[int, int]:
    """Mean and rstd of each group."""
    x = region.cast(of.x, _computed_in(of.x))
    if of.in_parts:
        mean, variance = _moments_in_parts(region, x, of.extents)
    else:
        split = region.view(x, of.extents)
        axes = [axis for axis in (1, 2, 3) if axis != of.axis and of.extents[axis] != 1]
        mean = region.emit("mean", [split], {"axes": axis_names(axes)})
        variance = region.emit("var", [split], {"axes": axis_names(axes), "unbiased": False})
    return mean, _rstd(region, variance, of.eps)


def _moments_in_parts(
    region: RegionBuilder, x: Value, grouped: tuple[int, int, int, int]
) -> tuple[int, int]:
    """Mean and variance of [sample, token, group, channel], the statistics of each channel over
    parts of the tokens first, so that many blocks share a sample: a group's variance is the mean of
    the variances of its parts, all of one size, and the variance of their means (the law of total
    variance)."""
    samples, tokens, groups, channels = grouped
    parts = _parts_of(tokens)
    plain = tuple((axis,) for axis in range(AXES))

    def by_groups(statistic: int) -> int:
        extents = (samples, parts, 1, groups * channels)
        value = Value(statistic, extents, plain, extents, x.dtype)
        return region.view(value, (samples, parts, groups, channels))

    cut = region.view(x, (samples, parts, tokens // parts, groups * channels))
    within, across = {"axes": axis_names((2,))}, {"axes": axis_names((1, 3))}
    means = by_groups(region.emit("mean", [cut], within))
    variances = by_groups(region.emit("var", [cut], {**within, "unbiased": False}))
    mean = region.emit("mean", [means], across)
    apart = region.emit("sub", [means, mean])
    spread = region.emit("add", [variances, region.emit("mul", [apart, apart])])
    return mean, region.emit("mean", [spread], across)


def _parts_of(tokens: int) -> int:
    """Into how many parts of one size a sample's tokens are cut for its statistics."""
    most = min(_MOST_PARTS, max(tokens // _LEAST_OF_A_PART, 1))
    return next(parts for parts in range(most, 0, -1) if tokens % parts == 0)


@row("aten::instance_norm")
def _instance_norm(call: Call) -> Value:
    value = call.value("input")
    if len(value.sizes) < 3 or value.dims[1] not in ((1,), ()):
        raise UnfitError("channels on other axes than the rows")
    rest = [axis for run in value.dims[2:] for axis in run]
    if rest not in ([3], []) or value.extents[2] != 1:
        raise UnfitError("an instance norm over other than the features")
    _check_counts(call, value, bool(call["use_input_stats"]))
    names = ("weight", "bias", "running_mean", "running_var")
    attributes = {
        "training": bool(call["use_input_stats"]),
        "momentum": call["momentum"],
        "eps": call["eps"],
    }
    return _affine(call, "instance_norm", value, names, attributes)
