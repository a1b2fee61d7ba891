"""Calls of a captured graph as two CUDA graphs, forward's and backward's: `mode="reduce-overhead"`.

Calls that are alike run as they are a few times. Then one is recorded, on tensors of its own: what
is the same tensor at every call (parameters, buffers) is read where it lies, other inputs are
copied to where the recorded kernels read them. From then on a call is a copy of its inputs, one
launch, and a copy of its results, so that nothing that a caller holds is ever written again; its
backward pass likewise. Whatever a recording is not for (two forwards before a backward, tensors
that moved, a second derivative) runs as without it.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.live import policy
from ingot.live.recording import CudaGraphs, NotRecordableError, Recording
from ingot.live.releases import unseen
from ingot.log import logger
from ingot.runtime.program import tensor_guards

# Calls that are alike before one is recorded.
_ALIKE = 3
# Kinds of calls (sizes, modes) that are recorded, and recordings of one kind, whose tensors move.
_MOST_KINDS, _MOST_RECORDINGS = 8, 3

# One recording at a time in a process.
_recording = threading.Lock()

_grad = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_backward_task = torch._C._current_graph_task_id
_functorch_is_active = torch._C._are_functorch_transforms_active
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_is_batched = torch._C._functorch.is_batchedtensor
_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _modes() -> tuple:
    """Settings around a call that are recorded with it."""
    return _grad(), _inference(), *policy.ambient("cuda")


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _saves_elsewhere() -> bool:
    """Whether somebody sees to what backward passes keep."""
    return _top_hooks is not None and _top_hooks(False) is not None


class _Kind:
    """Calls that are alike: how often they came, which tensors were the same ones at each."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.calls, self.recordings = 0, 0
        self.written: set[int] = set()
        self.seen = [weakref.ref(tensor) for tensor in tensors]
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.same = set(range(len(tensors)))

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        self.calls += 1
        for at, tensor in enumerate(tensors):
            if self.seen[at]() is not tensor or self.addresses[at] != tensor.data_ptr():
                self.same.discard(at)
                self.seen[at], self.addresses[at] = weakref.ref(tensor), tensor.data_ptr()

    def watched(self, run: Callable, args: Sequence, tensors: Sequence[torch.Tensor]) -> tuple:
        """A call, and what it writes."""
        before = [tensor._version for tensor in tensors]
        results = run(args)
        self.written.update(
            at for at, tensor in enumerate(tensors) if tensor._version != before[at]
        )
        return results


class _Known:
    """A recording, and which calls it is for."""

    def __init__(self, key: tuple, recording: Recording, args: Sequence, places: list[int]):
        self.key, self.recording, self.modes = key, recording, _modes()
        self.pick = _picker(places)
        self.values = _values(args)
        self.still = _picker([places[at] for at in recording.same])
        self.addresses = [tensor.data_ptr() for tensor in self.still(args)]
        tensors = self.pick(args)
        self.guards = tensor_guards(tensors)
        self.expected = _laid_out(tensors)
        # The forward of which no backward pass has run yet, while anybody may ask for it.
        self.pending: weakref.ref | None = None

    def fits(self, args: Sequence) -> bool:
        tensors = self.pick(args)
        alike = self.guards.check(*tensors) if self.guards else _laid_out(tensors) == self.expected
        return (
            alike
            and _modes() == self.modes
            and _values(args) == self.values
            and self.lie_still(args)
        )

    def lie_still(self, args: Sequence) -> bool:
        """Whether what is read where it lies is where it was."""
        return [tensor.data_ptr() for tensor in self.still(args)] == self.addresses

    def is_free(self) -> bool:
        """Whether nobody needs what the last forward left for its backward pass."""
        return self.pending is None or self.pending() is None


class GraphedCalls:
    """run: what takes a graph's inputs, by position, and gives its outputs in a tuple. tell: says
    once why calls are not recorded. graphs: what records, on a device."""

    def __init__(
        self,
        run: Callable,
        tell: Callable[[str], None],
        graphs: Callable[[torch.device], Any] = CudaGraphs,
    ):
        self._run, self._tell, self._graphs = run, tell, graphs
        self._kinds: dict[tuple, _Kind] = {}
        self._known: tuple[_Known, ...] = ()
        self._looks = True
        self._lock = threading.RLock()
        self.replays = 0

    def __call__(self, args: Sequence) -> tuple:
        if _is_captured() or _dispatch_modes() > 0 or _functorch_is_active() or _saves_elsewhere():
            return self._run(args)
        known = next((each for each in self._known if each.fits(args)), None)
        if known is None and self._looks and _backward_task() == -1:
            return self._looked_at(args)
        if known is None:
            return self._run(args)
        return self._by(known, args)

    def _by(self, known: _Known, args: Sequence) -> tuple:
        with self._lock:
            if not known.is_free():
                return self._run(args)
            return self._replayed(known, args)

    def _looked_at(self, args: Sequence) -> tuple:
        """A call that is no recording's: counted, and recorded where it is time for that."""
        places = [at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        tensors = [args[at] for at in places]
        if not tensors or any(type(tensor) not in _PLAIN for tensor in tensors):
            self._give_up(None)
            return self._run(args)
        key = _modes(), _values(args), _laid_out(tensors)
        with self._lock:
            kind = self._counted(key, tensors)
            due = kind is not None and kind.calls >= _ALIKE
        # Not while this holds the lock that backward passes of other threads may wait for.
        if due and _recording.acquire(blocking=False):
            try:
                known = self._recorded(key, kind, args, places)
            finally:
                _recording.release()
            if known is not None:
                return self._by(known, args)
        return self._run(args) if kind is None else kind.watched(self._run, args, tensors)

    def _counted(self, key: tuple, tensors: list[torch.Tensor]) -> _Kind | None:
        """The kind of a call; None where there is none to be recorded any more."""
        kind = self._kinds.get(key)
        if kind is None:
            self._looks = len(self._kinds) < _MOST_KINDS
            if self._looks:
                self._kinds[key] = kind = _Kind(tensors)
            return kind
        kind.note(tensors)
        if kind.recordings < _MOST_RECORDINGS:
            return kind
        self._looks = any(k.recordings < _MOST_RECORDINGS for k in self._kinds.values())
        return None

    def _recorded(self, key: tuple, kind: _Kind, args: Sequence, places: list) -> _Known | None:
        kind.calls, kind.recordings = 0, kind.recordings + 1
        with self._lock:  # a recording of the same kind is of tensors that have moved
            self._known = tuple(each for each in self._known if each.key != key)
        try:
            graphs = self._graphs(args[places[0]].device)
            same, written = sorted(kind.same), kind.written
            recording = Recording(self._run, args, places, same, written, graphs)
        except NotRecordableError as error:
            return self._give_up(str(error))
        except Exception as error:  # calls run as they did so far
            logger.error("recording a call failed: %r", error, exc_info=True)
            return self._give_up(f"recording them failed ({error!r})")
        known = _Known(key, recording, args, places)
        with self._lock:
            self._known = (known, *self._known)
        return known

    def _give_up(self, why: str | None) -> None:
        self._looks = False
        if why is not None:
            self._tell(f"its calls are not replayed by CUDA graphs: {why}")

    def _replayed(self, known: _Known, args: Sequence) -> tuple:
        recording = known.recording
        self.replays += 1
        if not recording.has_backward:
            return recording.outputs(recording.forward(args))
        inputs = [args[at] for at in recording.differentiable]
        results = _apply(known, self, tuple(args), *inputs)
        return recording.outputs(results)

    def again(self, recording: Recording, args: Sequence, random: Any, autocast: tuple) -> tuple:
        """The call anew, by what was recorded; also the tensors to take its derivatives by."""
        variables = {}
        for at in recording.differentiable:
            # A leaf may have been computed from another: its own part ends at itself.
            variables[at] = args[at].view_as(args[at])
        given = [variables.get(at, arg) for at, arg in enumerate(args)]
        device, dtype, enabled = autocast
        with recording.undone(args, random), torch.autocast(device, dtype, enabled):
            results = [r for r in self._run(given) if isinstance(r, torch.Tensor)]
        return results, list(variables.values())


def _picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[at] for at in places)


def _values(args: Sequence) -> tuple:
    return tuple([arg for arg in args if not isinstance(arg, torch.Tensor)])


def _laid_out(tensors: Sequence[torch.Tensor]) -> tuple:
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


class _Forward:
    """What a forward left for its backward pass; alive while that may still be asked for."""

    __slots__ = ("__weakref__", "is_spent")

    def __init__(self) -> None:
        self.is_spent = False


class _ReplayedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: _Known, calls: GraphedCalls, args: tuple, *inputs):
        recording = known.recording
        ctx.known, ctx.calls, ctx.args = known, calls, args
        ctx.random = recording.random_state()
        ctx.autocast = _autocast_of(args[recording.places[0]].device.type)
        results = recording.forward(args)
        ctx.versions = [args[at]._version for at in recording.watched]
        ctx.left = _Forward()
        known.pending = weakref.ref(ctx.left)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[results[at] for at in recording.without_gradient])
        return tuple(results)

    @staticmethod
    @unseen
    def backward(ctx, *gradients):
        head = (None, None, None)
        recording = ctx.known.recording
        if all(gradient is None for gradient in gradients):
            return (*head, *[None] * len(recording.differentiable))
        if ctx.args is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what the first pass read is "
                "gone. Specify retain_graph=True there"
            )
        if [ctx.args[at]._version for at in recording.watched] != ctx.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation"
            )
        transformed = _functorch_is_active() or any(
            g is not None and _is_batched(g) for g in gradients
        )
        if _grad() or ctx.left.is_spent or transformed or not ctx.known.lie_still(ctx.args):
            return (*head, *_anew(ctx, gradients))
        keeps = _keeps_graph()
        with ctx.calls._lock:
            ctx.left.is_spent, ctx.known.pending = True, None
            found = recording.backward(gradients)
        if not keeps:
            ctx.args = None
        return (*head, *found)


def _anew(ctx, gradients: Sequence) -> list:
    """Gradients of a call that is computed once more: a backward pass leaves nothing of what it
    read in a recording, and what it computes itself has no derivative there."""
    recorded = _grad()
    with torch.enable_grad():
        results, variables = ctx.calls.again(
            ctx.known.recording, ctx.args, ctx.random, ctx.autocast
        )
        both = [
            (result, gradient)
            for result, gradient in zip(results, gradients)
            if gradient is not None and result.requires_grad
        ]
        found = torch.autograd.grad(
            [result for result, _ in both],
            variables,
            [gradient for _, gradient in both],
            create_graph=recorded,
            allow_unused=True,
        )
    if not recorded and not _keeps_graph():
        ctx.args = None
    return list(found)


def _autocast_of(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


# Without looking for tensors of functorch's transforms, of which none comes here.
_apply = super(torch.autograd.Function, _ReplayedFunction).apply


def why_not(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """What a graph does that a recording would not do as the graph does it."""
    values = [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    # One of a single number is read when a kernel is launched.
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor) and v.dim()}
    if len(devices) > 1:
        return "it computes on several kinds of devices"  # a copy reads the same memory for ever
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            name = f"{getattr(node.target, '__module__', '')} {node.target}"
            if "c10d" in name or "distributed" in name:
                return "it communicates, and other processes may record other calls"
            if _unsafe is not None and _unsafe in getattr(node.target, "tags", ()):
                return f"CUDA graphs cannot hold {node.target}, as its author says"
    return None


def recorder_of(device_type: str) -> Callable[[torch.device], Any] | None:
    """What records calls on devices of a type; None where nothing can."""
    return CudaGraphs if device_type == "cuda" else None
