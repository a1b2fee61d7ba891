"""A region's graph while it grows: values appended in the form of docs/graph-format.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ingot.capture.layout import (
    AXIS_NAMES,
    Joined,
    Leaf,
    UnfitError,
    Value,
    extents_for,
    leaf_layout,
    memory_order,
    natural_axes,
    product,
)
from ingot.runtime.layouts import JoinedLayout, LeafLayout, ResultLayout
from ingot.runtime.library import AXES
from ingot.runtime.signature import DTYPE_NAMES

Operand = Value | Leaf


def json_shape(extents: Sequence[int]) -> list:
    return ["B" if extent == -1 else extent for extent in extents]


def json_number(value: bool | int | float) -> Any:
    """JSON has no infinities: the graph format writes them as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


class RegionBuilder:
    def __init__(self) -> None:
        self.values: list[dict] = []
        self.leaves: list[tuple[Any, LeafLayout]] = []
        self.operators: list[dict] = []
        self.roles: dict[Any, tuple[str, str]] = {}
        self.positions: set[Any] = set()  # nodes of tensors that hold 0, 1, 2, ...
        self._leaf_ids: dict[Any, int] = {}
        self.grouped: dict[int, Any] = {}  # by a group norm's id, what its statistics are of
        self._viewed: dict[int, Value] = {}  # by a view's id, what it is a view of
        self._origin = ""
        self._source = ""

    # A failed attempt to take an operator leaves nothing behind.
    def mark(self) -> tuple:
        return len(self.values), len(self.leaves), dict(self._leaf_ids)

    def rewind(self, mark: tuple) -> None:
        values, leaves, ids = mark
        del self.values[values:]
        del self.leaves[leaves:]
        self._leaf_ids = ids
        self.grouped = {norm: of for norm, of in self.grouped.items() if norm < values}

    def set_origin(self, origin: str, source: str) -> None:
        self._origin, self._source = origin, source

    def emit(self, op: str, args: Sequence[int], attributes: dict | None = None) -> int:
        entry: dict = {"op": op, "args": list(args)}
        if attributes:
            entry["attributes"] = attributes
        if self._origin:
            entry["origin"] = self._origin
        if self._source:
            entry["source"] = self._source
        self.values.append(entry)
        return len(self.values) - 1

    def constant(self, value: bool | int | float) -> int:
        self.values.append({"op": "constant", "value": json_number(value)})
        return len(self.values) - 1

    def is_constant(self, identity: int) -> bool:
        return self.values[identity]["op"] == "constant"

    def leaf(self, leaf: Leaf, dims, extents) -> int:
        for axis, extent in enumerate(extents):
            if extent < 0 and (axis != 0 or extent != -1):
                raise UnfitError("the batch size on another axis than the first")
        layout = leaf_layout(leaf, dims, extents)
        own = [1] * AXES
        for axis in range(AXES):
            if layout.axes[axis] is not None:
                own[axis] = extents[axis]
        key = (leaf.node, layout)
        known = self._leaf_ids.get(key)
        if known is None:
            role, name = self.roles[leaf.node]
            value: dict[str, Any] = {
                "op": role,
                "name": name,
                "dtype": DTYPE_NAMES[leaf.dtype],
                "shape": json_shape(own),
            }
            if leaf.node in self.positions and own == [1, 1, 1, *leaf.sizes] and not leaf.part:
                value["attributes"] = {"positions": True}
            self.values.append(value)
            known = len(self.values) - 1
            self.leaves.append((leaf.node, layout))
            self._leaf_ids[key] = known
        return known

    def materialise(self, operand: Operand) -> Value:
        """A leaf on its natural axes."""
        if isinstance(operand, Value):
            return operand
        dims = natural_axes(operand.sizes, memory_order(operand))
        extents = extents_for(operand.sizes, dims)
        identity = self.leaf(operand, dims, extents)
        return Value(identity, extents, dims, operand.sizes, operand.dtype)

    def view(self, value: Value, extents: Sequence[int]) -> int:
        """The same elements in the same order along other axes."""
        extents = tuple(extents)
        if extents == value.extents:
            return value.id
        flat = [axis for axes in value.dims for axis in axes]
        if flat != sorted(flat) or product(extents) != product(value.extents):
            raise UnfitError("its elements would have to move in memory")
        if extents[0] != value.extents[0]:
            raise UnfitError("a view that changes the batch")
        identity = self.emit("view", [value.id], {"shape": json_shape(extents)})
        self._viewed[identity] = value
        return identity

    def is_leaf(self, value: Value) -> bool:
        return "args" not in self.values[value.id]

    def behind_views(self, value: Value) -> Value:
        """What is computed, where `value` is a view of it."""
        while self.values[value.id]["op"] == "view" and value.id in self._viewed:
            value = self._viewed[value.id]
        return value

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        identity = self.emit("cast", [value.id], {"dtype": DTYPE_NAMES[dtype]})
        return Value(identity, value.extents, value.dims, value.sizes, dtype)

    def rounded(self, value: Value) -> Value:
        """With the bits that it has in memory: computed values of 16 bits hold more of them."""
        if value.dtype.itemsize != 2 or self.is_leaf(value):
            return value
        return self.cast(self.cast(value, torch.float32), value.dtype)

    def align(self, operands: Sequence[Operand]) -> tuple[list[int], tuple, tuple, tuple]:
        """Ids of the operands on common axes, and the broadcast extents, dims and sizes."""
        sizes = _broadcast([operand.sizes for operand in operands])
        dims = _common_dims(operands, sizes)
        extents = [1] * AXES
        for operand in operands:
            own = _padded_sizes(operand, len(sizes))
            held = _padded_axes(operand, len(sizes))
            for size, axes, run in zip(own, held, dims):
                if axes == ():
                    continue  # expanded, or of extent 1
                if axes == run:
                    for axis in run:
                        extents[axis] = operand.extents[axis]
                elif size != 1 and len(run) == 1:
                    extents[run[0]] = size
                elif size < -1 and run == (0, 1):
                    extents[0], extents[1] = -1, -size
        for size, run in zip(sizes, dims):
            if product([extents[axis] for axis in run]) != size:
                raise UnfitError("a broadcast along which no operand varies")
        ids = [self._place(operand, dims, extents) for operand in operands]
        return ids, tuple(extents), dims, sizes

    def _place(self, operand: Operand, dims, extents) -> int:
        lead = len(dims) - len(operand.sizes)
        wanted = dims[lead:]
        if isinstance(operand, Leaf):
            return self.leaf(operand, wanted, extents)
        own = [1] * AXES
        for axes, run in zip(operand.dims, wanted):
            if axes:
                for axis in run:
                    own[axis] = extents[axis]
        if tuple(own) == operand.extents and operand.dims == _where_held(operand, wanted):
            return operand.id
        # Equal extents alone say nothing: both sides of a square plane have the same.
        order = _order_in_memory(operand.dims, operand.extents)
        if order is None or order != _order_in_memory(_where_held(operand, wanted), own):
            raise UnfitError("operands whose dimensions lie on different axes")
        return self.view(in_memory(operand), own)

    def result_layout(
        self, value: Value, computed: Value, single: tuple[int | None, ...] = ()
    ) -> ResultLayout:
        """Of a tensor like `value` in whose memory `computed` is written."""
        for size, run in zip(value.sizes, value.dims):
            if product([value.extents[axis] for axis in run]) != size:
                raise UnfitError("an expanded tensor as a result")
            inner = [axis for axis in run if value.extents[axis] != 1]
            within = range(inner[0], inner[-1] + 1) if inner else ()
            if inner != [axis for axis in within if value.extents[axis] != 1]:
                raise UnfitError("a dimension with another one inside it as a result")
        written = None if computed.extents == value.extents else computed.extents
        return ResultLayout(value.sizes, value.dims, value.extents, value.dtype, written, single)

    def joined_layout(
        self, joined: Joined, order: Sequence[int], single: tuple[int | None, ...]
    ) -> JoinedLayout:
        """order: of the tensor's dimensions in memory, outermost first."""
        parts = tuple(self.result_layout(part, part) for part in joined.parts)
        return JoinedLayout(joined.sizes, tuple(order), joined.dimension, parts, single)


def in_memory(value: Value) -> Value:
    """The same with its axes as dimensions: in the order of memory, in which those need not be."""
    axes = tuple((axis,) for axis in range(AXES))
    return Value(value.id, value.extents, axes, value.extents, value.dtype)


def axis_names(axes: Sequence[int]) -> list[str]:
    return [AXIS_NAMES[axis] for axis in sorted(axes)]


def _padded_sizes(operand: Operand, rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(operand.sizes)) + operand.sizes


def _padded_axes(operand: Operand, rank: int) -> tuple:
    """The axes of each dimension of a value; None for a leaf's, which are not settled."""
    axes = operand.dims if isinstance(operand, Value) else (None,) * len(operand.sizes)
    return ((),) * (rank - len(axes)) + tuple(axes)


def _where_held(value: Value, wanted: Sequence[tuple[int, ...]]) -> tuple:
    """The wanted axes of those dimensions along which a value varies."""
    return tuple(run if axes else () for axes, run in zip(value.dims, wanted))


def _order_in_memory(dims: Sequence[tuple[int, ...]], extents: Sequence[int]) -> list[int] | None:
    """Dimensions as they follow one another along the axes; None where one lies inside another, or
    its own axes are not in order."""
    of_axis = {axis: d for d, run in enumerate(dims) for axis in run if extents[axis] != 1}
    order = [dimension for dimension, _ in itertools.groupby(of_axis[a] for a in sorted(of_axis))]
    in_order = all(list(run) == sorted(run) for run in dims)
    return order if in_order and len(order) == len(set(order)) else None


def _broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    sizes = []
    for position in range(rank):
        found = 1
        for shape in shapes:
            index = position - (rank - len(shape))
            size = shape[index] if index >= 0 else 1
            if size != 1:
                if found not in (1, size):
                    raise UnfitError("operands whose extents agree only for one batch size")
                found = size
        sizes.append(found)
    return tuple(sizes)


def _memory_order(operands: Sequence[Operand], sizes: tuple[int, ...]) -> list[int] | None:
    """Of the dimensions of the first operand from outside that fills them."""
    whole = (o for o in operands if isinstance(o, Leaf) and o.sizes == sizes)
    first = next(whole, None)
    return memory_order(first) if first is not None else None


def _common_dims(operands: Sequence[Operand], sizes: tuple[int, ...]):
    rank = len(sizes)
    dims: list = [None] * rank
    used: set[int] = set()
    values = [operand for operand in operands if isinstance(operand, Value)]
    # The operand with the most dimensions decides; the others follow by views.
    for value in sorted(values, key=lambda v: -sum(1 for axes in v.dims if axes)):
        lead = rank - len(value.dims)
        for index, axes in enumerate(value.dims):
            if axes and dims[lead + index] is None and not used.intersection(axes):
                dims[lead + index] = axes
                used.update(axes)
    open_dims = [i for i in range(rank) if dims[i] is None and sizes[i] != 1]
    if open_dims:
        natural = natural_axes(sizes, _memory_order(operands, sizes))
        if any(used.intersection(natural[index]) for index in open_dims):
            natural = _on_free_axes(natural, open_dims, used, sizes)
        for index in open_dims:
            dims[index] = natural[index]
    return tuple(run or () for run in dims)


def _on_free_axes(natural: Sequence[tuple], open_dims: list[int], used: set, sizes) -> dict:
    """Axes for dimensions whose natural ones are taken: in the dimensions' order, so that further
    operands, which are placed by themselves, lie alike."""
    found = {i: natural[i] for i in open_dims if sizes[i] < 0}
    taken = used.union(*found.values())
    if len(taken) != len(used) + sum(map(len, found.values())):
        raise UnfitError("operands whose dimensions do not fit on four axes")
    inner = [i for i in open_dims if i not in found]
    # A single one lies on the features if it can.
    free = [axis for axis in ((3, 1, 2) if len(inner) == 1 else (1, 2, 3)) if axis not in taken]
    if len(free) < len(inner):
        raise UnfitError("operands whose dimensions do not fit on four axes")
    places = free[:1] if len(inner) == 1 else free[len(free) - len(inner) :]
    return found | {index: (axis,) for index, axis in zip(inner, places)}
