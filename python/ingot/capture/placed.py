"""Gradients that reach one element of many: of a maximum along a dimension, with where it lies.

Autograd puts them into zeros by their places, which a region can neither write nor, where it begins
behind them, read in less than two passes. Told by a comparison of an element's number with the
place, they are an operator upon each element, of which nothing lies in memory.
"""

from __future__ import annotations

import torch

from ingot.capture import custom_ops  # noqa: F401 - defines what is written
from ingot.capture.nodes import COUNTED_IN_FP32
from ingot.capture.recorded import same_size
from ingot.capture.surgery import Writer, example

_aten, _ingot = torch.ops.aten, torch.ops.ingot


def place_by_number(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is _aten.scatter.src and _is_one_of_many(node):
            _write_comparison(node)
    graph.eliminate_dead_code()


def _is_one_of_many(scatter: torch.fx.Node) -> bool:
    """Whether it puts one element for each of all others' dimensions into zeros."""
    zeros, dim, places, x = scatter.args
    if zeros.target is not _aten.zeros.default or not isinstance(x, torch.fx.Node):
        return False
    sizes, number, given = (example(each).shape for each in (scatter, places, x))
    count = sizes[dim] if sizes else None
    if not isinstance(count, int) or not 0 < count <= COUNTED_IN_FP32:
        return False
    one = [1 if at == dim % len(sizes) else size for at, size in enumerate(sizes)]
    return all(len(one) == len(each) and all(map(same_size, one, each)) for each in (number, given))


def _write_comparison(scatter: torch.fx.Node) -> None:
    _, dim, places, x = scatter.args
    made, dim = example(scatter), dim % example(scatter).dim()
    count = made.shape[dim]
    wide = {"dtype": torch.float32}
    writer = Writer(scatter.graph, scatter)
    like = made.new_empty((count,), **wide)
    numbers = writer.made(like, _aten.arange.default, count, **wide, device=made.device)
    if behind := made.dim() - 1 - dim:
        shape = [count, *[1] * behind]
        numbers = writer.made(like.new_empty(shape), _aten.reshape.default, numbers, shape)
    found = writer.call(_ingot.placed.default, made.shape, numbers, places, x, dim)
    scatter.replace_all_uses_with(found)
    scatter.graph.erase_node(scatter)
