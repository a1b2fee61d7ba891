"""Operators of ATen that are others put together, written as those before a graph is imported.

Parts of a tensor (slices) are views that PyTorch makes in no time; what is computed from them joins
a region, which reads them where they lie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from functools import reduce
from typing import Any

import torch

from ingot.capture.layout import has_channels_last, hint
from ingot.capture.nodes import (
    LEFT_ALONE,
    hands_out_memory,
    lies_apart,
    mutates,
    named_arguments,
    of_each_dimension,
    only,
)
from ingot.capture.spelled_out import SPELLED_OUT
from ingot.capture.surgery import Writer, example

_aten = torch.ops.aten
# Overlapping windows of more elements than this are PyTorch's own pooling.
_MOST_PARTS = 8
# The end of x[3:].
_WHOLE = 2**63 - 1


def decompose(graph: torch.fx.Graph, needing: Container[torch.fx.Node] = ()) -> None:
    """needing: nodes whose tensors need gradients."""
    for node in list(graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or LEFT_ALONE in node.meta:
            continue
        writer = Writer(graph, node, node in needing)
        replacement = rule(writer, *named_arguments(node).values())
        if replacement is not None:
            if node.target in _UNREAD and node.args[0] in needing:
                replacement = _with_zeros_behind(Writer(graph, node), replacement, node.args[0])
            if isinstance(example(node), torch.Tensor) and replacement not in node.all_input_nodes:
                replacement.meta = dict(node.meta)
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)


def _glu(writer: Writer, x: torch.fx.Node, dim: int) -> torch.fx.Node | None:
    size = example(x).shape[dim]
    if not isinstance(size, int):
        return None
    half, sizes = size // 2, example(writer.node).shape
    gate = writer.call(_aten.sigmoid.default, sizes, writer.part(x, dim, half, half))
    return writer.call(_aten.mul.Tensor, sizes, writer.part(x, dim, 0, half), gate)


def _adaptive_avg_pool(writer: Writer, x: torch.fx.Node, size) -> torch.fx.Node | None:
    """To one number a plane (or what has three dimensions), the mean of it."""
    if any(s != 1 for s in size):
        return None
    dims = [-1 - at for at in range(len(size))]
    return writer.call(_aten.mean.dim, example(writer.node).shape, x, dims, True)


def _max_pool1d(writer: Writer, x, kernel, stride, padding, dilation, ceil_mode):
    size = example(x).shape[-1]
    whole = isinstance(size, int) and only(kernel, 1) == size
    if whole and only(padding, 0) == 0 and only(dilation, 1) == 1 and writer.needs_gradient:
        return _largest_of_all(writer, x)
    return _pool1d(writer, _largest, x, kernel, stride, padding, dilation, ceil_mode)


def _max_pool2d(writer: Writer, x, kernel, stride, padding, dilation, ceil_mode):
    """Of windows that are whole rows, as PointNet++ pools its neighbours."""
    size = example(x).shape[-1]
    if not isinstance(size, int) or not writer.needs_gradient or has_channels_last(x):
        return None
    given = (kernel, stride or kernel, padding, dilation)
    kernel, (down, _), padding, dilation = (of_each_dimension(numbers, 2) for numbers in given)
    is_whole = (kernel, down, padding, dilation) == ((1, size), 1, (0, 0), (1, 1))
    return _largest_of_all(writer, x) if is_whole else None


def _avg_pool1d(writer: Writer, x, kernel, stride, padding, ceil_mode, count_include_pad):
    return _pool1d(writer, _mean, x, kernel, stride, padding, 1, ceil_mode)


def _pool1d(writer: Writer, fold: Callable, x, kernel, stride, padding, dilation, ceil_mode):
    """Where windows lie side by side and there is no rest, the operator itself. Else `fold` of the
    parts that hold each window's first element, second, ...; where there would be many, or each
    would have a gradient as large as x, the operator on the part of x that windows side by side
    cover, and PyTorch's for others."""
    kernel = only(kernel, 1)
    stride, dilation = only(stride, kernel), only(dilation, 1)
    size, sizes = example(x).shape[-1], example(writer.node).shape
    reach = dilation * (kernel - 1) + 1
    if only(padding, 0) or not isinstance(size, int) or size < reach:
        return None
    count = (size - reach) // stride + 1
    if ceil_mode and (size - reach) % stride:
        return None
    covered = count * kernel
    tiled = stride == kernel and dilation == 1
    if tiled and covered == size:
        return None
    if kernel > _MOST_PARTS or writer.needs_gradient:
        part = writer.part(x, -1, 0, covered) if tiled else None
        return part and writer.call(writer.node.target, sizes, part, [kernel])
    parts = [writer.part(x, -1, i * dilation, count, stride) for i in range(kernel)]
    return fold(writer, sizes, parts)


def _largest_of_all(writer: Writer, x: torch.fx.Node) -> torch.fx.Node:
    """Over the last dimension, which is kept, with a derivative that a region takes."""
    sizes = (*example(x).shape[:-1], 1)
    found = writer.call(_aten.max.dim, sizes, x, -1, True)
    largest = found.meta["val"]
    found.meta["val"] = (largest, torch.empty_like(largest, dtype=torch.int64))
    return writer.call(operator.getitem, sizes, found, 0)


def _largest(writer: Writer, sizes, parts: list[torch.fx.Node]) -> torch.fx.Node:
    return reduce(lambda a, b: writer.call(_aten.maximum.default, sizes, a, b), parts)


def _mean(writer: Writer, sizes, parts: list[torch.fx.Node]) -> torch.fx.Node:
    total = reduce(lambda a, b: writer.call(_aten.add.Tensor, sizes, a, b), parts)
    return writer.call(_aten.div.Tensor, sizes, total, len(parts))


def _adaptive_max_pool1d(writer: Writer, x, output_size) -> torch.fx.Node | None:
    """Of windows of one size, the largest alone."""
    size, count = example(x).shape[-1], only(output_size, 0)
    places = [user for user in writer.node.users if user.args[1] != 0 and user.users]
    if places or not isinstance(size, int) or not count or size % count:
        return None
    if count == 1 and writer.needs_gradient:
        largest = _largest_of_all(writer, x)
    else:
        sizes = (*example(x).shape[:-1], count)
        largest = writer.call(_aten.max_pool1d.default, sizes, x, size // count)
    for user in list(writer.node.users):
        user.replace_all_uses_with(largest)
        writer.graph.erase_node(user)
    return largest


def _slice(writer: Writer, x, dim, start, end, step) -> torch.fx.Node | None:
    """x[:] is x."""
    size = example(x).shape[dim]
    numbers = isinstance(size, int) and isinstance(end, int)
    whole = end is None or end == _WHOLE or (numbers and end >= size)
    return x if start in (None, 0) and whole and step == 1 else None


def _parts_read(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """What is taken of its tuple, or None where that is read whole."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return parts if len(parts) == len(node.users) else None


def _broadcast_tensors(writer: Writer, tensors) -> torch.fx.Node | None:
    """Of tensors of one shape: these."""
    shapes = [example(tensor).shape for tensor in tensors]
    parts = _parts_read(writer.node)
    if parts is None or any(map(_unlike, shapes, shapes[1:])):
        return None
    for part in parts:
        part.replace_all_uses_with(tensors[part.args[1]])
        writer.graph.erase_node(part)
    return tensors[0]


def _unlike(shape: Any, other: Any) -> bool:
    return len(shape) != len(other) or any(map(_differ, shape, other))


def _aminmax(writer: Writer, x, dim: int | None, keepdim: bool) -> torch.fx.Node | None:
    """PyTorch's has no derivative, which a region would be asked for whoever reads the result."""
    parts = _parts_read(writer.node)
    if not writer.needs_gradient or parts is None:
        return None
    dims, made = [] if dim is None else [dim], x
    for part in parts:
        target = (_aten.amin.default, _aten.amax.default)[part.args[1]]
        made = writer.call(target, example(part).shape, x, dims, keepdim)
        part.replace_all_uses_with(made)
        writer.graph.erase_node(part)
    return made


def _with_no_sum(writer: Writer, c, a, b, beta, alpha) -> torch.fx.Node | None:
    """beta·c + alpha·(a·b) where beta is 0: what c holds, infinities too, counts for nothing."""
    if beta != 0:
        return None
    sizes = example(writer.node).shape
    product = _aten.mm.default if len(sizes) == 2 else _aten.bmm.default
    made = writer.call(product, sizes, a, b)
    return made if alpha == 1 else writer.call(_aten.mul.Scalar, sizes, made, alpha)


def _copy(writer: Writer, x, source, non_blocking) -> torch.fx.Node:
    """What writes without writing into anything become; PyTorch knows no derivative of it."""
    own, like = example(writer.node), example(source)
    if not isinstance(like, torch.Tensor):
        return writer.call(_aten.full_like.default, own.shape, x, source)
    if own.dtype != like.dtype:
        source = writer.call(_aten.to.dtype, like.shape, source, own.dtype)
    if _unlike(own.shape, like.shape):
        source = writer.call(_aten.expand_as.default, own.shape, source, x)
    return writer.call(_aten.clone.default, own.shape, source)


def _expand_as(writer: Writer, x, other) -> torch.fx.Node | None:
    """To sizes, not to a tensor that may not be there yet where PyTorch takes the view."""
    own, sizes = example(x).shape, example(writer.node).shape
    own = (1,) * (len(sizes) - len(own)) + tuple(own)
    lead, dims = len(sizes) - example(x).dim(), []
    for at, (size, before) in enumerate(zip(sizes, own)):
        kept = at >= lead and not _differ(before, size)
        if not kept and not isinstance(size, int):
            return None
        dims.append(-1 if kept else size)
    return writer.call(_aten.expand.default, sizes, x, dims)


def _shaped_as(target: Any) -> Callable:
    def rule(writer: Writer, x, other) -> torch.fx.Node | None:
        """To sizes, as above."""
        sizes = example(writer.node).shape
        wanted = [size if isinstance(size, int) else -1 for size in sizes]
        return writer.call(target, sizes, x, wanted) if wanted.count(-1) < 2 else None

    return rule


def _type_as(writer: Writer, x, other) -> torch.fx.Node | None:
    own, like = example(x), example(other)
    if own.device != like.device:
        return None
    return writer.call(_aten.to.dtype, own.shape, x, like.dtype)


def _to(writer: Writer, x, *_: Any) -> torch.fx.Node | None:
    """To the device where it is, as forwards say that run on any."""
    own, like = example(x), example(writer.node)
    how = named_arguments(writer.node)
    if own.device != like.device or how["copy"] or how["memory_format"] is not None:
        return None
    return writer.call(_aten.to.dtype, own.shape, x, like.dtype)


def _pad(writer: Writer, x, padding, *_: Any) -> torch.fx.Node | None:
    """By nothing, as forwards do that pad what does not divide: a copy, where nobody can tell it
    from what it is a copy of."""
    if any(isinstance(count, torch.fx.Node) or count for count in padding):
        return None
    own, like = (list(map(hint, example(of).stride())) for of in (writer.node, x))
    apart = lies_apart(x) and not hands_out_memory(writer.node)
    return x if own == like and apart and not any(map(mutates, writer.graph.nodes)) else None


def _differ(size: Any, other: Any) -> bool:
    """Of sizes that broadcast, without asking what a symbol is."""
    return isinstance(size, int) != isinstance(other, int) or (
        isinstance(size, int) and size != other
    )


def _with_zeros_behind(writer: Writer, made: torch.fx.Node, unread: torch.fx.Node) -> torch.fx.Node:
    """The same with gradients of zeros for what it was not made of, as PyTorch gives them: without
    any, an optimiser would leave parameters alone that it has to decay."""
    like = example(writer.node)
    never = writer.call(_aten.full.default, (), (), False, dtype=torch.bool, device=like.device)
    never.meta["val"] = like.new_empty((), dtype=torch.bool)
    return writer.call(_aten.where.self, like.shape, never, unread, made)


def _nothing(writer: Writer, x, *_: Any) -> torch.fx.Node:
    return x


_RULES: dict[Any, Callable] = {
    **SPELLED_OUT,
    _aten.slice.Tensor: _slice,
    _aten.copy.default: _copy,
    _aten.expand_as.default: _expand_as,
    _aten.view_as.default: _shaped_as(_aten.view.default),
    _aten.reshape_as.default: _shaped_as(_aten.reshape.default),
    _aten.type_as.default: _type_as,
    _aten.to.device: _to,
    _aten.to.dtype_layout: _to,
    _aten.to.other: _to,
    _aten.adaptive_avg_pool2d.default: _adaptive_avg_pool,
    _aten.adaptive_avg_pool3d.default: _adaptive_avg_pool,
    _aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
    _aten.aminmax.default: _aminmax,
    _aten.broadcast_tensors.default: _broadcast_tensors,
    _aten.constant_pad_nd.default: _pad,
    _aten.glu.default: _glu,
    _aten.pad.default: _pad,
    _aten.addmm.default: _with_no_sum,
    _aten.baddbmm.default: _with_no_sum,
    _aten.max_pool1d.default: _max_pool1d,
    _aten.max_pool2d.default: _max_pool2d,
    _aten.avg_pool1d.default: _avg_pool1d,
    # What a capture's inputs were like is compared at every call.
    _aten._assert_tensor_metadata.default: _nothing,
}
# Operators with a first operand that their rules leave away.
_UNREAD = {_aten.copy.default, _aten.addmm.default, _aten.baddbmm.default}
