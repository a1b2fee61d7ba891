"""Rows of the table: identities, casts and views."""

from __future__ import annotations

from typing import Any

import torch

from ingot.capture.layout import (
    Joined,
    Leaf,
    UnfitError,
    Value,
    merged_leaf,
    regroup,
    relabel_drop,
    relabel_expand,
    relabel_insert,
    relabel_permute,
)
from ingot.capture.region import Operand
from ingot.capture.table import FLOATING, Call, row


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
        raise UnfitError("a copy, or a move to another device")
    if call.dtype == value.dtype:
        return value
    if call.dtype not in FLOATING or value.dtype not in (*FLOATING, torch.bool):
        raise UnfitError(f"a cast from {value.dtype} to {call.dtype}")
    return call.region.cast(call.region.materialise(value), call.dtype)


@row("aten::numpy_T", shape_only=True)
def _all_turned(call: Call) -> Operand:
    value = call.tensor("self")
    return relabel_permute(value, list(reversed(range(len(value.sizes)))))


@row("aten::t", "aten::mT", "aten::adjoint", shape_only=True)
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
    if rank == 0:
        return value
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
        merged = merged_leaf(value, sizes)
        if merged is None:
            raise UnfitError("a view of a tensor that comes from outside")
        return merged
    extents, dims = regroup(value, sizes)
    return Value(call.region.view(value, extents), extents, dims, sizes, value.dtype)


@row("ingot::joined")
def _joined(call: Call) -> Joined:
    """A concatenation of what a region computes, as capture/joining.py brings it about."""
    parts, dimension = call["tensors"], call["dim"]
    for part in parts:
        if not isinstance(part, Value) or call.region.is_leaf(part) or part.dtype != call.dtype:
            raise UnfitError("a concatenation of what is there already")
    if len({part.id for part in parts}) < len(parts):
        raise UnfitError("the same part twice")
    if call.sizes is None or call.sizes[dimension] < 0:
        raise UnfitError("a concatenation along the batch")
    return Joined(tuple(parts), dimension % len(call.sizes), call.sizes, call.dtype)


def _target_sizes(call: Call) -> tuple[int, ...]:
    if call.sizes is None:
        raise UnfitError("a shape that depends on the batch size in another way than by a factor")
    return call.sizes
