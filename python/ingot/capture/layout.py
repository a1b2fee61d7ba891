"""How a tensor's dimensions lie on the graph's axes [batch, rows, groups, features].

A `Value` is computed inside a region: each of its dimensions runs along one or several axes (none
where its extent is 1). A `Leaf` comes from outside: its dimensions get their axes from the operator
that first uses it, since a bias [C] lies on the features behind a linear layer, but on the rows
beside [N, C, L]. Transposing and inserting dimensions only relabels; nothing moves.

Sizes are integers; a negative one, -k, stands for k times the symbolic batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ingot.capture.nodes import is_convolution
from ingot.runtime.layouts import LeafLayout
from ingot.runtime.library import AXES
from ingot.runtime.signature import BATCH

AXIS_NAMES = ("batch", "rows", "groups", "features")


class UnfitError(Exception):
    """This operator cannot be taken over here; the message says why."""


@dataclass(frozen=True)
class Value:
    """id: in the region's graph; extents: along the axes; dims: for each dimension its axes, in
    order; sizes: of the dimensions (an expanded dimension has a size but no axes)."""

    id: int
    extents: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Leaf:
    """node: what makes the tensor; order: for each dimension the tensor's own (several, outermost
    first, that memory does not tell apart), or None where one of extent 1 was inserted; part: what
    of the tensor is meant, along one of its own dimensions, from where on, how much."""

    node: Any
    order: tuple[int | tuple[int, ...] | None, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    part: tuple[int, int, int] | None = None

    @property
    def batched(self) -> bool:
        return any(size < 0 for size in self.sizes)


@dataclass(frozen=True)
class Joined:
    """Values of a region, one behind another along a dimension: to be a result, and no operand."""

    parts: tuple[Value, ...]
    dimension: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


def in_parts(sizes: Sequence[int], per_sample: int) -> tuple[int, ...]:
    """Sizes as a region has them whose batch is parts of samples, so many of each."""
    if any(size < 0 and size % per_sample for size in sizes):
        raise UnfitError("whole samples beside parts of samples")
    return tuple(size // per_sample if size < 0 else size for size in sizes)


def in_samples(sizes: Sequence[int], per_sample: int) -> tuple[int, ...]:
    """Sizes of such a region's, as the graph has them."""
    return tuple(size * per_sample if size < 0 else size for size in sizes)


def product(sizes: Sequence[int]) -> int:
    """Of sizes; at most one may be symbolic."""
    result, symbolic = 1, False
    for size in sizes:
        if size < 0 and symbolic:
            raise UnfitError("the batch size appears twice")
        symbolic = symbolic or size < 0
        result = result * size
    return result


def natural_axes(
    sizes: Sequence[int], order: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Axes for a tensor that nothing else decides: the last dimension on the features; what
    merges the batch with another dimension, on the batch and the rows. order: of the dimensions in
    memory, outermost first, where that is another one."""
    real = [index for index in order or range(len(sizes)) if sizes[index] != 1]
    axes: dict[int, tuple[int, ...]] = {}
    places: tuple[int, ...] | None
    # A batch or extent-1 dimension in front leaves [rows, groups, features] for the others.
    free = {0: (), 1: (3,), 2: (1, 3), 3: (1, 2, 3)}
    if real and sizes[real[0]] < 0:
        merged = sizes[real[0]] < -1
        axes[real.pop(0)] = (0, 1) if merged else (0,)
        if merged:
            free = {0: (), 1: (3,), 2: (2, 3)}
    places = free.get(len(real))
    if places is None:
        raise UnfitError(f"a tensor of {len(sizes)} dimensions has more than the four axes")
    if len(real) == 1 and real[0] != len(sizes) - 1 and len(sizes) >= 3:
        # [N, C, 1]: C lies where [N, C, L] has it.
        places = (1,)
    for index, place in zip(real, places):
        if sizes[index] < 0:
            raise UnfitError("the batch is not its first dimension")
        axes[index] = (place,)
    return tuple(axes.get(index, ()) for index in range(len(sizes)))


# In the meta of a node whose tensor has its channels innermost, as some convolutions lay them out.
CHANNELS_LAST = "ingot_channels_last"


def has_channels_last(node: Any) -> bool:
    if CHANNELS_LAST in node.meta:
        return node.meta[CHANNELS_LAST]
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 4:
        return False
    inner = (value.shape[1], *value.shape[2:])
    if any(not isinstance(size, int) for size in inner) or inner[0] == 1:
        return False
    return max(inner[1:]) > 1 and value.stride(1) == 1


def has_channels_innermost(axes: tuple) -> bool:
    """axes: of each dimension of a result [N, C, ...]."""
    sample, channels, space = axes[:1], axes[1:2], axes[2:]
    flat = [axis for run in (*sample, *space, *channels) for axis in run]
    return bool(space) and flat == sorted(flat)


def hand_on_channels_last(graph: torch.fx.Graph) -> None:
    """To tensors [N, C, space] that lie so, which do not tell it themselves: any matrix may be
    transposed."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            channels, space = value.shape[1:]
            if isinstance(channels, int) and isinstance(space, int) and min(channels, space) > 1:
                node.meta[CHANNELS_LAST] = value.stride(1) == 1


def may_lie_channels_last(node: torch.fx.Node) -> bool:
    """Whether it makes no difference to what reads a tensor if its channels lie innermost:
    convolutions read it, whose weights lie so, and to which PyTorch would turn it."""
    return bool(node.users) and all(
        may_lie_channels_last(user)
        if user.target is torch.ops.aten.unflatten.int
        else is_convolution(user) and user.args[0] is node and _lies_channels_last(user.args[1])
        for user in node.users
    )


def _lies_channels_last(weight: Any) -> bool:
    value = weight.meta.get("val") if isinstance(weight, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    return suggest_memory_format(value) in (torch.channels_last, torch.channels_last_3d)


def memory_order(leaf: Leaf) -> list[int] | None:
    """Of a leaf's dimensions, as natural_axes has it."""
    if leaf.part is not None:
        return _order_of_part(leaf)
    if not has_channels_last(leaf.node):
        return None
    # [N, C, ...]: C comes last.
    inward = [index for index, own in enumerate(leaf.order) if own == 1]
    return [index for index in range(len(leaf.sizes)) if index not in inward] + inward


def _order_of_part(leaf: Leaf) -> list[int] | None:
    """As the tensor lies, the batch in front: its parts are short runs of elements, which lie close
    together only so."""
    strides = [hint(stride) for stride in leaf.node.meta["val"].stride()]
    if any(isinstance(own, tuple) for own in leaf.order):
        return None
    apart = [0 if own is None else strides[own] for own in leaf.order]
    return sorted(range(len(apart)), key=lambda at: (leaf.sizes[at] > 0, -apart[at]))


def extents_for(sizes: Sequence[int], dims: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Extents along the axes where each dimension has one axis at most, or is the batch times
    something."""
    extents = [1] * AXES
    for size, axes in zip(sizes, dims):
        if len(axes) == 2:
            extents[axes[0]], extents[axes[1]] = BATCH, -size
        elif axes:
            extents[axes[0]] = size
    return tuple(extents)


def leaf_layout(leaf: Leaf, dims, extents) -> LeafLayout:
    """How the leaf's own tensor lies on the axes, given its dimensions' axes and their extents."""
    axes: list[int | tuple[int, ...] | None] = [None] * AXES
    splits: list[tuple[int, int] | None] = [None] * AXES
    for dimension, run in enumerate(dims):
        own = leaf.order[dimension]
        if own is None or leaf.sizes[dimension] == 1:
            continue
        step = 1
        for axis in reversed(run):
            axes[axis] = own
            if len(run) > 1:
                splits[axis] = (extents[axis], step)
                step *= extents[axis]
    return LeafLayout(tuple(axes), tuple(splits), leaf.part)


def part_of(leaf: Leaf, dimension: int, start: int, count: int) -> Leaf:
    own = leaf.order[dimension]
    if not isinstance(own, int) or leaf.part is not None or leaf.sizes[dimension] < 0:
        raise UnfitError("a part of a part, of the batch, or of several dimensions as one")
    sizes = (*leaf.sizes[:dimension], count, *leaf.sizes[dimension + 1 :])
    return replace(leaf, sizes=sizes, part=(own, start, count))


def relabel_permute(value, order: Sequence[int]):
    rank = len(value.sizes)
    order = [axis % rank for axis in order] if rank else []
    sizes = tuple(value.sizes[i] for i in order)
    if isinstance(value, Leaf):
        return replace(value, order=tuple(value.order[i] for i in order), sizes=sizes)
    return replace(value, dims=tuple(value.dims[i] for i in order), sizes=sizes)


def relabel_insert(value, at: int):
    at %= len(value.sizes) + 1
    sizes = (*value.sizes[:at], 1, *value.sizes[at:])
    if isinstance(value, Leaf):
        return replace(value, order=(*value.order[:at], None, *value.order[at:]), sizes=sizes)
    return replace(value, dims=(*value.dims[:at], (), *value.dims[at:]), sizes=sizes)


def relabel_drop(value, dimensions: Sequence[int]):
    """Removes those of `dimensions` whose extent is 1."""
    rank = len(value.sizes)
    gone = {d % rank for d in dimensions if value.sizes[d % rank] == 1} if rank else set()
    keep = [i for i in range(rank) if i not in gone]
    return relabel_permute(value, keep) if rank else value


def relabel_expand(value, sizes: Sequence[int]):
    """Broadcasting to `sizes`: dimensions without axes."""
    while len(value.sizes) < len(sizes):
        value = relabel_insert(value, 0)
    for old, new in zip(value.sizes, sizes):
        if old not in (1, new):
            raise UnfitError(f"cannot expand {old} to {new}")
    if isinstance(value, Leaf):
        if any(old != new for old, new in zip(value.sizes, sizes)):
            raise UnfitError("an expanded tensor")
        return value
    return replace(value, sizes=tuple(sizes))


def merged_leaf(leaf: Leaf, sizes: Sequence[int]) -> Leaf | None:
    """A leaf with dimensions of space merged, where the tensor is a convolution's: whichever format
    it has, its space lies in one piece."""
    if leaf.part is not None or not is_convolution(leaf.node):
        return None
    if leaf.order != tuple(range(len(leaf.sizes))):
        return None
    order: list[int | tuple[int, ...]] = []
    at = 0
    for size in sizes:
        first = at
        while at < len(leaf.sizes) and product(leaf.sizes[first:at]) != size:
            at += 1
        if product(leaf.sizes[first:at]) != size or (at > first + 1 and first < 2):
            return None
        order.append(first if at == first + 1 else tuple(range(first, at)))
    if at != len(leaf.sizes) or () in order:
        return None
    return replace(leaf, order=tuple(order), sizes=tuple(sizes))


def regroup(value: Value, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple]:
    """The extents and the dimensions' axes of `value` seen under other sizes (a view).

    Dimensions keep their axes where the factorings agree; where one dimension splits in two or
    three, or several merge, the axes follow if the order in memory allows it.
    """
    flat = [axis for axes in value.dims for axis in axes]
    if flat != sorted(flat):
        raise UnfitError("a view of transposed elements")
    for size, axes in zip(value.sizes, value.dims):
        if product([value.extents[axis] for axis in axes]) != size:
            raise UnfitError("a view of an expanded tensor")
    # Same factoring of the axes: dimensions take whole runs of consecutive axes.
    dims = _runs(flat, value.extents, sizes)
    if dims is not None:
        return value.extents, dims
    real = [size for size in sizes if size != 1]
    if real and real[0] < -1:
        raise UnfitError("a view that merges the batch with other dimensions")
    dims = _grouped_axes(sizes)
    return extents_for(sizes, dims), dims


def _runs(flat, extents, sizes):
    dims, at = [], 0
    for size in sizes:
        run, reached = [], 1
        while reached != size and at < len(flat):
            run.append(flat[at])
            reached *= extents[flat[at]]
            at += 1
        if reached != size:
            return None
        dims.append(tuple(run))
    return tuple(dims) if at == len(flat) or all(extents[a] == 1 for a in flat[at:]) else None


def _grouped_axes(sizes):
    """As natural_axes, but a pair of dimensions is (groups, features in a group)."""
    real = [index for index, size in enumerate(sizes) if size not in (1, BATCH)]
    places = {0: (), 1: (3,), 2: (2, 3), 3: (1, 2, 3)}.get(len(real))
    if places is None:
        raise UnfitError(f"a view with {len(real)} dimensions beside the batch")
    axes = dict(zip(real, places))
    for index, size in enumerate(sizes):
        if size == BATCH:
            if any(other < index for other in real):
                raise UnfitError("a view whose batch is not the first dimension")
            axes[index] = 0
    return tuple((axes[index],) if index in axes else () for index in range(len(sizes)))


def hint(size: Any) -> int:
    """The size that the graph was traced with, without binding it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def written(size: Any) -> Any:
    """To be compared without binding a symbolic size to the number that stands for it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def elements(value: Any) -> int:
    """By the sizes that the graph was traced with; of no tensor, 0."""
    return math.prod(map(hint, value.shape)) if isinstance(value, torch.Tensor) else 0


def size_in_bytes(value: Any) -> int:
    return value.element_size() * elements(value) if isinstance(value, torch.Tensor) else 0


def result_bytes(node: torch.fx.Node) -> int:
    return size_in_bytes(node.meta.get("val"))
