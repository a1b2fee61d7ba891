"""Calls of a captured graph as two CUDA graphs, forward's and backward's: `mode="reduce-overhead"`,
which INGOT_MODES=all in the environment allows until it is proven (docs/kernel-log.md, 2026-12-01).

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
from ingot.live.products import is_batched
from ingot.live.recording import CudaGraphs, NotRecordableError, Recording
from ingot.live.releases import unseen
from ingot.live.switches import may_write
from ingot.log import logger
from ingot.runtime.program import tensor_guards

# Calls that are alike before one is recorded.
_ALIKE = 3
# Kinds of calls (sizes, modes) that are recorded, and recordings of one kind, whose tensors move.
_MOST_KINDS, _MOST_RECORDINGS = 8, 3
# Backward passes of a kind that nothing was recorded for.
_MOST_ANEW = 4

# One recording at a time in a process.
_recording = threading.Lock()

_grad = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_backward_task = torch._C._current_graph_task_id
_functorch_is_active = torch._C._are_functorch_transforms_active
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
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
        self.written: set[int] = set()
        self.calls, self.recordings = 0, 0
        self.seen = [weakref.ref(tensor) for tensor in tensors]
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.same = set(range(len(tensors)))
        # Results that had a gradient, where a recording was for others; backward passes that found
        # nothing recorded.
        self.pattern: tuple[int, ...] | None = None
        self.anew = 0

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        self.calls += 1
        for at, tensor in enumerate(tensors):
            if self.seen[at]() is not tensor or self.addresses[at] != tensor.data_ptr():
                self.same.discard(at)
                self.seen[at], self.addresses[at] = weakref.ref(tensor), tensor.data_ptr()

    def watched(self, run: Callable, args: Sequence, tensors: Sequence[torch.Tensor]) -> tuple:
        """A call, and what it writes."""
        plain = [at for at, tensor in enumerate(tensors) if not tensor.is_inference()]
        before = [tensors[at]._version for at in plain]
        results = run(args)
        both = zip(plain, before)
        self.written.update(at for at, version in both if tensors[at]._version != version)
        return results


class _Known:
    """A recording, and which calls it is for."""

    def __init__(self, key: tuple, kind: _Kind, recording: Recording, args: Sequence):
        self.key, self.kind, self.recording, self.modes = key, kind, recording, _modes()
        places = recording.places
        self.pick = _picker(places)
        self.values = _values(args)
        self.still = _picker([places[at] for at in recording.same])
        self.kept = [weakref.ref(tensor) for tensor in self.still(args)]
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
            and not self._is_partly_hooked(args)
        )

    def lie_still(self, args: Sequence) -> bool:
        """Whether what is read where it lies is where it was."""
        return [tensor.data_ptr() for tensor in self.still(args)] == self.addresses

    def _is_partly_hooked(self, args: Sequence) -> bool:
        """Whether hooks would be called of what has no gradient in some backward pass, as autograd
        calls those of whatever a function of several results was applied to."""
        return any(args[at]._backward_hooks for at in self.recording.partly)

    def is_free(self) -> bool:
        """Whether nobody needs what the last forward left for its backward pass."""
        return self.pending is None or self.pending() is None

    def is_stale(self) -> bool:
        """Whether what it reads has moved, or is gone."""
        both = zip(self.kept, self.addresses)
        found = ((tensor(), address) for tensor, address in both)
        return any(tensor is None or tensor.data_ptr() != at for tensor, at in found)


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
        if _recording.locked():  # of whose random numbers PyTorch lets no replay draw
            return self._run(args)
        known = next((each for each in self._known if each.fits(args)), None)
        if known is None and self._looks and _backward_task() == -1:
            return self._looked_at(args)
        if known is None:
            return self._run(args)
        return self._by(known, args)

    def _by(self, known: _Known, args: Sequence) -> tuple:
        with self._lock:
            if known.is_free():
                return self._replayed(known, args)
        return self._run(args)  # with no lock: it may have to wait for TorchDynamo's

    def _looked_at(self, args: Sequence) -> tuple:
        """A call that is no recording's: counted, and recorded where it is time for that."""
        places = [at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        tensors = [args[at] for at in places]
        if not tensors or any(type(tensor) not in _PLAIN for tensor in tensors):
            self._give_up(None)
            return self._run(args)
        key = _modes(), _values(args), _laid_out(tensors)
        self.drop_stale()
        with self._lock:
            kind = self._counted(key, tensors)
            due = kind is not None and kind.calls >= _ALIKE
        # Not while this holds the lock that backward passes of other threads may wait for.
        if due and _recording.acquire(blocking=False):
            try:
                known = self._recorded(key, kind, args, places)
            finally:
                _recording.release()
            if known is not None and known.fits(args):
                return self._by(known, args)
        return self._run(args) if kind is None else kind.watched(self._run, args, tensors)

    def drop_stale(self) -> None:
        """Lets go of recordings that no call fits any more, and of the memory that they hold."""
        if not self._lock.acquire(blocking=False):  # where TorchDynamo compiles: not to wait there
            return
        try:
            self._known = tuple(k for k in self._known if not (k.is_stale() and k.is_free()))
        finally:
            self._lock.release()

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
            pattern = kind.pattern
            recording = Recording(self._run, args, places, same, written, pattern, graphs)
        except NotRecordableError as error:
            return self._give_up(str(error))
        except Exception as error:  # calls run as they did so far
            logger.error("recording a call failed: %r", error, exc_info=True)
            return self._give_up(f"recording them failed ({error!r})")
        known = _Known(key, kind, recording, args)
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

    def had_none(self, known: _Known, given: tuple[int, ...]) -> None:
        """A backward pass found nothing recorded for it: of results that had no gradient before,
        the next recording is for these; calls that go on like this are recorded no more."""
        kind = known.kind
        kind.anew += 1
        mends = kind.pattern is None and given != known.recording.pattern
        if mends:
            kind.pattern, kind.calls = given, _ALIKE - 1
        if mends or kind.anew > _MOST_ANEW:
            self._known = tuple(each for each in self._known if each is not known)
        if not mends and kind.anew > _MOST_ANEW:
            kind.recordings = _MOST_RECORDINGS


def _picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[at] for at in places)


def _values(args: Sequence) -> tuple:
    return tuple([arg for arg in args if not isinstance(arg, torch.Tensor)])


def _laid_out(tensors: Sequence[torch.Tensor]) -> tuple:
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


class _Forward:
    """What a forward left for its backward passes; alive while one may still be asked for."""

    __slots__ = ("__weakref__", "args", "before", "freed", "served")

    def __init__(self, args: tuple):
        self.args: tuple | None = args
        self.before: list[torch.Tensor] | None = None
        self.served: set[int] = set()
        self.freed: set[int] = set()

    def serve(self, given: Sequence[int], keeps: bool, recording: Recording) -> None:
        """Notes a backward pass from these results; what it freed, no other one may read."""
        if self.before is None and (keeps or len(given) < len(recording.with_gradient)):
            self.before = recording.state_before()
        self.served.update(given)
        if keeps:
            return
        self.freed.update(given, *(recording.joined[at] for at in given))
        if self.freed.issuperset(recording.with_gradient):
            self.args = self.before = None


class _ReplayedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, known: _Known, calls: GraphedCalls, args: tuple, *inputs):
        recording = known.recording
        ctx.known, ctx.calls, ctx.left = known, calls, _Forward(args)
        ctx.random = recording.random_state()
        ctx.autocast = _autocast_of(args[recording.places[0]].device.type)
        results = recording.forward(args)
        ctx.versions = {at: args[at]._version for at in recording.versioned}
        known.pending = weakref.ref(ctx.left)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[results[at] for at in recording.without_gradient])
        return tuple(results)

    @staticmethod
    @unseen
    def backward(ctx, *gradients):
        head = (None, None, None)
        recording, left, known = ctx.known.recording, ctx.left, ctx.known
        given = tuple(at for at, gradient in enumerate(gradients) if gradient is not None)
        if not given:
            return (*head, *[None] * len(recording.differentiable))
        if not left.freed.isdisjoint(given):
            raise RuntimeError(
                "Trying to backward through the graph a second time: what the first pass read is "
                "gone. Specify retain_graph=True there"
            )
        _check_versions(ctx, recording.watched)
        transformed = _functorch_is_active() or any(is_batched(gradients[at]) for at in given)
        by_record = not (left.served or _grad() or transformed or _recording.locked())
        by_record = by_record and given == recording.pattern and known.lie_still(left.args)
        with ctx.calls._lock:
            before, keeps = left.before, _keeps_graph()
            if not by_record and before is None:
                before = recording.state_before()
            args = left.args
            left.serve(given, keeps, recording)
            known.pending = None
            if by_record:
                return (*head, *recording.backward(gradients))
            ctx.calls.had_none(known, given)
        return (*head, *_anew(ctx, args, before, given, gradients))


def _check_versions(ctx, places: Sequence[int]) -> None:
    if any(ctx.left.args[at]._version != ctx.versions[at] for at in places):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation"
        )


def _anew(ctx, args: tuple, before: list, given: tuple, gradients: Sequence) -> list:
    """Gradients of a call that is computed once more: a backward pass leaves nothing of what it
    read in a recording, and what it computes itself has no derivative there."""
    recording, recorded = ctx.known.recording, _grad()
    if any(args[at]._version != version for at, version in ctx.versions.items()):
        raise RuntimeError(
            "what a call read has been modified by an inplace operation before a backward pass "
            'that computes it once more, as mode="reduce-overhead" does for a second pass, a '
            "second derivative, and one from other results than before"
        )
    device, dtype, enabled = ctx.autocast
    # A leaf may have been computed from another: its own part ends at itself.
    with torch.enable_grad():
        variables = {at: args[at].view_as(args[at]) for at in recording.differentiable}
        call = [variables.get(at, arg) for at, arg in enumerate(args)]
        with torch.autocast(device, dtype, enabled):
            results = recording.again(call, before, ctx.random)
        found = torch.autograd.grad(
            [results[at] for at in given],
            list(variables.values()),
            [gradients[at] for at in given],
            create_graph=recorded,
            allow_unused=True,
        )
    return list(found)


def _autocast_of(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


# Without looking for tensors of functorch's transforms, of which none comes here.
_apply = super(torch.autograd.Function, _ReplayedFunction).apply


# What makes a tensor of numbers that a graph holds.
_LITERALS = {torch.tensor, torch.scalar_tensor, torch.full, torch.zeros, torch.ones}


def why_not(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """What a graph does that a recording would not do as the graph does it."""
    values = [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    if len(devices) > 1 and any(map(_is_of_the_host, gm.graph.nodes)):
        return "it computes on several kinds of devices"  # a copy reads the same memory for ever
    held = [n for n in gm.graph.nodes if n.op == "get_attr" and _is_tensor(gm, n)]
    if held and may_write(gm):
        return "it may write into tensors that it holds itself"
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if node.target is torch._C._autograd._get_data_attr:
                return "it reads .data, past what autograd sees"
            name = f"{getattr(node.target, '__module__', '')} {node.target}"
            if "c10d" in name or "distributed" in name:
                return "it communicates, and other processes may record other calls"
            if _unsafe is not None and _unsafe in getattr(node.target, "tags", ()):
                return f"CUDA graphs cannot hold {node.target}, as its author says"
    return None


def _is_of_the_host(node: torch.fx.Node) -> bool:
    """Whether it gives a tensor on the CPU; a number that is the same at every call is read when a
    kernel is launched."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    return value.dim() > 0 or node.target not in _LITERALS or bool(node.all_input_nodes)


def _is_tensor(gm: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    return isinstance(operator.attrgetter(str(node.target))(gm), torch.Tensor)


def recorder_of(device_type: str) -> Callable[[torch.device], Any] | None:
    """What records calls on devices of a type; None where nothing can."""
    return CudaGraphs if device_type == "cuda" else None
