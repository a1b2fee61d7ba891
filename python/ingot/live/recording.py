"""One call, recorded: the memory that its kernels read and write, and what launches them again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ingot.live.gradients import edges_behind

# Before a call is recorded, on the same stream: what is compiled, measured and set up by calls.
_WARMUPS = 2
_WAITS = "called a synchronizing CUDA operation"


class NotRecordableError(Exception):
    """A call does what a recording cannot repeat; the message says what."""


class CudaGraphs:
    """CUDA graphs of a device that share memory, recorded one behind the other."""

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise NotRecordableError(f"they run on a device of type {device.type!r}")
        self._device, self._side = device, torch.cuda.Stream(device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._pool = torch.cuda.graph_pool_handle()
        self._generator = torch.cuda.default_generators[self._index]

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """On a stream of its own; raises NotRecordableError where the host waits for the GPU, which
        would end a recording, and PyTorch's own state with it."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")  # in threads of others, too
        try:
            with warnings.catch_warnings(record=True) as said, torch.cuda.device(self._device):
                warnings.simplefilter("always")
                current = torch.cuda.current_stream()
                self._side.wait_stream(current)
                with torch.cuda.stream(self._side):
                    yield
                current.wait_stream(self._side)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        if any(_WAITS in str(warning.message) for warning in said):
            raise NotRecordableError("it waits for the GPU")

    def recorded(self, function: Callable) -> tuple[Callable[[], None], Any]:
        """What launches the kernels of a function again, and its result, of the same memory."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        )
        try:
            with warnings.catch_warnings(), torch.cuda.device(self._device):
                warnings.simplefilter("ignore")  # of a graph without kernels
                with recording:
                    result = function()
        except Exception:
            torch.cuda.set_stream(current)  # PyTorch stays on the recording's
            self._clean_up()
            raise
        return graph.replay, result

    def _clean_up(self) -> None:
        """What PyTorch leaves as in the middle of a recording that failed: where memory comes from,
        and its random numbers, which another recording ends."""
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        with contextlib.suppress(Exception), torch.cuda.device(self._device):
            other, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(other, stream=side, capture_error_mode="thread_local"):
                torch.zeros(1, device=self._device)

    def random_state(self) -> Any:
        return self._generator.get_state()

    def set_random_state(self, state: Any) -> None:
        self._generator.set_state(state)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self._device)


class Recording:
    """args: the inputs of a call, tensors at `places`; same: which of these are the same ones, at
    the same addresses, at every call it is for; written: which were seen to be written; pattern:
    places of the results that have gradients in backward, where it is known. graphs: what records.

    differentiable: places of inputs that a result has a gradient for, partly: those that not all
    results have one for; watched: places of inputs that backward reads where they lie, versioned:
    those and others that a second computation reads; without_gradient: places of results.
    """

    def __init__(
        self,
        run: Callable,
        args: Sequence,
        places: list[int],
        same: list[int],
        written: set[int],
        pattern: tuple[int, ...] | None,
        graphs: Any,
    ):
        device = args[places[0]].device
        if any(args[at].device != device for at in places):
            raise NotRecordableError("its tensors are on several devices")
        if not written.issubset(same):
            raise NotRecordableError("it writes into an input")
        if any(args[places[at]].requires_grad for at in written):
            raise NotRecordableError("it writes into a tensor that needs a gradient")
        self._run, self._graphs = run, graphs
        self.places, self.same, self.pattern = places, same, pattern
        kept, seen = {places[at] for at in same}, {places[at] for at in written}
        self._own = [_stand_in(at in kept, arg) for at, arg in enumerate(args)]
        self._copied = [at for at in places if at not in kept]
        self._inputs = [self._own[at].detach() for at in self._copied]
        # What forward may write: running statistics are not seen to be written.
        self._state = [
            at
            for at in sorted(kept)
            if not args[at].requires_grad
            and (at in seen or not isinstance(args[at], torch.nn.Parameter))
        ]
        self._still = [at for at in sorted(kept) if at not in seen]
        self.versioned = [at for at in places if not args[at].is_inference()]
        self.watched: list[int] = []
        self.differentiable: list[int] = []
        self._moved: list[int] = []
        self._last_stream: Any = None
        self._fill(args)
        self._warm_up(args)
        self._record()

    def _fill(self, args: Sequence) -> None:
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._inputs, [args[at] for at in self._copied])

    # The call, and what it gives.

    def _call(self, inputs: list) -> list[torch.Tensor]:
        if self._moved:
            with torch.no_grad():
                torch._foreach_copy_(self._before, [inputs[at] for at in self._moved])
        self._given = self._run(list(inputs))
        self._results = [value for value in self._given if isinstance(value, torch.Tensor)]
        return self._results

    def _differentiate(self, inputs: list) -> list[torch.Tensor | None]:
        results = [self._results[at] for at in self.pattern or ()]
        wanted = [inputs[at] for at in self.differentiable]
        device = results[0].device.type
        with torch.autocast(device, enabled=False):  # as backward passes are called
            return list(torch.autograd.grad(results, wanted, self._gradients, allow_unused=True))

    def _look_at_results(self, inputs: list) -> None:
        results, device = self._results, inputs[self.places[0]].device
        if any(result.device != device for result in results):
            raise NotRecordableError("a result is on another device")
        own = {id(inputs[at]): at for at in self._state}
        self._handed_on = {at: own[id(r)] for at, r in enumerate(results) if id(r) in own}
        new = [r for at, r in enumerate(results) if at not in self._handed_on]
        if any(tensor.layout != torch.strided for tensor in new):
            raise NotRecordableError("a result is sparse")
        memory = {inputs[at].untyped_storage().data_ptr() for at in self.places}
        found = [result.untyped_storage().data_ptr() for result in new]
        if not memory.isdisjoint(found) or len(set(found)) < len(found):
            raise NotRecordableError("a result lies in the memory of an input or of another one")
        if any(map(_overlaps, new)):
            raise NotRecordableError("a result has numbers that share memory")
        needs = [r.requires_grad and torch.is_grad_enabled() for r in results]
        self.with_gradient = [at for at, need in enumerate(needs) if need]
        self.without_gradient = [at for at, need in enumerate(needs) if not need]
        self._look_behind_results(inputs)
        self.has_backward = bool(self.with_gradient and self.differentiable)
        if self.pattern is None or not set(self.pattern).issubset(self.with_gradient):
            self.pattern = tuple(self.with_gradient)
        self._gradients = [torch.zeros_like(results[at]) for at in self.pattern]

    def _look_behind_results(self, inputs: list) -> None:
        """reach: for each result that has a gradient, the places of the inputs that it has one for;
        joined: the results of which a backward pass reads some of what its own reads."""
        leaves = {}
        for at in self.places if self.with_gradient else ():
            if inputs[at].requires_grad:
                leaves[torch.autograd.graph.get_gradient_edge(inputs[at]).node] = at
        self.reach: dict[int, set[int]] = {}
        behind: dict[int, set] = {}
        for place in self.with_gradient:
            edge = torch.autograd.graph.get_gradient_edge(self._results[place])
            seen, stack, reached = set(), [(edge.node, edge.output_nr)], set()
            while stack:
                node, output = stack.pop()
                if node in leaves:
                    reached.add(leaves[node])
                elif node is not None and (node, output) not in seen:
                    seen.add((node, output))
                    stack += edges_behind(node, output)
            self.reach[place] = reached
            behind[place] = seen
        self.joined = {
            place: {other for other, nodes in behind.items() if not nodes.isdisjoint(own)}
            for place, own in behind.items()
        }
        by_some = set().union(*self.reach.values())
        by_all = by_some.intersection(*self.reach.values())
        self.differentiable, self.partly = sorted(by_some), sorted(by_some - by_all)

    def _warm_up(self, args: Sequence) -> None:
        """With copies of what forward may write: nobody is to see that it ran."""
        before = self._graphs.random_state()
        inputs = list(self._own)
        for at in self._state:
            inputs[at] = args[at].detach().clone()
        versions = {at: _version(inputs[at]) for at in self._state}
        try:
            with self._graphs.beside():
                for _ in range(_WARMUPS):
                    with self._watching(inputs):
                        self._call(inputs)
                    self._look_at_results(inputs)
                    found = self._differentiate(inputs) if self.has_backward else []
                draws = not torch.equal(self._graphs.random_state(), before)
        finally:
            self._graphs.set_random_state(before)
        self._draws = draws
        if any(g is not None and g.layout != torch.strided for g in found):
            raise NotRecordableError("a gradient is sparse")
        if not all(_same(self._own[at], args[at]) for at in self._copied):
            raise NotRecordableError("it writes into an input")
        told = [at for at in self._state if _version(inputs[at]) != versions[at]]
        self._written = [at for at in told if versions[at] is not None]
        moved = [at for at in self._state if at in told or not _same(inputs[at], args[at])]
        self._before = [torch.empty_like(inputs[at]) for at in moved]
        self._moved = moved if self.has_backward else []

    @contextlib.contextmanager
    def _watching(self, inputs: list) -> Iterator[None]:
        """Notes what a forward keeps for its backward pass of inputs that are read where they
        lie."""
        kept: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        places = [at for at in self._still if at in self.versioned]
        found = [inputs[at].untyped_storage().data_ptr() for at in places]
        self.watched = [at for at, address in zip(places, found) if address in kept]

    def _record(self) -> None:
        # Running statistics are moved by kernels that tell nobody.
        self.watched, self.versioned = (
            [at for at in places if at not in self._moved]
            for places in (self.watched, self.versioned)
        )
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast of before would be read for ever
        try:
            self._launch_forward, results = self._graphs.recorded(lambda: self._call(self._own))
            made = (r for at, r in enumerate(results) if at not in self._handed_on)
            self._made = [result.detach() for result in made]
            if self.has_backward:
                self._launch_backward, found = self._graphs.recorded(
                    lambda: self._differentiate(self._own)
                )
                self._found = [g if g is None else g.detach() for g in found]
        finally:
            torch.set_autocast_cache_enabled(cached)

    # Replays.

    def forward(self, args: Sequence) -> list[torch.Tensor]:
        """New tensors."""
        with torch.no_grad():
            self._on_this_stream()
            self._fill(args)
            self._launch_forward()
            if self._written:
                torch.autograd.graph.increment_version([args[at] for at in self._written])
            results: list[torch.Tensor] = [*_copies(self._made)]
            for at, place in sorted(self._handed_on.items()):
                results.insert(at, args[place])
            return results

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """New tensors, by input, of gradients of the results in `pattern`; None where these have
        none for it."""
        with torch.no_grad():
            self._on_this_stream()
            torch._foreach_copy_(self._gradients, [gradients[at] for at in self.pattern])
            self._launch_backward()
            wanted = [at for at, gradient in enumerate(self._found) if gradient is not None]
            result: list[torch.Tensor | None] = [None] * len(self._found)
            for at, copy in zip(wanted, _copies([self._found[at] for at in wanted])):
                result[at] = copy
            return result

    def outputs(self, results: Sequence[torch.Tensor]) -> tuple:
        """All that a call gives, with these in the place of its tensors."""
        rest = iter(results)
        return tuple(next(rest) if isinstance(v, torch.Tensor) else v for v in self._given)

    def state_before(self) -> list[torch.Tensor]:
        """What the last forward found of what it has moved."""
        return [tensor.clone() for tensor in self._before] if self._moved else []

    def again(self, args: Sequence, before: Sequence, random: Any) -> list[torch.Tensor]:
        """The results of a call, computed once more: from the state that it began with, which
        nobody sees to be moved, and with the same random numbers."""
        given = list(args)
        for at, tensor in zip(self._moved, before):
            given[at] = tensor.clone()
        now = self._graphs.random_state()
        if random is not None:
            self._graphs.set_random_state(random)
        try:
            return [value for value in self._run(given) if isinstance(value, torch.Tensor)]
        finally:
            self._graphs.set_random_state(now)

    def _on_this_stream(self) -> None:
        """Behind what another stream may still do with the recording's memory."""
        stream = self._graphs.stream()
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def random_state(self) -> Any:
        """That a forward begins with, if it draws numbers."""
        return self._graphs.random_state() if self._draws else None


def _stand_in(is_kept: bool, arg: Any) -> Any:
    """What stands for an input in a recording; with a version of its own, since recording it writes
    nothing."""
    if not isinstance(arg, torch.Tensor):
        return arg
    if is_kept:
        made = arg.detach() if arg.is_inference() else arg.data
    elif _overlaps(arg):
        raise NotRecordableError("an input has numbers that share memory")
    else:
        made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    return made.requires_grad_() if arg.requires_grad else made


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _overlaps(tensor: torch.Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) != 0


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN is the same as NaN."""
    with torch.no_grad():
        return bool(((a == b) | ((a != a) & (b != b))).all())


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    made = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        if not _overlaps(t)
        else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in tensors
    ]
    if made:
        torch._foreach_copy_(made, tensors)
    return made
