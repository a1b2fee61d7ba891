"""Putting operators into a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.nodes import IMPLIED


class Writer:
    """Puts operators in front of a node, with its place in the user's sources.

    needs_gradient: whether what the node gives does."""

    def __init__(self, graph: torch.fx.Graph, node: torch.fx.Node, needs_gradient: bool = False):
        self.graph, self.node, self.needs_gradient = graph, node, needs_gradient

    def call(self, target: Callable, sizes: Sequence, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """An operator whose result has these sizes, and the dtype of the node that it stands for
        (of its first result).

        It is not tried on tensors without data: what it would ask about a symbolic batch size could
        bind that to the number that stood in for it.
        """
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = dict(self.node.meta)
        like = self.node.meta["val"]
        like = like if isinstance(like, torch.Tensor) else like[0]
        made.meta["val"] = like.new_empty(sizes)
        return made

    def made(self, like: torch.Tensor, target: Callable, *args: Any, **kwargs: Any):
        """An operator whose result is like this tensor, of any dtype."""
        node = self.call(target, like.shape, *args, **kwargs)
        node.meta["val"] = like
        return node

    def part(self, x: torch.fx.Node, dim: int, start: int, count: int, step: int = 1):
        """`count` elements from `start` on."""
        sizes = list(example(x).shape)
        sizes[dim] = count
        end = start + (count - 1) * step + 1
        return self.call(torch.ops.aten.slice.Tensor, sizes, x, dim, start, end, step)


def last_input(node: torch.fx.Node) -> torch.fx.Node:
    """The node; of an input, the last of them: what is made of one comes behind all."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def write_cast(
    value: torch.fx.Node, dtype: torch.dtype, readers: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """A cast that autocast makes of what is read, in front of those that are to read it cast."""
    to_copy, how = torch.ops.aten._to_copy.default, {"dtype": dtype}
    with value.graph.inserting_before(min(readers)):
        cast = value.graph.call_function(to_copy, (value,), how)
    cast.meta |= {"val": value.meta["val"].to(dtype), IMPLIED: True}
    for reader in readers:
        reader.replace_input_with(value, cast)
    return cast


def example(argument: Any) -> Any:
    """The tensor (without data) that a node stands for."""
    return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument


def sizes_of(argument: Any) -> tuple:
    """() for what stands for no tensor."""
    value = example(argument)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
