"""Error measures of an output against fp64 truth."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from . import blocks

ATOL = RTOL = 1e-4
_BLOCK_ELEMENTS = 1 << 24  # on a GPU
_SQUARABLE = 1e-140


@dataclass(frozen=True)
class Measures:
    """relative_error: relative Frobenius norm of the error. worst_row_error: the largest row's
    relative error. scaled_error: largest error over the largest |truth|. mismatches: elements
    outside atol = rtol = 1e-4. nonfinite_mismatches: positions where NaN, +Inf or -Inf differ;
    positions that are not finite in both alike count as equal."""

    relative_error: float
    worst_row_error: float
    scaled_error: float
    mismatches: int
    nonfinite_mismatches: int

    def to_dict(self) -> dict:
        return asdict(self)


def measure(
    truth: torch.Tensor,
    candidate: torch.Tensor,
    rows: int,
    eager: torch.Tensor | None = None,
    counted: bool = True,
    dtype: torch.dtype | None = None,
) -> Measures:
    """Measures `candidate` against `truth` (fp64 or its complex type, same shape), both seen as
    rows × columns.

    Where eager overflows and the truth does not, NaN and Inf may be as in either. counted: whether
    mismatches are wanted; else they are given as 0. dtype: what the output has, where `candidate`
    stands for one in another type: what it cannot hold is infinite. Runs in blocks, on the truth's
    device, so that no temporary is as large as the output.
    """
    if truth.numel() == 0:
        return Measures(0.0, 0.0, 0.0, 0, 0)
    if truth.is_complex():  # as real and imaginary parts
        truth, candidate = _parts(truth), _parts(candidate)
        eager = None if eager is None else _parts(eager)
    truth = truth.reshape(rows, -1)
    candidate = candidate.reshape(rows, -1)
    if eager is not None:
        eager = eager.reshape(rows, -1)
    elements = blocks.ELEMENTS if truth.device.type == "cpu" else _BLOCK_ELEMENTS
    step = max(1, elements // truth.shape[1])
    dtype = candidate.dtype if dtype is None else dtype
    largest = torch.finfo(dtype).max if dtype.is_floating_point else math.inf

    def look(number: int, start: int) -> _Sums:
        t = truth[start : start + step].double()
        c = candidate[start : start + step].to(device=t.device, dtype=torch.float64)
        found = _Sums()
        if not found.add_ordinary(t, c, largest, counted):
            own = None if eager is None else eager[start : start + step].to(t)
            found.add_any(t, c, own, dtype)
        return found

    total = _Sums()
    for found in blocks.each(look, list(range(0, rows, step))):
        total.add(found)
    return total.measures()


class _Sums:
    """What has been found in some of the blocks."""

    def __init__(self) -> None:
        self.error = self.truth = self.worst_row = self.largest = self.scale = 0.0
        self.mismatches = self.nonfinite = 0

    def add(self, other: _Sums) -> None:
        self.error = math.hypot(self.error, other.error)
        self.truth = math.hypot(self.truth, other.truth)
        self.worst_row = max(self.worst_row, other.worst_row)
        self.largest = max(self.largest, other.largest)
        self.scale = max(self.scale, other.scale)
        self.mismatches += other.mismatches
        self.nonfinite += other.nonfinite

    def measures(self) -> Measures:
        error = _ratio(self.error, self.truth)
        scaled = _ratio(self.largest, self.scale)
        return Measures(error, self.worst_row, scaled, self.mismatches, self.nonfinite)

    def add_ordinary(
        self, t: torch.Tensor, c: torch.Tensor, type_max: float, counted: bool
    ) -> bool:
        """A block whose values are all finite, within the output's type and of magnitudes whose
        squares fp64 holds: by few passes over it. False: it is not of that kind."""
        error = c - t
        row_error = torch.linalg.vector_norm(error, dim=1)
        row_truth = torch.linalg.vector_norm(t, dim=1)
        found = torch.stack(
            [
                *torch.aminmax(t),
                *torch.aminmax(error),
                row_truth.amin(),
                (row_error / row_truth).amax(),
                torch.linalg.vector_norm(row_error),
                torch.linalg.vector_norm(row_truth),
            ]
        ).tolist()
        if not all(map(math.isfinite, found)):
            return False
        scale = max(abs(found[0]), abs(found[1]))
        largest = max(abs(found[2]), abs(found[3]))
        if scale > type_max or max(scale, largest) > 1 / _SQUARABLE or found[4] < _SQUARABLE:
            return False
        self.error, self.truth, self.worst_row = found[6], found[7], found[5]
        self.largest, self.scale = largest, scale
        if counted and largest > ATOL:
            self.mismatches = int((error.abs() > ATOL + RTOL * t.abs()).sum())
        return True

    def add_any(
        self, t: torch.Tensor, c: torch.Tensor, eager: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        # What the output's type cannot hold is infinite in it, in the truth as well.
        if dtype.is_floating_point:
            t = torch.where(t.abs() > torch.finfo(dtype).max, t.to(dtype), t)
        both = torch.isfinite(t) & torch.isfinite(c)
        alike = _both_alike(t, c)
        if eager is not None:
            alike |= _both_alike(eager, c)
        self.nonfinite = int((~both & ~alike).sum())
        t = torch.where(both, t, 0.0)
        error = torch.where(both, c - t, 0.0)
        self.mismatches = int(((error.abs() > ATOL + RTOL * t.abs()) | (~both & ~alike)).sum())
        # Scaled by the block's largest magnitude: squares of 2^±60 and beyond must not overflow.
        row_error = _row_norms(error)
        row_truth = _row_norms(t)
        ratio = torch.where(row_error == 0, 0.0, row_error / row_truth)
        self.error = float(_row_norms(row_error[None]))
        self.truth = float(_row_norms(row_truth[None]))
        self.worst_row = float(ratio.max())
        self.largest = float(error.abs().max())
        self.scale = float(t.abs().max())


def _parts(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _both_alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where both are NaN, both the same infinity, or both finite."""
    infinite = torch.isinf(a) & (a == b)
    return (torch.isnan(a) & torch.isnan(b)) | infinite | (torch.isfinite(a) & torch.isfinite(b))


def _row_norms(values: torch.Tensor) -> torch.Tensor:
    largest = values.abs().amax(dim=1, keepdim=True)
    safe = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(values / safe, dim=1) * largest[:, 0]


def _ratio(error: float, scale: float) -> float:
    if error == 0.0:
        return 0.0
    return error / scale if scale > 0 else math.inf
