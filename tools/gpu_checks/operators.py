"""Operators alone, and losses, of the kinds that public benchmark suites hold: what needs no
product and is one pass over memory, or two. Each at a real size, and at a small, odd one for
CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Lone(nn.Module):
    """parts: modules, and sizes of parameters."""

    def __init__(self, what: Callable, parts: dict[str, Any]):
        super().__init__()
        self.what = what
        for name, part in parts.items():
            made = part if isinstance(part, nn.Module) else nn.Parameter(torch.randn(part))
            setattr(self, name, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


class OfTwo(Lone):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.what(self, x, y)


class OfThree(Lone):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.what(self, x, y, z)


# Forwards as people write them, with the tensors named: what takes any number costs Dynamo more.
_MODULES = (Lone, OfTwo, OfThree)


@dataclass(frozen=True)
class Operator:
    """large, small: sizes of the first tensor. others: functions of that tensor that make the
    further ones. parts: by the first tensor's sizes. training: whether the module is in training
    mode. rereads: how often the first tensor must be read again, since what is computed of it needs
    all of it and nothing could keep it."""

    name: str
    what: Callable
    large: tuple[int, ...]
    small: tuple[int, ...]
    others: tuple[Callable, ...] = ()
    parts: Callable[[tuple[int, ...]], dict[str, Any]] = field(default=lambda sizes: {})
    first: Callable | None = None
    training: bool = False
    rereads: int = 0

    def sizes(self, small: bool) -> tuple[int, ...]:
        return self.small if small else self.large

    def build(self, small: bool) -> Lone:
        module = _MODULES[len(self.others)]
        return module(self.what, self.parts(self.sizes(small))).train(self.training)

    def inputs(self, small: bool, device: Any = "cpu") -> list[torch.Tensor]:
        x = torch.randn(self.sizes(small), device=device)
        x = self.first(x) if self.first else x
        return [x, *(other(x) for other in self.others)]


OPERATORS: list[Operator] = []


def _operator(large, small, *others, **options):
    """The function below it, as an operator of its name."""

    def register(what: Callable) -> Callable:
        OPERATORS.append(Operator(what.__name__, what, large, small, others, **options))
        return what

    return register


def named(name: str) -> Operator:
    return next(operator for operator in OPERATORS if operator.name == name)


_LONG, _ROWS = (1024, 393216), (32768, 4096)
_ODD = (2048, 65535)
_IMAGES, _FEW_IMAGES = (8, 64, 512, 512), (16, 64, 256, 256)
_THREE = (32, 4096, 1024)
_SMALL_ROWS, _SMALL_IMAGES, _SMALL_THREE = (5, 37), (3, 8, 5, 6), (3, 11, 12)


def _alike(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x)


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, x.shape[1], (x.shape[0],), device=x.device)


def _signs(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 2, (x.shape[-1],), device=x.device).to(x.dtype) * 2 - 1


def _probabilities(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x).add_(0.01).div_(x.shape[-1])


# Along rows --------------------------------------------------------------------------------------


@_operator(_LONG, _SMALL_ROWS)
def softmax_long_rows(m, x):
    return torch.softmax(x, dim=1)


@_operator(_LONG, _SMALL_ROWS)
def log_softmax_long_rows(m, x):
    return torch.log_softmax(x, dim=1)


@_operator(_LONG, _SMALL_ROWS)
def logsumexp_long_rows(m, x):
    return torch.logsumexp(x, dim=1)


@_operator(_FEW_IMAGES, _SMALL_IMAGES)
def softmax_channels(m, x):
    return torch.softmax(x, dim=1)


@_operator(_ROWS, _SMALL_ROWS, parts=lambda sizes: {"weight": (sizes[-1],)})
def rms_norm_rows(m, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight


@_operator(_IMAGES, _SMALL_IMAGES)
def rms_norm_channels(m, x):
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)


@_operator(_ODD, _SMALL_ROWS)
def l1_norm_rows(m, x):
    return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


@_operator(_ODD, _SMALL_ROWS)
def l2_norm_rows(m, x):
    return x / torch.norm(x, p=2, dim=1, keepdim=True)


@_operator(_IMAGES, _SMALL_IMAGES, rereads=1)
def frobenius_norm(m, x):
    return x / torch.norm(x, p="fro")


@_operator(_ROWS, _SMALL_ROWS)
def normalize_rows(m, x):
    return F.normalize(x, dim=1)


@_operator(_IMAGES, _SMALL_IMAGES)
def normalize_channels(m, x):
    return F.normalize(x, dim=1)


@_operator(_ROWS, _SMALL_ROWS)
def cumulative_sum(m, x):
    return torch.cumsum(x, dim=1)


@_operator((4096, 32768), _SMALL_ROWS)
def cumulative_sum_long_rows(m, x):
    return torch.cumsum(x, dim=1)


@_operator((1 << 20, 128), _SMALL_ROWS)
def cumulative_sum_short_rows(m, x):
    return torch.cumsum(x, dim=1)


# Norms -------------------------------------------------------------------------------------------


@_operator(_ROWS, _SMALL_ROWS, parts=lambda sizes: {"norm": nn.LayerNorm(sizes[-1])})
def layer_norm_rows(m, x):
    return m.norm(x)


@_operator(_FEW_IMAGES, _SMALL_IMAGES, parts=lambda sizes: {"norm": nn.LayerNorm(sizes[1:])})
def layer_norm_images(m, x):
    return m.norm(x)


@_operator(_IMAGES, _SMALL_IMAGES, parts=lambda sizes: {"norm": nn.GroupNorm(8, sizes[1])})
def group_norm_images(m, x):
    return m.norm(x)


@_operator(_IMAGES, _SMALL_IMAGES, parts=lambda sizes: {"norm": nn.InstanceNorm2d(sizes[1])})
def instance_norm_images(m, x):
    return m.norm(x)


@_operator(
    (32, 64, 256, 256),
    _SMALL_IMAGES,
    parts=lambda sizes: {"norm": nn.BatchNorm2d(sizes[1])},
    training=True,
    rereads=1,
)
def batch_norm_images(m, x):
    return m.norm(x)


# Losses ------------------------------------------------------------------------------------------


@_operator(_ROWS, _SMALL_ROWS, _classes)
def cross_entropy(m, x, target):
    return F.cross_entropy(x, target)


@_operator((8192, 16384), _SMALL_ROWS, _alike)
def mse_loss(m, x, target):
    return torch.mean((x - target) ** 2)


@_operator((8192, 16384), _SMALL_ROWS, _alike)
def huber_loss(m, x, target):
    return F.smooth_l1_loss(x, target)


@_operator((8192, 16384), _SMALL_ROWS, _probabilities)
def logits_loss(m, x, target):
    return F.binary_cross_entropy_with_logits(x, target)


@_operator((8192, 16384), _SMALL_ROWS, _probabilities, first=_probabilities)
def kl_div(m, x, target):
    return F.kl_div(torch.log(x), target, reduction="batchmean")


@_operator((8192, 16384), _SMALL_ROWS, _probabilities)
def distillation_loss(m, x, target):
    return F.kl_div(F.log_softmax(x, dim=1), target, reduction="batchmean")


@_operator((32768, 4096), _SMALL_ROWS, _alike)
def mse_of_layer_norm(m, x, target):
    return F.mse_loss(F.layer_norm(x, x.shape[1:]), target)


@_operator((32768, 1024), _SMALL_ROWS, _alike, _alike)
def triplet_margin_loss(m, x, positive, negative):
    return F.triplet_margin_loss(x, positive, negative, margin=1.0)


@_operator((8192, 16384), _SMALL_ROWS, _signs)
def hinge_loss(m, x, target):
    return torch.mean(torch.clamp(1 - x * target, min=0))


# Reductions over one dimension of three ----------------------------------------------------------


@_operator(_THREE, _SMALL_THREE)
def sum_middle(m, x):
    return torch.sum(x, dim=1, keepdim=True)


@_operator((32, 4096, 1023), _SMALL_THREE)
def mean_middle_odd(m, x):
    return torch.mean(x, dim=1)


@_operator(_THREE, _SMALL_THREE)
def max_middle(m, x):
    return torch.max(x, dim=1)[0]


@_operator(_THREE, _SMALL_THREE)
def argmax_middle(m, x):
    return torch.argmax(x, dim=1)


@_operator((16, 21, 1024, 1024), (2, 21, 12, 10))
def argmax_channels(m, x):
    return torch.argmax(x, dim=1)


@_operator((1024, 128256), _SMALL_ROWS)
def argmax_rows(m, x):
    return torch.argmax(x, dim=1)


@_operator(_THREE, _SMALL_THREE)
def min_last(m, x):
    return torch.min(x, dim=2)[0]


@_operator(_THREE, _SMALL_THREE)
def mean_first(m, x):
    return torch.mean(x, dim=0)


# Element by element ------------------------------------------------------------------------------


@_operator((8192, 16384), _SMALL_ROWS)
def swish_by_hand(m, x):
    return x * torch.sigmoid(x)


@_operator((8192, 16384), _SMALL_ROWS)
def softsign(m, x):
    return x / (1 + torch.abs(x))


@_operator((8192, 16384), _SMALL_ROWS)
def gelu_by_hand(m, x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


# At 10 to 50 MB ----------------------------------------------------------------------------------


@_operator((4096, 1024), _SMALL_ROWS)
def small_softmax(m, x):
    return torch.softmax(x, dim=1)


@_operator((2048, 4096), _SMALL_ROWS, parts=lambda sizes: {"weight": (sizes[-1],)})
def small_rms_norm(m, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight


@_operator((4096, 2048), _SMALL_ROWS)
def small_normalize(m, x):
    return F.normalize(x, dim=1)


@_operator((4096, 1000), _SMALL_ROWS, _classes)
def small_cross_entropy(m, x, target):
    return F.cross_entropy(x, target)


@_operator((2048, 2048), _SMALL_ROWS, _alike)
def small_huber_loss(m, x, target):
    return F.smooth_l1_loss(x, target)


@_operator(
    (4, 64, 128, 128), _SMALL_IMAGES, parts=lambda sizes: {"norm": nn.GroupNorm(8, sizes[1])}
)
def small_group_norm(m, x):
    return m.norm(x)
