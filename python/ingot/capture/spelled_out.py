"""Operators under another name, and short formulas that have a name of their own, written as the
operators that the table knows, and that PyTorch's own implementations call.

Rules receive a writer and the operator's arguments; `decompose` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.layout import written
from ingot.capture.surgery import Writer, example, sizes_of

_aten = torch.ops.aten
_LENGTH = 2  # the order of the norm
_OTHER_NAMES = {
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "special_erf": "erf",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "special_round": "round",
}


def _renamed() -> dict[Any, Callable]:
    """Overloads of one name each for that of the other."""
    found = {
        _aten.special_softmax.default: _as(_aten.softmax.int),
        _aten.special_log_softmax.default: _as(_aten.log_softmax.int),
        _aten.special_xlogy.default: _as(_aten.xlogy.Tensor),
        _aten.special_xlogy.self_scalar: _as(_aten.xlogy.Scalar_Self),
        _aten.special_xlogy.other_scalar: _as(_aten.xlogy.Scalar_Other),
    }
    for name, plain in _OTHER_NAMES.items():
        packet, same = getattr(_aten, name), getattr(_aten, plain)
        for overload in {*packet.overloads()} & {*same.overloads()}:
            if "out" not in overload:
                found[getattr(packet, overload)] = _as(getattr(same, overload))
    return found


def _as(target: Callable) -> Callable:
    def rule(writer: Writer, *_: Any) -> torch.fx.Node:
        node = writer.node
        return writer.call(target, example(node).shape, *node.args, **node.kwargs)

    return rule


def _with_its_dtype(rule: Callable) -> Callable:
    """A rule for what is computed in the dtype of its operands, all of one: no promotion, no cast
    of autocast's."""

    def checked(writer: Writer, *arguments: Any) -> torch.fx.Node | None:
        dtype = example(writer.node).dtype
        operands = [example(each) for each in writer.node.all_input_nodes]
        same = all(isinstance(each, torch.Tensor) and each.dtype == dtype for each in operands)
        return rule(writer, *arguments) if same else None

    return checked


def _moved(writer: Writer, x, source, destination) -> torch.fx.Node:
    rank = example(x).dim()
    source, destination = (
        [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]
        for dims in (source, destination)
    )
    rest = iter(dim for dim in range(rank) if dim not in source)
    comes_from = dict(zip(destination, source))
    order = [comes_from[at] if at in comes_from else next(rest) for at in range(rank)]
    return writer.call(_aten.permute.default, example(writer.node).shape, x, order)


def _norm(writer: Writer, x, order, dim, keepdim, dtype) -> torch.fx.Node | None:
    """Of vectors, as most are meant; of matrices, of two dimensions, where it is that of all their
    numbers."""
    dims = [dim] if isinstance(dim, int) else dim
    if dtype is not None or (order is not None and len(dims or range(example(x).dim())) != 1):
        return None
    return _norm_of(writer, x, _LENGTH if order is None else order, dims, keepdim)


def _matrix_norm(writer: Writer, x, order, dims, keepdim, dtype) -> torch.fx.Node | None:
    if dims is None and example(x).dim() == 2:
        dims = [0, 1]
    is_plain = order == "fro" and dtype is None and dims is not None and len(dims) == 2
    return _norm_of(writer, x, _LENGTH, dims, keepdim) if is_plain else None


def _norm_of(writer: Writer, x, order, dims, keepdim: bool) -> torch.fx.Node:
    target = _aten.linalg_vector_norm.default
    return writer.call(target, example(writer.node).shape, x, order, dims, keepdim)


def _similarity(writer: Writer, x, y, dim: int, eps: float) -> torch.fx.Node | None:
    """Σ (x / |x|)·(y / |y|), lengths of eps at least: which PyTorch's derivative does not see."""
    shape = _broadcast(sizes_of(x), sizes_of(y))
    if shape is None or not shape:
        return None
    dim = dim % len(shape) - len(shape)
    along = [sizes[dim] if len(sizes) >= -dim else 1 for sizes in map(sizes_of, (x, y))]
    if written(along[0]) != written(along[1]):  # one is expanded, and its length with it
        return None

    def directed(a: torch.fx.Node) -> torch.fx.Node:
        sizes = list(sizes_of(a))
        sizes[dim] = 1
        length = writer.call(_aten.linalg_vector_norm.default, sizes, a, _LENGTH, [dim], True)
        longer = writer.call(_aten.clamp_min.default, sizes, length, eps)
        if writer.needs_gradient:
            missing = writer.call(_aten.sub.Tensor, sizes, longer, length)
            missing = writer.call(_aten.detach.default, sizes, missing)
            longer = writer.call(_aten.add.Tensor, sizes, length, missing)
        return writer.call(_aten.div.Tensor, sizes_of(a), a, longer)

    product = writer.call(_aten.mul.Tensor, shape, directed(x), directed(y))
    return writer.call(_aten.sum.dim_IntList, example(writer.node).shape, product, [dim])


def _distance(writer: Writer, x, y, p, eps, keepdim) -> torch.fx.Node | None:
    shape = _broadcast(sizes_of(x), sizes_of(y))
    if shape is None or not shape:
        return None
    apart = writer.call(_aten.sub.Tensor, shape, x, y)
    apart = writer.call(_aten.add.Scalar, shape, apart, eps)
    return _norm_of(writer, apart, p, [-1], keepdim)


def _dot(writer: Writer, x, y, dim: int) -> torch.fx.Node | None:
    shape = _broadcast(sizes_of(x), sizes_of(y))
    if shape is None or min(len(sizes_of(x)), len(sizes_of(y))) < 2:
        return None
    return _sum_of_products(writer, shape, x, y, [dim])


def _einsum(writer: Writer, equation: str, tensors, path) -> torch.fx.Node | None:
    """Of two tensors whose dimensions have the same names, some of them summed over: no product of
    matrices."""
    operands, _, result = equation.replace(" ", "").partition("->")
    names, _, others = operands.partition(",")
    kept = "".join(name for name in names if name in result)
    one_name_each = len({*names}) == len(names) == len(sizes_of(tensors[0]))
    summed = [at for at, name in enumerate(names) if name not in result]
    if names != others or kept != result or not (one_name_each and names.isalpha() and summed):
        return None
    shape = _broadcast(*map(sizes_of, tensors))
    return None if shape is None else _sum_of_products(writer, shape, *tensors, summed)


def _sum_of_products(writer: Writer, shape: tuple, x, y, dims: list[int]) -> torch.fx.Node | None:
    """In fp32: PyTorch makes a product of it that autocast runs in 16 bits, and sums in 32."""
    if example(writer.node).dtype != torch.float32:
        return None
    product = writer.call(_aten.mul.Tensor, shape, x, y)
    return writer.call(_aten.sum.dim_IntList, example(writer.node).shape, product, dims)


def _broadcast(sizes: Sequence, others: Sequence) -> tuple | None:
    """The shape that both are expanded to, without asking what a symbol is; None: it is not said
    by what is written."""
    rank = max(len(sizes), len(others))
    shape = []
    for a, b in zip(*((*[1] * (rank - len(each)), *each) for each in (sizes, others))):
        if written(a) == written(b) or written(b) == 1:
            shape.append(a)
        elif written(a) == 1:
            shape.append(b)
        else:
            return None
    return tuple(shape)


SPELLED_OUT: dict[Any, Callable] = {
    **_renamed(),
    _aten.moveaxis.int: _moved,
    _aten.moveaxis.intlist: _moved,
    _aten.movedim.int: _moved,
    _aten.movedim.intlist: _moved,
    _aten.linalg_norm.default: _with_its_dtype(_norm),
    _aten.linalg_norm.ord_str: _with_its_dtype(_matrix_norm),
    _aten.linalg_matrix_norm.str_ord: _with_its_dtype(_matrix_norm),
    _aten.cosine_similarity.default: _with_its_dtype(_similarity),
    _aten.pairwise_distance.default: _with_its_dtype(_distance),
    _aten.linalg_vecdot.default: _with_its_dtype(_dot),
    _aten.einsum.default: _with_its_dtype(_einsum),
}
