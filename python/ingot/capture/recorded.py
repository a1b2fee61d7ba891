"""What autograd's records of a backward pass leave behind, taken out of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ingot.capture.nodes import may_share_memory, mutates
from ingot.capture.sharing import share

_aten = torch.ops.aten
_BY_A_NUMBER = {_aten.div.Scalar, _aten.mul.Scalar}


def simplify(graph: torch.fx.Graph) -> None:
    """Drops what autograd's records leave behind: detached copies, views that change nothing,
    transpositions of transpositions."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target in (_aten.view.default, _aten._unsafe_view.default):
            # Gradients come with any strides.
            node.target = _aten.reshape.default
        elif node.target is _aten._to_copy.default:
            _drop_places(node)
        elif node.target is _aten._efficientzerotensor.default:
            node.target = _aten.zeros.default  # a user's gradient has memory
        elif node.target in _BY_A_NUMBER:
            _expand_behind(node)
    _make_functional(graph)
    graph.eliminate_dead_code()
    _share(graph)


def measure_gradients(graph: torch.fx.Graph, gradients: Sequence[torch.fx.Node]) -> None:
    """Reads sizes off the gradients that are given, where they tell: a tensor of which nothing else
    is read would be kept for them. Equal ones are read off one tensor, so that what is made by them
    is seen to be equal."""
    dimensions = {
        size.node.expr: (gradient, dimension)
        for gradient in gradients
        for dimension, size in enumerate(gradient.meta["val"].shape)
        if isinstance(size, torch.SymInt)
    }
    for node in graph.nodes:
        if node.target is _aten.sym_size.int:
            node.args = dimensions.setdefault(node.meta["val"].node.expr, node.args)


def outputs_of(graph: torch.fx.Graph) -> Sequence[torch.fx.Node | None]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return output.args[0]


def same_size(a: Any, b: Any) -> bool:
    """Without asking, which could bind a symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.node.expr == b.node.expr


def _drop_places(cast: torch.fx.Node) -> None:
    """Autograd's casts of gradients say where these are, and how they lie, even if they stay."""
    if not isinstance(cast.args[0], torch.fx.Node):
        return  # a number, beside zeros that autograd makes without memory
    device, layout = cast.kwargs.get("device"), cast.kwargs.get("layout")
    before = cast.args[0].meta["val"]
    if device in (None, before.device) and layout in (None, before.layout):
        cast.kwargs = {k: v for k, v in cast.kwargs.items() if k not in ("device", "layout")}


def _expand_behind(node: torch.fx.Node) -> None:
    """A mean's gradient is expanded first, and divided by their count then."""
    expanded, *numbers = node.args
    if expanded.target is not _aten.expand.default or len(expanded.users) > 1:
        return
    given = expanded.args[0]
    with node.graph.inserting_before(node):
        small = node.graph.call_function(node.target, (given, *numbers))
        small.meta = {**node.meta, "val": given.meta["val"].new_empty(given.meta["val"].shape)}
        after = node.graph.call_function(_aten.expand.default, (small, *expanded.args[1:]))
    after.meta = dict(node.meta)
    node.replace_all_uses_with(after)
    node.graph.erase_node(node)


def _share(graph: torch.fx.Graph) -> None:
    """Each product that reads a tensor under autocast brings a cast of it, for one."""
    if any(mutates(node) for node in graph.nodes):
        return
    share(graph, lambda node: True, results=True)
    for node in list(graph.nodes):  # once it is known how many read each
        if node.target is _aten.reshape.default:
            _reshape_once(node)


def _reshape_once(node: torch.fx.Node) -> None:
    before = node.args[0]
    if before.target is _aten.reshape.default and len(before.users) == 1:
        node.update_arg(0, before.args[0])
        node.graph.erase_node(before)


def _make_functional(graph: torch.fx.Graph) -> None:
    """Operators that write into a tensor that nothing else shares, as those that make a new one."""
    for node in list(graph.nodes):
        if not mutates(node) or not isinstance(node.args[0], torch.fx.Node):
            continue
        written = node.args[0]
        family = getattr(_aten, node.target._schema.name.partition("::")[2].rstrip("_"), None)
        made = getattr(family, node.target._overloadname, None)
        if made is None or _shares_memory(written):
            continue
        node.target = made
        written.replace_all_uses_with(
            node, delete_user_cb=lambda user, after=node: after < user and user is not after
        )


def _shares_memory(node: torch.fx.Node) -> bool:
    """Whether a node's tensor is, or has, a view, or comes from outside."""
    around = [user for user in node.users if not mutates(user)]
    return node.op != "call_function" or any(may_share_memory(other) for other in (node, *around))


def _same_as(node: torch.fx.Node) -> torch.fx.Node | None:
    if node.target in (_aten.detach.default, _aten.alias.default):
        return node.args[0]
    if node.target is _aten.t.default and node.args[0].target is _aten.t.default:
        return node.args[0].args[0]
    if node.target in (_aten.view.default, _aten._unsafe_view.default, _aten.expand.default):
        before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
        if len(before) == len(after) and all(map(same_size, before, after)):
            return node.args[0]
    return None
