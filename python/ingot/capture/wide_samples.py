"""Products of which a training step cannot afford the packing.

A region packs what several of its products multiply once for all of them, beside everything that a
training step keeps. Where that is larger than all that these products give, as the adjacency of a
dense graph is (67 MB: 117 MB at the peak of a step of four layers, for eager's 49), they had better
read it as it lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable

import torch

from ingot.capture.kept import source_of
from ingot.capture.layout import size_in_bytes
from ingot.capture.nodes import named_arguments, schema_name
from ingot.capture.products import PRODUCTS

_SAMPLES = ("input", "mat1", "batch1", "self")  # a product's first operand, by its schema
_MUCH = 32 << 20  # bytes


def share_wide_samples(nodes: Iterable[torch.fx.Node], needing: Container[torch.fx.Node]) -> bool:
    """Whether products among a region's nodes share such samples in fp32, from outside and without
    a gradient, which would be as large as what is packed. needing: nodes with a gradient."""
    readers = defaultdict(list)
    for node in nodes:
        samples = _samples(node) if schema_name(node.target) in PRODUCTS else None
        if samples is not None and samples.op in ("placeholder", "get_attr"):
            readers[samples].append(node)
    return any(
        len(products) > 1
        and samples not in needing
        and samples.meta["val"].dtype == torch.float32
        and size_in_bytes(samples.meta["val"]) >= _MUCH
        and size_in_bytes(samples.meta["val"]) > sum(size_in_bytes(n.meta["val"]) for n in products)
        for samples, products in readers.items()
    )


def _samples(product: torch.fx.Node) -> torch.fx.Node | None:
    arguments = named_arguments(product)
    node = next((arguments[name] for name in _SAMPLES if name in arguments), None)
    return source_of(node) if isinstance(node, torch.fx.Node) else None
