"""Products of 16 bits whose rows do not start at multiples of 16 bytes, as those of a vocabulary of
50257 words do not.

cuBLAS takes kernels of earlier GPUs for them, at an eighth of the rate, or at a quarter where the
length is even. (H100, bf16: the gradients of 4096×1024→50265 3.0 and 2.9 ms, of rows with zeros
behind them 0.51 and 0.53, a copy of the rows 0.51.) In a backward pass both products that read the
gradient share one such copy.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ingot.capture.layout import hint
from ingot.capture.surgery import example, last_input
from ingot.capture.table import PIECE, has_uneven_rows, is_half

_aten = torch.ops.aten
# Multiplications from which a copy costs less than the slow product.
_LEAST_WORK = 1 << 31


def pad_gradients(graph: torch.fx.Graph) -> None:
    """Of a backward pass: products read padded rows of what has uneven ones. (gradient · w, and
    gradientᵀ · x.)"""
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not _aten.mm.default:
            continue
        a, b = node.args
        turned = a.target is _aten.t.default
        gradient = a.args[0] if turned else a
        if not _is_slow(gradient, node):
            continue
        if gradient not in copies:
            copies[gradient] = _copy_of(gradient)
        node.target = transposed_product_of_padded if turned else product_of_padded
        columns = (example(gradient).shape[1],) if turned else ()
        node.args = (copies[gradient], b, *columns)


def _is_slow(gradient: torch.fx.Node, product: torch.fx.Node) -> bool:
    rows, result = example(gradient), example(product)
    if not has_uneven_rows(rows) or rows.device.type != "cuda" or not is_half(result):
        return False
    return hint(rows.shape[0]) * rows.shape[1] * hint(result.shape[1]) >= _LEAST_WORK


def _copy_of(gradient: torch.fx.Node) -> torch.fx.Node:
    value = example(gradient)
    with gradient.graph.inserting_after(last_input(gradient)):
        copy = gradient.graph.call_function(padded, (gradient,))
    copy.meta["val"] = value.new_empty((value.shape[0], _whole(value.shape[1])))
    return copy


def _whole(length: int) -> int:
    return -(-length // PIECE) * PIECE


def padded(x: torch.Tensor) -> torch.Tensor:
    """[M, N] with zeros behind each row, up to a multiple of 16 bytes."""
    rows, columns = x.shape
    copy = x.new_empty((rows, _whole(columns)))
    copy[:, :columns] = x
    copy[:, columns:] = 0
    return copy


def product_of_padded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a·b for a padded a and b [N, K]."""
    return torch.mm(a, F.pad(b, (0, 0, 0, a.shape[1] - b.shape[0])))


def transposed_product_of_padded(
    a: torch.Tensor, b: torch.Tensor, columns: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """aᵀ·b for a padded a, of so many columns, and b [M, K]. dtype: fp32 where it is to be wider
    than both."""
    made = torch.mm(a.t(), b) if dtype is None else torch.mm(a.t(), b, out_dtype=dtype)
    return made[:columns]


PADDED = (padded, product_of_padded, transposed_product_of_padded)
