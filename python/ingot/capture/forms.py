"""What tells two regions of one network apart but for the tensors that they read: of fifty equal
blocks, the derivative is recorded and planned once."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import torch

from ingot.capture.captured import Region
from ingot.capture.reference import Reference

# Of a graph's values: what people call them, and where they come from.
_NAMES = ("name", "origin", "source")


def form_of(region: Region) -> Hashable:
    """Equal for regions that compute the same of their leaves, whatever these are called."""
    graph = region.graph
    values = [{k: v for k, v in value.items() if k not in _NAMES} for value in graph["values"]]
    results = [result["value"] for result in graph["results"]]
    return (
        json.dumps([values, results, graph["updates"]], sort_keys=True),
        repr((region.leaf_layouts, region.result_layouts, len(region.results))),
        _of_reference(region.reference),
    )


def _of_reference(reference: Reference) -> Hashable:
    nodes = list(reference.module.graph.nodes)
    places = {node: at for at, node in enumerate(nodes)}
    by_name = {node.name: at for at, node in enumerate(nodes)}

    def placed(value: Any) -> str:
        return repr(torch.fx.node.map_arg(value, lambda node: _Place(places[node])))

    return (
        tuple((n.op, _target(reference, n), placed((n.args, n.kwargs))) for n in nodes),
        tuple(sorted((by_name[name], at) for name, at in reference.products.items())),
        tuple(sorted((by_name[name], repr(at)) for name, at in reference.statistics.items())),
    )


def _target(reference: Reference, node: torch.fx.Node) -> Hashable:
    if node.op == "get_attr":  # a constant: the same tensor, which the reference keeps
        return id(getattr(reference.module, node.target))
    return node.target if node.op == "call_function" else None


class _Place:
    """A node's in its graph, in the place of its name."""

    def __init__(self, at: int):
        self._at = at

    def __repr__(self) -> str:
        return f"%{self._at}"
