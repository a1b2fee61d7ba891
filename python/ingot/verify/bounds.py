"""Runs of the fp64 original in which every operator's result is disturbed by stated roundings.

Monte Carlo arithmetic (Parker 1997, "Monte Carlo arithmetic: exploiting randomness in
floating-point arithmetic"): the spread of the disturbed results shows how far roundings of the
stated size carry through this very module, on these very inputs. It needs no analysis by operator,
so it serves whatever chain a model is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import blocks, criteria
from .criteria import ErrorModel
from .terms import Forms, TermSizes

_KEPT_BYTES = 4 << 30  # of products' sizes
_SUM_ROUNDINGS = 4.0  # of a blocked sum, relative to the mean
_SMALLEST_NORMAL = 2.0**-126  # results below it may be flushed to zero
_SEED = 20211  # of the disturbances


@dataclass(frozen=True)
class Roundings:
    """Sizes of the disturbances: of a product's terms, of a split's floor, of other results."""

    product: float
    range_floor: float
    pointwise: float
    model: ErrorModel

    @classmethod
    def of(cls, precision: str, dtype: torch.dtype, model: ErrorModel) -> Roundings:
        pointwise = torch.finfo(dtype).eps
        return cls(
            max(criteria.C1 * criteria.PRODUCT_ROUNDOFF[precision], pointwise),
            criteria.C2 * criteria.RANGE_FLOOR.get(precision, 0.0),
            pointwise,
            model,
        )


class Disturbance(TorchDispatchMode):
    """Within it, floating results carry random errors of the given sizes, but for a run that is
    started as exact, whose results are the operators' own.

    Products of leaves (inputs and parameters, known by their storage) are taken from the exact run,
    since every other repeats them, until something is written into a leaf: from then on it is as
    any other tensor. Kept are also the sizes of every product's errors, which the disturbances
    themselves hardly change. forms: of the parameters, which lie where `fixed` do.
    """

    def __init__(self, roundings: Roundings, forms: Forms, fixed: list) -> None:
        super().__init__()
        self._roundings = roundings
        self._forms = forms
        self._fixed = _storages(fixed)
        self._blocks_drawn = 0
        self._products: dict = {}
        self._sizes: dict = {}
        self._sizes_bytes = 0
        self._leaves: frozenset = frozenset()
        self._written: set = set()  # storages of leaves
        self._exact = False
        self._number = 0

    def start_run(self, leaves: list, exact: bool = False) -> None:
        """leaves: tensors that stay where they are, and hold the same values, from run to run."""
        self._leaves = _storages(leaves) - self._written
        self._exact = exact
        self._number = 0

    def has_written(self, tensors: list) -> bool:
        """Whether a run has written into any of these leaves, be it the values that were there."""
        return not self._written.isdisjoint(_storages(tensors))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        if func._schema.is_mutable:
            self._note_written(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._exact:
            return result
        sources = _storages(_tensors((args, kwargs)))
        mutable = func._schema.is_mutable
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
            return result  # a sparse gradient, or a sum of such, is made of what was disturbed
        if not (first.is_floating_point() or first.is_complex()):
            return result
        if not sources:
            return result  # a factory: constants are exact
        if first.untyped_storage().data_ptr() in sources:
            if mutable and func not in _EXACT:
                self._disturb(first)
            return result
        if func in _EXACT:
            return result
        if func is _aten.logsumexp.default:
            self._disturb_logsumexp(first, *args)
            return result
        if func in _SUMS and args[0].is_floating_point():
            self._disturb_sum(first, *args[:3])
            return result
        if func in _SOFTMAXES and first.numel():
            self._disturb_softmax(func, first, *args[:2])
        self._disturb(first)
        if isinstance(result, tuple) and func.name().endswith("_backward"):
            for other in result[1:]:  # gradients of parameters: sums over the batch
                if isinstance(other, torch.Tensor) and other.is_floating_point():
                    self._disturb(other, _SUM_ROUNDINGS)
        if func in _BATCH_NORMS and isinstance(result, (tuple, list)) and result[1].numel():
            self._disturb_statistics(*result[:3], args[1], _by_channel)
            self._disturb_running(*args[3:5], *result[1:3], momentum=args[6])
        if func in _ROW_NORMS and first.numel():
            weight, by_channel = _ROW_NORMS[func](args)
            self._disturb_statistics(*result[:3], weight, by_channel)
        if func in _BATCH_NORM_GRADIENTS:
            self._disturb_gradient_sums(first, *_BATCH_NORM_GRADIENTS[func](args))
        return result

    def _note_written(self, func: Any, args: tuple, kwargs: dict) -> None:
        written = [
            args[number] if number < len(args) else kwargs.get(argument.name)
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        leaves = _storages(_tensors(written)) & self._leaves
        self._written |= leaves
        self._leaves -= leaves

    def _disturb_sum(
        self,
        result: torch.Tensor,
        value: torch.Tensor,
        dims: Any = None,
        keepdim: bool = False,
    ) -> None:
        """Of terms of both signs it carries the roundings of its parts, however much of them it
        cancels; with gradients on, where it is over the batch, several of each."""
        parts = torch.linalg.vector_norm(value, 2, dims or None, keepdim)
        roundings = _SUM_ROUNDINGS if torch.is_grad_enabled() else 1.0
        size = self._pointwise_size(torch.hypot(result, parts), roundings)
        result.add_(self._noise(result).mul_(_finite_or_none(size)))

    def _disturb_logsumexp(
        self, result: torch.Tensor, value: torch.Tensor, dims: Any, keepdim: bool = False
    ) -> None:
        """It is the largest value and a logarithm. Where that is below the last bit of the value,
        no sum is off by more than what it leaves out: backward's exponentials would be infinite."""
        least = torch.where(torch.isfinite(result), result - value.amax(dims, keepdim), 0.0).abs()
        most = least + self._roundings.pointwise
        size = torch.minimum(_finite_or_none(self._pointwise_size(result)), most)
        result.add_(self._noise(result).mul_(size))

    def _disturb_softmax(
        self, func: Any, result: torch.Tensor, value: torch.Tensor, dim: int
    ) -> None:
        """All of a row share the roundings of its sum. They show where a gradient subtracts the
        row's mean, as an entropy's does."""
        if func is _aten._log_softmax.default:
            exact = torch.logsumexp(value, dim, keepdim=True)
            disturbed = exact.clone()
            self._disturb_logsumexp(disturbed, value, dim, keepdim=True)
            result.add_(torch.where(torch.isfinite(exact), exact - disturbed, 0.0))
        else:
            of_rows = self._noise(result.amax(dim, keepdim=True))
            result.mul_(of_rows.mul_(self._roundings.pointwise).add_(1))

    def _disturb_statistics(
        self,
        output: torch.Tensor,
        mean: torch.Tensor,
        inverse_deviation: torch.Tensor,
        weight: torch.Tensor | None,
        by_channel: Callable,
    ) -> None:
        """The mean of a batch, group or row is itself a rounded sum, and all that it is subtracted
        from share its error: it shows where they hardly vary, and again in the gradient, for which
        both statistics are kept. by_channel(statistic or weight, output): so that it broadcasts."""
        shift = self._sum_noise(mean)
        shown = by_channel(shift * inverse_deviation, output)
        if weight is not None:
            shown = shown * by_channel(weight, output)
        output.add_(torch.where(torch.isfinite(shown), shown, 0.0))
        mean.sub_(shift)
        inverse_deviation.add_(self._sum_noise(inverse_deviation))

    def _disturb_running(
        self,
        running_mean: torch.Tensor | None,
        running_variance: torch.Tensor | None,
        mean: torch.Tensor,
        inverse_deviation: torch.Tensor,
        momentum: float,
    ) -> None:
        if running_mean is not None:
            running_mean.add_(momentum * self._sum_noise(mean))
        if running_variance is not None:
            running_variance.add_(momentum * self._sum_noise(inverse_deviation**-2))

    def _disturb_gradient_sums(
        self,
        gradient: torch.Tensor,
        incoming: torch.Tensor,
        value: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor | None,
        inverse_deviation: torch.Tensor | None,
    ) -> None:
        """The gradient before a batch norm is what comes in less its mean and less its projection
        on the normalised input: two sums over the batch, whose errors all rows share. A product
        that sums over the batch again, the gradient of a weight, does not average them out."""
        if mean is None or not gradient.numel():
            return
        batch = [axis for axis in range(value.dim()) if axis != 1]
        normalised = (value - _by_channel(mean, value)) * _by_channel(inverse_deviation, value)
        shared = self._sum_noise(incoming.abs().mean(batch))
        along = self._sum_noise((incoming * normalised).abs().mean(batch))
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        error = _by_channel(shared, value) + _by_channel(along, value) * normalised
        error = error * _by_channel(scale, value)
        gradient.add_(torch.where(torch.isfinite(error), error, 0.0))

    def _sum_noise(self, size: torch.Tensor) -> torch.Tensor:
        """What a sum over the batch may be off by, where its terms are as large as `size`."""
        noise = self._noise(size) * (_SUM_ROUNDINGS * self._roundings.pointwise) * size.abs()
        return torch.where(torch.isfinite(noise), noise, 0.0)

    def _disturb(self, value: torch.Tensor, roundings: float = 1.0) -> None:
        def add(number: int, part: torch.Tensor) -> None:
            size = _finite_or_none(self._pointwise_size(part, roundings))
            part.add_(self._noise(part, number).mul_(size))

        self._in_blocks(add, blocks.parts_of(value))

    def _in_blocks(self, function: Callable[[int, Any], None], jobs: list) -> None:
        """function(number, job), the number being one that the noise of a block is drawn by."""
        drawn = self._blocks_drawn
        self._blocks_drawn += len(jobs)
        blocks.each(lambda i, job: function(drawn + i, job), jobs)

    def _pointwise_size(self, value: torch.Tensor, roundings: float = 1.0) -> torch.Tensor:
        """Of this many of the value's own roundings; not finite where it is not."""
        return value.abs().mul_(self._roundings.pointwise * roundings).add_(_SMALLEST_NORMAL)

    def _noise(self, like: torch.Tensor, number: int | None = None) -> torch.Tensor:
        """Between -1 and 1. number: of `_in_blocks`."""
        if number is None:
            number = self._blocks_drawn
            self._blocks_drawn += 1
        generator = torch.Generator(device=like.device).manual_seed(_SEED + number)
        return (
            torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
            .mul_(2)
            .sub_(1 + 1j if like.is_complex() else 1)
        )

    def _product(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        operands = PRODUCTS[func](args)
        number, self._number = self._number, self._number + 1
        # A leaf's storage is held by whoever named it, so that its address is its own.
        kept = _storages(_tensors((args, kwargs))) <= self._leaves
        key = (func, *map(_identity, torch.utils._pytree.tree_leaves((args, kwargs))))
        # The truth takes nothing from anywhere.
        exact = self._products.get(key) if kept and not self._exact else None
        if exact is None:
            exact = func(*args, **kwargs)
            if kept:
                self._products[key] = exact
        result = exact.clone() if kept else exact
        if not self._exact:
            self._disturb_product(result, self._sizes_of(number, func, *operands))
        return result

    def _sizes_of(self, number: int, func: Any, a: torch.Tensor, b: torch.Tensor) -> TermSizes:
        """number: of the product within its run."""
        key = (number, func, a.shape, b.shape)
        sizes = self._sizes.get(key)
        if sizes is None:
            fixed = b.untyped_storage().data_ptr() in self._fixed - self._written
            sizes = TermSizes.of(a, b, self._roundings.model, self._forms if fixed else None)
            self._sizes_bytes += sizes.core.numel() * sizes.core.element_size()
            if self._sizes_bytes <= _KEPT_BYTES:
                self._sizes[key] = sizes
        return sizes

    def _disturb_product(self, value: torch.Tensor, sizes: TermSizes) -> None:
        """Half of its power is shared by all rows of a column: tensor cores truncate towards zero,
        so a column's roundings have a bias, which the mean of a batch does not average out. An
        operand's own roundings are shared as well: what they make of its direction scales all of a
        row or column, which a variance does not average out."""
        shared = self._noise(value.new_empty(value.shape[-1]))
        rounding = self._roundings
        half = 2**-0.5
        scale = rounding.product * half / math.sqrt(max(sizes.terms, 1))
        of_rows = self._noise(value.new_empty((*value.shape[:-1], 1))).mul_(scale).add_(1)
        of_columns = self._noise(value.new_empty(value.shape[-1])).mul_(scale).add_(1)

        def add(number: int, rows: slice) -> None:
            part = value[..., rows, :]
            size = self._pointwise_size(part, half)
            size += sizes.block(rows, rounding.product * half, rounding.range_floor * half)
            part.mul_(of_rows[..., rows, :]).mul_(of_columns)
            part.add_(self._noise(part, number).add_(shared).mul_(_finite_or_none(size)))

        self._in_blocks(add, blocks.rows_of_parts(value))


def _finite_or_none(size: torch.Tensor) -> torch.Tensor:
    """What is not finite is not disturbed."""
    if size.device.type == "cpu" and torch.isfinite(size.sum()):
        return size  # as nearly always
    return torch.where(torch.isfinite(size), size, 0.0)


def _storages(tensors: list) -> frozenset:
    """Where they lie; a sparse one is made of others that do."""
    dense = (t for t in tensors if t.layout is torch.strided)
    return frozenset(t.untyped_storage().data_ptr() for t in dense)


def _identity(argument: Any) -> Any:
    """What two arguments of a product have in common where they are the same values."""
    if not isinstance(argument, torch.Tensor):
        return argument
    place = argument.data_ptr(), tuple(argument.shape), tuple(argument.stride())
    return (*place, argument.dtype, argument.is_conj(), argument.is_neg())


def _by_channel(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C] as a value of each channel of [B, C, ...]."""
    return value.reshape([1, -1] + [1] * (like.dim() - 2))


def _by_group(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, groups], or [C], as a value of each channel of [B, C, ...]."""
    if value.dim() == 2:
        value = value.repeat_interleave(like.size(1) // value.size(1), 1)
    return value.reshape([-1, like.size(1)] + [1] * (like.dim() - 2))


def _by_row(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A layer norm's statistics and weight broadcast as they are."""
    return value


def _tensors(tree: Any) -> list:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


_aten = torch.ops.aten
# (first operand, second) of arguments.
PRODUCTS: dict = {
    _aten.mm.default: lambda args: (args[0], args[1]),
    _aten.bmm.default: lambda args: (args[0], args[1]),
    _aten.addmm.default: lambda args: (args[1], args[2]),
    _aten.baddbmm.default: lambda args: (args[1], args[2]),
}
_BATCH_NORMS = {
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten.cudnn_batch_norm.default,
}
# (weight, how statistics and weight become those of each channel)
_ROW_NORMS = {
    _aten.native_layer_norm.default: lambda args: (args[2], _by_row),
    _aten.native_group_norm.default: lambda args: (args[1], _by_group),
}
# (incoming gradient, input, weight, mean and inverse deviation of the batch); no mean in eval mode.
_BATCH_NORM_GRADIENTS = {
    _aten.native_batch_norm_backward.default: lambda args: (
        args[:3] + (args[5:7] if args[7] else (None, None))
    ),
    _aten.cudnn_batch_norm_backward.default: lambda args: (
        args[1],
        args[0],
        args[2],
        args[5],
        args[6],
    ),
}
_SOFTMAXES = frozenset({_aten._softmax.default, _aten._log_softmax.default})
_SUMS = frozenset({_aten.sum.dim_IntList, _aten.sum.default})
# They copy, choose or set values: nothing is rounded. A disturbed maximum would be none of the
# values that it is of, and have no derivative.
_EXACT = frozenset(
    getattr(packet, overload)
    for packet in (
        *(_aten.clone, _aten.copy_, _aten._to_copy, _aten.detach, _aten.fill_, _aten.zero_),
        *(_aten.cat, _aten.stack, _aten.repeat, _aten.flip, _aten.roll, _aten.constant_pad_nd),
        *(_aten.where, _aten.masked_fill, _aten.index, _aten.index_select, _aten.gather),
        *(_aten.neg, _aten.abs, _aten.relu, _aten.relu_, _aten.threshold, _aten.hardtanh),
        *(_aten.clamp, _aten.clamp_min, _aten.clamp_max, _aten.maximum, _aten.minimum),
        *(_aten.amax, _aten.amin, _aten.max, _aten.min, _aten.sort, _aten.topk, _aten.kthvalue),
        *(_aten.cummax, _aten.cummin, _aten.max_pool2d_with_indices),
        *(_aten.max_pool3d_with_indices, _aten.adaptive_max_pool2d, _aten.triu, _aten.tril),
        *(_aten.floor, _aten.ceil, _aten.round, _aten.trunc, _aten.sign),
    )
    for overload in packet.overloads()
)
