"""Pooling over windows that lie side by side, as a fold of the parts of a tensor that hold each
window's first element, second, ...

A part is a view that PyTorch makes of what lies in memory; what is computed of each element before
the pooling is computed of the parts' elements, and all of it is one pass: relu → avg_pool2d(2)
reads four parts of a convolution's result and writes a quarter of it. Taken where regions then
take all of that, which is tried on a copy of the graph: overlapping or padded windows stay
PyTorch's, and where gradients are needed all do (a part's derivative is a whole tensor).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture import pointwise
from ingot.capture.feed import Feed
from ingot.capture.gains import pays_as_windows
from ingot.capture.nodes import LEFT_ALONE, named_arguments, of_each_dimension, schema_name
from ingot.capture.surgery import example
from ingot.capture.table import SHAPE_OPERATORS, TABLE
from ingot.capture.trial import taken_of_copy

_aten = torch.ops.aten
# Of a window; and where nothing is computed before it, of which 16 took 1.14 times as long as
# PyTorch's pooling and what was behind it (H200).
_MOST_PARTS, _MOST_PARTS_ALONE = 16, 4
# In the meta of what stands for a pooling: the number of that.
_OF_POOLING = "ingot_of_pooling"

_MAXIMUM = {_aten.max_pool2d.default: 2, _aten.max_pool3d.default: 3}
_MEAN = {_aten.avg_pool2d.default: 2, _aten.avg_pool3d.default: 3}


def open_windows(feed: Feed, refused: dict[str, str], autocast: bool) -> None:
    found = [node for node in feed.graph.nodes if may_be_opened(node) and node.name not in refused]
    found = [node for node in found if _Opening(node, 0).pays()]
    if not found:
        return

    def rewritten(copies: dict[torch.fx.Node, torch.fx.Node]) -> None:
        for number, node in enumerate(found):
            _Opening(copies[node], number).run()

    graph, taken = taken_of_copy(feed, refused, autocast, rewritten)
    parts = [node for node in graph.nodes if _OF_POOLING in node.meta]
    parts = [node for node in parts if schema_name(node.target) not in SHAPE_OPERATORS]
    left = {node.meta[_OF_POOLING] for node in parts if node not in taken}
    for number, node in enumerate(found):
        if number not in left:
            _Opening(node, number).run()


def may_be_opened(node: torch.fx.Node, most: int = _MOST_PARTS) -> bool:
    window = _windows(node)
    return bool(window) and math.prod(window) <= most and pays_as_windows(node)


def may_take_bias(node: torch.fx.Node) -> bool:
    """Whether a convolution's bias, alone, may be left to this pooling: in windows of 16 that took
    1.33 times as long as PyTorch's operators (H200)."""
    return may_be_opened(node, _MOST_PARTS_ALONE)


def _windows(node: torch.fx.Node) -> tuple[int, ...]:
    """The window's extents, where windows lie side by side in an fp32 tensor; else none."""
    dimensions = _MAXIMUM.get(node.target) or _MEAN.get(node.target)
    if node.op != "call_function" or not dimensions or LEFT_ALONE in node.meta:
        return ()
    arguments = named_arguments(node)
    x = example(arguments["self"])
    kernel = of_each_dimension(arguments["kernel_size"], dimensions)
    stride = of_each_dimension(arguments["stride"], dimensions) if arguments["stride"] else kernel
    plain = not any(of_each_dimension(arguments["padding"], dimensions))
    plain = plain and set(of_each_dimension(arguments.get("dilation", 1), dimensions)) == {1}
    # 0 is an error of PyTorch's.
    plain = plain and arguments.get("divisor_override") is None
    space = tuple(x.shape[-dimensions:])
    if not plain or stride != kernel or len(x.shape) != dimensions + 2 or x.dtype != torch.float32:
        return ()
    if any(not isinstance(s, int) or not 0 < k <= s for s, k in zip(space, kernel)):
        return ()
    # Without ceil_mode, a rest is in no window.
    tiled = not arguments["ceil_mode"] or not any(s % k for s, k in zip(space, kernel))
    return kernel if tiled and 1 < math.prod(kernel) <= _MOST_PARTS else ()


def _is_pointwise(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or LEFT_ALONE in node.meta or not node.all_input_nodes:
        return False
    row = TABLE.get(schema_name(node.target))
    if row is None or row.__module__ != pointwise.__name__:
        return False
    return isinstance(example(node), torch.Tensor) and "_like" not in schema_name(node.target)


class _Opening:
    """number: of the pooling, for its parts' meta."""

    def __init__(self, node: torch.fx.Node, number: int):
        self.node, self.number, self.graph = node, number, node.graph
        self.window = _windows(node)
        self.x = named_arguments(node)["self"]
        self.before = self._before()
        self.views: dict[tuple, torch.fx.Node] = {}

    def _before(self) -> set[torch.fx.Node]:
        """What is computed of each element for the pooling alone."""
        space, found = tuple(example(self.x).shape[2:]), {self.node}
        ahead = [self.x]
        while ahead:
            node = ahead.pop()
            computed = _is_pointwise(node) and _OF_POOLING not in node.meta
            computed = computed and tuple(example(node).shape[2:]) == space
            if node not in found and computed and all(user in found for user in node.users):
                found.add(node)
                ahead += node.all_input_nodes
        return found - {self.node}

    def pays(self) -> bool:
        """By itself PyTorch's kernel is one pass as well, and takes less of the parts."""
        if not self.before and math.prod(self.window) > _MOST_PARTS_ALONE:
            return False
        names = [schema_name(user.target) for user in self.node.users if user.op == "call_function"]
        behind = any(name in TABLE and name not in SHAPE_OPERATORS for name in names)
        return bool(self.before) or behind

    def run(self) -> None:
        places = itertools.product(*map(range, self.window))
        parts = [self._part(self.x, place, {}) for place in places]
        largest = self.node.target in _MAXIMUM
        target = _aten.maximum.default if largest else _aten.add.Tensor
        total = parts[0]
        for part in parts[1:]:
            total = self._call(target, example(part), total, part)
        if not largest:
            total = self._call(_aten.div.Tensor, example(total), total, len(parts))
        total.meta = {**self.node.meta, _OF_POOLING: self.number}
        self.node.replace_all_uses_with(total)
        self.graph.erase_node(self.node)
        for node in sorted(self.before, reverse=True):
            self.graph.erase_node(node)

    def _call(self, target: Callable, like: torch.Tensor, *args: Any, **kwargs: Any):
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {**self.node.meta, "val": like, _OF_POOLING: self.number}
        return made

    def _part(self, node: Any, place: Sequence[int], known: dict) -> Any:
        """Of a tensor that lies or is computed, the elements at one place of the windows."""
        if not isinstance(node, torch.fx.Node):
            return node
        if node in known:
            return known[node]
        if node not in self.before:
            return self._view(node, place)
        args = torch.fx.node.map_arg(node.args, lambda n: self._part(n, place, known))
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: self._part(n, place, known))
        sizes = list(example(node).shape)
        for at, extent in enumerate(self.window, len(sizes) - len(self.window)):
            sizes[at] //= extent
        made = self._call(node.target, example(node).new_empty(sizes), *args, **kwargs)
        made.meta = {**node.meta, "val": made.meta["val"], _OF_POOLING: self.number}
        known[node] = made
        return made

    def _view(self, node: torch.fx.Node, place: Sequence[int]) -> torch.fx.Node:
        key = (node, *place)
        if key in self.views:
            return self.views[key]
        extents = self.window[: len(place)]
        dim = len(place) - 1 - len(self.window)
        value = example(node)
        if not place or value.dim() < -dim:
            below = self._view(node, place[:-1]) if place else node
        else:
            below = self._view(node, place[:-1])
            below = self._sliced(below, dim, place[-1], extents[-1])
        self.views[key] = below
        return below

    def _sliced(self, x: torch.fx.Node, dim: int, start: int, step: int) -> torch.fx.Node:
        value = example(x)
        size = value.shape[dim]
        if size == 1:
            return x
        sizes, strides = list(value.shape), list(value.stride())
        sizes[dim], strides[dim] = size // step, strides[dim] * step
        like = value.new_empty_strided(sizes, strides)
        end = start + (sizes[dim] - 1) * step + 1
        made = self._call(_aten.slice.Tensor, like, x, dim, start, end, step)
        made.meta.pop(_OF_POOLING)
        return made
