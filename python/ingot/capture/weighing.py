"""Which regions of a cut are worth a program of their own."""

from __future__ import annotations

import torch

from ingot.capture import token_chains
from ingot.capture.cutting import Cut
from ingot.capture.gains import pays_alone, turns_too_little, without_gain
from ingot.capture.host_time import pays_in_few_bits, pays_on_cpu, pays_without_gradients
from ingot.capture.nodes import PART, schema_name
from ingot.capture.products import PRODUCTS


def weak_nodes(cut: Cut) -> set[str]:
    """Nodes of regions too small to be worth a program of their own. Of those around a product the
    smallest alone: what they leave may make others large enough."""
    weak: set[str] = set()
    gaining_little: list[tuple[int, list[torch.fx.Node]]] = []
    for level, region in cut.regions.items():
        nodes = [
            node
            for node, own in cut.taken.items()
            if own == level and node.name not in cut.refused and PART not in node.meta
        ]
        multiplies = cut.has_product(level)
        if cut.gradients and not multiplies:
            weak.update(node.name for node in without_gain(cut, nodes))
            continue
        computing = [node for node in nodes if cut.computes(node)]
        # What reads no tensor (it takes the shape of one) has nothing to say where it should run.
        alone = len(computing) < 2 and not any(map(pays_alone, computing))
        small = not multiplies and (alone or turns_too_little(nodes))
        if computing and (small or not region.leaves):
            weak.update(node.name for node in nodes)
        elif computing and multiplies and not _pays(cut, computing):
            gaining_little.append((len(computing), nodes))
    fewest = min((count for count, _ in gaining_little), default=0)
    for count, nodes in gaining_little:
        if count == fewest:
            weak.update(node.name for node in _left_of(cut, nodes))
    return weak


def _left_of(cut: Cut, nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Of a region that gains little: what stands between its products may be worth one all the
    same."""
    if not token_chains.may_be_taken(cut):
        return nodes
    return [node for node in nodes if schema_name(node.target) in PRODUCTS]


def _pays(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    """Whether a region with a product is worth its two passes where gradients are needed, else its
    one."""
    if not cut.gradients:
        return pays_without_gradients(cut, computing)
    if cut.device_type == "cpu" and cut.feed.weighs_steps and not pays_on_cpu(computing):
        cut.has_small_steps = True
        return False
    return pays_in_few_bits(cut, computing)
