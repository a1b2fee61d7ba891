"""Constant folding: what follows from numbers of a graph alone is computed once, when it is
captured.

A forward that writes a mask out, element by element, computes the same one at every call: the
shifted windows of a Swin transformer take some ninety of PyTorch's operators each.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from ingot.capture.feed import Feed
from ingot.capture.nodes import hands_out_memory, is_pure, schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.table import is_half

_aten = torch.ops.aten
# Of a tensor these read no more than its type and where it is.
_MADE_LIKE = {
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
}
# Constants stay for as long as what was captured, where the forward has them for a while.
_MOST_BYTES, _MOST_BYTES_TOGETHER = 1 << 20, 1 << 24


def fold_constants(feed: Feed) -> None:
    """Nodes that follow from numbers alone become constants, where others read them and nobody
    could write into them."""
    if feed.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # what is computed here would become part of the user's CUDA graph
    graph, taken = feed.graph, 0
    constant = constant_nodes(graph)
    known: dict[torch.fx.Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        if node not in constant or constant.issuperset(node.users):
            continue
        size = node.meta["val"].numel() * node.meta["val"].element_size()
        if size > _MOST_BYTES or taken + size > _MOST_BYTES_TOGETHER or not _is_folded(node):
            continue
        taken += size
        _replace(node, evaluated(node, known).clone(), feed)
    graph.eliminate_dead_code(lambda node: node not in constant)


def _is_folded(node: torch.fx.Node) -> bool:
    """Not what one operator makes from nothing: the importer makes it once by itself."""
    made_here = node.op == "call_function" and bool(node.all_input_nodes)
    return made_here and not hands_out_memory(node)


def _replace(node: torch.fx.Node, value: torch.Tensor, feed: Feed) -> None:
    name = f"_folded_{node.name}"
    feed.attributes.register_buffer(name, value)
    with node.graph.inserting_before(node):
        made = node.graph.get_attr(name)
    like = node.meta["val"]
    with like.fake_mode:
        made.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    node.replace_all_uses_with(made)


def constant_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Those whose values follow from numbers that stand in the graph, whatever its inputs are."""
    constant: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if _has_fixed_value(node) and (
            node.target in _MADE_LIKE or constant.issuperset(node.all_input_nodes)
        ):
            constant.add(node)
    return constant


def _has_fixed_value(node: torch.fx.Node) -> bool:
    """Where its operands have."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.requires_grad or value.is_complex():
        return False
    if any(not isinstance(size, int) for size in value.shape):
        return False
    if is_half(value) and torch.is_autocast_enabled(value.device.type):
        return False  # some operators of it are run in 32 bits
    if node.op == "get_attr":
        return str(node.target).startswith("_tensor_constant")
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and is_pure(node)
        and "empty" not in node.target.__name__
        and schema_name(node.target) not in PRODUCTS
    )


def evaluated(
    node: torch.fx.Node, known: dict[torch.fx.Node, torch.Tensor], device: str | None = None
) -> torch.Tensor:
    """The value of one of constant_nodes(). known: values found so far, added to; device: in the
    place of those that the graph names."""
    ahead = [node]
    with unset_fake_temporarily(), torch.no_grad():
        while ahead:
            each = ahead[-1]
            reads = [] if each.target in _MADE_LIKE else each.all_input_nodes
            missing = [read for read in reads if read not in known]
            if missing:
                ahead += missing
                continue
            if each not in known:
                known[each] = _computed(each, known, device)
            ahead.pop()
    return known[node]


def _computed(node: torch.fx.Node, known: dict, device: str | None) -> torch.Tensor:
    if node.op == "get_attr":
        found = getattr(node.graph.owning_module, str(node.target))
        return found if device is None else found.to(device)

    def value(read: torch.fx.Node) -> torch.Tensor:
        like = read.meta["val"]
        if node.target in _MADE_LIKE:
            return torch.empty((), dtype=like.dtype, device=device or like.device)
        return known[read]

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if device is None:
        return node.target(*args, **kwargs)
    kwargs = {name: each for name, each in kwargs.items() if name not in ("device", "pin_memory")}
    with torch.device(device):
        return node.target(*args, **kwargs)
