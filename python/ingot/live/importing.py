"""One graph of TorchDynamo's, imported and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.capture import CaptureError
from ingot.capture.captured import Captured, TorchStep
from ingot.capture.causal import ATTENTION, take_causal_inputs
from ingot.capture.feed import Feed
from ingot.capture.folding import fold_constants
from ingot.capture.gains import joins_parts
from ingot.capture.host_time import is_of_the_host
from ingot.capture.importer import import_graph
from ingot.capture.nodes import computes, schema_name
from ingot.capture.numbers import numbers_as_tensors
from ingot.capture.products import PRODUCTS
from ingot.capture.table import SHAPE_OPERATORS
from ingot.live import lengths, policy
from ingot.live.autocast import (
    cast_by_torch,
    cast_for_convolutions,
    cast_inputs,
    cast_weights,
    read_uncast,
)
from ingot.live.compiled import Compiled, RefusedError
from ingot.live.memory import copies_of_inputs, copies_of_written, views_among_results
from ingot.live.products import LEAST_WORK, product, with_own_products
from ingot.live.returned import INNER, readers_of_results
from ingot.live.switches import kept_from_autocast
from ingot.live.tracing import (
    Lengths,
    changing_sizes,
    feed_of,
    other_batches,
    value_at_capture,
)
from ingot.log import logger
from ingot.runtime.ahead import compile_ahead

_DEVICES = ("cpu", "cuda")
_MAX_REFUSALS = 16
# Of a graph, and of its inputs, up to which other places of the batch are tried.
_MOST_NODES, _MOST_PLACES = 64, 6
# Operators that a causal form of an attention is worth.
_OF_CAUSAL = 3


@dataclass(frozen=True)
class Request:
    """precision, options: as of the backend; keeps_lengths: of sizes that change, whether graphs
    for one size alone were not called again; is_replayed: as a feed has it."""

    precision: str | None
    options: dict | None
    keeps_lengths: bool = False
    is_replayed: bool = False


def compile_whole(
    request: Request, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Compiled | None:
    """None where it is PyTorch's to answer, with an error of its own. Raises CaptureError."""
    changing = bool(changing_sizes(gm, example_inputs))
    compiled = _with_lengths(request, gm, example_inputs) if changing else None
    if compiled is None:
        if changing and lengths.are_marked(gm, example_inputs):
            raise CaptureError("nothing is taken over with a size that its caller marked dynamic")
        compiled = _compiled(_Import(request, gm, example_inputs, Lengths.BOUND))
        if compiled is not None:
            compiled.bound_lengths = changing
    if compiled is not None:
        lengths.note(gm, example_inputs)
        if compiled.example_batch is not None:
            compile_ahead(compiled.for_batch(compiled.example_batch))
    return compiled


def _with_lengths(request: Request, gm, example_inputs) -> Compiled | None:
    """For sizes that change, where that takes over nearly as much as for one of them alone; or
    half of it, where such captures are in vain."""
    try:
        compiled = _compiled(_Import(request, gm, example_inputs, Lengths.KEPT))
        taken = compiled and _taken(compiled.captured)
        if not taken:
            return None
        alone = 0
        with contextlib.suppress(CaptureError):
            alone = _taken(_Import(request, gm, example_inputs, Lengths.TRIED).captured())
    except CaptureError:
        return None
    except Exception as error:  # a fault of ours: there is another way
        logger.error("a graph for all lengths failed: %r", error, exc_info=True)
        return None
    if taken < alone * (0.5 if request.keeps_lengths else 0.9):
        return None
    lengths.keep_apart(gm, example_inputs)
    return compiled


def _taken(captured: Captured) -> int:
    """How many operators are Ingot's; an attention that reads no mask counts as some of them."""
    found = sum(len(region.operators) for region in captured.regions)
    for step in captured.steps:
        if isinstance(step, TorchStep):
            found += step.target is product
            found += _OF_CAUSAL * (step.target is ATTENTION and step.args[5:6] == (True,))
    return found


def _compiled(imported: _Import) -> Compiled | None:
    request, feed = imported.request, imported.feed
    for _ in range(_MAX_REFUSALS):
        captured = imported.captured()
        if captured.static_batch in captured.delegate_batches:
            return None
        try:
            compiled = Compiled(
                captured, feed.device_type, request.precision, imported.tf32, request.options
            )
        except RefusedError as error:
            imported.refused.update(error.nodes)
            continue
        compiled.causal_inputs, compiled.apart = feed.causal_inputs, feed.apart
        compiled.example_batch = feed.example_batch
        return compiled
    raise CaptureError("; ".join(sorted(set(imported.refused.values()))))


class _Import:
    """captured(): the graph, cut, with what has been refused so far left to PyTorch."""

    def __init__(self, request: Request, gm, example_inputs, sizes: Lengths):
        gradients = torch.is_grad_enabled() and any(
            isinstance(e, torch.Tensor) and e.requires_grad for e in example_inputs
        )
        feed, refused = _fed(request, gm, example_inputs, gradients, sizes)
        autocast, tf32 = policy.ambient(feed.device_type)
        feed.tf32 = tf32 and request.precision in (None, "tf32")
        refused.update(
            dict.fromkeys(kept_from_autocast(feed.graph), "its forward keeps it from autocast")
        )
        if autocast is not None:
            read_uncast(feed, autocast, refused)
            refused.update(dict.fromkeys(cast_by_torch(feed, autocast, refused), ""))
            if gradients:
                cast_weights(feed, autocast, refused)
                cast_inputs(feed, autocast, refused)
            cast_for_convolutions(feed, autocast, refused)
        own_products = _has_own_products(feed.device_type, autocast)
        weighs = gradients and feed.tf32 and not feed.is_replayed
        own_products &= not (weighs and is_of_the_host(feed.graph.nodes))
        self.request, self.feed, self.refused, self.tf32 = request, feed, refused, tf32
        self._autocast, self._gradients = autocast is not None, gradients
        self._own_products = own_products

    def captured(self) -> Captured:
        captured = import_graph(
            self.feed,
            refused=self.refused,
            autocast=self._autocast,
            gradients=self._gradients,
            apart=LEAST_WORK if self._own_products else None,
        )
        if self._own_products:
            precision = policy.candidates(self.request.precision, self.tf32)[0]
            captured = with_own_products(captured, precision)
        return captured


def _has_own_products(device_type: str, autocast: torch.dtype | None) -> bool:
    """Whether a product that no region takes may be Ingot's."""
    return device_type == "cuda" and autocast is None


def _fed(
    request: Request, gm: torch.fx.GraphModule, example_inputs, gradients: bool, sizes: Lengths
) -> tuple[Feed, dict[str, str]]:
    """With the batch where regions take most: of a product of two inputs either may have it, and a
    transposed one on its second dimension. Without a chain there is nothing to take it for.
    Second: what PyTorch must run in any case, as `refused` of import_graph()."""
    inner = gm.meta.get(INNER, ())
    best = _with_refused(request, _feed(gm, example_inputs, lengths=sizes), gradients, inner)
    if sizes is not Lengths.BOUND or policy.ambient(best[0].device_type)[0] is not None:
        return best  # autocast's casts are looked for in a graph that is as it was traced
    places = other_batches(gm, example_inputs)
    nodes = best[0].graph.nodes
    if not 0 < len(places) <= _MOST_PLACES or len(nodes) > _MOST_NODES:
        return best
    if not any(_is_chain(node) for node in nodes):
        return best
    least = _left(*best, gradients)
    for place in places if least else ():
        with contextlib.suppress(CaptureError):
            other = _with_refused(request, _feed(gm, example_inputs, place), gradients, inner)
            left = _left(*other, gradients)
            if left < least:
                best, least = other, left
    return best


def _feed(gm: torch.fx.GraphModule, *arguments: Any, **named: Any) -> Feed:
    feed = feed_of(gm, *arguments, **named)
    if feed.device_type not in _DEVICES:
        raise CaptureError(f"its tensors are on {feed.device_type!r}, where Ingot has no kernels")
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    known = {
        node: value
        for node, value in zip(feed.placeholders, map(value_at_capture, inputs))
        if value is not None
    }
    at = {node: index for index, node in enumerate(feed.placeholders)}
    feed.causal_inputs = [at[node] for node in take_causal_inputs(feed.graph, known)]
    return feed


def _with_refused(
    request: Request, feed: Feed, gradients: bool, inner: Container[int]
) -> tuple[Feed, dict[str, str]]:
    """inner: places of results that no user gets."""
    feed.trains_chains = feed.weighs_steps = feed.shares_masks = True
    feed.joins_parts = joins_parts(feed.device_type, gradients)
    feed.is_replayed = request.is_replayed
    fold_constants(feed)
    refused = views_among_results(feed.graph)
    if gradients:
        refused += copies_of_inputs(feed) + copies_of_written(feed)
        refused += readers_of_results(feed, inner)
    if policy.ambient(feed.device_type)[0] is None:  # autocast may make few bits of a tensor
        refused += numbers_as_tensors(feed.graph)
    return feed, dict.fromkeys(refused, "")


def _is_chain(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    computing = node.op == "call_function" and computes(node)
    return computing and name not in PRODUCTS and name not in SHAPE_OPERATORS


def _left(feed: Feed, refused: dict[str, str], gradients: bool) -> int:
    """How many products stay PyTorch's."""
    captured = import_graph(feed, refused=refused, gradients=gradients)
    return sum(f"aten::{item.what}" in PRODUCTS for item in captured.unsupported)
