"""Which of its compiled graphs runs a call of an optimised module, or PyTorch, and why."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from ingot import policy
from ingot.capture import CaptureError, capture
from ingot.capture.exporting import batched_inputs
from ingot.execution import Compiled, RefusedError
from ingot.guards import Guards, hooked, opaque_attribute, training_flags
from ingot.log import logger
from ingot.recent import Delegated, Recent, intercepted, parameter_with_gradient
from ingot.runtime.library import STATUS_INVALID_ARGUMENT, IngotError

_MAX_ENTRIES = 64
# A module that differs at every call would be captured at every call.
_MAX_CAPTURES = 100
_MAX_REFUSALS = 8

# torch.export keeps global state; one capture at a time.
_capture_lock = threading.Lock()


class IngotWarning(UserWarning):
    """Something that PyTorch runs in Ingot's place, said once."""


class _Entry:
    """One compiled forward, or the reason why there is none."""

    __slots__ = ("compiled", "delegate_batches", "flags", "guards", "mode", "problem", "signature")

    def __init__(self, guards: Guards, flags: list[bool]):
        self.guards, self.flags = guards, flags
        self.compiled: Compiled | None = None
        self.problem: str | None = None
        self.delegate_batches: frozenset = frozenset({0})


class State:
    """What an optimised module knows beside the original's attributes."""

    def __init__(
        self,
        original_forward: Callable,
        name: str,
        precision: str | None = None,
        options: dict | None = None,
    ):
        self.precision, self.options = precision, options
        self.original_forward, self.name = original_forward, name
        self.entries: dict[Any, _Entry] = {}
        self.last: Recent | None = None
        self.delegated: Delegated | None = None
        self.warned: set[str] = set()
        self.captures = 0
        self.frozen = False
        self.lock = threading.RLock()

    def settings(self) -> dict:
        return {"precision": self.precision, "options": self.options}

    # The fast path: everything as at the last call. ------------------------------------------

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        recent = self.last
        if recent is not None and not kwargs:
            leaves = recent.leaves(args)
            if leaves is not None:
                return recent.run(leaves)
        delegated = self.delegated
        if delegated is not None and not kwargs and delegated.like(args):
            return self.original_forward(module, *args)
        return self.slow_call(module, args, kwargs)

    # Everything else. ------------------------------------------------------------------------

    def slow_call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if intercepted():
            return self.original_forward(module, *args, **kwargs)
        self.delegated = None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        plain = not kwargs and len(tensors) == len(args)
        reason = self.unfit_for_any_graph(module, tensors)
        if reason is None and torch.is_grad_enabled() and _needs_grad(module, tensors):
            reason = (
                "a call needs gradients, which Ingot does not compute yet: PyTorch runs it "
                "(use torch.no_grad() where no gradients are needed)"
            )
            if plain and parameter_with_gradient(module) is not None:
                self.delegated = Delegated(module, args, (), with_gradients=True)
        if reason is not None:
            return self._delegate(module, args, kwargs, reason)
        entry = self.entry(module, args, kwargs, leaves, spec, tensors)
        if entry.compiled is None:
            result = self._delegate(module, args, kwargs, entry.problem)
            if plain:
                mode = policy.ambient(tensors[0].device.type)
                self.delegated = Delegated(module, args, mode, with_gradients=False)
            return result
        batched, batch = batched_inputs(tensors)
        if any(batched) and batch in entry.delegate_batches:
            return self.original_forward(module, *args, **kwargs)
        result = entry.compiled.run(tensors)
        plain = plain and entry.compiled.reads_tensors_only
        self.last = Recent(entry, tensors, tensors[0].device.type) if plain else None
        return result

    def _delegate(self, module, args, kwargs, reason: str | None) -> Any:
        self.last = None
        result = self.original_forward(module, *args, **kwargs)
        if reason:  # after the call, which may raise PyTorch's own error
            self.warn(reason)
        return result

    def warn(self, reason: str) -> None:
        with self.lock:
            if reason in self.warned:
                return
            self.warned.add(reason)
        warnings.warn(f"ingot: {self.name}: {reason}", IngotWarning, stacklevel=6)

    def unfit_for_any_graph(self, module: nn.Module, tensors) -> str | None:
        if not tensors:
            return "it is called without tensors; PyTorch runs it"
        devices = {t.device for t in tensors}
        for t in tensors:
            if type(t) not in (torch.Tensor, Parameter):
                return f"its input is a {type(t).__name__}; PyTorch runs it"
            if t.layout is not torch.strided:
                return f"its input has the layout {t.layout}; PyTorch runs it"
            if t.is_neg() or t.is_conj():
                return "its input is a lazily negated or conjugated view; PyTorch runs it"
        if len(devices) > 1:
            return ""  # PyTorch's error, if it is one
        kind = next(iter(devices)).type
        if kind not in ("cpu", "cuda"):
            return f"it runs on {kind}, which Ingot does not know; PyTorch runs it"
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
                return ""  # a lazy module's first call
            if type(tensor) not in (torch.Tensor, Parameter, getattr(nn, "Buffer", Parameter)):
                return f"{name} is a {type(tensor).__name__}; PyTorch runs the module"
        hook = hooked(module)
        if hook is not None:
            return f"{hook}; PyTorch runs the module so that it is called"
        hidden = opaque_attribute(module)
        return None if hidden is None else f"{hidden}; PyTorch runs the module"

    def entry(self, module, args, kwargs, leaves, spec, tensors) -> _Entry:
        device_type = tensors[0].device.type
        mode = policy.ambient(device_type)
        key = (
            tuple(training_flags(module)),
            mode,
            device_type,
            str(spec),
            batched_inputs(tensors)[0],
            tuple(_signature(leaf, tensors) for leaf in leaves),
            _state_signature(module),
        )
        with self.lock:
            entry = self.entries.get(key)
            if entry is not None and entry.compiled and entry.compiled.captured.static_batch:
                key = (key, tuple(t.shape for t in tensors))
                entry = self.entries.get(key)
            if entry is not None and entry.guards.hold():
                return entry
            if entry is not None:
                self.entries.clear()
            self.captures += 1
            if self.captures > _MAX_CAPTURES:
                entry = _Entry(Guards(module), [])
                entry.problem = (
                    f"it changed in other ways than its tensors' values {_MAX_CAPTURES} times; "
                    "PyTorch runs what is new"
                )
                return entry
            entry = self._compile(module, args, kwargs, device_type, mode, len(args))
            if len(self.entries) >= _MAX_ENTRIES:
                self.entries.pop(next(iter(self.entries)))
            self.entries[key] = entry
            if entry.compiled and entry.compiled.captured.static_batch:
                self.entries[(key, tuple(t.shape for t in tensors))] = entry
            if self.frozen:
                self._freeze(entry)
            return entry

    def set_frozen(self, frozen: bool) -> None:
        with self.lock:
            self.frozen = frozen
            for entry in self.entries.values():
                self._freeze(entry)

    def _freeze(self, entry: _Entry) -> None:
        """Weights are kept for inference alone: a training step changes them anyway."""
        for program in entry.compiled.programs if entry.compiled else ():
            if self.frozen and not entry.flags[0]:
                program.freeze()
            else:
                program.unfreeze()

    def _compile(self, module, args, kwargs, device_type, mode, arguments: int) -> _Entry:
        guards = Guards(module)
        entry = _Entry(guards, guards.flags)
        entry.mode, entry.signature = mode, arguments
        refused: dict[str, str] = {}
        start = time.perf_counter()
        try:
            for _ in range(_MAX_REFUSALS):
                try:
                    with _capture_lock:
                        captured = capture(
                            module,
                            args,
                            kwargs,
                            forward=self.original_forward,
                            refused=refused,
                            autocast=mode[0] is not None,
                        )
                    entry.compiled = Compiled(
                        captured, module, device_type, self.precision, mode[1], self.options
                    )
                    break
                except RefusedError as error:
                    refused.update(error.nodes)
            else:
                entry.problem = f"PyTorch runs it: {'; '.join(sorted(set(refused.values())))}"
        except CaptureError as error:
            entry.problem = f"PyTorch runs it: {error}"
        except IngotError as error:
            if error.status == STATUS_INVALID_ARGUMENT:
                raise
            entry.problem = f"PyTorch runs it: {error}"
        took = 1e3 * (time.perf_counter() - start)
        name = type(module).__name__
        logger.info("captured and planned %s for %s in %.0f ms", name, device_type, took)
        if entry.compiled is not None:
            entry.delegate_batches = entry.compiled.captured.delegate_batches
            if not entry.compiled.programs:
                entry.problem = "PyTorch runs it: it holds nothing that Ingot takes over"
                entry.compiled = None
            else:
                for item in captured.unsupported:
                    self.warn(f"PyTorch runs {item.what} ({item.where}): {item.why}")
        return entry


def _signature(leaf: Any, tensors) -> Any:
    """What a graph is specialised on, per argument."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    batched = leaf.dim() >= 2 and leaf.size(0) == batched_inputs(tensors)[1]
    shape = leaf.shape[1:] if batched else leaf.shape
    return leaf.dtype, tuple(shape), leaf.dim(), leaf.is_contiguous()


def _state_signature(module: nn.Module) -> tuple:
    """Shapes and dtypes of parameters and buffers: load_state_dict(assign=True), half(), ..."""
    members = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, t.dtype, t.shape, t.device.type) for name, t in members)


def _needs_grad(module: nn.Module, tensors) -> bool:
    return any(t.requires_grad for t in tensors) or any(
        p.requires_grad for p in module.parameters()
    )
