"""The families of inputs on which a pair is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import passing
from .criteria import ErrorModel

# Batch sizes of hostile families: large enough for statistics, small enough for a CPU, where a
# model of many parameters is given fewer rows.
HOSTILE_BATCH = 96
_FEWER_ROWS = 32
_MANY_PARAMETERS = 1 << 24
_MORE_COLUMNS = 16
ODD_BATCHES = ((3, False), (37, True))


@dataclass(frozen=True)
class Family:
    """make(values, generator) changes the model's own inputs, given as a list of values of which
    some are tensors. batch: the extent that replaces the inputs' own first one (None: unchanged).
    layout: how the tensors lie in memory, of `lay_out`.
    unannounced: of a batch that was drawn for this run, which no candidate can know. gradients: the
    mode in which they are asked for too (True: training), None where they are not."""

    name: str
    why: str
    make: Callable[[list, torch.Generator], list]
    model: ErrorModel = ErrorModel.INDEPENDENT
    batch: int | None = None
    layout: str = "contiguous"
    unannounced: bool = False
    gradients: bool | None = None


def _each_float(change: Callable[[torch.Tensor, torch.Generator], torch.Tensor]) -> Callable:
    def make(values: list, generator: torch.Generator) -> list:
        return passing.map_tensors(
            values, lambda v: change(v, generator).to(v.dtype) if v.is_floating_point() else v
        )

    return make


def _own(values: list, generator: torch.Generator) -> list:
    return values


def _normal(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(value.shape, generator=generator)


def _reach(precision: str, dtypes: set[torch.dtype]) -> int:
    """Powers of two that inputs are spread over. fp16, which ends at 2^15, gets the range that it
    has, whether it is the inputs' type or what products round them to."""
    return 6 if precision == "fp16" or torch.float16 in dtypes else 60


def _exponents(shape: Any, generator: torch.Generator, reach: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-reach, reach + 1, shape, generator=generator).float())


def _large_mean(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return 1000.0 + 0.01 * _normal(value, generator)


def _across_rows(reach: int) -> Callable:
    def change(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        shape = [value.shape[0] if value.dim() else 1] + [1] * max(0, value.dim() - 1)
        return _normal(value, generator) * _exponents(shape, generator, reach)

    return change


def _within_rows(reach: int) -> Callable:
    def change(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return _normal(value, generator) * _exponents(value.shape, generator, reach)

    return change


def _denormals(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return _normal(value, generator) * (torch.finfo(value.dtype).tiny * 0.125)


def _one_special(special: float) -> Callable:
    def change(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        changed = value.clone().reshape(-1)
        if changed.numel():
            at = torch.randint(0, changed.numel(), (1,), generator=generator)
            changed[at] = special
        return changed.reshape(value.shape)

    return change


def _all_specials(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    changed = value.clone().reshape(-1)
    if changed.numel():
        at = torch.randint(0, changed.numel(), (6,), generator=generator)
        changed[at] = torch.tensor([float("nan"), float("inf"), float("-inf")] * 2).to(value.dtype)
    return changed.reshape(value.shape)


OWN = Family("own inputs", "what the model's file gives", _own)


def hostile_batch(device: torch.device, parameters: int) -> int:
    """The most rows that hostile inputs have. parameters: how many elements the model's have."""
    slow = device.type == "cpu" and parameters >= _MANY_PARAMETERS
    return _FEWER_ROWS if slow else HOSTILE_BATCH


def hostile_families(
    values: list, precision: str, drawn_batches: tuple = (), largest_batch: int = HOSTILE_BATCH
) -> list:
    """The families beyond the model's own inputs, `values`, of which one has a batch extent.
    precision: the policy that products follow. drawn_batches: other sizes to try, drawn at
    random. largest_batch: of the others."""
    own = own_batch(values)
    batch = largest_batch if own is None else min(own, largest_batch)
    reach = _reach(precision, {t.dtype for t in passing.tensors_of(values)})
    bound = ErrorModel.STATED_BOUND
    families = [
        Family("normal", "values of both signs", _each_float(_normal), batch=batch, gradients=True),
        Family(
            "large mean",
            "a mean 100000 times the deviation breaks E[x²]−E[x]²",
            _each_float(_large_mean),
            batch=batch,
            gradients=True,
        ),
        Family(
            f"2^±{reach} across rows",
            "rows of unlike magnitude",
            _each_float(_across_rows(reach)),
            bound,
            batch,
            gradients=False,
        ),
        Family(
            f"2^±{reach} within rows",
            "elements of unlike magnitude meet in one product",
            _each_float(_within_rows(reach)),
            bound,
            batch,
        ),
        Family("denormals", "values below the normal range", _each_float(_denormals), bound, batch),
        Family(
            "zeros",
            "no magnitude to scale by",
            _each_float(lambda v, g: torch.zeros_like(v)),
            batch=batch,
        ),
        Family(
            "one NaN",
            "NaN must go where eager sends it",
            _each_float(_one_special(float("nan"))),
            batch=batch,
            gradients=True,
        ),
        Family("one Inf", "Inf likewise", _each_float(_one_special(float("inf"))), batch=batch),
        Family("NaN and ±Inf", "several at once", _each_float(_all_specials), batch=batch),
        Family("batch of 1", "the smallest batch", _own, batch=1),
    ]
    families += [
        Family(f"batch of {n}", "an odd batch", _own, batch=n, gradients=gradients)
        for n, gradients in ODD_BATCHES
    ]
    families += [
        Family(f"batch of {n}, drawn", "drawn for this run", _own, batch=n, unannounced=True)
        for n in drawn_batches
    ]
    families += [
        Family(
            "strided", "non-contiguous views", _own, batch=batch, layout="strided", gradients=True
        ),
        Family("sliced", "some columns of a wider tensor", _own, batch=batch, layout="sliced"),
        Family("turned", "another axis lies innermost", _own, batch=batch, layout="turned"),
        Family("misaligned", "data one element off", _own, batch=batch, layout="misaligned"),
    ]
    return families


def with_batch(values: list, batch: int | None, start: int = 0) -> list:
    """The values with their batch extent (the first tensor's first extent, wherever another
    tensor's first extent equals it) replaced by repeating or cutting rows, from row `start` on."""
    own = own_batch(values)
    if batch is None or own is None or own == batch:
        return values

    def cut(value: torch.Tensor) -> torch.Tensor:
        if not (value.dim() and value.shape[0] == own):
            return value
        if own == 0:
            return value.new_zeros((batch, *tuple(value.shape[1:])))
        return value[(start + torch.arange(batch)) % own].clone()

    return passing.map_tensors(values, cut)


def own_batch(values: list) -> int | None:
    return next((int(t.shape[0]) for t in passing.tensors_of(values) if t.dim()), None)


def lay_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, lying in memory as `layout` says: "contiguous", "strided", "sliced",
    "turned", "misaligned", or, where all are one value, "expanded"."""
    if layout == "strided" and value.dim():
        wide = value.new_empty((*tuple(value.shape[:-1]), 2 * value.shape[-1]))
        view = wide[..., ::2]
        view.copy_(value)
        return view
    if layout == "sliced" and value.dim():  # rows lie further apart than they are long
        columns = value.shape[-1]
        wide = value.new_empty((*tuple(value.shape[:-1]), columns + _MORE_COLUMNS))
        view = wide[..., :columns]
        view.copy_(value)
        return view
    if layout == "expanded" and value.numel():
        return value.reshape(-1)[:1].view([1] * value.dim()).expand(value.shape)
    if layout == "turned" and value.dim() > 1:  # of images: channels last; of a matrix: by columns
        axis = 1 if value.dim() > 2 else 0
        return value.movedim(axis, -1).contiguous().movedim(-1, axis)
    if layout == "misaligned":
        flat = value.new_empty(value.numel() + 1)
        view = flat[1:].view(value.shape)
        view.copy_(value)
        return view
    return value
