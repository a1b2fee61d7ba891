"""What an optimised module knows beside the original's attributes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot.capture.feed import batched_inputs
from ingot.live import dynamo, lengths, releases, shortcut
from ingot.live.backend import (
    DynamoGraph,
    Session,
    compile_graph,
    forward_of,
    switched_off,
    weakly,
)
from ingot.live.backward import compile_lock
from ingot.live.left import LeftCalls
from ingot.live.refused import RefusedCalls
from ingot.live.vain import USED, CapturesInVain
from ingot.runtime.library import IngotError

_peek_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_tracing = torch._C._get_tracing_state
is_traced = torch.compiler.is_dynamo_compiling
_forward_ad = torch.autograd.forward_ad
_forward_hooks = nn.modules.module._global_forward_hooks
_forward_pre_hooks = nn.modules.module._global_forward_pre_hooks
_backward_hooks = nn.modules.module._global_backward_hooks
_backward_pre_hooks = nn.modules.module._global_backward_pre_hooks
_Tensor = torch.Tensor
_fx_tracing = releases.fx_is_tracing
_eval_frame = torch._dynamo.eval_frame

# Combinations of modes, gradients and sizes in turn.
_MAX_SHORTCUTS = 6


def intercepted() -> bool:
    """Whether something watches this thread's operators (torch.export, vmap, jit.trace, modes,
    hooks on all modules) or asks for eager: it must see the original's, as what is_traced() does.
    torch.compiler.is_compiling() is of no use: while one thread exports a module it is true in all.
    """
    return (
        _dispatch_modes() > 0
        or _peek_functorch() is not None
        or _jit_tracing() is not None
        or _forward_ad._current_level >= 0
        or _eval_frame._stance.stance == "force_eager"
        # Dynamo does not guard these: what is compiled already would not call them.
        or bool(_forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks)
    )


def nested(args: tuple, kwargs: dict) -> bool:
    """Whether a call brings a nested tensor without strides: Dynamo's guards, asked of one, end the
    process."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _Tensor) and value.is_nested and value.layout is torch.strided:
            return True
    return False


class _PreparedError(Exception):
    """Ends a call that was made to prepare others."""


class _PyTorchsError(Exception):
    """Ends such a call where PyTorch would run what was captured."""


@contextlib.contextmanager
def _undone(module: nn.Module, tensors: list[torch.Tensor]) -> Iterator[None]:
    """What Dynamo leaves to Python runs while a call is prepared: it moves no statistics, and draws
    no random numbers."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {t.get_device() for t in tensors if t.is_cuda}
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


class State(Session):
    def __init__(
        self,
        original_forward: Callable,
        name: str,
        precision: str | None = None,
        options: dict | None = None,
    ):
        super().__init__(name, precision, options)
        self.original_forward = original_forward
        self.frozen = False
        self._training = False
        self._calling = threading.local()
        self._function = dynamo.with_own_code(original_forward)
        # Dynamo keeps every backend for good, and code that it compiled: neither may keep programs.
        told = (self._backend, self._seen, self.warn, self.broke, self.lost)
        asked = (self._captured, self._is_prepared, self.warn)
        self._vain = CapturesInVain(*map(weakly, asked))
        self._compiled = dynamo.compiled(self._function, *map(weakly, told), self._vain)
        self._off = switched_off()
        if self._compiled is None and not self._off:
            self._off = True
            self.warn(
                "TorchDynamo is switched off (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE in the "
                "environment, or torch._dynamo.config.disable): PyTorch runs it"
            )
        weakref.finalize(self, dynamo.forget, self._function.__code__).atexit = False
        self._parameters = shortcut.parameters_of(self._function)
        self._shortcuts: tuple[shortcut.Shortcut, ...] = ()
        self.left, self._refused = LeftCalls(self._function), RefusedCalls()
        self._overlooked = releases.overlooked()

    def settings(self) -> dict:
        return {"precision": self.precision, "options": self.options}

    def __deepcopy__(self, memo: dict) -> State:
        """For what copies a module slot by slot, as PyTorch does with parametrized ones."""
        return State(self.original_forward, self.name, **self.settings())

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """args: the module, then those of the call."""
        self._look_at_overlooked()
        left = self.left
        if self._refused.kinds and self._refused.hold(refused := left.kind(args, kwargs)):
            result = self.original_forward(*args, **kwargs)
            self._refused.drop(refused)
            return result
        plain = self._parameters and self._parameters.of(args, kwargs)
        if plain:
            frame_locals = dict(zip(self._parameters.names, plain))
            for known in self._shortcuts:
                if known.matches(frame_locals):
                    left.taken(args, kwargs)
                    return known.run(*plain)
        kind = left.kind(args, kwargs) if left else None
        if kind is not None:
            if left.hold_kind(kind, args, kwargs):
                return self.original_forward(*args, **kwargs)
            if left.hold(kind, args, kwargs):
                object.__setattr__(args[0], "_ingot_left", left.mode_held(args[0], kind))
                return self.original_forward(*args, **kwargs)
        left.drop(kind)
        return self._through_dynamo(args, kwargs, bool(plain))

    def _look_at_overlooked(self) -> None:
        if self._overlooked is not None and self._overlooked.changed():
            self._shortcuts, self._overlooked = (), releases.overlooked()
            self.left.forget()
            dynamo.forget(self._function.__code__)

    def _through_dynamo(self, args: tuple, kwargs: dict, plain: bool) -> Any:
        if self._off or self._symbolically_traced():
            return self.original_forward(*args, **kwargs)
        made = self._calling.graphs = []
        self._calling.captures, self._calling.lost = False, None
        try:
            result = self._compiled(*args, **kwargs)
        except (_PreparedError, _PyTorchsError):
            self._note_lost()
            raise
        except Exception:
            if self._calling.captures and not self._is_prepared():
                self._refused.add(self.left.kind(args, kwargs))
            if self._calling.lost is not None:
                self._vain.forgive()
            raise
        self._note_lost()
        holds_nothing = all(graph.holds_nothing for graph in made)
        if not holds_nothing:
            self.left.forget_cut()
            self.left.not_all(args[0])
        if made and holds_nothing:
            self._leave(args[0].training, made[-1].mode)
        elif plain:
            found = shortcut.latest(self._function)
            if found is not None:
                alive = (known for known in self._shortcuts if known.is_alive)
                self._shortcuts = (found, *alive)[:_MAX_SHORTCUTS]
        return result

    def lost(self, why: str, where: str) -> None:
        self._calling.lost = why, where

    def _note_lost(self) -> None:
        """That of a call that fails itself is nothing to report."""
        if self._calling.lost is not None:
            super().lost(*self._calling.lost)

    def _leave(self, training: bool, mode: str) -> None:
        """Calls like the last one, whose new graphs hold nothing."""
        if self.left.add():
            return
        if all(graph.holds_nothing for graph in self.graphs if graph.mode == mode):
            self.left.add_cut(training)

    @staticmethod
    def _symbolically_traced() -> bool:
        """Whether torch.fx traces this call. Its flag is one for all threads, and is set while
        another thread compiles too: then this one waits."""
        if not _fx_tracing():
            return False
        with compile_lock:
            return _fx_tracing()

    def prepare(self, module: nn.Module, args: tuple, kwargs: dict, with_kernels: bool) -> None:
        """Captures and plans what a call like this one needs, and compiles its kernels."""
        if not self.graphs and dynamo.has_no_weights_yet(module):
            problem = "its lazy layers have no weights yet, which its first call makes"
            if with_kernels:
                raise IngotError(f"{self.name} cannot be prepared: {problem}")
            self.warn(f"it is captured later: {problem}")
            return
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        batch = batched_inputs(tensors)[1]
        self._calling.batch = batch if with_kernels else None
        self._calling.now = True
        try:
            with _undone(module, tensors):
                with contextlib.suppress(_PyTorchsError):
                    self._look_at_overlooked()
                    self._through_dynamo((module, *args), kwargs, plain=False)
        except _PreparedError:
            return
        finally:
            self._calling.now = False
        if with_kernels and not (self.graphs and self.graphs[-1].gains_nothing):
            problem = self.graphs[-1].problem if self.graphs else "Ingot is switched off"
            problem = problem or "it begins with what PyTorch runs"
            raise IngotError(f"{self.name} cannot be prepared: {problem}")

    def made(self, graph: DynamoGraph) -> Callable:
        run, calling = graph.compiled.run, self._calling
        replayed = self.replayed(graph, run, graph.compiled.device_type)
        if self.frozen:
            self._freeze(graph)

        def call(*args: Any) -> Any:
            if getattr(calling, "now", False):
                if calling.batch is not None:
                    device = max(a.get_device() for a in args if isinstance(a, torch.Tensor))
                    for program, batch in graph.compiled.for_batch(calling.batch):
                        program.prepare(batch, device)
                raise _PreparedError
            if graph.calls < USED:
                graph.calls += 1
            # Packed weights are made anew by the host, where they have changed.
            return (run if graph.is_frozen else replayed)(args)

        return call

    def _captured(self) -> list[DynamoGraph]:
        return self.graphs

    def _is_prepared(self) -> bool:
        return getattr(self._calling, "now", False)

    def run_by_pytorch(self, gm: torch.fx.GraphModule) -> Callable:
        return self._by_pytorch(forward_of(gm))

    def lengths_change(self) -> bool:
        return lengths.changed_often(self.graphs)

    def mode(self) -> str:
        return "training" if self._training else "eval"

    def set_frozen(self, frozen: bool) -> None:
        self.frozen = frozen
        for graph in self.graphs:
            self._freeze(graph)

    def _freeze(self, graph: DynamoGraph) -> None:
        """Weights are kept for inference alone: a training step changes them anyway."""
        graph.is_frozen = self.frozen and graph.mode == "eval"
        for program in graph.compiled.programs if graph.compiled else ():
            if graph.is_frozen:
                program.freeze()
            else:
                program.unfreeze()

    def _seen(self, module: Any) -> None:
        """Before a frame is compiled."""
        self._calling.captures = True
        # One that a forward makes has no state before nn.Module's __init__.
        if isinstance(module, nn.Module) and "_modules" in vars(module):
            self._training = module.training
            if self._overlooked is not None:
                self._overlooked.note(module)

    def _backend(self, gm: torch.fx.GraphModule, examples: list) -> Callable:
        behind = dynamo.break_behind(gm)
        if behind is not None:
            self.broke(*behind)
        before = len(self.graphs)
        made = compile_graph(self, gm, examples)
        new = self.graphs[before:]
        getattr(self._calling, "graphs", []).extend(new)
        by_ingot = any(graph.compiled is not None for graph in new)
        return shortcut.mark(made if by_ingot else self._by_pytorch(made), gm)

    def _by_pytorch(self, forward: Callable) -> Callable:
        calling = self._calling

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(calling, "now", False):
                raise _PyTorchsError
            return forward(*args, **kwargs)

        return call
