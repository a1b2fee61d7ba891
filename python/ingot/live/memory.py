"""Operators that PyTorch must run for the sake of whose memory a tensor is."""

from __future__ import annotations

from typing import Any

import torch

from ingot.capture.feed import Feed, needing_gradients
from ingot.capture.kept import source_of
from ingot.capture.nodes import LEFT_ALONE, mutates, reached, schema_name
from ingot.capture.table import COPYING

_aten = torch.ops.aten


def views_among_results(graph: torch.fx.Graph) -> list[str]:
    """Nodes that PyTorch must run, so that results which share memory go on doing so."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    sharing: dict[Any, set[torch.fx.Node]] = {}
    for node in output.all_input_nodes:
        sharing.setdefault(_memory(node), set()).add(node)
    sharing.pop(None, None)
    found = []
    for nodes in sharing.values():
        for node in nodes if len(nodes) > 1 else ():
            base = next(iter(node.all_input_nodes), None)
            while base is not None and _memory(base) == _memory(node):
                found.append(node.name)
                node.meta[LEFT_ALONE] = True
                node, base = base, next(iter(base.all_input_nodes), None)
    return found


def copies_of_written(feed: Feed) -> list[str]:
    """Nodes that PyTorch must run: copies, put into the graph, of inputs that it writes into in the
    end and that something with a gradient follows from. Autograd keeps what is read for backward,
    and refuses it when it was written."""
    found, needing = [], needing_gradients(feed)
    for node in feed.placeholders:
        readers = [user for user in node.users if not mutates(user)]
        if len(readers) == len(node.users) or not _is_kept(readers, needing):
            continue
        with feed.graph.inserting_before(min(readers)):
            copied = feed.graph.call_function(_aten.clone.default, (node,))
        copied.meta = dict(node.meta) | {LEFT_ALONE: True}
        for reader in readers:
            reader.replace_input_with(node, copied)
        found.append(copied.name)
    return found


def copies_of_inputs(feed: Feed) -> list[str]:
    """Nodes that PyTorch must run: copies that the forward takes of an input, where backward would
    read the input in their place. Whoever asks for a copy may write into the input before that."""
    found, needing = [], needing_gradients(feed)
    for node in feed.graph.nodes:
        if schema_name(node.target) not in COPYING or _memory(node) == _memory(node.args[0]):
            continue
        # Copies for the sake of a layout are in the way of a fused read: those of activations.
        layout = node.kwargs.get("memory_format")
        asked = node.target is _aten.clone.default and layout in (None, torch.preserve_format)
        known = feed.placeholders.get(source_of(node.args[0]))
        if known and (asked or known.source.kind == "buffer") and _is_kept([node], needing):
            node.meta[LEFT_ALONE] = True
            found.append(node.name)
    return found


def _is_kept(readers: list[torch.fx.Node], needing: set[torch.fx.Node]) -> bool:
    """Whether something with a gradient reads what follows from a tensor: a region would keep the
    tensor itself, and compute it again."""
    behind = reached(readers, lambda n: [user for user in n.users if not mutates(user)])
    return any(node in needing for node in behind)


def _memory(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
