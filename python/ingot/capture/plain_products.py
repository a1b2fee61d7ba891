"""Products that no region takes, as PyTorch itself makes them of plain ones: `mm` and `bmm` between
views and, where the memory asks for it, copies."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from ingot.capture.layout import elements, hint
from ingot.capture.nodes import named_arguments, schema_name
from ingot.capture.surgery import Writer

_aten = torch.ops.aten
_COMPOSED = {
    f"aten::{name}"
    for name in "linear matmul einsum tensordot inner chain_matmul linalg_multi_dot".split()
}
_PLAIN = (_aten.mm.default, _aten.bmm.default)
_VIEWS = (_aten.expand.default, _aten.view.default, _aten._unsafe_view.default)
_WITH_SUM = {_aten.addmm.default: _aten.mm.default, _aten.baddbmm.default: _aten.bmm.default}


def take_products_apart(
    graph: torch.fx.Graph,
    nodes: Iterable[torch.fx.Node],
    least: int,
    needing: Container[torch.fx.Node],
) -> dict[str, str] | None:
    """Of these nodes, those that can be, and hold a plain product of `least` multiplications (at
    the sizes of the call that was traced). needing: nodes with a gradient: PyTorch does not expand
    a weight of this kind to a batch of matrices, since as many would be made of its gradient. The
    names of the views and copies that this makes, which are PyTorch's without a reason; None where
    nothing was changed."""
    changed, around = False, []
    for node in list(nodes):
        if node.target in _WITH_SUM:
            taken = _without_sum(graph, node, least)
        else:
            taken = schema_name(node.target) in _COMPOSED and _composed(
                graph, node, least, needing, around
            )
        changed = changed or taken
    return dict.fromkeys(around, "") if changed else None


def _without_sum(graph: torch.fx.Graph, node: torch.fx.Node, least: int) -> bool:
    """beta·c + alpha·(a·b), whose sum may join what follows."""
    c, a, b, beta, alpha = named_arguments(node).values()
    if _work(a.meta["val"], b.meta["val"]) < least:
        return False
    writer, sizes = Writer(graph, node), node.meta["val"].shape
    made = writer.call(_WITH_SUM[node.target], sizes, a, b)
    if alpha != 1:
        made = writer.call(_aten.mul.Scalar, sizes, made, alpha)
    made = writer.call(_aten.add.Tensor, sizes, made, c, alpha=beta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _composed(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    least: int,
    needing: Container[torch.fx.Node],
    around: list[str],
) -> bool:
    traced = _traced(node, needing)
    if traced is None or _most_work(traced) < least:
        return False
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    given = iter(node.all_input_nodes)
    for inner in traced.nodes:
        if inner.op == "placeholder":
            copies[inner] = next(given)
        elif inner.op == "output":
            node.replace_all_uses_with(copies[inner.args[0]])
        else:
            with graph.inserting_before(node):
                made = copies[inner] = graph.node_copy(inner, copies.__getitem__)
            made.meta = {**node.meta, "val": inner.meta["val"]}
            if made.target in _VIEWS[1:]:
                made.target = _aten.reshape.default  # a region may lay out what PyTorch would not
            if made.target not in _PLAIN:
                around.append(made.name)
    graph.erase_node(node)
    return True


def _traced(node: torch.fx.Node, needing: Container[torch.fx.Node]) -> torch.fx.Graph | None:
    """None where it needs a tensor that the graph has not."""
    inputs = node.all_input_nodes
    values = [given.meta.get("val") for given in inputs]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None or not all(isinstance(value, FakeTensor) for value in values):
        return None

    def run(*given: Any) -> Any:
        found = dict(zip(inputs, given))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), found.__getitem__)
        return node.target(*args, **kwargs)

    with tracing(None), torch.no_grad(), mode, enable_python_dispatcher():
        values = [v.detach().requires_grad_(given in needing) for given, v in zip(inputs, values)]
        graph = make_fx(run, _allow_non_fake_inputs=True)(*values).graph
    for inner in list(graph.nodes):
        if inner.target in _VIEWS and _changes_nothing(inner):
            inner.replace_all_uses_with(inner.args[0])
    graph.eliminate_dead_code()
    whole = all(n.op in ("placeholder", "call_function", "output") for n in graph.nodes)
    return graph if whole else None


def _changes_nothing(view: torch.fx.Node) -> bool:
    """Without asking whether sizes are equal, which could bind a symbol."""
    before, after = ([str(s) for s in n.meta["val"].shape] for n in (view.args[0], view))
    return before == after


def _most_work(graph: torch.fx.Graph) -> int:
    products = (node for node in graph.nodes if node.target in _PLAIN)
    return max((_work(*(a.meta["val"] for a in n.args)) for n in products), default=0)


def _work(a: torch.Tensor, b: torch.Tensor) -> int:
    """Multiplications, by the sizes that the graph was traced with."""
    return elements(a) * hint(b.shape[-1])
