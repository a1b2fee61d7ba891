"""Weights under autocast, cast once where eager casts them once.

Autocast keeps the cast of a weight that requires a gradient until its outermost context ends:
several calls in one context, and the backward pass, find it. A region would cast the weight at each
call instead, which for a large weight costs as much as half of its product. So PyTorch casts it, in
front of the region, by an operator that autocast looks after and that computes nothing: an einsum
which only names its operand's axes. A weight that takes less time to cast than that, the region
casts at each call; with gradients it keeps the cast for its backward pass, whose product then
writes the weight's gradient in fp32 (live/widened.py).

An input without a gradient is cast by the region, once for all products: what backward reads of it
is the cast, as for eager, and the caller may write into the input before.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

import torch

from ingot.capture.feed import Feed, Placeholder, needing_gradients
from ingot.capture.nodes import is_convolution, lies_apart, mutates, schema_name
from ingot.capture.surgery import write_cast
from ingot.capture.table import CASTS

_aten = torch.ops.aten
# Smaller weights are cast, by the region, in less time than PyTorch takes to hand out its copy.
_LARGE = 1 << 22
# Of smaller ones backward makes the cast again in less time than the host takes to keep it.
_LEAST_KEPT = 1 << 20
# Products and where their schemas have matrices.
_MATRICES = {"linear": (0, 1), "mm": (0, 1), "matmul": (0, 1), "addmm": (1, 2)}


def cast_by_torch(feed: Feed, dtype: torch.dtype, refused: Container[str] = ()) -> list[str]:
    """Names of the nodes, added to the graph, that PyTorch must run. dtype: autocast's. refused:
    nodes that PyTorch runs, those among them that the forward keeps from autocast."""
    if feed.device_type != "cuda":  # autocast of other devices does not know einsum
        return []
    casts = []
    for weight, users in _weights(feed, refused, _LARGE):
        with feed.graph.inserting_before(min(users)):
            cast = feed.graph.call_function(_aten.einsum.default, ("ij->ij", [weight]))
        cast.meta["val"] = weight.meta["val"].to(dtype)
        for node in users:
            node.replace_input_with(weight, cast)
        casts.append(cast.name)
    return casts


def cast_weights(feed: Feed, dtype: torch.dtype, refused: Container[str] = ()) -> None:
    """Writes the casts of other weights, for products to keep. dtype, refused: as above."""
    if feed.device_type != "cuda":
        return
    for weight, users in _weights(feed, refused, _LEAST_KEPT, _LARGE):
        write_cast(weight, dtype, users)


def cast_inputs(feed: Feed, dtype: torch.dtype, refused: Container[str] = ()) -> None:
    """Writes the casts of what products read that has no gradient and is no module's. dtype,
    refused: as above."""
    needing = needing_gradients(feed)
    for node in list(feed.graph.nodes):
        value, known = node.meta.get("val"), feed.placeholders.get(node)
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        if node in needing or not is_wide or (known and known.source.kind != "input"):
            continue
        users = _products_of(node, refused)
        if users:
            write_cast(node, dtype, users)


def read_uncast(feed: Feed, dtype: torch.dtype, refused: Container[str] = ()) -> None:
    """Makes products read what was cast for them alone from autocast's dtype to fp32, of which they
    would have the cast back. (T5's feed-forwards bring what they multiply to the weights' dtype.)
    dtype, refused: as above."""
    if any(map(mutates, feed.graph.nodes)):
        return  # a cast is a copy, which nobody writes into before its backward
    for node in list(feed.graph.nodes):
        users = list(node.users)
        if schema_name(node.target) not in CASTS or len(users) != 1 or users[0].name in refused:
            continue
        if not lies_apart(node.args[0]):
            continue
        narrow, wide = (each.meta["val"] for each in (node.args[0], node))
        widened = (narrow.dtype, wide.dtype) == (dtype, torch.float32)
        if widened and narrow.device == wide.device and _multiplies(users[0], node):
            node.replace_all_uses_with(node.args[0])
            feed.graph.erase_node(node)


def cast_for_convolutions(feed: Feed, dtype: torch.dtype, refused: Container[str] = ()) -> None:
    """Writes the casts that autocast makes of what convolutions read, so that what computes a
    tensor writes it in 16 bits: where one convolution reads it, whose gradient eager casts back.
    dtype, refused: as above."""
    for node in list(feed.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or getattr(value, "dtype", None) != torch.float32:
            continue
        users = [user for user in node.users if is_convolution(user) and user.args[0] is node]
        if len(users) != 1 or users[0].name in refused:
            continue
        write_cast(node, dtype, users)


def _weights(
    feed: Feed, refused: Container[str], least: int, below: float = math.inf
) -> Iterator[tuple[torch.fx.Node, list[torch.fx.Node]]]:
    """Of so many numbers or more, with the products that read them."""
    for weight in [n for n, known in feed.placeholders.items() if _is_kept(n, known)]:
        if not least <= weight.meta["val"].numel() < below:
            continue
        users = _products_of(weight, refused)
        if users:
            yield weight, users


def _products_of(node: torch.fx.Node, refused: Container[str]) -> list[torch.fx.Node]:
    return [user for user in node.users if _multiplies(user, node) and user.name not in refused]


def _is_kept(node: torch.fx.Node, known: Placeholder) -> bool:
    """Whether autocast keeps the cast of this input."""
    value = node.meta.get("val")
    return (
        known.source.kind == "parameter"
        and known.requires_grad
        and isinstance(value, torch.Tensor)
        and value.dim() == 2
        and value.dtype == torch.float32
    )


def _multiplies(node: torch.fx.Node, weight: torch.fx.Node) -> bool:
    name = getattr(node.target, "__name__", "").partition(".")[0]
    at = [index for index, argument in enumerate(node.args) if argument is weight]
    return bool(at) and set(at) <= set(_MATRICES.get(name, ()))
