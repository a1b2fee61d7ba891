"""What a region's derivative is written in, so that the importer takes it: backward operators of
PyTorch's as operators of its table.

Normalisations follow the stable forms of the forward pass: statistics by moments, x̂ by them, and
means in place of sums over a count, which may be the batch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from ingot.capture import custom_ops  # noqa: F401 - defines operators of ours
from ingot.capture.table import HALVES

_aten = torch.ops.aten


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in HALVES else x


def _statistics(x: torch.Tensor, axes: Sequence[int], eps: float):
    """Mean and reciprocal deviation, with the axes kept."""
    spread, mean = _aten.var.correction(x, axes, correction=0, keepdim=True), x.mean(axes, True)
    return mean, torch.rsqrt(spread + eps)


def _affine(x: torch.Tensor, weight, bias, shape: Sequence[int]) -> torch.Tensor:
    if weight is not None:
        x = x * _wide(weight).reshape(shape)
    return x if bias is None else x + _wide(bias).reshape(shape)


def _through_statistics(grad, normal, scale, axes: Sequence[int], centred: bool = True):
    """The gradient of x where x̂ = (x - mean)·rstd, from that of x̂; scale: rstd. centred: whether
    there is a mean."""
    along = (grad * normal).mean(axes, True)
    return scale * ((grad - grad.mean(axes, True) if centred else grad) - normal * along)


# Batch norm -------------------------------------------------------------------------------------


def _channels(x: torch.Tensor) -> tuple[list[int], list[int]]:
    return [0, *range(2, x.dim())], [1, x.shape[1], *[1] * (x.dim() - 2)]


def _batch_norm(x, weight, bias, training, momentum, eps):
    axes, shape = _channels(x)
    wide = _wide(x)
    mean, rstd = _statistics(wide, axes, eps)
    y = _affine((wide - mean) * rstd, weight, bias, shape).to(x.dtype)
    return y, mean.reshape(-1), rstd.reshape(-1)


def _batch_norm_with_running(x, weight, bias, mean, var, training, momentum, eps):
    if training:
        return _batch_norm(x, weight, bias, training, momentum, eps)
    shape = _channels(x)[1]
    rstd = torch.rsqrt(_wide(var) + eps)
    y = (_wide(x) - _wide(mean).reshape(shape)) * rstd.reshape(shape)
    empty = x.new_empty((0,))
    return _affine(y, weight, bias, shape).to(x.dtype), empty, empty


def _batch_norm_backward(grad, x, weight, mean, var, save_mean, save_rstd, training, eps, mask):
    shape = _channels(x)[1]
    if training:
        mean, rstd = save_mean.reshape(shape), save_rstd.reshape(shape)
    else:
        mean, rstd = _wide(mean).reshape(shape), torch.rsqrt(_wide(var) + eps).reshape(shape)
    normal = (_wide(x) - mean) * rstd
    scale = rstd if weight is None else rstd * _wide(weight).reshape(shape)
    return _channel_gradients(grad, x, weight, normal, scale, training, mask)


def _channel_gradients(grad, x, weight, normal, scale, training, mask):
    """Of x, weight and bias, those in `mask`. normal: x̂; scale: rstd times the weight. The weight
    is the same for all that a statistic is of: outside of the means, these are read off the same
    sums as the parameters' gradients."""
    (axes, _), wide = _channels(x), _wide(grad)
    grad_x = None
    if mask[0]:
        grad_x = _through_statistics(wide, normal, scale, axes) if training else wide * scale
        grad_x = grad_x.to(x.dtype)
    like = x.dtype if weight is None else weight.dtype
    grad_weight = (wide * normal).sum(axes).to(like) if mask[1] else None
    return grad_x, grad_weight, wide.sum(axes).to(like) if mask[2] else None


def _cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    reserve = x.new_empty((0,), dtype=torch.uint8)
    return *_batch_norm_with_running(x, weight, bias, mean, var, training, momentum, eps), reserve


def _cudnn_batch_norm_backward(x, grad, weight, mean, var, save_mean, save_rstd, eps, reserve):
    statistics = (mean, var, save_mean, save_rstd)
    return _batch_norm_backward(grad, x, weight, *statistics, True, eps, (True, True, True))


class BatchNormByStatistics(torch.autograd.Function):
    """Batch norm in training mode from statistics that were stored: mean, rstd, and rstd times the
    weight, or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, rstd, scale):
        shape = _channels(x)[1]
        if scale is None:
            scale = rstd if weight is None else rstd * _wide(weight)
        ctx.save_for_backward(x, weight, mean, rstd, scale)
        # As the forward pass rounds it: what an activation let through is let through again.
        y = (_wide(x) - mean.reshape(shape)) * scale.reshape(shape)
        return _affine(y, None, bias, shape).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, rstd, scale = ctx.saved_tensors
        shape = _channels(x)[1]
        mean, rstd, scale = (t.reshape(shape) for t in (mean, rstd, scale))
        normal, needs = (_wide(x) - mean) * rstd, ctx.needs_input_grad[:3]
        found = _channel_gradients(grad, x, weight, normal, scale, True, needs)
        return *found, None, None, None


# By results ---------------------------------------------------------------------------------------


class ByResult(torch.autograd.Function):
    """An operator whose result was stored: backward need not compute what it was applied to."""

    @staticmethod
    def forward(ctx, x, result, backward):
        ctx.gradient_of_x = backward
        made = result.view_as(result)
        ctx.save_for_backward(made)  # not what was given: a second derivative goes on to x
        return made

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return ctx.gradient_of_x(grad, result), None, None


def _of_elements(backward: Callable) -> Callable:
    return lambda result, x: ByResult.apply(x, result, backward)


def _along_a_dimension(backward: Callable) -> Callable:
    def by_result(result, x, dim, dtype=None):
        return ByResult.apply(x, result, lambda g, y: backward(g, y, dim, x.dtype))

    return by_result


def _log_total(result, x, largest):
    def backward(gradient, total):
        return gradient.unsqueeze(1) * torch.exp((x - largest) - total.unsqueeze(1))

    return ByResult.apply(x, result, backward)


# Operators with a result that was stored in front of their arguments.
BY_RESULT: dict[Any, Callable] = {
    _aten.relu.default: _of_elements(lambda g, y: _aten.threshold_backward.default(g, y, 0)),
    _aten.sigmoid.default: _of_elements(_aten.sigmoid_backward.default),
    _aten.tanh.default: _of_elements(_aten.tanh_backward.default),
    _aten.softmax.int: _along_a_dimension(_aten._softmax_backward_data.default),
    _aten._safe_softmax.default: _along_a_dimension(_aten._softmax_backward_data.default),
    _aten.log_softmax.int: _along_a_dimension(_aten._log_softmax_backward_data.default),
    torch.ops.ingot.log_total.default: _log_total,
}


class ExtremumByPlace(torch.autograd.Function):
    """The largest or smallest along a dimension, with a place that was stored. plain: PyTorch's."""

    @staticmethod
    def forward(ctx, plain, x, dim, keepdim, place):
        ctx.save_for_backward(place if keepdim else place.unsqueeze(dim))
        ctx.given, ctx.dim = (x.shape, keepdim), dim
        given = place.view_as(place)
        ctx.mark_non_differentiable(given)
        return plain(x, dim, keepdim)[0], given

    @staticmethod
    def backward(ctx, grad, _):
        (place,), (shape, keepdim) = ctx.saved_tensors, ctx.given
        grad = grad if keepdim else grad.unsqueeze(ctx.dim)
        placed = torch.zeros(shape, dtype=grad.dtype, device=grad.device)
        return None, placed.scatter(ctx.dim, place, grad), None, None, None


# Layer norm, RMS norm, group norm -----------------------------------------------------------------


def _inner(x: torch.Tensor, normalized_shape: Sequence[int]) -> list[int]:
    return list(range(x.dim() - len(normalized_shape), x.dim()))


def _layer_norm(x, normalized_shape, weight, bias, eps):
    wide = _wide(x)
    mean, rstd = _statistics(wide, _inner(x, normalized_shape), eps)
    y = _affine((wide - mean) * rstd, weight, bias, normalized_shape)
    return y.to(x.dtype), mean, rstd


def _layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, mask):
    return _row_norm_backward(grad, x, mean, rstd, weight, _inner(x, normalized_shape), mask)


def _row_norm_backward(grad, x, mean, rstd, weight, axes, mask):
    """Gradients of x, weight and bias, where the mask wants them. mean: None, of an RMS norm."""
    wide, normal = _wide(grad), _row_normal(x, mean, rstd)
    grad_x = None
    if mask[0]:
        inner = wide if weight is None else wide * _wide(weight)
        grad_x = _through_statistics(inner, normal, rstd, axes, mean is not None).to(x.dtype)
    like = x.dtype if weight is None else weight.dtype
    grad_weight = _over_outer(wide * normal, axes[0]).to(like) if mask[1] else None
    return grad_x, grad_weight, _over_outer(wide, axes[0]).to(like) if mask[2] else None


class RowNormByStatistics(torch.autograd.Function):
    """Layer norm over the last dimensions, or without a mean RMS norm, from statistics that were
    stored: [..., 1], of each row. normalized_shape: of those dimensions."""

    @staticmethod
    def forward(ctx, x, normalized_shape, weight, bias, mean, rstd):
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.axes = _inner(x, normalized_shape)
        return _affine(_row_normal(x, mean, rstd), weight, bias, normalized_shape).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, rstd = ctx.saved_tensors
        x_wanted, _, *parameters_wanted = ctx.needs_input_grad[:4]
        mask = x_wanted, *parameters_wanted
        grad_x, *rest = _row_norm_backward(grad, x, mean, rstd, weight, ctx.axes, mask)
        return grad_x, None, *rest, None, None


def _row_normal(x: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor) -> torch.Tensor:
    x = _wide(x)
    return (x if mean is None else x - mean) * rstd


def _over_outer(x: torch.Tensor, count: int) -> torch.Tensor:
    """Of no dimensions, PyTorch's sum is that of all."""
    return x.sum(list(range(count))) if count else x


def _in_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[N, groups, channels of a group, the rest]."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def _of_groups(parameter: torch.Tensor, groups: int) -> torch.Tensor:
    return _wide(parameter).reshape(1, groups, -1, 1)


def _group_norm(x, weight, bias, N, C, HxW, group, eps):
    wide = _in_groups(_wide(x), group)
    mean, rstd = _statistics(wide, [2, 3], eps)
    y = _affine((wide - mean) * rstd, weight, bias, (1, group, -1, 1))
    shape = (x.shape[0], group)
    return y.reshape(x.shape).to(x.dtype), mean.reshape(shape), rstd.reshape(shape)


def _group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, mask):
    wide, shape = _in_groups(_wide(grad), group), (x.shape[0], group, 1, 1)
    rstd = rstd.reshape(shape)
    normal = (_in_groups(_wide(x), group) - mean.reshape(shape)) * rstd
    grad_x = None
    if mask[0]:
        inner = wide if weight is None else wide * _of_groups(weight, group)
        grad_x = _through_statistics(inner, normal, rstd, [2, 3]).reshape(x.shape).to(x.dtype)
    like = x.dtype if weight is None else weight.dtype
    grad_weight = (wide * normal).sum([0, 3]).reshape(-1).to(like) if mask[1] else None
    return grad_x, grad_weight, wide.sum([0, 3]).reshape(-1).to(like) if mask[2] else None


class _Groups:
    """How a tensor [N, C, ...] is cut into groups of channels, in the order in which it lies: as
    [N, group, channel, space], or [N, space, group, channel]."""

    def __init__(self, x: torch.Tensor, groups: int):
        self._inner = x.dim() > 2 and x.stride(1) == 1 and x.shape[1] > 1
        self._sizes = (groups, x.shape[1] // groups)
        self._shape = x.shape
        self.channel, self.space = (3, 1) if self._inner else (2, 3)
        self.parameters = (1, 1, *self._sizes) if self._inner else (1, *self._sizes, 1)
        self.members = self._sizes[1] * math.prod(x.shape[2:])

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        space = math.prod(self._shape[2:])
        if self._inner:
            return _wide(x).movedim(1, -1).reshape(x.shape[0], space, *self._sizes)
        return _wide(x).reshape(x.shape[0], *self._sizes, space)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        if self._inner:
            channels_last = (x.shape[0], *self._shape[2:], self._shape[1])
            return x.reshape(channels_last).movedim(-1, 1)
        return x.reshape(x.shape[0], *self._shape[1:])

    def statistic(self, of_group: torch.Tensor) -> torch.Tensor:
        """[N, group]."""
        if self._inner:
            return of_group.unsqueeze(1).unsqueeze(3)
        return of_group.unsqueeze(2).unsqueeze(3)


class GroupNormByStatistics(torch.autograd.Function):
    """Group norm from statistics that were stored: mean and rstd of [sample, group]."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, rstd):
        ctx.save_for_backward(x, weight, mean, rstd)
        groups = _Groups(x, mean.shape[1])
        y = (groups.cut(x) - groups.statistic(mean)) * groups.statistic(rstd)
        return groups.whole(_affine(y, weight, bias, groups.parameters)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        """Sums of each channel come first: the parameters' gradients are sums of these over the
        batch, and the means over a group are sums of these over its channels."""
        x, weight, mean, rstd = ctx.saved_tensors
        groups = _Groups(x, mean.shape[1])
        rstd = groups.statistic(rstd)
        normal, wide = (groups.cut(x) - groups.statistic(mean)) * rstd, groups.cut(grad)
        along, total = (y.sum([groups.space], True) for y in (wide * normal, wide))
        grad_x = None
        if ctx.needs_input_grad[0]:
            of_channel = 1.0 if weight is None else _wide(weight).reshape(groups.parameters)
            mean_along, mean_total = (
                (sums * of_channel).sum([groups.channel], True) / groups.members
                for sums in (along, total)
            )
            inner = wide * of_channel - mean_total - normal * mean_along
            grad_x = groups.whole(rstd * inner).to(x.dtype)
        like = x.dtype if weight is None else weight.dtype
        of_parameters = (
            sums.sum([0]).reshape(-1).to(like) if needed else None
            for sums, needed in zip((along, total), ctx.needs_input_grad[1:3])
        )
        return grad_x, *of_parameters, None, None


# Softmax ------------------------------------------------------------------------------------------


def _softmax_backward(grad, output, dim, input_dtype):
    wide, y = _wide(grad), _wide(output)
    return (y * (wide - (wide * y).sum([dim], True))).to(input_dtype)


def _log_softmax_backward(grad, output, dim, input_dtype):
    wide = _wide(grad)
    return (wide - torch.exp(_wide(output)) * wide.sum([dim], True)).to(input_dtype)


def _silu_backward(grad, x):
    """By the sigmoid, which is cheap enough to be computed again where x is read twice."""
    wide = _wide(x)
    sigmoid = torch.sigmoid(wide)
    return (_wide(grad) * (sigmoid * (1 + wide * (1 - sigmoid)))).to(x.dtype)


def _log_sigmoid_backward(grad, x, buffer):
    """PyTorch's chooses between whole numbers, of which regions know none."""
    return (_wide(grad) * torch.sigmoid(-_wide(x))).to(x.dtype)


def _shrink_backward(grad, x, lambd):
    """In x's own type, which PyTorch makes of the number, too."""
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


def _threshold_backward(grad, x, threshold):
    """PyTorch's kernels compare in x's type on a GPU, in fp32 on a CPU."""
    compared = _wide(x) if x.device.type == "cpu" and threshold else x
    return torch.where(compared <= threshold, 0.0, grad)


def _hardtanh_backward(grad, x, least, most):
    """PyTorch's kernels compare in fp32."""
    wide = _wide(x)
    return torch.where((wide <= least) | (wide >= most), 0.0, grad)


# Elementwise --------------------------------------------------------------------------------------
# PyTorch's own.
_POINTWISE = """
    gelu_backward tanh_backward sigmoid_backward mish_backward leaky_relu_backward elu_backward
    softplus_backward hardswish_backward hardsigmoid_backward _prelu_kernel_backward
"""


def _table() -> dict[Any, Callable]:
    found: dict[Any, Callable] = dict(
        get_decompositions([getattr(_aten, name) for name in _POINTWISE.split()])
    )
    found.update(
        {
            _aten._native_batch_norm_legit.no_stats: _batch_norm,
            _aten._native_batch_norm_legit.default: _batch_norm_with_running,
            _aten.native_batch_norm.default: _batch_norm_with_running,
            _aten.native_batch_norm_backward.default: _batch_norm_backward,
            _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
            _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
            _aten.native_layer_norm.default: _layer_norm,
            _aten.native_layer_norm_backward.default: _layer_norm_backward,
            _aten.native_group_norm.default: _group_norm,
            _aten.native_group_norm_backward.default: _group_norm_backward,
            _aten.silu_backward.default: _silu_backward,
            _aten.threshold_backward.default: _threshold_backward,
            _aten.hardtanh_backward.default: _hardtanh_backward,
            _aten.hardshrink_backward.default: _shrink_backward,
            _aten.softshrink_backward.default: _shrink_backward,
            _aten.log_sigmoid_backward.default: _log_sigmoid_backward,
            _aten._softmax_backward_data.default: _softmax_backward,
            _aten._log_softmax_backward_data.default: _log_softmax_backward,
        }
    )
    return found


BACKWARD_OPERATORS = _table()
