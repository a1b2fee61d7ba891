"""A region of a live module's call, and its gradients."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.captured import Region
from ingot.capture.forms import form_of
from ingot.capture.reference import gradients_reach
from ingot.live.again import edges_of, stand_in
from ingot.live.backward import Backward, compile_lock
from ingot.live.products import is_batched
from ingot.live.releases import unseen
from ingot.runtime.ahead import compile_ahead
from ingot.runtime.layouts import JoinedLayout
from ingot.runtime.library import IngotWarning
from ingot.runtime.program import Binding, Program

_with_gradients = torch.is_grad_enabled
_set_gradients = torch._C._set_grad_enabled
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_functorch_is_active = torch._C._are_functorch_transforms_active


class NoDerivativeError(Exception):
    """A region's derivative could not be taken."""


class RegionCall:
    """Runs a region's program; where a leaf needs a gradient, as a function of autograd's."""

    def __init__(
        self,
        region: Region,
        program: Program,
        compile: Callable | None = None,
        shared: dict[Any, Backward] | None = None,
    ):
        """compile: a captured graph -> what runs it, for the region's own backward pass. shared:
        backward passes of the same network's regions, of which equal ones have one."""
        self.region, self.program, self._compile = region, program, compile
        self._shared = {} if shared is None else shared
        self.device_type = program.device
        self.results = len(region.results)
        self.reach = gradients_reach(region.reference)
        self._severed = frozenset(range(len(region.leaves))).difference(*self.reach)
        self._backwards: dict[Any, Backward] = {}
        self._last: tuple = (None, None, None, None)
        self._lock = threading.Lock()
        self._is_pytorchs = False  # where gradients are needed
        # Whether PyTorch's results are as its own: no parts of one tensor.
        joined = (isinstance(layout, JoinedLayout) for layout in region.result_layouts)
        self._has_own_results = not any(joined)

    def __call__(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if _with_gradients():
            if self._severed:
                leaves = self._without_edges(leaves)
            if self.region.written_leaves:
                leaves = self._apart(leaves)
            for leaf in leaves:
                if leaf.requires_grad:
                    if self._is_pytorchs:
                        return self._by_operators(leaves)
                    try:
                        if _functorch_is_active():  # the function alone sees inside its tensors
                            return _RegionFunction.apply(self, None, None, *leaves)
                        return self._applied(self._begun(leaves), leaves)
                    except NoDerivativeError as error:
                        self._leave(error)
                        return self._by_operators(leaves)
        return self.forward(leaves)[: self.results]

    def _applied(self, begun: tuple, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Results that have nothing in common are of functions of their own: autograd calls the
        hooks of all that a function is applied to, DDP's among them, whichever result is asked.
        Where a user's hook would be called so of a leaf that one of several results has no gradient
        for, PyTorch's operators run."""
        way = begun[2]
        hooked = way.partly and any(leaves[at]._backward_hooks for at in way.partly)
        if hooked and self._has_own_results:
            return self.region.reference.module(*leaves)[: self.results]
        if len(way.halves) == 1:
            return _apply(self, begun, None, *leaves)
        found: list[Any] = [None] * self.results
        for half in way.halves:
            given = [at for at in half if way.derivative.differentiable[at]]
            reached = frozenset().union(*(self.reach[at] for at in given))
            own = [
                leaf if at in reached or not leaf.requires_grad else leaf.detach()
                for at, leaf in enumerate(leaves)
            ]
            for at, result in zip(half, _apply(self, begun, half, *own)):
                found[at] = result
        return found

    def _leave(self, error: NoDerivativeError) -> None:
        """To PyTorch, aloud, from now on where gradients are needed."""
        if not self._has_own_results:
            raise error
        said = f"PyTorch runs {self.region.graph['name']} where gradients are needed: {error}"
        warnings.warn(f"ingot: {said}", IngotWarning, stacklevel=2)
        self._is_pytorchs = True

    def _by_operators(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """By PyTorch's operators and their derivatives; the program moves running statistics."""
        if self.program.signature.updates:
            _set_gradients(False)
            try:
                self.forward(leaves)
            finally:
                _set_gradients(True)
        return self.region.reference.module(*leaves)[: self.results]

    def _begun(self, leaves: Sequence[torch.Tensor]) -> tuple:
        """A call on its way, as in the function's forward: autograd's own work, of some 20 µs, is
        done while the GPU computes."""
        _set_gradients(False)
        try:
            return self.begin(leaves, tuple([leaf.requires_grad for leaf in leaves]))
        finally:
            _set_gradients(True)

    def begin(self, leaves: Sequence[torch.Tensor], needed: tuple[bool, ...]) -> tuple:
        binding, autocast = self.program.bind(leaves), _autocast_of(self.device_type)
        # Made at a first call, while the kernels of forward are being compiled.
        way = self.backward(leaves, binding, needed, autocast)
        return binding, autocast, way, self.forward(leaves, binding)

    def _without_edges(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Autograd would call the hooks of a leaf that gets no gradient, as it never does of a
        tensor that was detached."""
        return [
            leaf.detach() if at in self._severed and leaf.requires_grad else leaf
            for at, leaf in enumerate(leaves)
        ]

    def _apart(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Autograd's copies, so that a second derivative goes on to what they are of."""
        written = self.region.written_leaves
        return [
            leaf.clone() if at in written and leaf.requires_grad else leaf
            for at, leaf in enumerate(leaves)
        ]

    def forward(
        self, leaves: Sequence[torch.Tensor], binding: Binding | None = None
    ) -> list[torch.Tensor]:
        # Autograd is not told of the running statistics that this writes, as PyTorch's batch norm
        # does not tell it: the backward of an earlier call may keep them, and does not read them.
        program = self.program
        return program.run_bound(binding or program.bind(leaves), leaves)

    def backward(
        self,
        leaves: Sequence[torch.Tensor],
        binding: Binding,
        needed: tuple[bool, ...],
        autocast: tuple,
    ) -> Backward:
        """Made when first needed: for any batch size where the region's operators allow it."""
        last = self._last
        if last[0] is binding and last[1] == needed and last[2] == autocast:
            return last[3]
        batch = binding.batch
        key = (needed, autocast, tuple(leaf.dim() and leaf.size(0) == 1 for leaf in leaves))
        with self._lock:
            found = self._backwards.get(key)
            if found is None:
                found = self._made(leaves, needed, batch if batch > 1 else None, batch)
                self._backwards[key] = found
            if found.derivative.batch not in (None, batch):
                found = self._backwards.get((key, batch))
                if found is None:
                    found = self._made(leaves, needed, None, batch)
                    self._backwards[(key, batch)] = found
        self._last = (binding, needed, autocast, found)
        return found

    def _made(self, leaves, needed, batch: int | None, size: int) -> Backward:
        """batch: the size that its graph may take for a symbol; size: of the call."""
        # Graphs are recorded in one thread at a time: this one, or one in which Dynamo compiles.
        with compile_lock:
            key = form_of(self.region), tuple(map(_laid_out, leaves)), needed, batch
            key = *key, _autocast_of(self.device_type)
            found = self._shared.get(key)
            if found is None:
                precision, compile = self.program.precision, self._compile
                try:
                    found = Backward(self.region, leaves, needed, batch, precision, compile)
                except Exception as error:  # a fault of ours must not stop a program of PyTorch's
                    raise NoDerivativeError(repr(error)) from error
                self._shared[key] = found
                compile_ahead([(program, size) for program in found.programs], found.products)
            return found


def _laid_out(leaf: torch.Tensor) -> tuple:
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device


_FIRST_LEAF = 3  # among the function's arguments


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: RegionCall, begun: tuple | None, half: tuple[int, ...] | None, *leaves):
        """begun: what call.begin() gave, if that was done before; half: places of the results that
        this gives, if not all."""
        begun = begun or call.begin(leaves, ctx.needs_input_grad[_FIRST_LEAF:])
        binding, autocast, way, results = begun
        ctx.call, ctx.way, ctx.autocast = call, way, autocast
        # Only what backward reads, as PyTorch's own functions keep it.
        stored, written = way.derivative.stored, call.region.written
        inputs = [*leaves, *(results[at] for at in stored)]
        reads, ctx.half, ctx.places = way.derivative.reads, half, way.kept
        if half is not None:
            reads = way.read_by(tuple(at in half for at in range(call.results)))
            ctx.places = tuple(at for at in way.kept if reads[at])
            for at, place in enumerate(stored, len(leaves)):
                if place < call.results and place not in half:
                    inputs[at] = inputs[at].detach()  # of another half's function
        for at, place in enumerate(stored, len(leaves)) if written else ():
            if place in written and reads[at]:
                inputs[at] = inputs[at].clone()
        for at in call.region.written_inputs:
            if reads[at] and not leaves[at].requires_grad:
                inputs[at] = inputs[at].clone()
        for at in call.region.tables:
            if reads[at] and leaves[at].is_inference():
                inputs[at] = inputs[at].clone()
        ctx.save_for_backward(*[inputs[at] for at in ctx.places])
        edges = way.again.edges
        ctx.edges = edges_of([leaves[at] for at in edges]) if edges else ()
        places = range(call.results) if half is None else half
        given = [results[at] for at in places]
        # A result that the loss does not depend on gives no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        ctx.binding = binding
        if not way.all_differentiable:
            has_gradient = way.derivative.differentiable
            ctx.mark_non_differentiable(*(results[at] for at in places if not has_gradient[at]))
        return tuple(given)

    @staticmethod
    @unseen
    def backward(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            # Autograd goes on to what no gradient reaches; an earlier backward may have freed it.
            return (None,) * len(ctx.needs_input_grad)
        way, unreached, of_some = ctx.way, frozenset(), False
        if ctx.half is not None:
            given = dict(zip(ctx.half, gradients))
            gradients = [given.get(at) for at in range(ctx.call.results)]
        inputs: list[Any] = [None] * way.inputs
        for at, tensor in _saved(ctx, gradients):
            inputs[at] = tensor
        if _with_gradients():
            if any(gradient is None for gradient in gradients):
                _keep_for_others(ctx, inputs, gradients)
            found = _recorded(ctx, inputs, gradients)
        else:
            run, given = way.run, gradients
            if not way.all_differentiable:  # argmax and its like never have one
                given = [gradients[at] for at in way.differentiable]
            transformed = _functorch_is_active() or any(
                g is not None and is_batched(g) for g in given
            )
            if transformed or any(gradient is None for gradient in given):
                unreached, of_some = _unreached(ctx, gradients), True
                _keep_for_others(ctx, inputs, gradients)
                run, given = _of_some(ctx, given, transformed)
            # What is read last is freed then: nothing here holds it.
            ctx.maybe_clear_saved_tensors()
            inputs += given
            del gradients, given
            tensor = None
            found = run(inputs)
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        for at, gradient in zip(way.derivative.wanted, found):
            if at in unreached:
                continue
            if gradient is None and of_some:  # what is left of it is a sign's, or the like
                gradient = stand_in(ctx.binding.expected[at], None, False)
            result[_FIRST_LEAF + at] = gradient
        return tuple(result)


def edges_behind(node: Any, output: int) -> list[tuple[Any, int]]:
    """Where a gradient of one of the outputs of a node of autograd's graph goes on to: of a
    region's, where that result's does."""
    following = list(node.next_functions)
    if getattr(node, "_forward_cls", None) is not _RegionFunction:
        return following
    place = output if node.half is None else node.half[output]
    return [following[leaf] for leaf in node.call.reach[place]]


def _saved(ctx, gradients: Sequence) -> list[tuple[int, torch.Tensor]]:
    """What backward reads, with its places; of results that have nothing in common with those of an
    earlier backward, which has freed what was saved, what that has kept for them."""
    try:
        return list(zip(ctx.places, ctx.saved_tensors))
    except RuntimeError:
        kept, served = getattr(ctx, "kept", ()), getattr(ctx, "served", None)
        given = _computed_for(ctx, [gradient is not None for gradient in gradients])
        if served is None or given & served or _with_gradients():
            raise  # a second derivative would want the leaves themselves
        for _, tensor, version in kept:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    "inplace operation"
                ) from None
        return [(at, tensor) for at, tensor, _ in kept]


def _keep_for_others(ctx, inputs: list, gradients: Sequence) -> None:
    """Halves of a region that have nothing in common are two graphs in eager mode, with a backward
    each: what the others read outlives this one."""
    if _keeps_graph():
        return
    served = _computed_for(ctx, [gradient is not None for gradient in gradients])
    served |= getattr(ctx, "served", frozenset())
    others = tuple(
        bool(ctx.way.derivative.differentiable[at])
        and (ctx.half is None or at in ctx.half)
        and not computed & served
        for at, computed in enumerate(ctx.way.computed)
    )
    ctx.served, ctx.kept = served, ()
    if any(others):
        # detach(): a result would hold this function, and that the result.
        reads = ctx.way.read_by(others)
        ctx.kept = [
            (at, inputs[at].detach(), inputs[at]._version)
            for at in ctx.places
            if reads[at] and inputs[at] is not None
        ]


def _computed_for(ctx, given: Sequence[bool]) -> frozenset:
    both = zip(ctx.way.computed, given)
    return frozenset().union(*(computed for computed, has in both if has))


def _unreached(ctx, gradients: Sequence) -> set[int]:
    """The leaves of results without a gradient, and of no other."""
    reach = zip(ctx.call.reach, gradients)
    reached = set().union(*(leaves for leaves, given in reach if given is not None))
    return set(range(len(ctx.call.region.leaves))) - reached


def _of_some(
    ctx, gradients: Sequence, transformed: bool
) -> tuple[Callable, list[torch.Tensor | None]]:
    """What runs the backward pass where some differentiable results have no gradient, or torch.vmap
    transforms it, and the gradients for it."""
    binding = ctx.binding
    both = list(zip(gradients, (binding.outputs[at] for at in ctx.way.differentiable)))
    which = tuple(gradient is not None for gradient, _ in both)
    run, reads = ctx.way.of_some(which, transformed)
    return run, [
        torch.zeros(shape, dtype=dtype, device=binding.device) if g is None and read else g
        for (g, (shape, _, dtype, _)), read in zip(both, reads)
    ]


# Without looking for tensors of functorch's transforms.
_apply = super(torch.autograd.Function, _RegionFunction).apply


def _recorded(
    ctx, inputs: list, gradients: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Where backward itself is to be differentiated: by PyTorch's operators, from the leaves."""
    derivative, again = ctx.way.derivative, ctx.way.again
    leaves = inputs[: len(ctx.call.region.leaves)]
    edges = dict(zip(again.edges, ctx.edges))
    run, missing = again.run, again.missing
    if ctx.half is not None:
        run, read = again.of_half(ctx.half)
        missing = tuple(at for at in read if leaves[at] is None)
    for at in missing:
        described = ctx.binding.expected[at]
        leaves[at] = stand_in(described, edges.get(at), at in derivative.wanted)
    # A leaf may have been computed from another: its own part of the derivative ends at itself.
    # None stands for one that nothing differentiable reads; what another half alone reaches came
    # without a gradient.
    given = [at for at in derivative.wanted if leaves[at] is not None]
    wanted = [at for at in given if leaves[at].requires_grad]
    variables = {at: leaves[at].view_as(leaves[at]) for at in wanted}
    leaves = [variables.get(at, leaf) for at, leaf in enumerate(leaves)]
    device, dtype, enabled = ctx.autocast
    known = (None if at is None else inputs[at] for at in again.stored)
    stored = [None if value is None else value.detach() for value in known]
    with torch.autocast(device, dtype, enabled):
        results = run(*leaves, *stored)
    both = [(r, g) for r, g in zip(results, gradients) if r is not None and g is not None]
    pairs = [(result, gradient) for result, gradient in both if result.requires_grad]
    if not pairs:
        return [None] * len(derivative.wanted)
    found = torch.autograd.grad(
        [result for result, _ in pairs],
        list(variables.values()),
        [gradient for _, gradient in pairs],
        create_graph=True,
        allow_unused=True,
    )
    by_leaf = dict(zip(variables, found))
    return [by_leaf.get(at) for at in derivative.wanted]


def _autocast_of(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
