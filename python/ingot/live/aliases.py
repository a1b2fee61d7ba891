"""Operators that give what shares memory with an argument, though their schema does not say so:
dropout that is off gives its argument itself, an einsum that only names dimensions a view. A write
into the one changes the other, and results that share memory go on doing so. Where that tells,
such operators are taken apart into those that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ingot.capture.captured import CaptureError
from ingot.capture.nodes import schema_name, written_by
from ingot.live import functional, switches
from ingot.live.unseen_writes import UnseenWritesError

_aten = torch.ops.aten
# What an operator is made of may be made of such operators, too.
_MOST_TIMES = 8
_DROPOUTS = {
    _aten.dropout.default,
    _aten.feature_dropout.default,
    _aten.alpha_dropout.default,
    _aten.feature_alpha_dropout.default,
}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def declared(gm: torch.fx.GraphModule, values: Sequence[Any]) -> torch.fx.GraphModule:
    """gm: an ATen graph that was traced from these values. Raises CaptureError where something is
    written that an operator shares unsaid which is made of no others."""
    for _ in range(_MOST_TIMES):
        hidden = _hidden_that_tell(gm.graph)
        if not hidden:
            return gm
        for node in hidden:
            node.target = _apart(node.target)
        try:
            gm = functional.traced(switches.Runner(gm, watching=True).run, values)
        except UnseenWritesError as error:  # by the names of another graph
            raise CaptureError(str(error)) from None
    raise CaptureError(_problem(hidden[0]))


def _problem(node: torch.fx.Node) -> str:
    name = schema_name(node.target)
    return f"{name} shares memory with an argument, which its schema does not say"


def _apart(target: Any) -> Any:
    def parts(*args: Any, **kwargs: Any) -> Any:
        if target in _DROPOUTS:  # in tracing, PyTorch's own parts of one that is off are a copy
            return args[0]
        if target is _aten.type_as.default:  # which decompose() gives again
            return args[0].to(args[1])
        return target.decompose(*args, **kwargs)

    parts.__name__ = schema_name(target)
    return parts


def _has_parts(target: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), _COMPOSITE)


def _hidden_that_tell(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Those with whose memory something is written, or with which several of the graph's results
    have their memory in common, or one and an input."""
    same: dict[int, int] = {}

    def memory(value: Any) -> int:
        return _root(same, value)

    found = []
    for node in graph.nodes:
        shared = _shared_unsaid(node)
        for mine, given in shared:
            same[_root(same, mine)] = _root(same, given)
        if shared:
            found.append((node, shared[0][0]))
    if not found:
        return []
    written = {
        memory(each) for n in graph.nodes for into in written_by(n) for each in _memories(into)
    }
    (output,) = (node for node in graph.nodes if node.op == "output")
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    ends = [memory(each) for node in {*output.all_input_nodes, *inputs} for each in _memories(node)]
    results = {memory(each) for node in output.all_input_nodes for each in _memories(node)}
    told = written | {each for each in results if ends.count(each) > 1}
    for node, mine in found:
        if memory(mine) in written and not _has_parts(node.target):
            raise CaptureError(_problem(node))
    return [node for node, mine in found if memory(mine) in told and _has_parts(node.target)]


def _root(same: dict[int, int], memory: int) -> int:
    while memory in same and same[memory] != memory:
        memory = same[memory]
    return memory


def _shared_unsaid(node: torch.fx.Node) -> list[tuple[int, int]]:
    """Pairs of memory that are one to eager: a result's, an argument's."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    if any(argument.alias_info is not None for argument in target._schema.arguments):
        return []
    if target is _aten.dropout.default:
        off = not functional.draws(node)
        return [(m, g) for m in _memories(node) for g in _memories(node.args[0])] if off else []
    given = {each for source in node.all_input_nodes for each in _memories(source)}
    return [(each, each) for each in _memories(node) if each in given]


def _memories(node: torch.fx.Node) -> list[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    strided = (v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided)
    return [value.untyped_storage()._cdata for value in strided]
