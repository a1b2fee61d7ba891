"""Weights that a program keeps, packed, from call to call, and when they are out of date."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ingot.runtime.library import STATUS_INVALID_ARGUMENT, IngotError


class FrozenWeights:
    """Packed weights with the state of the parameters that they were packed from.

    They hold while every parameter is the same tensor, at the same address, in the same layout, and
    PyTorch has counted no write to it. The addresses stay taken meanwhile (aliases keep the memory
    alive), so that none of them can come to mean another tensor. Writes through `.data` or by
    foreign code are not counted by PyTorch: after those, freeze again.

    layouts: for each of a call's tensors what decides, beside its address, how it is read.
    """

    __slots__ = ("_aliases", "_layouts", "_seen", "address", "buffer", "bytes")

    def __init__(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[tuple[int, torch.Tensor]],
        layouts: Sequence[tuple],
    ):
        self.buffer, self.bytes = buffer, buffer.numel()
        self.address = buffer.data_ptr()
        self._aliases = [tensor.detach() for _, tensor in parameters]
        self._seen = [(i, t, t.data_ptr(), t._version) for i, t in parameters]
        self._layouts = layouts

    def holds(self, tensors: Sequence[torch.Tensor], layouts: Sequence[tuple]) -> bool:
        for index, tensor, address, version in self._seen:
            now = tensors[index]
            if now is not tensor or now._version != version or now.data_ptr() != address:
                return False
        # Mostly the very object: `w.data = w.data.t()` changes nothing but the layout.
        return layouts is self._layouts or all(
            layouts[index] == self._layouts[index] for index, *_ in self._seen
        )


def check_counted(name: str, tensor: torch.Tensor) -> None:
    """Writes to tensors made in inference mode are not counted by PyTorch: they cannot be kept."""
    if tensor.is_inference():
        raise IngotError(
            f"{name} was made in inference mode, where PyTorch does not count writes: its packed "
            "form could go stale unseen. Make the module outside of torch.inference_mode()",
            STATUS_INVALID_ARGUMENT,
        )
