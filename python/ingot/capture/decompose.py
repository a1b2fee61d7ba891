"""Operators of ATen that are others put together, written as those before a graph is imported.

Parts of a tensor (slices) are views that PyTorch makes in no time; what is computed from them joins
a region, which reads them where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.capture.surgery import Writer, example

_aten = torch.ops.aten
# Overlapping windows of more elements than this are PyTorch's own pooling.
_MOST_PARTS = 8
# The end of x[3:].
_WHOLE = 2**63 - 1


def decompose(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        replacement = rule(Writer(graph, node), *_arguments(node))
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)


def _arguments(node: torch.fx.Node) -> list:
    """Positional, defaults filled in."""
    values = []
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            values.append(node.args[index])
        else:
            values.append(node.kwargs.get(argument.name, argument.default_value))
    return values


def _glu(writer: Writer, x: torch.fx.Node, dim: int) -> torch.fx.Node | None:
    size = example(x).shape[dim]
    if not isinstance(size, int):
        return None
    half, sizes = size // 2, example(writer.node).shape
    gate = writer.call(_aten.sigmoid.default, sizes, writer.part(x, dim, half, half))
    return writer.call(_aten.mul.Tensor, sizes, writer.part(x, dim, 0, half), gate)


def _first(value: Any, otherwise: int) -> int:
    return value[0] if isinstance(value, (list, tuple)) and value else value or otherwise


def _windows(writer: Writer, x, kernel, stride, padding, dilation, ceil_mode):
    """The parts of x that hold each window's first element, second, ...; the pooled part where
    windows lie side by side; or neither."""
    kernel = _first(kernel, 1)
    stride, dilation = _first(stride, kernel), _first(dilation, 1)
    size = example(x).shape[-1]
    reach = dilation * (kernel - 1) + 1
    if _first(padding, 0) or not isinstance(size, int) or size < reach:
        return None, None
    count = (size - reach) // stride + 1
    if ceil_mode and (size - reach) % stride:
        return None, None
    if stride == kernel and dilation == 1:
        used = count * kernel
        return None, writer.part(x, -1, 0, used) if used < size else None
    if kernel > _MOST_PARTS:
        return None, None
    parts = [writer.part(x, -1, i * dilation, count, stride) for i in range(kernel)]
    return parts, None


def _max_pool1d(writer: Writer, x, kernel, stride, padding, dilation, ceil_mode):
    sizes = example(writer.node).shape
    parts, used = _windows(writer, x, kernel, stride, padding, dilation, ceil_mode)
    if used is not None:
        return writer.call(_aten.max_pool1d.default, sizes, used, kernel)
    if parts is None:
        return None
    largest = parts[0]
    for part in parts[1:]:
        largest = writer.call(_aten.maximum.default, sizes, largest, part)
    return largest


def _avg_pool1d(writer: Writer, x, kernel, stride, padding, ceil_mode, count_include_pad):
    sizes = example(writer.node).shape
    parts, used = _windows(writer, x, kernel, stride, padding, 1, ceil_mode)
    if used is not None:
        return writer.call(_aten.avg_pool1d.default, sizes, used, kernel)
    if parts is None:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = writer.call(_aten.add.Tensor, sizes, total, part)
    return writer.call(_aten.div.Tensor, sizes, total, len(parts))


def _adaptive_max_pool1d(writer: Writer, x, output_size) -> torch.fx.Node | None:
    """Of windows of one size, the largest alone."""
    size, count = example(x).shape[-1], _first(output_size, 0)
    places = [user for user in writer.node.users if user.args[1] != 0 and user.users]
    if places or not isinstance(size, int) or not count or size % count:
        return None
    largest = writer.call(
        _aten.max_pool1d.default, (*example(x).shape[:-1], count), x, size // count
    )
    for user in list(writer.node.users):
        user.replace_all_uses_with(largest)
        writer.graph.erase_node(user)
    return largest


def _slice(writer: Writer, x, dim, start, end, step) -> torch.fx.Node | None:
    """x[:] is x."""
    size = example(x).shape[dim]
    whole = end is None or end == _WHOLE or (isinstance(size, int) and end >= size)
    return x if start in (None, 0) and whole and step == 1 else None


def _nothing(writer: Writer, x, *_: Any) -> torch.fx.Node:
    return x


_RULES: dict[Any, Callable] = {
    _aten.slice.Tensor: _slice,
    _aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
    _aten.glu.default: _glu,
    _aten.max_pool1d.default: _max_pool1d,
    _aten.avg_pool1d.default: _avg_pool1d,
}
# What a capture's inputs were like is compared at every call.
if hasattr(_aten, "_assert_tensor_metadata"):
    _RULES[_aten._assert_tensor_metadata.default] = _nothing
