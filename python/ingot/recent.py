"""What the last call was like, so that the next one like it is recognised in a few comparisons.

These are made by a call that was looked at in full (dispatch.py). They must notice every
difference that could change the result; where they do, the call is looked at in full again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ingot import policy
from ingot.runtime.program import are_like, description

# Calls that PyTorch runs between two full looks at whether Ingot could.
_LOOK_AGAIN = 256

_peek_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_mode = torch._C._is_torch_function_mode_enabled
_tracing = torch._C._get_tracing_state
_dynamo = torch.compiler.is_dynamo_compiling
_forward_ad = torch.autograd.forward_ad
_with_gradients = torch.is_grad_enabled


def intercepted() -> bool:
    """Whether something watches this thread's operators (torch.compile, torch.export, vmap,
    jit.trace, modes): it must see the original's. torch.compiler.is_compiling() is of no use: while
    one thread exports a module (a capture of ours, say) it is true in all."""
    return (
        _dynamo()
        or _dispatch_modes() > 0
        or _peek_functorch() is not None
        or _function_mode()
        or _tracing() is not None
        or _forward_ad._current_level >= 0
    )


def _like(tensors: Sequence[torch.Tensor], device_type: str) -> Callable[..., bool]:
    """A function that takes tensors and says whether they are like these: of the same type, dtype,
    device, sizes and strides, as lazily negated, as much in need of gradients, and reaching the
    same operators (autocast, inference mode and all that watches operators from below show here).

    torch.compile's own check, where there is one and these tensors pass it (it wants no tensor
    twice): a fifth of the time of comparing in Python.
    """
    try:
        check = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        if check(*tensors):
            return check
    except (AttributeError, TypeError, RuntimeError):
        pass
    expected, ambient = description(tensors), policy.ambient(device_type)
    states = [(t.requires_grad, t.is_neg()) for t in tensors]

    def compared(*found: torch.Tensor) -> bool:
        # First of all: a tracer would record the comparisons.
        return (
            not intercepted()
            and are_like(found, expected)
            and [(t.requires_grad, t.is_neg()) for t in found] == states
            and policy.ambient(device_type) == ambient
        )

    return compared


class Recent:
    """The last call's graph and what its tensors were like. Never changed once made: threads share
    it."""

    __slots__ = (
        "_count",
        "_holds",
        "_leaves",
        "_like",
        "_mode",
        "_needs_no_grad",
        "_same_flags",
        "_unread",
        "compiled",
        "run",
    )

    def __init__(self, entry, tensors: Sequence[torch.Tensor], device_type: str):
        compiled = entry.compiled
        self.compiled = compiled
        self._count = len(tensors)
        self._same_flags, self._holds = entry.guards.same_flags, entry.guards.hold
        self._leaves = compiled.leaves
        self._unread = [i for i in range(len(tensors)) if i not in compiled.inputs_read]
        # Of these, only what the tensors do not show is left to compare.
        autocast, tf32 = entry.mode
        self._mode = (device_type, autocast, tf32)
        if autocast is None:
            self._mode = tf32 if device_type == "cuda" else None
        leaves = compiled.leaves(tensors)
        self._like = _like(leaves, device_type)
        self._needs_no_grad = any(leaf.requires_grad for leaf in leaves)
        # (leaves): what the module returns.
        self.run = compiled.run_steps
        if compiled.direct is not None:
            self.run = partial(compiled.run_direct, compiled.direct.bind(leaves))

    def leaves(self, args: tuple) -> tuple | None:
        """The tensors that the call reads, where it is like the last one."""
        # What watches operators from below shows in the tensors' comparison.
        if _dynamo() or _function_mode() or _forward_ad._current_level >= 0:
            return None
        try:
            if len(args) != self._count or not self._same_flags() or not self._holds():
                return None
            leaves = self._leaves(args)
            if not self._like(*leaves) or (self._needs_no_grad and _with_gradients()):
                return None
            for index in self._unread:
                if type(args[index]) is not torch.Tensor:
                    return None
            mode = self._mode
            if mode is not None and not self._same_mode(mode):
                return None
            return leaves
        except (RuntimeError, KeyError, AttributeError):
            # A member that went away.
            return None

    @staticmethod
    def _same_mode(mode: bool | tuple) -> bool:
        if type(mode) is bool:
            return policy.tf32_allowed() == mode
        device_type, *expected = mode
        return [*policy.ambient(device_type)] == expected


class Delegated:
    """The last call that PyTorch ran, where the next one like it is PyTorch's too. PyTorch's answer
    is always right: only what is cheap is compared, and the rest at every _LOOK_AGAIN-th call."""

    __slots__ = ("_arguments", "_dicts", "_expected", "_flags", "_left", "_mode", "_parameter")

    def __init__(self, module: nn.Module, args: tuple, mode: tuple, with_gradients: bool):
        self._left, self._mode = _LOOK_AGAIN, mode
        self._parameter = parameter_with_gradient(module) if with_gradients else None
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


def parameter_with_gradient(module: nn.Module) -> tuple[dict, str] | None:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                return child._parameters, name
    return None
