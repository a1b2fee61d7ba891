"""`torch.compile(model, backend="ingot")`: TorchDynamo's graph in, a callable out.

Dynamo captures, guards, breaks graphs and replays side effects. Of a graph, Ingot runs regions, and
PyTorch the operators between them, under its autograd.
"""

from __future__ import annotations

import contextlib
import operator
import os
import time
import warnings
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ingot.capture.custom_ops  # noqa: F401  (the operator that batch norms become)
from ingot.capture import CaptureError
from ingot.capture.captured import NothingToGainError, Unsupported
from ingot.capture.causal import AskedInVainError, take_causal_inputs, was_asked, while_causal
from ingot.capture.derivative import unwatched
from ingot.capture.feed import Feed
from ingot.capture.folding import fold_constants
from ingot.capture.gains import joins_parts
from ingot.capture.host_time import is_of_the_host
from ingot.capture.importer import import_graph
from ingot.capture.nodes import computes, schema_name, where
from ingot.capture.numbers import numbers_as_tensors
from ingot.capture.products import PRODUCTS
from ingot.capture.table import SHAPE_OPERATORS
from ingot.live import policy
from ingot.live.autocast import cast_by_torch, cast_inputs
from ingot.live.compiled import Compiled, RefusedError
from ingot.live.memory import copies_of_inputs, copies_of_written, views_among_results
from ingot.live.overlaps import while_apart
from ingot.live.pieces import compile_pieces
from ingot.live.products import LEAST_WORK, with_own_products
from ingot.live.reporting import HOLDS_NOTHING
from ingot.live.returned import INNER, readers_of_results
from ingot.live.switches import kept_from_autocast
from ingot.live.tracing import feed_of, other_batches, value_at_capture
from ingot.live.unseen_writes import UnseenWritesError, parts_to_run_apart
from ingot.log import logger
from ingot.runtime.ahead import compile_ahead
from ingot.runtime.library import STATUS_INVALID_ARGUMENT, IngotError, IngotWarning

_forward_ad = torch.autograd.forward_ad
_DEVICES = ("cpu", "cuda")
_dtype = operator.attrgetter("dtype")
_CONVERTED = (
    "PyTorch runs it: its parameters have another dtype than when TorchDynamo captured it, which "
    "looks at them no more. Call torch._dynamo.reset() after the conversion, or use ingot.optimize"
)
_MAX_REFUSALS = 16
# Of a graph, and of its inputs, up to which other places of the batch are tried.
_MOST_NODES, _MOST_PLACES = 64, 6


@dataclass
class DynamoGraph:
    """One graph of Dynamo's: compiled, or the reason why PyTorch runs it whole."""

    mode: str
    compiled: Compiled | None = None
    problem: str | None = None
    holds_nothing: bool = False  # that Ingot would take over
    calls: int = 0  # up to a few


@dataclass
class Session:
    """What one user of the backend (a module, or a call of torch.compile) asked for and got."""

    name: str = "the model"
    precision: str | None = None
    options: dict | None = None
    graphs: list[DynamoGraph] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    breaks: list[Unsupported] = field(default_factory=list)

    def warn(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"ingot: {self.name}: {reason}", IngotWarning, stacklevel=2)

    def tell(self, item: Unsupported) -> None:
        place = item.where and f" ({item.where})"
        self.warn(f"PyTorch runs {item.what}{place}: {item.why}")

    def leaves(self, item: Unsupported) -> None:
        """What no graph of Ingot's holds."""
        if item not in self.breaks:
            self.breaks.append(item)
            self.tell(item)

    def broke(self, reason: str, where: str) -> None:
        """What is called where TorchDynamo breaks a graph is PyTorch's, with all beneath it."""
        why = next(iter(reason.splitlines()), "").strip().rstrip(".:")
        if all(item.why != why for item in self.breaks):
            self.breaks.append(Unsupported("a part of the forward", where, why))
            self.warn(
                f"PyTorch runs what TorchDynamo cannot capture{where and f' ({where})'}: {why}. "
                "TORCH_LOGS=graph_breaks tells the lines"
            )

    def run_by_pytorch(self, gm: torch.fx.GraphModule) -> Callable:
        return gm.forward

    def made(self, graph: DynamoGraph) -> Callable:
        """The callable that Dynamo gets for a graph that was compiled."""
        run = graph.compiled.run
        return lambda *args: run(args)

    def mode(self) -> str:
        """Of the graph being compiled."""
        return "training" if torch.is_grad_enabled() else "eval"


def ingot_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict | None = None,
) -> Callable:
    """The backend as TorchDynamo knows it by name. options: `precision` ("fp32", "ieee", "high",
    "tf32", "bf16" or "fp16"), and further options of ingot_program_create. Raises ValueError for
    what it does not know; modes are Inductor's alone."""
    if mode not in (None, "default"):
        raise ValueError(f"backend='ingot' has no modes ({mode!r} was given), only options")
    if switched_off():
        return gm.forward
    options = dict(options or {})
    precision = options.pop("precision", None)
    policy.check_precision(precision)
    session = Session(precision=precision, options=options)
    with unwatched():
        run = compile_graph(session, gm, example_inputs)
    if run == gm.forward:
        return run
    dtypes = _dtypes_of(example_inputs)
    captured = dtypes(example_inputs)

    # Dynamo guards neither, by its defaults: regions have no derivative forwards, and parameters
    # of another dtype (`model.half()` after a call) are those of another graph.
    def watched(*args: Any) -> Any:
        if _forward_ad._current_level >= 0:
            return gm.forward(*args)
        if dtypes(args) != captured:
            session.warn(_CONVERTED)
            return gm.forward(*args)
        return run(*args)

    return watched


def _dtypes_of(inputs: Sequence[Any]) -> Callable[[Sequence[Any]], tuple]:
    """What tells them of inputs like these, in a call."""
    places = [
        at for at, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    if len(places) < 2:
        return lambda args: tuple(args[at].dtype for at in places)
    chosen = operator.itemgetter(*places)
    return lambda args: tuple(map(_dtype, chosen(args)))


def switched_off() -> bool:
    """By the environment: INGOT=off leaves everything to PyTorch."""
    return os.environ.get("INGOT", "").lower() == "off"


def compile_graph(
    session: Session, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable:
    return compile_pieces(gm, example_inputs, partial(_compile_piece, session))


def _compile_piece(
    session: Session, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable:
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    if not any(isinstance(value, torch.Tensor) for value in (*example_inputs, *values)):
        return gm.forward  # sizes alone, as for a shape that is printed: nothing to tell
    start = time.perf_counter()
    graph, tell = DynamoGraph(session.mode()), True
    try:
        graph.compiled = _compiled(session, gm, example_inputs)
        if graph.compiled is None:
            graph.problem = "PyTorch runs it: it refuses a batch of this size"
            tell = False  # PyTorch does, by an error
        elif not graph.compiled.takes_something:
            graph.compiled, graph.holds_nothing = None, True
            graph.problem = HOLDS_NOTHING
    except AskedInVainError:
        raise
    except UnseenWritesError as error:
        apart = parts_to_run_apart(list(gm.graph.nodes), error.nodes)
        if apart:
            return _compile_around(session, gm, example_inputs, error, apart)
        graph.problem = f"PyTorch runs it: {error}"
    except CaptureError as error:
        graph.problem = f"PyTorch runs it: {error}"
        graph.holds_nothing = isinstance(error, NothingToGainError)
    except IngotError as error:
        if error.status == STATUS_INVALID_ARGUMENT:
            raise
        graph.problem = f"PyTorch runs it: {error}"
    except Exception as error:  # a fault of ours must not stop a program that PyTorch can run
        logger.error("capturing %s failed: %r", session.name, error, exc_info=True)
        graph.problem = f"PyTorch runs it: capturing it failed ({error!r}), which is Ingot's fault"
    if graph.compiled is None and was_asked():
        raise AskedInVainError(graph.problem)
    session.graphs.append(graph)
    took = 1e3 * (time.perf_counter() - start)
    logger.info("captured and planned %s in %.0f ms", session.name, took)
    if graph.compiled is None:
        if tell:
            session.warn(graph.problem)
        return gm.forward
    for item in graph.compiled.captured.unsupported:
        session.tell(item)
    made, masks, apart = session.made(graph), graph.compiled.causal_inputs, graph.compiled.apart
    if apart:
        made = while_apart(made, session.run_by_pytorch(gm), apart, session.warn)
    return while_causal(made, gm.forward, masks) if masks else made


def _compile_around(
    session: Session, gm, example_inputs, error: UnseenWritesError, apart: set[torch.fx.Node]
) -> Callable:
    """The same in pieces, between which PyTorch runs what is apart."""
    for node in gm.graph.nodes:
        if node.name in error.nodes:
            session.leaves(Unsupported("a write", where(node), str(error)))
    around, between = partial(_compile_piece, session), lambda gm, _: session.run_by_pytorch(gm)
    return compile_pieces(gm, example_inputs, around, apart, between)


def _compiled(session: Session, gm, example_inputs) -> Compiled | None:
    """None where it is PyTorch's to answer, with an error of its own."""
    gradients = torch.is_grad_enabled() and any(
        isinstance(e, torch.Tensor) and e.requires_grad for e in example_inputs
    )
    feed, refused = _fed(gm, example_inputs, gradients)
    autocast, tf32 = policy.ambient(feed.device_type)
    feed.tf32 = tf32 and session.precision in (None, "tf32")
    refused.update(
        dict.fromkeys(kept_from_autocast(feed.graph), "its forward keeps it from autocast")
    )
    if autocast is not None:
        refused.update(dict.fromkeys(cast_by_torch(feed, autocast, refused), ""))
        if gradients:
            cast_inputs(feed, autocast, refused)
    own_products = _has_own_products(feed.device_type, autocast)
    own_products &= not (gradients and feed.tf32 and is_of_the_host(feed.graph.nodes))
    for _ in range(_MAX_REFUSALS):
        captured = import_graph(
            feed,
            refused=refused,
            autocast=autocast is not None,
            gradients=gradients,
            apart=LEAST_WORK if own_products else None,
        )
        if own_products:
            captured = with_own_products(captured, policy.candidates(session.precision, tf32)[0])
        if captured.static_batch in captured.delegate_batches:
            return None
        try:
            compiled = Compiled(
                captured, feed.device_type, session.precision, tf32, session.options
            )
        except RefusedError as error:
            refused.update(error.nodes)
            continue
        compiled.causal_inputs, compiled.apart = feed.causal_inputs, feed.apart
        compile_ahead(compiled.programs, feed.example_batch)
        return compiled
    raise CaptureError("; ".join(sorted(set(refused.values()))))


def _has_own_products(device_type: str, autocast: torch.dtype | None) -> bool:
    """Whether a product that no region takes may be Ingot's."""
    return device_type == "cuda" and autocast is None


def _fed(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], gradients: bool
) -> tuple[Feed, dict[str, str]]:
    """With the batch where regions take most: of a product of two inputs either may have it, and a
    transposed one on its second dimension. Without a chain there is nothing to take it for.
    Second: what PyTorch must run in any case, as `refused` of import_graph()."""
    inner = gm.meta.get(INNER, ())
    best = _with_refused(_feed(gm, example_inputs), gradients, inner)
    if policy.ambient(best[0].device_type)[0] is not None:
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
            other = _with_refused(_feed(gm, example_inputs, place), gradients, inner)
            left = _left(*other, gradients)
            if left < least:
                best, least = other, left
    return best


def _feed(gm: torch.fx.GraphModule, *arguments: Any) -> Feed:
    feed = feed_of(gm, *arguments)
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
    feed: Feed, gradients: bool, inner: Container[int]
) -> tuple[Feed, dict[str, str]]:
    """inner: places of results that no user gets."""
    feed.trains_chains = True
    feed.joins_parts = joins_parts(feed.device_type, gradients)
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
