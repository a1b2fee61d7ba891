"""What a second derivative computes again: a region's results, with what the region stored in the
place of what is computed, as in its first derivative.

So a second derivative reads no more than the first one does: what else a region was given may be
freed or written by then, as under eager, which keeps nothing of what is only added. Of such leaves
it takes the shapes, and the places in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ingot.capture.backward_operators import ByResult
from ingot.capture.derivative import (
    Derivative,
    Substitute,
    batch_norm,
    group_norm,
    relus_by_result,
    row_norm,
    with_stored,
)
from ingot.capture.recorded import outputs_of
from ingot.capture.reference import Reference
from ingot.live.releases import unseen

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


class Again:
    """run(leaves and stored values): the results that have a gradient, None for the others.

    stored: places, among the inputs of the derivative, of the stored values, None for those that it
    does not read; missing: leaves that this reads and the derivative does not; edges: of these,
    those whose places in autograd's graph the derivative's own derivative goes on to.
    """

    def __init__(self, reference: Reference, derivative: Derivative, leaves: int):
        self.run = _differentiable_part(
            _with_all_stored(reference, derivative), derivative.differentiable
        )
        self._leaves = leaves
        reads, places = derivative.reads, range(leaves, leaves + len(derivative.stored))
        self.stored = tuple(at if reads[at] else None for at in places)
        given = [n for n in self.run.graph.nodes if n.op == "placeholder"]
        self.missing = tuple(at for at in range(leaves) if given[at].users and not reads[at])
        kept = {node for node, at in zip(given[leaves:], self.stored) if at is not None}
        behind = _in_front_of(self.run.graph, kept)
        self.edges = tuple(
            at for at in self.missing if at in derivative.wanted and given[at] in behind
        )
        self._halves: dict[tuple[int, ...], tuple[torch.fx.GraphModule, tuple[int, ...]]] = {}

    def of_half(self, half: tuple[int, ...]) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
        """run() for the results at these places alone, and the leaves that it reads."""
        found = self._halves.get(half)
        if found is None:
            results = len(outputs_of(self.run.graph))
            run = _differentiable_part(self.run, [at in half for at in range(results)])
            given = [n for n in run.graph.nodes if n.op == "placeholder"][: self._leaves]
            found = run, tuple(at for at, leaf in enumerate(given) if leaf.users)
            self._halves[half] = found
        return found


def _with_all_stored(reference: Reference, derivative: Derivative) -> torch.fx.GraphModule:
    """Statistics and results of ReLUs where the derivative takes them."""
    products = sorted(set(reference.products.values()))
    if len(derivative.stored) == len(products):
        return with_stored(reference, products, {}, {})
    made = with_stored(reference, products, reference.statistics, relus_by_result(reference))
    for node in made.graph.nodes:
        if node.target is batch_norm:
            node.target = _batch_norm
        elif node.target is group_norm:
            node.target, node.args = _aten.group_norm.default, node.args[2:]
        elif node.target is row_norm:
            *_, node.target, node.kwargs = node.args
            node.args = ()
    return made


def _batch_norm(stored: dict[str, torch.Tensor | None], x, weight, *others: Any) -> torch.Tensor:
    """The derivative reads no weight where it has its product with the deviation's reciprocal."""
    scale, rstd = stored.get("scale"), stored.get("rstd")
    if scale is not None:
        if rstd is None:
            eps = others[-2]
            rstd = _aten._native_batch_norm_legit.no_stats(x.detach(), None, None, True, 0, eps)[2]
        known = (scale.reshape(weight.shape) / rstd.reshape(weight.shape)).to(weight.dtype)
        weight = _substitute(weight, known)
    return _aten.batch_norm.default(x, weight, *others)


def _differentiable_part(
    module: torch.fx.GraphModule, differentiable: Sequence[bool]
) -> torch.fx.GraphModule:
    """State that a forward moves may be gone by then."""
    graph = torch.fx.Graph()
    results = graph.graph_copy(module.graph, {})
    graph.output(tuple(r if has else None for r, has in zip(results, differentiable)))
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.target in _VIEWS:  # what was stored may lie otherwise than what was computed
            node.target = _aten.reshape.default
    return torch.fx.GraphModule(module, graph)


def _in_front_of(graph: torch.fx.Graph, stored: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """What those that were stored were computed from."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or not stored.isdisjoint(node.all_input_nodes):
            found.update(node.all_input_nodes)
    return found - stored


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf):
        ctx.set_materialize_grads(False)
        return torch.empty_strided(
            leaf.shape, (0,) * leaf.dim(), dtype=leaf.dtype, device=leaf.device
        )

    @staticmethod
    def backward(ctx, gradient):
        return gradient


for _function in (_Edge, Substitute, ByResult):
    _function.backward = staticmethod(unseen(_function.backward))

# Nothing that a transform of functorch wraps comes here.
_edge_of = super(torch.autograd.Function, _Edge).apply
_substitute = super(torch.autograd.Function, Substitute).apply


def edges_of(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Their places in autograd's graph, without their memory, which autograd keeps itself of its
    own leaves."""
    with torch.enable_grad():
        return [leaf if leaf.is_leaf else _edge_of(leaf) for leaf in leaves]


def stand_in(described: tuple, edge: torch.Tensor | None, wanted: bool) -> torch.Tensor:
    """For a tensor of which nobody reads what it holds. described: as runtime.program's
    description() says."""
    shape, strides, dtype, device, *_ = described
    made: Any = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
    return made.requires_grad_(wanted) if edge is None else _substitute(edge, made)
