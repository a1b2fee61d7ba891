"""Tensors that a standalone file holds as text."""

from __future__ import annotations

import torch

from ingot.standalone.printing import UnprintableError, value_text

_MOST_NUMBERS = 1 << 16  # of a constant that is written down


class Constants:
    """Tensors that a forward makes from nothing, written down once."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def text(self, tensor: torch.Tensor, device: str) -> str:
        tensor = tensor.detach().cpu()
        same = [
            at
            for at, known in enumerate(self.tensors)
            if known.dtype == tensor.dtype and torch.equal(known, tensor)
        ]
        if not same:
            if tensor.numel() > _MOST_NUMBERS:
                raise UnprintableError(f"a constant tensor of {tensor.numel()} numbers")
            self.tensors.append(tensor)
        return f"_ingot_constant({same[0] if same else len(self.tensors) - 1}, {device})"

    def lines(self) -> list[str]:
        """One expression for each tensor."""
        found = []
        for tensor in self.tensors:
            values = value_text(tensor.tolist(), str)
            found.append(f"torch.tensor({values}, dtype={tensor.dtype}, device='cpu')")
        return found
