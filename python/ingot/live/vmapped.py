"""Parts of a forward under `torch.vmap`, as the masks of transformers' models are made: traced by
themselves to the plain operators that their batching rules give, which then stand in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from ingot.capture.captured import CaptureError
from ingot.capture.nodes import mutates

_ENTER, _EXIT, _NESTING = "_vmap_increment_nesting", "_vmap_decrement_nesting", "_nesting"
_layers = torch._C._functorch


def refuse_other_transforms(graph: torch.fx.Graph) -> None:
    """Raises CaptureError where a forward holds a transform of torch.func but vmap."""
    for node in graph.nodes:
        if _NESTING in _name(node) and _name(node) not in (_ENTER, _EXIT):
            raise CaptureError("transforms of torch.func inside a forward are PyTorch's")


def spans(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """The nodes from where each outermost vmap is entered to where it is left, by the first."""
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    depth, now = 0, []
    for node in graph.nodes:
        if _name(node) == _ENTER:
            if depth == 0:
                now = found[node] = []
            depth += 1
        if depth:
            now.append(node)
        if _name(node) == _EXIT:
            depth -= 1
    return found


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def results_of(
    gm: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node], env: dict[torch.fx.Node, Any]
) -> dict[torch.fx.Node, Any]:
    """What is read behind a span, from operators without vmap that are run (and so traced) here.
    env: the values of what stands before it. Raises CaptureError where a gradient would go
    through the span, or it writes into tensors."""
    inside = set(nodes)
    given = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    wanted = [n for n in nodes if any(user not in inside for user in n.users)]
    values = [env[node] for node in given]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise CaptureError("a gradient goes through torch.vmap, which is PyTorch's")
    span = torch.fx.Interpreter(_cut(gm, nodes, given, wanted))
    flat = _without_vmap(span.run, values)
    if any(mutates(node) for node in flat.graph.nodes):
        raise CaptureError("its forward writes into a tensor under torch.vmap")
    return dict(zip(wanted, torch.fx.Interpreter(flat).run(*values)))


def _cut(
    gm: torch.fx.GraphModule,
    nodes: Sequence[torch.fx.Node],
    given: Sequence[torch.fx.Node],
    wanted: Sequence[torch.fx.Node],
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in wanted))
    return torch.fx.GraphModule(gm, graph)


def _without_vmap(function: Callable, values: Sequence[Any]) -> torch.fx.GraphModule:
    depth = _layers.get_dynamic_layer_stack_depth()
    try:
        with tracing(None), disable_proxy_modes_tracing(), _disable_current_modes():
            plain = [_plain(value) for value in values]
            return make_fx(function, _allow_non_fake_inputs=True)(*plain)
    finally:
        _layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def _plain(value: Any) -> Any:
    if isinstance(value, FunctionalTensor):
        torch._sync(value)
        value = torch._from_functional_tensor(value.elem)
    return value.detach() if isinstance(value, torch.Tensor) else value
