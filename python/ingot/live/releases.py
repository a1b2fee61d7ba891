"""What differs between the releases of PyTorch that are served (2.6 and later)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
import torch._dynamo
from torch import nn
from torch.fx import _symbolic_trace


def _is_tracing() -> bool:
    return _symbolic_trace.is_fx_tracing() and not torch.compiler.is_compiling()


# Whether torch.fx traces something, in any thread.
fx_is_tracing = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _is_tracing)

# Dynamo's guards were seen to overlook what follows in 2.6, and to notice it in 2.11; the releases
# between are not tried.
_GUARDS_SUFFICE = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)
_DEVICES = ("cpu", "cuda")
_eval_frame = torch._C._dynamo.eval_frame


def unseen(function: Callable) -> Callable:
    """`function`, with frames that TorchDynamo lets pass, and all beneath: a program that asks for
    gradients between two of its graphs has autograd call it where Dynamo looks at every frame.
    Costs a call nothing, where torch.compiler.disable takes 0.8 µs (before 2.7 it is that)."""
    types, mark = torch._dynamo.types, getattr(_eval_frame, "set_code_exec_strategy", None)
    if mark is None:
        return torch.compiler.disable(function)
    mark(function.__code__, types.FrameExecStrategy(*[types.FrameAction.SKIP] * 2))
    return function


class Overlooked:
    """What can change about a compiled module unnoticed by Dynamo: parameters of several names that
    are untied, and the dtype of autocast."""

    def __init__(self) -> None:
        self._ties: list[list[tuple[nn.Module, str]]] = []
        self._dtypes: dict[str, torch.dtype] = {}

    def note(self, module: nn.Module) -> None:
        """Before it is compiled."""
        names = defaultdict(list)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    names[id(parameter)].append((part, name))
        self._ties = [group for group in names.values() if len(group) > 1]
        self._dtypes.update(autocast_dtypes())

    def changed(self) -> bool:
        now = autocast_dtypes()
        return any(
            dtype != self._dtypes.get(device, dtype) for device, dtype in now.items()
        ) or any(
            len({id(part._parameters.get(name)) for part, name in group}) > 1
            for group in self._ties
        )


def overlooked() -> Overlooked | None:
    return None if _GUARDS_SUFFICE else Overlooked()


def autocast_dtypes() -> dict[str, torch.dtype]:
    """Of the devices for which it is on."""
    return {d: torch.get_autocast_dtype(d) for d in _DEVICES if torch.is_autocast_enabled(d)}
