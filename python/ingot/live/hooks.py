"""Hooks that a forward puts on tensors that it computes.

TorchDynamo makes of `y.register_hook(f)` a function of autograd's that y passes through, and that
all who read y read from. A second hook is called before the first one then; what somebody keeps of
y (`retain_grad()`, `torch.autograd.grad` of it) is the gradient before its hooks; and where f reads
what was computed from y, the graph has a cycle, which nothing can run. Here they are hooks again.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ingot.live.functions import FUNCTION, is_switch


def anchored(tensor: torch.Tensor) -> torch.Tensor:
    """Where a graph is cut: what reads a tensor with hooks is behind it, so that all of the
    tensor's gradient comes through it."""
    return tensor


def hooked(body: torch.fx.GraphModule, at: int, tensor: torch.Tensor, *others: Any) -> torch.Tensor:
    """body: gives the hook's result, as the one `at` a place in a sequence, of a gradient and what
    else the hook reads."""

    def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
        """None: of one of several results, where only others have a gradient."""
        return None if gradient is None else body(gradient, *others)[at]

    if tensor.requires_grad:
        tensor.register_hook(hook)
    return tensor


def restore(gm: torch.fx.GraphModule) -> None:
    """Makes hooks of a graph's functions that stand for one."""
    functions = [node for node in gm.graph.nodes if node.target is FUNCTION]
    hooks = [node for node in functions if _hook_of(gm, node) is not None]
    for node in hooks:
        body, at, tensor, *others = _hook_of(gm, node)
        (taken,) = node.users
        _without_switches(getattr(gm, body.target))
        with gm.graph.inserting_after(tensor):
            anchor = gm.graph.call_function(anchored, (tensor,))
        with gm.graph.inserting_after(node):
            hook = gm.graph.call_function(hooked, (body, at, anchor, *others))
        anchor.meta, hook.meta = dict(taken.meta), dict(taken.meta)
        taken.replace_all_uses_with(anchor)
        gm.graph.erase_node(taken)
        gm.graph.erase_node(node)
    if hooks:
        gm.recompile()


def _hook_of(gm: torch.fx.GraphModule, node: torch.fx.Node) -> tuple | None:
    """What `hooked` takes, where a function hands on the only use of a tensor, and gives it alone a
    gradient: it is none the worse for being a hook, whoever wrote it."""
    forward, body, *given = node.args
    inputs, results = _ends(getattr(gm, forward.target).graph)
    _, gradients = _ends(getattr(gm, body.target).graph)
    handed_on = _handed_on(getattr(gm, forward.target).graph)
    if handed_on not in inputs or len(results) != 2 or not set(results[1]) <= set(inputs):
        return None
    at, users = inputs.index(handed_on), list(node.users)
    tensor = given[at]
    is_hook = (
        len(users) == len(results[0]) == 1
        and users[0].target is operator.getitem
        and not node.kwargs.get("saved_for_backward_idx")
        and all(gradient is None for to, gradient in enumerate(gradients) if to != at)
        and tensor.op in ("call_function", "call_method")
        and all(user is node or user.target is hooked for user in tensor.users)
    )
    saved = (given[inputs.index(each)] for each in results[1])
    return (body, at, tensor, *saved) if is_hook else None


def _ends(graph: torch.fx.Graph) -> tuple[list[torch.fx.Node], tuple]:
    """Inputs and results."""
    (results,) = next(node for node in graph.nodes if node.op == "output").args
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return inputs, results if isinstance(results, tuple) else (results,)


def _handed_on(forward: torch.fx.Graph) -> torch.fx.Node | None:
    """The input of which a function gives a view, and nothing else."""
    computed = [n for n in forward.nodes if n.op.startswith("call") and not is_switch(n)]
    is_view = len(computed) == 1 and computed[0].target == "view_as"
    return computed[0].args[0] if is_view else None


def _without_switches(body: torch.fx.GraphModule) -> None:
    """Gradients of hooks are differentiated as backward itself is."""
    for node in filter(is_switch, list(body.graph.nodes)):
        body.graph.erase_node(node)
    body.recompile()
