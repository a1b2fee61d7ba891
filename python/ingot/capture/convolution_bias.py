"""Biases of convolutions, which belong to the chain behind them.

On a GPU PyTorch's convolution is cuDNN's without a bias, and a pass over its result that adds it. A
chain that reads the result adds it for nothing, with the same rounding. Where the chain stays
PyTorch's after all, so does the sum: in place, as PyTorch does it.
"""

from __future__ import annotations

from typing import Any

import torch

from ingot.capture.merged_axes import may_be_taken
from ingot.capture.nodes import LEFT_ALONE, named_arguments
from ingot.capture.surgery import Writer, example
from ingot.capture.windows import may_take_bias

_aten = torch.ops.aten
_CONVOLUTIONS = {
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.conv_transpose1d.default,
    _aten.conv_transpose2d.input,
    _aten.conv_transpose3d.input,
}
# In the meta of the sum of a convolution's result, which nothing else reads, and its bias.
ADDS_BIAS = "ingot_adds_bias"


def separate_biases(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CONVOLUTIONS:
            _separate(graph, node)


def _separate(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    arguments = named_arguments(node)
    bias, sizes = arguments["bias"], example(node).shape
    if bias is None or LEFT_ALONE in node.meta or example(bias).dtype != example(node).dtype:
        return
    if len(sizes) != example(arguments["weight"]).dim():
        return  # channels come first in what has no batch
    if not node.users or not all(may_be_taken(u) or may_take_bias(u) for u in node.users):
        return
    writer = Writer(graph, node)
    args = [None if argument is bias else argument for argument in arguments.values()]
    made = writer.call(node.target, sizes, *args)
    made.meta["val"] = example(node)
    along = [sizes[1], *[1] * (len(sizes) - 2)]
    beside = writer.call(_aten.view.default, along, bias, along)
    total = writer.call(_aten.add.Tensor, sizes, made, beside)
    total.meta = {**node.meta, ADDS_BIAS: True}
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def in_place(node: torch.fx.Node, target: Any) -> Any:
    """What PyTorch runs for a node that no region took."""
    adds = ADDS_BIAS in node.meta and target is _aten.add.Tensor
    return _aten.add_.Tensor if adds else target
