"""Parts of samples that an operator takes for samples: windows of an image, frames of a video.

`x.view(B * T, N, C)` makes more samples of the same size. To a product, or a softmax, that is a
batch of B · T; counted in samples of the graph's, its first dimension is two, and four axes are
soon not enough. So a region may have parts of samples for its batch, T of each: its own batch size
is T times the graph's, and nothing else of it is different. Which operators are computed so is
tried: where regions take more of the graph.
"""

from __future__ import annotations

import torch

from ingot.capture.cutting import Cut
from ingot.capture.feed import Feed
from ingot.capture.nodes import PER_SAMPLE, computes, reached, schema_name
from ingot.capture.surgery import sizes_of
from ingot.capture.table import TABLE
from ingot.capture.trial import settled


def tell_parts_of_samples(
    feed: Feed, refused: dict[str, str], autocast: bool, gradients: bool
) -> None:
    if feed.batch is None and not feed.static_batch:
        return
    counts = {node: _per_sample(feed, node) for node in feed.graph.nodes}
    counts = {node: count for node, count in counts.items() if count > 1}
    if not any(computes(node) and schema_name(node.target) in TABLE for node in counts):
        return
    before = settled(feed, refused, autocast, gradients)
    chosen = _joined_to(set(before.unsupported) & set(counts), counts)
    if not chosen:
        return
    for node in chosen:
        node.meta[PER_SAMPLE] = counts[node]
    if _taken(settled(feed, refused, autocast, gradients)) <= _taken(before):
        for node in chosen:
            del node.meta[PER_SAMPLE]


def _per_sample(feed: Feed, node: torch.fx.Node) -> int:
    """How many times the batch the first dimension of what an operator gives is; 0 of others."""
    sizes = sizes_of(node) if node.op == "call_function" else ()
    if not sizes or isinstance(sizes[0], torch.SymInt) != (feed.batch is not None):
        return 0
    if feed.batch is None:
        count, rest = divmod(sizes[0], feed.static_batch)
        return 0 if rest else count
    factor = sizes[0].node.expr / feed.batch
    return int(factor) if factor.is_Integer else 0


def _joined_to(left: set[torch.fx.Node], counts: dict[torch.fx.Node, int]) -> set[torch.fx.Node]:
    """What operators that PyTorch was left read, or are read by, with parts of the same count."""
    begun = [node for node in left if schema_name(node.target) in TABLE]

    def beside(node: torch.fx.Node) -> list[torch.fx.Node]:
        others = (*node.all_input_nodes, *node.users)
        return [other for other in others if counts.get(other) == counts[node]]

    return set(reached(begun, beside))


def _taken(cut: Cut) -> int:
    return sum(cut.computes(node) for node in cut.taken)
