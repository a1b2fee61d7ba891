"""Error measures of an output against fp64 truth."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

ATOL = RTOL = 1e-4
_BLOCK_ELEMENTS = 1 << 24


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
) -> Measures:
    """Measures `candidate` against `truth` (fp64 or its complex type, same shape), both seen as
    rows × columns.

    Where eager overflows and the truth does not, NaN and Inf may be as in either. Runs in blocks,
    on the truth's device, so that no temporary is as large as the output.
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
    step = max(1, _BLOCK_ELEMENTS // truth.shape[1])
    scale = 0.0
    error2 = truth2 = worst_row = largest = 0.0
    mismatches = nonfinite = 0
    for start in range(0, rows, step):
        t = truth[start : start + step].double()
        c = candidate[start : start + step].to(device=t.device, dtype=torch.float64)
        # What the output's type cannot hold is infinite in it, in the truth as well.
        if candidate.is_floating_point():
            t = torch.where(t.abs() > torch.finfo(candidate.dtype).max, t.to(candidate.dtype), t)
        both = torch.isfinite(t) & torch.isfinite(c)
        alike = _both_alike(t, c)
        if eager is not None:
            alike |= _both_alike(eager[start : start + step].to(t), c)
        nonfinite += int((~both & ~alike).sum())
        t = torch.where(both, t, 0.0)
        error = torch.where(both, c - t, 0.0)
        mismatches += int(((error.abs() > ATOL + RTOL * t.abs()) | (~both & ~alike)).sum())
        # Scaled by the block's largest magnitude: squares of 2^±60 and beyond must not overflow.
        row_error = _row_norms(error)
        row_truth = _row_norms(t)
        ratio = torch.where(row_error == 0, 0.0, row_error / row_truth)
        worst_row = max(worst_row, float(ratio.max()))
        error2 = math.hypot(error2, float(_row_norms(row_error[None])))
        truth2 = math.hypot(truth2, float(_row_norms(row_truth[None])))
        largest = max(largest, float(error.abs().max()))
        scale = max(scale, float(t.abs().max()))
    return Measures(
        _ratio(error2, truth2), worst_row, _ratio(largest, scale), mismatches, nonfinite
    )


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
