"""What gradients are asked of: the sum of the outputs times random numbers."""

from __future__ import annotations

import copy

import torch


class Cotangents:
    """What the outputs' derivatives are asked for: the sum of outputs times random numbers.
    of_inputs: whether gradients of the inputs are asked for too. between: whether the module is
    called once more, with `execution.decoys`, before the first call's outputs go backwards; that
    call's go backwards after them, and the gradients add up. frozen: names of parameters of which
    none is asked for. layout: how the random numbers lie in memory (of `families.lay_out`). only:
    the number of the one output whose derivative is asked for. only_input: of the one input that
    asks for a gradient. twice: whether the outputs go backwards twice over the same graph, and the
    gradients add up."""

    def __init__(
        self,
        seed: int,
        of_inputs: bool = True,
        between: bool = False,
        frozen: tuple = (),
        layout: str = "contiguous",
        only: int | None = None,
        only_input: int | None = None,
        twice: bool = False,
    ) -> None:
        self.of_inputs = of_inputs
        self.between = between
        self.frozen = frozen
        self.layout = layout
        self.only = only
        self.only_input = only_input
        self.twice = twice
        self._seed = seed
        self._made: list | None = None

    def without_inputs(self) -> Cotangents:
        alike = copy.copy(self)
        alike.of_inputs, alike._made = False, None
        return alike

    def of(self, outputs: list) -> list:
        """One for each output, None where it can have no derivative or none is asked for; alike in
        every type."""
        if self._made is None:
            self._made = [self._drawn(o, number) for number, o in enumerate(outputs)]
        return [
            None if made is None else made.to(output.dtype)
            for made, output in zip(self._made, outputs, strict=True)
        ]

    def _drawn(self, output: torch.Tensor, number: int) -> torch.Tensor | None:
        if not has_error(output) or self.only not in (None, number):
            return None
        generator = torch.Generator(output.device).manual_seed(self._seed + number)
        single = torch.complex64 if output.is_complex() else torch.float32
        values = torch.randn(output.shape, generator=generator, dtype=single, device=output.device)
        if self.layout == "expanded":  # as .sum() gives it: one number, everywhere
            return values.fill_(1.0)
        # Multiples of 1/16 between -4 and 4: every type holds them exactly.
        parts = torch.view_as_real(values) if output.is_complex() else values
        parts.mul_(16).round_().clamp_(-64, 64).div_(16)
        return values


def has_error(value: torch.Tensor) -> bool:
    """Whether it holds numbers that may be rounded."""
    return value.is_floating_point() or value.is_complex()
