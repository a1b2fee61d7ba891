"""One call, recorded: the memory that its kernels read and write, and what launches them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ingot.live.gradients import edges_behind

# Before a call is recorded, on the stream on which it will be: what is compiled, measured and set
# up by calls.
_WARMUPS = 2


class NotRecordableError(Exception):
    """A call does what a recording cannot repeat; the message says what."""


class CudaGraphs:
    """CUDA graphs of a device that share memory, recorded one behind the other."""

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise NotRecordableError(f"they run on a device of type {device.type!r}")
        self._device, self._side = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._generator = torch.cuda.default_generators[self._device_index()]

    def _device_index(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream that is recorded."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                yield
            current.wait_stream(self._side)

    def recorded(self, function: Callable) -> tuple[Callable[[], None], Any]:
        """What launches the kernels of a function again, and its result, of the same memory."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ),
        ):
            result = function()
        return graph.replay, result

    def random_state(self) -> Any:
        return self._generator.get_state()

    def set_random_state(self, state: Any) -> None:
        self._generator.set_state(state)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self._device)


class Recording:
    """args: the inputs of a call, tensors at `places`; same: which of these are the same ones, at
    the same addresses, at every call it is for; written: which were seen to be written. graphs:
    what records.

    differentiable: places of inputs with a gradient; watched: of inputs that backward reads where
    they lie; without_gradient: places, among the results, of those that have none.
    """

    def __init__(
        self,
        run: Callable,
        args: Sequence,
        places: list[int],
        same: list[int],
        written: set[int],
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
        self.places, self.same = places, same
        kept = {places[at] for at in same}
        self._own = [self._own_of(at in kept, arg) for at, arg in enumerate(args)]
        self._copied = [at for at in places if at not in kept]
        # What forward may write: running statistics are not seen to be written.
        known = {places[at] for at in written}
        self._state = [
            at
            for at in sorted(kept)
            if not args[at].requires_grad
            and (at in known or not isinstance(args[at], torch.nn.Parameter))
        ]
        self.differentiable: list[int] = []
        if torch.is_grad_enabled():
            self.differentiable = [at for at in places if args[at].requires_grad]
        self._still = [at for at in sorted(kept) if at not in known]
        self.watched: list[int] = []
        self._inputs = [self._own[at].detach() for at in self._copied]
        self._last_stream: Any = None
        self._fill(args)
        self._warm_up(args)
        with self.undone(args, None):
            self._record()

    @staticmethod
    def _own_of(is_kept: bool, arg: Any) -> Any:
        """What stands for an input in the recording."""
        if not isinstance(arg, torch.Tensor):
            return arg
        if is_kept:
            made = arg.detach()
        elif torch._debug_has_internal_overlap(arg) != 0:
            raise NotRecordableError("an input has numbers that share memory")
        else:
            made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
        return made.requires_grad_(arg.requires_grad)

    def _fill(self, args: Sequence) -> None:
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._inputs, [args[at] for at in self._copied])

    # The call, and what it gives.

    def _call(self) -> list[torch.Tensor]:
        self._given = self._run(list(self._own))
        self._results = [value for value in self._given if isinstance(value, torch.Tensor)]
        return self._results

    def _differentiate(self) -> list[torch.Tensor | None]:
        results = [self._results[at] for at in self._with_gradient]
        inputs = [self._own[at] for at in self.differentiable]
        device = results[0].device.type
        with torch.autocast(device, enabled=False):  # as backward passes are called
            return list(torch.autograd.grad(results, inputs, self._gradients, allow_unused=True))

    def _look_at_results(self) -> None:
        device = self._own[self.places[0]].device
        if any(result.device != device for result in self._results):
            raise NotRecordableError("a result is on another device")
        own = {id(self._own[at]): at for at in self._state}
        self._handed_on = {
            at: own[id(result)] for at, result in enumerate(self._results) if id(result) in own
        }
        inputs = {self._own[at].untyped_storage().data_ptr() for at in self.places}
        new = [r for at, r in enumerate(self._results) if at not in self._handed_on]
        found = [result.untyped_storage().data_ptr() for result in new]
        if not inputs.isdisjoint(found) or len(set(found)) < len(found):
            raise NotRecordableError("a result lies in the memory of an input or of another one")
        if any(torch._debug_has_internal_overlap(result) != 0 for result in new):
            raise NotRecordableError("a result has numbers that share memory")
        needs = [result.requires_grad for result in self._results]
        self._with_gradient = [at for at, need in enumerate(needs) if need]
        self.without_gradient = [at for at, need in enumerate(needs) if not need]
        self.has_backward = bool(self._with_gradient and self.differentiable)
        self._gradients = [torch.zeros_like(self._results[at]) for at in self._with_gradient]

    def _warm_up(self, args: Sequence) -> None:
        state = self._graphs.random_state()
        with self._graphs.aside(), self.undone(args, state):
            for _ in range(_WARMUPS):
                with self._watching():
                    self._call()
                self._look_at_results()
                self.reach = self._reach() if self.has_backward else []
                if self.has_backward:
                    self._differentiate()
            for at in self._copied:
                if not torch.equal(self._own[at], args[at]):
                    raise NotRecordableError("it writes into an input")
            self._draws = not torch.equal(self._graphs.random_state(), state)
            both = zip(self._state, self._versions)
            self._written = [at for at, version in both if self._own[at]._version != version]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Notes what a forward keeps for its backward pass of inputs that are read where they
        lie."""
        kept: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        found = [self._own[at].untyped_storage().data_ptr() for at in self._still]
        self.watched = [at for at, address in zip(self._still, found) if address in kept]

    def _reach(self) -> list[set[int]]:
        """For each result that has a gradient, the inputs (places among the differentiable ones)
        that it has one for."""
        leaves = {}
        for at, place in enumerate(self.differentiable):
            leaves[torch.autograd.graph.get_gradient_edge(self._own[place]).node] = at
        found = []
        for place in self._with_gradient:
            edge = torch.autograd.graph.get_gradient_edge(self._results[place])
            seen, stack, reached = set(), [(edge.node, edge.output_nr)], set()
            while stack:
                node, output = stack.pop()
                if node is None or (node, output) in seen:
                    continue
                seen.add((node, output))
                if node in leaves:
                    reached.add(leaves[node])
                stack += edges_behind(node, output)
            found.append(reached)
        return found

    def _record(self) -> None:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast of before would be read for ever
        try:
            self._launch_forward, results = self._graphs.recorded(self._call)
            made = (r for at, r in enumerate(results) if at not in self._handed_on)
            self._made = [result.detach() for result in made]
            if self.has_backward:
                self._launch_backward, found = self._graphs.recorded(self._differentiate)
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
        """New tensors, by input; None where no result with a gradient has one for it."""
        given = [gradients[at] for at in self._with_gradient]
        with torch.no_grad():
            self._on_this_stream()
            pairs = [(own, g) for own, g in zip(self._gradients, given) if g is not None]
            torch._foreach_copy_([own for own, _ in pairs], [g for _, g in pairs])
            if len(pairs) < len(given):
                torch._foreach_zero_([own for own, g in zip(self._gradients, given) if g is None])
            self._launch_backward()
            reached = set().union(*(r for r, g in zip(self.reach, given) if g is not None))
            wanted = [at for at, g in enumerate(self._found) if g is not None and at in reached]
            result: list[torch.Tensor | None] = [None] * len(self._found)
            for at, copy in zip(wanted, _copies([self._found[at] for at in wanted])):
                result[at] = copy
            return result

    def outputs(self, results: Sequence[torch.Tensor]) -> tuple:
        """All that a call gives, with these in the place of its tensors."""
        rest = iter(results)
        return tuple(next(rest) if isinstance(v, torch.Tensor) else v for v in self._given)

    def _on_this_stream(self) -> None:
        """Behind what another stream may still do with the recording's memory."""
        stream = self._graphs.stream()
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def random_state(self) -> Any:
        """That a forward begins with, if it draws numbers."""
        return self._graphs.random_state() if self._draws else None

    @contextlib.contextmanager
    def undone(self, args: Sequence, random: Any) -> Iterator[None]:
        """A call inside draws the numbers of a state, and neither that nor what it writes into
        buffers is there afterwards."""
        with torch.no_grad():
            before = [args[at].detach().clone() for at in self._state]
        self._versions = [self._own[at]._version for at in self._state]
        now = self._graphs.random_state()
        if random is not None:
            self._graphs.set_random_state(random)
        try:
            yield
        finally:
            self._graphs.set_random_state(now)
            with torch.no_grad():
                for at, value in zip(self._state, before):
                    if not torch.equal(args[at], value):  # others may be kept for a backward pass
                        args[at].copy_(value)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    made = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors
    ]
    if made:
        torch._foreach_copy_(made, tensors)
    return made
