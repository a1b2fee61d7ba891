"""Forty chains behind convolutions, of the kinds that public benchmark suites hold: each with its
input, at a real size, and at a small, odd one for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Chain(nn.Module):
    """A convolution and what stands behind it. parts: modules, and sizes of parameters."""

    def __init__(self, convolution: nn.Module, behind: Callable, parts: dict[str, Any]):
        super().__init__()
        self.convolution, self.behind = convolution, behind
        for name, part in parts.items():
            made = part if isinstance(part, nn.Module) else nn.Parameter(torch.randn(part))
            for parameter in made.parameters() if isinstance(made, nn.Module) else ():
                nn.init.normal_(parameter)
            setattr(self, name, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self, self.convolution(x))


@dataclass(frozen=True)
class ConvChain:
    """layer: of torch.nn; channels: in and out; large, small: of the input, batch and space;
    parts: by the number of channels out."""

    name: str
    layer: type
    channels: tuple[int, int]
    large: tuple[int, ...]
    small: tuple[int, ...]
    options: dict
    behind: Callable
    parts: Callable[[int], dict[str, Any]]

    def build(self, small: bool) -> Chain:
        inner, outer = self._channels(small)
        return Chain(self.layer(inner, outer, **self.options), self.behind, self.parts(outer))

    def inputs(self, small: bool) -> tuple[torch.Tensor]:
        batch = (self.small if small else self.large)[0]
        return (torch.randn(batch, self._channels(small)[0], *self._space(small)),)

    def _channels(self, small: bool) -> tuple[int, int]:
        inner, outer = self.channels
        return (min(inner, 4), min(outer, 8)) if small else (inner, outer)

    def _space(self, small: bool) -> tuple[int, ...]:
        return (self.small if small else self.large)[1:]


CHAINS: list[ConvChain] = []
# Of input, batch first, then space.
_LINE, _PLANE, _ROOM = (64, 16384), (64, 128, 128), (16, 16, 64, 64)
_SMALL = {1: (3, 21), 2: (3, 9, 11), 3: (3, 5, 6, 7)}


def _chain(layer: type, channels: tuple[int, int], large, kernel=3, parts=None, **options):
    """The function below it: what stands behind the convolution, as a chain of its name."""

    def register(behind: Callable) -> Callable:
        name = behind.__name__
        made = parts or (lambda channels: {})
        small, options["kernel_size"] = _SMALL[len(large) - 1], kernel
        CHAINS.append(ConvChain(name, layer, channels, large, small, options, behind, made))
        return behind

    return register


def named(name: str) -> ConvChain:
    return next(chain for chain in CHAINS if chain.name == name)


def _wide(dimensions: int, **names: int) -> Callable:
    """Parameters [C, 1, ...] beside so many dimensions of space; names: those wanted."""
    return lambda c: dict.fromkeys(names, (c, *[1] * dimensions))


# One dimension -----------------------------------------------------------------------------------


@_chain(nn.Conv1d, (32, 128), _LINE, parts=lambda c: {"norm": nn.BatchNorm1d(c)})
def conv1d_batchnorm_relu_mean(m, y):
    return torch.relu(m.norm(y)).mean(-1)


@_chain(nn.Conv1d, (32, 128), _LINE, parts=lambda c: {"norm": nn.LayerNorm(c)})
def conv1d_gelu_channel_layernorm(m, y):
    return m.norm(F.gelu(y).transpose(1, 2)).transpose(1, 2)


@_chain(nn.ConvTranspose1d, (32, 128), _LINE, parts=lambda c: {"norm": nn.GroupNorm(4, c)})
def convtranspose1d_groupnorm_silu(m, y):
    return F.silu(m.norm(y))


# Two dimensions ----------------------------------------------------------------------------------


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=_wide(2, bias=1))
def conv2d_relu_biasadd(m, y):
    return torch.relu(y) + m.bias


@_chain(nn.Conv2d, (16, 64), _PLANE)
def conv2d_subtract_hardswish_maxpool_mish(m, y):
    return F.mish(F.max_pool2d(F.hardswish(y - 0.5), 2))


@_chain(nn.Conv2d, (16, 64), _PLANE)
def conv2d_subtract_subtract_mish(m, y):
    return F.mish(y - 0.5 - 0.2)


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=lambda c: {"norm": nn.BatchNorm2d(c)})
def conv2d_softplus_tanh_multiply_batchnorm(m, y):
    return m.norm(torch.tanh(F.softplus(y)) * y)


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=lambda c: {"norm": nn.InstanceNorm2d(c)})
def conv2d_instancenorm_divide(m, y):
    return m.norm(y) / 2.0


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=lambda c: {"norm": nn.GroupNorm(4, c)})
def conv2d_groupnorm_tanh_hardswish_residual_logsumexp(m, y):
    z = F.hardswish(torch.tanh(m.norm(y)))
    return torch.logsumexp(y + z, dim=1, keepdim=True)


@_chain(nn.Conv2d, (16, 64), _PLANE)
def conv2d_min_tanh_tanh(m, y):
    return torch.tanh(torch.tanh(torch.min(y, dim=1, keepdim=True)[0]))


@_chain(
    nn.Conv2d,
    (16, 64),
    _PLANE,
    parts=lambda c: {"bias": (c, 1, 1), "scale": (c, 1, 1), "norm": nn.GroupNorm(4, c)},
)
def conv2d_add_scale_sigmoid_groupnorm(m, y):
    return m.norm(torch.sigmoid((y + m.bias) * m.scale))


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=_wide(2, multiplier=1))
def conv2d_multiply_leakyrelu_gelu(m, y):
    return F.gelu(F.leaky_relu(y * m.multiplier))


@_chain(nn.Conv2d, (16, 64), _PLANE)
def conv2d_gelu_globalavgpool(m, y):
    return F.adaptive_avg_pool2d(F.gelu(y), 1).squeeze(-1).squeeze(-1)


@_chain(nn.Conv2d, (16, 64), _PLANE)
def conv2d_hardswish_relu(m, y):
    return torch.relu(F.hardswish(y))


@_chain(nn.Conv2d, (16, 64), _PLANE)
def conv2d_avgpool_sigmoid_sum(m, y):
    return torch.sigmoid(F.avg_pool2d(y, 4)).sum(dim=[1, 2, 3])


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=_wide(2, bias=1))
def conv2d_tanh_scale_biasadd_maxpool(m, y):
    return F.max_pool2d(torch.tanh(y) * 2.0 + m.bias, 4)


@_chain(
    nn.Conv2d,
    (16, 64),
    _PLANE,
    parts=lambda c: {"norm": nn.GroupNorm(4, c), "scale": (c, 1, 1)},
)
def conv2d_groupnorm_scale_maxpool_clamp(m, y):
    return torch.clamp(F.max_pool2d(m.norm(y) * m.scale, 4), 0.0, 1.0)


@_chain(nn.Conv2d, (16, 64), _PLANE, parts=lambda c: {"norm": nn.GroupNorm(8, c)})
def conv2d_gelu_groupnorm(m, y):
    return m.norm(F.gelu(y))


@_chain(nn.Conv2d, (16, 128), _PLANE)
def conv2d_mean_logsumexp(m, y):
    return torch.logsumexp(y.mean(dim=(2, 3)), dim=1)


@_chain(nn.ConvTranspose2d, (16, 64), _PLANE, parts=_wide(2, bias=1))
def convtranspose2d_bias_clamp_scale_clamp_divide(m, y):
    z = torch.clamp(y + m.bias, 0.0, 1.0) * 2.0
    return torch.clamp(z, 0.0, 1.0) / 2.0


@_chain(nn.ConvTranspose2d, (16, 64), _PLANE)
def convtranspose2d_maxpool_hardtanh_mean_tanh(m, y):
    z = F.hardtanh(F.max_pool2d(y, 2))
    return torch.tanh(z.mean(dim=(2, 3), keepdim=True))


@_chain(nn.ConvTranspose2d, (16, 64), _PLANE, parts=_wide(2, bias=1))
def convtranspose2d_globalavgpool_bias_logsumexp_sum_multiply(m, y):
    z = y.mean(dim=(2, 3), keepdim=True) + m.bias
    return torch.logsumexp(z, dim=1, keepdim=True).sum(dim=(2, 3)) * 10.0


@_chain(nn.ConvTranspose2d, (16, 64), _PLANE, parts=_wide(2, bias=1))
def convtranspose2d_softmax_bias_scale_sigmoid(m, y):
    return torch.sigmoid((torch.softmax(y, dim=1) + m.bias) * 2.0)


@_chain(nn.ConvTranspose2d, (16, 64), _PLANE)
def convtranspose2d_add_min_gelu_multiply(m, y):
    return F.gelu(torch.clamp(y + 0.5, max=0.0)) * 2.0


@_chain(nn.ConvTranspose2d, (16, 64), _PLANE, parts=lambda c: {"norm": nn.GroupNorm(8, c)})
def convtranspose2d_gelu_groupnorm(m, y):
    return m.norm(F.gelu(y))


# Three dimensions --------------------------------------------------------------------------------


@_chain(nn.Conv3d, (8, 32), _ROOM)
def conv3d_softmax_maxpool_maxpool(m, y):
    return F.max_pool3d(F.max_pool3d(torch.softmax(y, dim=1), 2), 2, ceil_mode=True)


@_chain(nn.Conv3d, (8, 32), _ROOM, parts=_wide(3, scale=1, bias=1))
def conv3d_scale_tanh_multiply_sigmoid(m, y):
    return torch.sigmoid(torch.tanh(y * m.scale) * m.bias)


@_chain(nn.Conv3d, (8, 32), _ROOM, parts=lambda c: {"norm": nn.GroupNorm(8, c)})
def conv3d_groupnorm_mean(m, y):
    return m.norm(y).mean(dim=[1, 2, 3, 4])


@_chain(nn.Conv3d, (8, 32), _ROOM, parts=_wide(3, addend=1))
def conv3d_leakyrelu_sum_clamp_gelu(m, y):
    return F.gelu(torch.clamp(F.leaky_relu(y, 0.2) + m.addend, -1.0, 1.0))


@_chain(nn.Conv3d, (8, 32), _ROOM, parts=_wide(3, bias=1))
def conv3d_divide_max_globalavgpool_bias_sum(m, y):
    z = F.adaptive_avg_pool3d(F.max_pool3d(y / 2.0, 2), 1)
    return (z + m.bias).sum(dim=1)


@_chain(nn.Conv3d, (8, 32), _ROOM)
def conv3d_min_softmax(m, y):
    return torch.softmax(torch.min(y, dim=2)[0], dim=1)


@_chain(nn.Conv3d, (8, 32), _ROOM)
def conv3d_mish_tanh(m, y):
    return torch.tanh(F.mish(y))


@_chain(nn.Conv3d, (8, 32), _ROOM, parts=_wide(3, bias=1))
def conv3d_relu_leakyrelu_gelu_sigmoid_bias(m, y):
    return torch.sigmoid(F.gelu(F.leaky_relu(torch.relu(y)))) + m.bias


@_chain(
    nn.Conv3d,
    (8, 32),
    _ROOM,
    parts=lambda c: {"scale": (c, 1, 1, 1), "norm": nn.InstanceNorm3d(c)},
)
def conv3d_multiply_instancenorm_clamp_multiply_max(m, y):
    z = torch.clamp(m.norm(y * m.scale), -1.0, 1.0) * m.scale
    return torch.max(z, dim=1)[0]


@_chain(nn.ConvTranspose3d, (8, 32), _ROOM, parts=lambda c: {"norm": nn.GroupNorm(4, c)})
def convtranspose3d_swish_groupnorm_hardswish(m, y):
    return F.hardswish(m.norm(torch.sigmoid(y) * y))


@_chain(nn.ConvTranspose3d, (8, 32), _ROOM, parts=lambda c: {"norm": nn.BatchNorm3d(c)})
def convtranspose3d_batchnorm_avgpool_avgpool(m, y):
    return F.avg_pool3d(F.avg_pool3d(m.norm(y), 2), 2, ceil_mode=True)


@_chain(nn.ConvTranspose3d, (8, 32), _ROOM, parts=_wide(3, subtract=1))
def convtranspose3d_maxpool_softmax_subtract_swish_max(m, y):
    z = torch.softmax(F.max_pool3d(y, 2), dim=1) - m.subtract
    return torch.max(torch.sigmoid(z) * z, dim=1)[0]


@_chain(nn.ConvTranspose3d, (8, 32), _ROOM, parts=lambda c: {"bias": (1, 1, 1, 1)})
def convtranspose3d_logsumexp_hardswish_subtract_clamp(m, y):
    z = torch.logsumexp(y, dim=1, keepdim=True)
    return torch.clamp(z * torch.sigmoid(z + 3) / 6 - m.bias, -1.0, 1.0)


@_chain(nn.ConvTranspose3d, (8, 32), _ROOM, parts=lambda c: {"norm": nn.BatchNorm3d(c)})
def convtranspose3d_scale_batchnorm_globalavgpool(m, y):
    return F.adaptive_avg_pool3d(m.norm(y * 2.0), 1)


@_chain(nn.ConvTranspose3d, (8, 32), _ROOM, parts=_wide(3, bias=1))
def convtranspose3d_sum_residual_multiply_residual(m, y):
    z = y.clone().detach()
    return ((y + m.bias) + z) * z + z
