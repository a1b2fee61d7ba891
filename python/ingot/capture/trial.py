"""Cuts a copy of a graph, to know what regions will take before the graph itself is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ingot.capture.cutting import Cut
from ingot.capture.feed import Feed
from ingot.capture.gains import may_pay
from ingot.capture.merged_axes import merge_axes
from ingot.capture.weighing import weak_nodes

# In the meta of a copy's nodes: the node that each was, or was put in for.
_ORIGINAL = "ingot_original"
Rewrite = Callable[[dict[torch.fx.Node, torch.fx.Node]], None]


def chosen(feed: Feed, refused: dict[str, str], autocast: bool) -> tuple[set, set]:
    """Nodes of chains without a product that regions take, and those that PyTorch runs, found on a
    copy of the graph with all axes merged: what stays PyTorch's keeps its dimensions."""
    if not may_pay(feed):
        return set(), set()
    for node in feed.graph.nodes:
        node.meta[_ORIGINAL] = node
    cut = _cut_of_copy(feed, refused, autocast, True)
    taken = {n for n, level in cut.taken.items() if not cut.has_product(level)}
    of_product = {n for n, level in cut.taken.items() if cut.has_product(level)}
    taken, of_product = ({n.meta[_ORIGINAL] for n in some} for some in (taken, of_product))
    for node in feed.graph.nodes:
        del node.meta[_ORIGINAL]
    theirs = {node for node in feed.graph.nodes if node not in taken and node not in of_product}
    return taken - of_product, theirs


def taken_of_copy(
    feed: Feed, refused: dict[str, str], autocast: bool, rewrite: Rewrite
) -> tuple[torch.fx.Graph, set[torch.fx.Node]]:
    """A copy of the graph, rewritten, with its nodes that regions take without gradients. rewrite:
    gets the copies of the graph's nodes."""
    cut = _cut_of_copy(feed, refused, autocast, False, rewrite)
    return cut.feed.graph, {node for node in cut.taken if node not in cut.by_torch}


def _cut_of_copy(
    feed: Feed,
    refused: dict[str, str],
    autocast: bool,
    gradients: bool,
    rewrite: Rewrite = lambda copies: None,
) -> Cut:
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(feed.graph, copies))
    names = {copies[n].name: refused[n.name] for n in feed.graph.nodes if n.name in refused}
    placeholders = {copies[node]: known for node, known in feed.placeholders.items()}
    rewrite(copies)
    merge_axes(graph, feed.device_type)
    trial = replace(feed, graph=graph, placeholders=placeholders, rewritten=True)
    return settled(trial, names, autocast, gradients)


def settled(feed: Feed, refused: dict[str, str], autocast: bool, gradients: bool) -> Cut:
    """A graph as it is, with what is too little for a region left to PyTorch."""
    refused = dict(refused)
    while True:
        cut = Cut(feed, refused, autocast, gradients)
        weak = weak_nodes(cut)
        if not weak:
            return cut
        refused |= dict.fromkeys(weak, "")
