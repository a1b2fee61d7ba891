"""Calls that hold nothing for Ingot: they run the original's forward, with nothing around it.

What TorchDynamo captured would be PyTorch's own operators, but not always those of the forward: one
that asks whether it is being captured may take another way (transformers then make masks that their
attention does without else). And its guards cost the host more than a small operator takes.
"""

from __future__ import annotations

from typing import Any

import torch

from ingot.live import policy

_MOST = 64


class LeftCalls:
    """Kinds of calls, told apart by modes, settings, and dtypes and sizes of the tensors that are
    arguments themselves. One capture is for all batch sizes but 0 and 1."""

    def __init__(self) -> None:
        self._kinds: set[tuple] = set()

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def __contains__(self, call: tuple[Any, tuple, dict]) -> bool:
        return _kind(*call) in self._kinds

    def add(self, call: tuple[Any, tuple, dict]) -> None:
        if len(self._kinds) < _MOST:
            self._kinds.add(_kind(*call))


def _kind(module: Any, args: tuple, kwargs: dict) -> tuple:
    device, tensors = "cpu", []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            device = value.device.type
            batch, *sizes = value.shape or (2,)
            tensors.append((value.dtype, device, min(batch, 2), *sizes, value.requires_grad))
        else:
            tensors.append((type(value),))
    modes = module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, policy.ambient(device), tuple(kwargs), tuple(tensors)
