"""Numbers that change from call to call (a step count, a temperature) as tensors of one element:
what is computed with them joins a region, which reads the number where it lies."""

from __future__ import annotations

from typing import Any

import torch

from ingot.capture.nodes import named_arguments
from ingot.capture.surgery import example, last_input

_aten = torch.ops.aten
# With what takes a tensor in the place of the number, in the order of the operands.
_WITH_TENSORS = {
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.sub.Tensor: _aten.sub.Tensor,
    _aten.mul.Tensor: _aten.mul.Tensor,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.eq.Scalar: _aten.eq.Tensor,
    _aten.ne.Scalar: _aten.ne.Tensor,
    _aten.gt.Scalar: _aten.gt.Tensor,
    _aten.ge.Scalar: _aten.ge.Tensor,
    _aten.lt.Scalar: _aten.lt.Tensor,
    _aten.le.Scalar: _aten.le.Tensor,
}
_REVERSED = {_aten.rsub.Scalar: _aten.sub.Tensor}


def numbers_as_tensors(graph: torch.fx.Graph) -> list[str]:
    """Returns the names of the nodes that make them, which are PyTorch's.

    Of fp32 tensors alone: there an operator rounds a number as a tensor of one element is rounded.
    """
    made: dict[tuple[torch.fx.Node, torch.device], torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target not in _WITH_TENSORS and node.target not in _REVERSED:
            continue
        x, number = node.args[:2]
        like = example(x)
        if not _is_number(number) or not isinstance(like, torch.Tensor) or not _fits(node, like):
            continue
        tensor = made.get((number, like.device))
        if tensor is None:
            tensor = made[number, like.device] = _tensor_of(number, like)
        reverse = node.target in _REVERSED
        node.target = _REVERSED[node.target] if reverse else _WITH_TENSORS[node.target]
        node.args, node.kwargs = ((tensor, x) if reverse else (x, tensor)), {}
    return [tensor.name for tensor in made.values()]


def _is_number(argument: Any) -> bool:
    return isinstance(example(argument), (torch.SymInt, torch.SymFloat))


def _fits(node: torch.fx.Node, like: torch.Tensor) -> bool:
    return like.dtype == torch.float32 and named_arguments(node).get("alpha", 1) == 1


def _tensor_of(number: torch.fx.Node, like: torch.Tensor) -> torch.fx.Node:
    how = {"dtype": like.dtype, "device": like.device}
    with number.graph.inserting_after(last_input(number)):
        tensor = number.graph.call_function(_aten.scalar_tensor.default, (number,), how)
    tensor.meta["val"] = like.new_empty(())
    return tensor
