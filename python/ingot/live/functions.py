"""A `torch.autograd.Function` of the user's, as TorchDynamo captured it: a graph a direction.

PyTorch's own way to run the two keeps what backward reads beside autograd, so that second
derivatives by it are lost without a word. Here autograd keeps it, as in the function itself: what
the function was given and what it gave have the gradients that they have in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

FUNCTION = torch.ops.higher_order.autograd_function_apply
# In PyTorch 2.11. Where a release has others, its own way stays.
_WITHOUT_GRADIENT, _SAVED = "non_differentiable_idx", "saved_for_backward_idx"


def restore(gm: torch.fx.GraphModule) -> None:
    """Makes such functions of a graph's."""
    found = [node for node in gm.graph.nodes if node.target is FUNCTION]
    for node in found:
        if set(node.kwargs) == {_WITHOUT_GRADIENT, _SAVED}:
            _with_gradients(getattr(gm, node.args[1].target))
            node.target = apply
    if found:
        gm.recompile()


def _with_gradients(backward: torch.fx.GraphModule) -> None:
    """Without the switches around all of it: autograd says whether it is to be differentiated."""
    nodes = [node for node in backward.graph.nodes if node.op not in ("placeholder", "get_attr")]
    first, *_, last, _ = nodes if len(nodes) > 2 else [None] * 4
    if is_switch(first) and is_switch(last) and first.args == (False,) and last.args == (True,):
        backward.graph.erase_node(first)
        backward.graph.erase_node(last)
        backward.recompile()


def is_switch(node: torch.fx.Node | None) -> bool:
    return node is not None and node.target is torch._C._set_grad_enabled


def apply(forward: Callable, backward: Callable, *args: Any, **settings: Any) -> Any:
    """As FUNCTION is called."""
    if torch._C._are_functorch_transforms_active():
        return FUNCTION(forward, backward, *args, **settings)
    how = forward, backward, settings[_WITHOUT_GRADIENT], settings[_SAVED]
    return _Applied.apply(how, *args)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple, *args: Any) -> Any:
        forward, ctx.run_backward, without_gradient, checked = how
        results, kept = forward(*args)
        # Autograd watches for writes into what the function saved, not into what it put on its ctx.
        saved = [at for at, each in enumerate(kept) if at in checked and _is_tensor(each)]
        ctx.save_for_backward(*(kept[at] for at in saved))
        ctx.saved_places = saved
        ctx.kept = [None if at in saved else each for at, each in enumerate(kept)]
        if without_gradient:
            given = (results,) if _is_tensor(results) else results
            ctx.mark_non_differentiable(*(given[at] for at in without_gradient))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple:
        kept = list(ctx.kept)
        for at, tensor in zip(ctx.saved_places, ctx.saved_tensors):
            kept[at] = tensor
        found = ctx.run_backward(*gradients, *kept)
        return (None, *(found if isinstance(found, (tuple, list)) else (found,)))


def waited_for(results: Any) -> Any:
    """Without the wrappers of tensors that a collective is still to fill in: where the graph was
    captured there are none."""
    return pytree.tree_map_only(_is_waiting, _Waited.apply, results)


def _is_waiting(value: Any) -> bool:
    return type(value).__name__ == "AsyncCollectiveTensor"


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        return tensor.trigger_wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
