"""`ingot.optimize`: an nn.Module that computes what the original does, faster.

The optimised module *is* the original under another class: both share one `__dict__`, and with it
parameters, buffers, submodules, attributes and hooks. Whatever a user does to one, the other sees;
state_dict, train(), to(), optimisers and pickling need no code of ours. Only `forward` differs: it
runs compiled graphs where that is sure to give the original's result, and the original's forward
wherever it is not.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
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
from ingot.reporting import report
from ingot.runtime.library import STATUS_INVALID_ARGUMENT, IngotError, library
from ingot.runtime.program import are_like, description

_MAX_ENTRIES = 64
# A module that differs at every call would be captured at every call.
_MAX_CAPTURES = 100
_MAX_REFUSALS = 8
# Calls that PyTorch runs between two full looks at whether Ingot could.
_LOOK_AGAIN = 256

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


class _Recent:
    """The last call's entry and what its tensors were like. Never changed once made: threads
    share it."""

    __slots__ = ("binding", "compiled", "device_type", "entry", "expected")

    def __init__(self, entry: _Entry, tensors, device_type: str):
        self.entry, self.compiled, self.device_type = entry, entry.compiled, device_type
        leaves = entry.compiled.leaves(tensors)
        self.binding = None
        if entry.compiled.direct is not None:
            self.binding = entry.compiled.direct.bind(leaves)
        self.expected = description(leaves)


class _Delegated:
    """The last call that PyTorch ran, where the next one like it is PyTorch's too. PyTorch's answer
    is always right: only what is cheap is compared, and the rest at every _LOOK_AGAIN-th call."""

    __slots__ = ("_arguments", "_dicts", "_expected", "_flags", "_left", "_mode", "_parameter")

    def __init__(self, module: nn.Module, args: tuple, mode: tuple, with_gradients: bool):
        self._left, self._mode = _LOOK_AGAIN, mode
        self._parameter = _parameter_with_gradient(module) if with_gradients else None
        self._dicts = [m.__dict__ for m in module.modules()]
        self._flags = [d["training"] for d in self._dicts]
        self._arguments, self._expected = len(args), description(args)

    def like(self, args: tuple) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        try:
            if self._parameter is not None:
                members, name = self._parameter
                return torch.is_grad_enabled() and members[name].requires_grad
            return (
                len(args) == self._arguments
                and are_like(args, self._expected)
                and [d["training"] for d in self._dicts] == self._flags
                and policy.ambient(args[0].device.type) == self._mode
            )
        except (RuntimeError, KeyError, AttributeError):
            return False


class _State:
    """What an optimised module knows beside the original's attributes."""

    def __init__(self, module: nn.Module, precision: str | None, options: dict | None):
        self.precision, self.options = precision, options
        self.original_forward = _original_forward(type(module))
        self.name = _original_class(type(module)).__name__
        self.entries: dict[Any, _Entry] = {}
        self.last: _Recent | None = None
        self.delegated: _Delegated | None = None
        self.warned: set[str] = set()
        self.captures = 0
        self.frozen = False
        self.lock = threading.RLock()

    def settings(self) -> dict:
        return {"precision": self.precision, "options": self.options}

    # The fast path: everything as at the last call. ------------------------------------------

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        recent = self.last
        if recent is not None and not kwargs and not _intercepted():
            leaves = self._unchanged(recent, args)
            if leaves is not None:
                if recent.binding is None:
                    return recent.compiled.run_steps(leaves)
                return recent.compiled.run_direct(recent.binding, leaves)
        delegated = self.delegated
        if delegated is not None and not kwargs and delegated.like(args):
            return self.original_forward(module, *args)
        return self.slow_call(module, args, kwargs)

    @staticmethod
    def _unchanged(recent: _Recent, args: tuple):
        """The tensors that the call reads, where it is like the last one."""
        entry = recent.entry
        try:
            if len(args) != entry.signature:
                return None
            for argument in args:
                if type(argument) is not torch.Tensor or argument.is_neg():
                    return None
            guards = entry.guards
            if not guards.same_flags() or not guards.hold():
                return None
            leaves = recent.compiled.leaves(args)
            if torch.is_grad_enabled():
                for leaf in leaves:
                    if leaf.requires_grad:
                        return None
            if not are_like(leaves, recent.expected):
                return None
            return leaves if policy.ambient(recent.device_type) == entry.mode else None
        except (RuntimeError, KeyError, AttributeError):
            # No strides (sparse), a member that went away or became None.
            return None

    # Everything else. ------------------------------------------------------------------------

    def slow_call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        if _intercepted():
            return self.original_forward(module, *args, **kwargs)
        self.delegated = None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        plain = not kwargs and len(tensors) == len(args)
        reason = self._unfit_for_any_graph(module, tensors)
        if reason is None and torch.is_grad_enabled() and _needs_grad(module, tensors):
            reason = (
                "a call needs gradients, which Ingot does not compute yet: PyTorch runs it "
                "(use torch.no_grad() where no gradients are needed)"
            )
            if plain and _parameter_with_gradient(module) is not None:
                self.delegated = _Delegated(module, args, (), with_gradients=True)
        if reason is not None:
            return self._delegate(module, args, kwargs, reason)
        entry = self._entry(module, args, kwargs, leaves, spec, tensors)
        if entry.compiled is None:
            result = self._delegate(module, args, kwargs, entry.problem)
            if plain:
                mode = policy.ambient(tensors[0].device.type)
                self.delegated = _Delegated(module, args, mode, with_gradients=False)
            return result
        batched, batch = batched_inputs(tensors)
        if any(batched) and batch in entry.delegate_batches:
            return self.original_forward(module, *args, **kwargs)
        result = entry.compiled.run(tensors)
        plain = plain and entry.compiled.reads_tensors_only
        self.last = _Recent(entry, tensors, tensors[0].device.type) if plain else None
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

    def _unfit_for_any_graph(self, module: nn.Module, tensors) -> str | None:
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

    def _entry(self, module, args, kwargs, leaves, spec, tensors) -> _Entry:
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


def _parameter_with_gradient(module: nn.Module) -> tuple[dict, str] | None:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                return child._parameters, name
    return None


_peek_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_mode = torch._C._is_torch_function_mode_enabled
_tracing = torch._C._get_tracing_state
_dynamo = torch.compiler.is_dynamo_compiling


def _intercepted() -> bool:
    """Whether something watches this thread's operators (torch.compile, torch.export, vmap,
    jit.trace, modes): it must see the original's. torch.compiler.is_compiling() is of no use: while
    one thread exports a module (a capture of ours, say) it is true in all."""
    return (
        _dynamo()
        or _dispatch_modes() > 0
        or _peek_functorch() is not None
        or _function_mode()
        or _tracing() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _original_forward(cls: type):
    """The forward that the user's class would have without us."""
    after = False
    for base in cls.__mro__:
        if after and "forward" in base.__dict__:
            return base.__dict__["forward"]
        after = after or base is OptimizedModule
    raise TypeError(f"{cls.__name__} has no forward of its own")


def _original_class(cls: type) -> type:
    after = False
    for base in cls.__mro__:
        if after:
            return base
        after = base is OptimizedModule
    return cls


class OptimizedModule(nn.Module):
    """Put before a model's class, it makes its calls run through Ingot:
    `class ModelNew(ingot.OptimizedModule, Model)`. `ingot.optimize` does so for an instance.

    `ingot_precision` and `ingot_options` are class attributes that such a class may set.
    """

    # Outside of __dict__, which the original shares.
    __slots__ = ("_ingot",)

    ingot_precision: str | None = None
    ingot_options: dict | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            state = self._ingot
        except AttributeError:
            state = _new_state(self)
        return state.call(self, args, kwargs)

    def ingot_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compiles and loads all that a call with tensors like these needs, so that it can be
        captured in a CUDA graph. Runs nothing: buffers stay as they are."""
        state = _state_of(self)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        reason = state._unfit_for_any_graph(self, tensors)
        if reason is not None:
            raise IngotError(f"{state.name} cannot be prepared: {reason or 'mixed devices'}")
        entry = state._entry(self, args, kwargs, leaves, spec, tensors)
        if entry.compiled is None:
            raise IngotError(f"{state.name} cannot be prepared: {entry.problem}")
        batch = batched_inputs(tensors)[1]
        device = tensors[0].get_device()
        for program in entry.compiled.programs:
            program.prepare(batch, device)

    def ingot_freeze(self) -> None:
        """Keeps the weights of matrix products, packed as the GPU's kernels read them, for the
        calls in eval mode that follow; costs as much device memory as the weights.

        Nothing goes stale that PyTorch counts: a parameter that was replaced, moved, loaded or
        written is packed again at the next call. What it does not count, writes through `.data`
        and by foreign kernels, asks for another `ingot_freeze()`. CUDA graphs captured meanwhile
        read the packed weights, which live until one of these, `ingot_unfreeze()` or such a change:
        capture again after it. Calls in training mode, on the CPU and with a library's products
        are as before. Raises IngotError in training mode."""
        state = _state_of(self)
        if self.training:
            raise IngotError(
                f"{state.name} is in training mode; weights are frozen for inference: call eval() "
                "first",
                STATUS_INVALID_ARGUMENT,
            )
        state.set_frozen(True)

    def ingot_unfreeze(self) -> None:
        """Gives the packed weights' memory back; weights are packed at every call again."""
        _state_of(self).set_frozen(False)

    def ingot_report(self, batch: int | None = None) -> dict:
        """What was taken over and what was not, over all that was captured so far.

        Returns `operators_replaced` (list of {what, where, by}), `optimisations` (list of {what,
        identity_or_reason, where}), `unsupported` (list of {what, where, why}), `programs` (the
        library's explanation of each region, with its mode and the bytes of frozen weights that it
        keeps). batch: for which sizes and predicted
        times are given (default: that of the last call, else 1)."""
        state = _state_of(self)
        return report(state.entries.values(), batch)

    def __reduce_ex__(self, protocol: int) -> Any:
        cls = type(self)
        dynamic = cls.__dict__.get("_ingot_dynamic", False)
        settings = _state_of(self).settings()
        getstate = next(
            (b.__dict__["__getstate__"] for b in cls.__mro__ if "__getstate__" in b.__dict__), None
        )
        if getstate is None or getstate is getattr(object, "__getstate__", None):
            state = self.__dict__.copy()
        else:
            state = getstate(self)
        home = _original_class(cls) if dynamic else cls
        return _rebuild, (home, dynamic, settings), state


def _new_state(module: OptimizedModule) -> _State:
    cls = type(module)
    state = _State(module, cls.ingot_precision, cls.ingot_options)
    object.__setattr__(module, "_ingot", state)
    return state


def _state_of(module: OptimizedModule) -> _State:
    try:
        return module._ingot
    except AttributeError:
        return _new_state(module)


def _rebuild(home: type, dynamic: bool, settings: dict) -> OptimizedModule:
    cls = _optimized_class(home) if dynamic else home
    module = cls.__new__(cls)
    object.__setattr__(module, "_ingot", _State(module, **settings))
    return module


_classes: dict[type, type] = {}


def _optimized_class(cls: type) -> type:
    made = _classes.get(cls)
    if made is None:
        name = f"Optimized{cls.__name__}"
        body = {"__doc__": cls.__doc__, "__module__": cls.__module__, "_ingot_dynamic": True}
        made = _classes[cls] = type(name, (OptimizedModule, cls), body)
    return made


def optimize(
    module: nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor | None = None,
    *,
    precision: str | None = None,
    device: str | torch.device | None = None,
    options: dict | None = None,
) -> OptimizedModule:
    """An nn.Module that computes what `module` does and shares everything with it.

    example_inputs: arguments of a call; only shapes, dtypes and strides matter, and the batch size
    (the first dimension) may differ from call to call. With them the module is captured and planned
    now, else at its first call. Kernels are compiled when first needed, or by `ingot_prepare`.
    precision: of float32 matrix products, "fp32", "ieee", "high", "tf32", "bf16" or "fp16"; None
    follows PyTorch's own switches. device: where to move the module first. options: further options
    of ingot_program_create.

    Calls that need gradients run the original's operators. Parts that Ingot does not know are named
    by a warning and run by PyTorch. Raises TypeError where `module` is not an nn.Module that can be
    shared, ValueError for an unknown precision, IngotError where the library is absent.
    """
    policy.check_precision(precision)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("TorchScript modules cannot be captured: give the module it was made from")
    if not isinstance(module, nn.Module):
        raise TypeError(f"ingot.optimize takes an nn.Module, not a {type(module).__name__}")
    library()  # a missing or foreign library is reported here, not at the first call
    if device is not None:
        module.to(device)
    cls = type(module) if isinstance(module, OptimizedModule) else _optimized_class(type(module))
    optimized = cls.__new__(cls)
    object.__setattr__(optimized, "__dict__", module.__dict__)
    state = _State(optimized, precision, options)
    object.__setattr__(optimized, "_ingot", state)
    if example_inputs is not None:
        _capture_now(optimized, state, example_inputs, device)
    return optimized


def _capture_now(module, state: _State, example_inputs, device) -> None:
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, (list, tuple)):
        raise TypeError("example_inputs must be a list or tuple of a call's arguments")
    args = tuple(example_inputs)
    if device is not None:
        args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), args)
    leaves, spec = pytree.tree_flatten((args, {}))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    reason = state._unfit_for_any_graph(module, tensors)
    if reason is not None:
        if reason:
            state.warn(reason)
        return
    entry = state._entry(module, args, {}, leaves, spec, tensors)
    if entry.problem:
        state.warn(entry.problem)
