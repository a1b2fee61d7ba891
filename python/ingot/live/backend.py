"""`torch.compile(model, backend="ingot")`: TorchDynamo's graph in, a callable out.

Dynamo captures, guards, breaks graphs and replays side effects. Of a graph, Ingot runs regions, and
PyTorch the operators between them, under its autograd.
"""

from __future__ import annotations

import operator
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ingot.capture.custom_ops  # noqa: F401  (the operator that batch norms become)
from ingot.capture import CaptureError
from ingot.capture.captured import NothingToGainError, Unsupported
from ingot.capture.causal import AskedInVainError, was_asked, while_causal
from ingot.capture.derivative import unwatched
from ingot.capture.nodes import where
from ingot.live import lengths, policy
from ingot.live.compiled import Compiled
from ingot.live.graphed import GraphedCalls, recorder_of, why_not
from ingot.live.importing import Request, compile_whole
from ingot.live.nested import write_out
from ingot.live.overlaps import while_apart
from ingot.live.pieces import compile_pieces, left_whole
from ingot.live.reporting import HOLDS_NOTHING
from ingot.live.unseen_writes import UnseenWritesError, parts_to_run_apart
from ingot.log import logger
from ingot.runtime.library import STATUS_INVALID_ARGUMENT, IngotError, IngotWarning

_forward_ad = torch.autograd.forward_ad
_dtype = operator.attrgetter("dtype")
_CONVERTED = (
    "PyTorch runs it: its parameters have another dtype than when TorchDynamo captured it, which "
    "looks at them no more. Call torch._dynamo.reset() after the conversion, or use ingot.optimize"
)


def weakly(method: Callable) -> Callable:
    """A bound method that does not keep its object."""
    bound = weakref.WeakMethod(method)
    return lambda *args: bound()(*args)


def forward_of(gm: torch.fx.GraphModule) -> Callable:
    """Until its text is made, which is put off, a graph has another forward: one that goes through
    the module's __call__ ever after, and prints a traceback of it where PyTorch refuses a call."""
    if hasattr(gm, "real_recompile"):
        gm.real_recompile()
    return gm.forward


@dataclass
class DynamoGraph:
    """One graph of Dynamo's: compiled, or the reason why PyTorch runs it whole."""

    mode: str
    compiled: Compiled | None = None
    problem: str | None = None
    holds_nothing: bool = False  # that Ingot would take over
    gains_nothing: bool = False  # by what Ingot could take over
    calls: int = 0  # up to a few
    is_frozen: bool = False
    not_replayed: str | None = None  # why not
    replayed: GraphedCalls | None = None


@dataclass
class Session:
    """What one user of the backend (a module, or a call of torch.compile) asked for and got."""

    name: str = "the model"
    precision: str | None = None
    options: dict | None = None
    graphs: list[DynamoGraph] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    breaks: list[Unsupported] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.program_options, self.is_replayed = policy.without_mode(self.options)

    def warn(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            text = f"ingot: {self.name}: {reason}"
            try:
                warnings.warn(text, IngotWarning, stacklevel=2)
            except IngotWarning:  # warnings are errors here, but nothing is wrong with the call
                logger.warning(text)

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

    def lost(self, why: str, where: str) -> None:
        """A call that PyTorch runs whole: for the report, since the next one may be another."""
        item = Unsupported("the module", where, why)
        if item not in self.breaks:
            self.breaks.append(item)

    def run_by_pytorch(self, gm: torch.fx.GraphModule) -> Callable:
        return forward_of(gm)

    def made(self, graph: DynamoGraph) -> Callable:
        """The callable that Dynamo gets for a graph that was compiled."""
        run = self.replayed(graph, graph.compiled.run, graph.compiled.device_type)
        return lambda *args: run(args)

    def replayed(self, graph: DynamoGraph, run: Callable, device_type: str) -> Callable:
        """A graph's call, by CUDA graphs where that is asked for, and there are any."""
        graphs = recorder_of(device_type) if self.is_replayed else None
        if graphs is not None and graph.not_replayed:
            self.warn(f"its calls are not replayed by CUDA graphs: {graph.not_replayed}")
            return run
        if graphs is None:
            return run
        graph.replayed = GraphedCalls(run, weakly(self.warn), graphs)
        return graph.replayed

    def given_back(self, graph: DynamoGraph, gm, device_types: set[str]) -> Callable:
        """The callable that Dynamo gets for a graph of which nothing was compiled."""
        forward = forward_of(gm)
        if not self.is_replayed or len(device_types) != 1:
            return forward
        made = self.replayed(graph, lambda args: forward(*args), *device_types)
        if graph.replayed is None:
            return forward
        graph.holds_nothing = False  # calls are to come here
        return lambda *args: made(args)

    def lengths_change(self) -> bool:
        """Whether graphs for one length of several are captured in vain."""
        return lengths.captured_often()

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
    options = dict(options or {})
    if mode is not None:
        options["mode"] = mode
    policy.without_mode(options)
    if switched_off():
        return forward_of(gm)
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
    """By the environment: INGOT=off leaves everything to PyTorch. Another value is told."""
    value = os.environ.get("INGOT", "").lower()
    if value not in ("", "off", "on"):
        said = f"ingot: INGOT={value} in the environment means nothing: it is off or on"
        warnings.warn(said, IngotWarning, stacklevel=3)
    return value == "off"


def compile_graph(
    session: Session, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable:
    write_out(gm)
    for item in left_whole(gm, example_inputs):
        session.leaves(item)
    return compile_pieces(gm, example_inputs, partial(_compile_piece, session))


def _compile_piece(
    session: Session, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable:
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    if not any(isinstance(value, torch.Tensor) for value in (*example_inputs, *values)):
        return forward_of(gm)  # sizes alone, as for a shape that is printed: nothing to tell
    start = time.perf_counter()
    graph, tell = DynamoGraph(session.mode()), True
    if session.is_replayed:
        graph.not_replayed = why_not(gm, example_inputs)
        for other in session.graphs:
            if other.replayed is not None:
                other.replayed.drop_stale()
    try:
        request = Request(
            session.precision,
            session.program_options,
            session.lengths_change(),
            session.is_replayed,
        )
        graph.compiled = compile_whole(request, gm, example_inputs)
        if graph.compiled is None:
            graph.problem = "PyTorch runs it: nothing can be captured with a batch of this size"
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
        graph.holds_nothing = graph.gains_nothing = isinstance(error, NothingToGainError)
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
        tensors = (e for e in example_inputs if isinstance(e, torch.Tensor))
        return session.given_back(graph, gm, {tensor.device.type for tensor in tensors})
    for item in graph.compiled.captured.unsupported:
        session.tell(item)
    made, masks, apart = session.made(graph), graph.compiled.causal_inputs, graph.compiled.apart
    if apart:
        made = while_apart(made, session.run_by_pytorch(gm), apart, weakly(session.warn))
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
