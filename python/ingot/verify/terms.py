"""How large the terms of a product are, for the errors that their roundings may add up to.

These sizes need few digits: they are made in fp32, at half of an fp64 product's cost, of operands
over the largest magnitude of each row and column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import blocks
from .criteria import ErrorModel


class Forms:
    """Forms of parameters, which many products share, by where the parameters lie: to be cleared
    when their values change."""

    def __init__(self) -> None:
        self._forms: dict = {}

    def of(self, b: torch.Tensor, squared: bool) -> tuple:
        key = (b.data_ptr(), b.shape, b.stride(), b.dtype, squared)
        if key not in self._forms:
            self._forms[key] = _form(b, -2, squared)
        return self._forms[key]

    def clear(self) -> None:
        self._forms.clear()


@dataclass(frozen=True)
class TermSizes:
    """terms: K, how many each sum has. core: [..., M, N], the size of each sum's terms (the root of
    the sum of their squares, or the sum of their magnitudes) over `rows` [..., M, 1] and `columns`
    [..., 1, N], the largest magnitudes of the operands. row_sums, column_sums: of magnitudes, None
    where only the root is asked for."""

    terms: int
    core: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    row_sums: torch.Tensor | None
    column_sums: torch.Tensor | None

    @classmethod
    def of(
        cls, a: torch.Tensor, b: torch.Tensor, model: ErrorModel, forms: Forms | None
    ) -> TermSizes:
        """a: [..., M, K], b: [..., K, N]. forms: where b is a parameter."""
        squared = model is ErrorModel.INDEPENDENT
        left, rows, row_sums = _form(a, -1, squared)
        right, columns, column_sums = (
            _form(b, -2, squared) if forms is None else forms.of(b, squared)
        )
        with torch.autocast(left.device.type, enabled=False):  # an original may have it on
            core = left @ right
        if squared:
            core.sqrt_()
        return cls(a.shape[-1], core, rows, columns, row_sums, column_sums)

    def block(self, rows: slice, rounding: float, floor: float) -> torch.Tensor:
        """The size of these rows' errors. rounding: of one term; floor: what may be lost of one
        beside the largest of its row or column."""
        largest = self.rows[..., rows, :]
        size = (self.columns * (largest * rounding)).mul_(self.core[..., rows, :])
        if self.row_sums is not None and self.column_sums is not None and floor:
            size.addcmul_(largest, self.column_sums, value=floor)
            size.addcmul_(self.row_sums[..., rows, :], self.columns, value=floor)
        return size


def _form(value: torch.Tensor, axis: int, squared: bool) -> tuple:
    """(magnitudes over the largest along `axis`, or their squares, in fp32; the largest ones; sums
    along it, None for squares)."""
    if not value.shape[axis]:
        largest = value.abs().sum(axis, keepdim=True)
    else:
        largest = torch.linalg.vector_norm(value, torch.inf, axis, keepdim=True)
    sums = None if squared else torch.linalg.vector_norm(value, 1, axis, keepdim=True)
    # What holds NaN or Inf has no size, whatever it is divided by.
    largest = torch.where(torch.isfinite(largest), largest, 1.0)
    divisor = torch.where(largest > 0, largest, 1.0)
    form = torch.empty_like(value, dtype=torch.float32)
    # In the order of memory: a weight comes as a transposed view.
    turned = value.dim() == 2 and value.t().is_contiguous()
    source, by, target = [t.t() if turned else t for t in (value, divisor, form)]
    one_divisor = source.dim() != 2 or by.shape[0] == 1

    def fill(number: int, rows: slice) -> None:
        scaled = source[rows].abs().div_(by if one_divisor else by[rows])
        target[rows].copy_(scaled.square_() if squared else scaled)

    blocks.each(fill, blocks.rows_of_parts(source))
    return form, largest, sums
