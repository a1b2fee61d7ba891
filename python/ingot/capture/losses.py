"""Losses written as what they are made of, where a region then takes them in one pass.

PyTorch writes what a loss is of each element and reads it again for the sum. Where gradients are
needed its derivative is one pass as well, and the losses stay PyTorch's, but for the cross entropy
of classes by number: PyTorch keeps all logarithms of probabilities, and writes a gradient of zeros
but for one a row, where the logarithm of a row's sum says as much.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch

from ingot.capture import custom_ops  # noqa: F401 - defines what is written
from ingot.capture.gains import pays_as_loss
from ingot.capture.nodes import (
    ASIDE,
    BATCHED,
    COUNTED_IN_FP32,
    LEFT_ALONE,
    LOSS,
    named_arguments,
)
from ingot.capture.surgery import Writer, example
from ingot.capture.table import HALVES, is_half

_aten, _ingot = torch.ops.aten, torch.ops.ingot
_NONE, _MEAN, _SUM = range(3)


def take_losses_apart(
    graph: torch.fx.Graph, needing: Container[torch.fx.Node] = (), autocast: bool = False
) -> None:
    """needing: nodes whose tensors need a gradient."""
    for node in list(graph.nodes):
        rules = _WITH_GRADIENT if node in needing else {} if autocast else _RULES
        rule = rules.get(node.target) if node.op == "call_function" else None
        if rule is None or LEFT_ALONE in node.meta or not pays_as_loss(node):
            continue
        replacement = rule(Writer(graph, node), *named_arguments(node).values())
        if replacement is not None:
            replacement.meta = dict(node.meta)
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)


def _is_plain(*tensors: torch.fx.Node, halves: bool = False) -> bool:
    """Of one shape, in fp32 or, all of them, in the same 16 bits."""
    values = [example(tensor) for tensor in tensors]
    same = all(tuple(value.shape) == tuple(values[0].shape) for value in values)
    same = same and all(value.dtype == values[0].dtype for value in values)
    return same and (values[0].dtype == torch.float32 or (halves and is_half(values[0])))


class _Elements:
    """Writes operators on elements of one shape."""

    def __init__(self, writer: Writer, like: torch.fx.Node):
        self.writer, self.sizes = writer, tuple(example(like).shape)

    def __call__(self, target: Callable, *args: Any) -> torch.fx.Node:
        return self.writer.call(target, self.sizes, *args)

    def condition(self, target: Callable, *args: Any) -> torch.fx.Node:
        return _condition(self(target, *args))

    def reduced(self, each: torch.fx.Node, reduction: int) -> torch.fx.Node:
        target = _aten.mean.dim if reduction == _MEAN else _aten.sum.dim_IntList
        return self.writer.call(target, (), each, list(range(len(self.sizes))))


def _of_elements(each: Callable) -> Callable:
    """The rule of a loss whose elements `each` writes, of input and target of one shape."""

    def rule(writer: Writer, x, target, reduction: int, *settings: Any) -> torch.fx.Node | None:
        if not _is_plain(x, target, halves=True) or reduction not in (_MEAN, _SUM):
            return None
        of = _Elements(writer, x)
        return of.reduced(each(of, x, target, *settings), reduction)

    return rule


def _distance(of: _Elements, x, target) -> torch.fx.Node:
    return of(_aten.abs.default, of(_aten.sub.Tensor, x, target))


def _square(of: _Elements, x, target) -> torch.fx.Node:
    difference = of(_aten.sub.Tensor, x, target)
    return of(_aten.mul.Tensor, difference, difference)


def _smooth_l1(writer: Writer, x, target, reduction, beta) -> torch.fx.Node | None:
    return _of_elements(_smooth)(writer, x, target, reduction, beta) if beta > 0 else None


def _smooth(of: _Elements, x, target, beta) -> torch.fx.Node:
    """Half the square over beta, below beta; above, the distance less half of beta."""
    distance = _distance(of, x, target)
    half = of(_aten.mul.Tensor, distance, 0.5)
    near = of(_aten.div.Tensor, of(_aten.mul.Tensor, half, distance), beta)
    far = of(_aten.sub.Tensor, distance, 0.5 * beta)
    below = of.condition(_aten.lt.Scalar, distance, beta)
    return of(_aten.where.self, below, near, far)


def _huber(of: _Elements, x, target, delta) -> torch.fx.Node:
    distance = _distance(of, x, target)
    near = of(_aten.mul.Tensor, of(_aten.mul.Tensor, distance, 0.5), distance)
    far = of(_aten.mul.Tensor, of(_aten.sub.Tensor, distance, 0.5 * delta), delta)
    within = of.condition(_aten.le.Scalar, distance, delta)
    return of(_aten.where.self, within, near, far)


def _divergence(of: _Elements, x, target, log_target) -> torch.fx.Node:
    """t·(log t - x), and -0·x where t is 0."""
    if log_target:
        difference = of(_aten.sub.Tensor, target, x)
        return of(_aten.mul.Tensor, of(_aten.exp.default, target), difference)
    is_none = of.condition(_aten.eq.Scalar, target, 0.0)
    entropy = of(_aten.mul.Tensor, target, of(_aten.log.default, target))
    entropy = of(_aten.masked_fill.Scalar, entropy, is_none, 0.0)
    return of(_aten.sub.Tensor, entropy, of(_aten.mul.Tensor, target, x))


def _with_logits(writer: Writer, x, target, weight, pos_weight, reduction):
    weights = [each for each in (weight, pos_weight) if each is not None]
    if any(example(each).dtype != example(x).dtype for each in weights):
        return None
    return _of_elements(_of_logits)(writer, x, target, reduction, weight, pos_weight)


def _of_logits(of: _Elements, x, target, weight, pos_weight) -> torch.fx.Node:
    """(1 - t)·x - log σ(x), the logarithm (p - 1)·t + 1 times where positives count p times."""
    logarithm = of(_aten.log_sigmoid.default, x)
    if pos_weight is not None:
        above = of.writer.call(_aten.sub.Tensor, example(pos_weight).shape, pos_weight, 1)
        times = of(_aten.add.Tensor, of(_aten.mul.Tensor, above, target), 1)
        logarithm = of(_aten.mul.Tensor, logarithm, times)
    others = of(_aten.mul.Tensor, of(_aten.rsub.Scalar, target, 1), x)
    each = of(_aten.sub.Tensor, others, logarithm)
    return each if weight is None else of(_aten.mul.Tensor, each, weight)


def _poisson(writer: Writer, x, target, log_input, full, eps, reduction) -> torch.fx.Node | None:
    if full:
        return None
    return _of_elements(_of_rate)(writer, x, target, reduction, log_input, eps)


def _of_rate(of: _Elements, x, target, log_input, eps) -> torch.fx.Node:
    """e^x - t·x, of a rate r itself r - t·log(r + eps)."""
    rate = of(_aten.exp.default, x) if log_input else x
    logarithm = x if log_input else of(_aten.log.default, of(_aten.add.Tensor, x, eps))
    return of(_aten.sub.Tensor, rate, of(_aten.mul.Tensor, target, logarithm))


def _triplet(writer: Writer, x, positive, negative, margin, p, eps, swap, reduction):
    if not _is_plain(x, positive, negative) or p not in (1, 2) or reduction == _NONE:
        return None
    of = _Elements(writer, x)
    rows = of.sizes[:-1]
    if len(rows) != 1:
        return None

    def apart(a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
        difference = of(_aten.add.Scalar, of(_aten.sub.Tensor, a, b), eps)
        return writer.call(_aten.linalg_vector_norm.default, rows, difference, p, [-1])

    far = apart(x, negative)
    if swap:
        far = writer.call(_aten.minimum.default, rows, far, apart(positive, negative))
    each = writer.call(_aten.sub.Tensor, rows, apart(x, positive), far)
    each = writer.call(_aten.add.Scalar, rows, each, margin)
    each = writer.call(_aten.clamp_min.default, rows, each, 0)
    return _Elements(writer, each).reduced(each, reduction)


def _cross_entropy(writer: Writer, x, target, weight, reduction, ignored, smoothing):
    """Of classes by number: (m - x[target]) + log Σ exp(x - m), with m the row's largest. Which
    element a target names is PyTorch's to find, and whether there is one."""
    if not _is_by_number(x, target, weight, reduction, smoothing) or not _is_plain(x):
        return None
    rows = tuple(example(x).shape[:1])
    of = _Elements(writer, x)
    largest = writer.call(_aten.amax.default, (*rows, 1), x, [1], True)
    exponentials = of(_aten.exp.default, of(_aten.sub.Tensor, x, largest))
    total = writer.call(_aten.sum.dim_IntList, rows, exponentials, [1])
    picked = _aside(writer.call(_aten.nll_loss.default, rows, x, target, None, _NONE, ignored))
    each = writer.call(_aten.squeeze.dim, rows, largest, 1)
    each = writer.call(_aten.add.Tensor, rows, each, picked)
    each = writer.call(_aten.add.Tensor, rows, each, writer.call(_aten.log.default, rows, total))
    return _of_rows(writer, writer.call, each, target, ignored, reduction)


def _cross_entropy_to_derive(writer: Writer, x, target, weight, reduction, ignored, smoothing):
    """The same in operators whose derivatives a region takes, x[target] as a sum of x where a
    column's number is the class, else of 0: one pass makes the gradient, from x, m and log Σ. A
    class that there is not gives NaN. Under autocast PyTorch casts what it takes the loss of."""
    if not _is_by_number(x, target, weight, reduction, smoothing):
        return None
    *rows, columns = example(x).shape
    if not isinstance(columns, int) or columns > COUNTED_IN_FP32:
        return None
    write = partial(_marked, writer)
    if example(writer.node).dtype == torch.float32 and example(x).dtype in HALVES:
        x = write(_aten.to.dtype, (*rows, columns), x, torch.float32)
    if not _is_plain(x):
        return None
    number = _aside(writer.call(_aten.to.dtype, rows, target, torch.float32))
    made = {"dtype": torch.float32, "device": example(x).device}
    numbers = writer.call(_aten.arange.default, (columns,), columns, **made)
    wanted = write(_aten.unsqueeze.default, (*rows, 1), number, 1)
    picked = write(_ingot.where_equal.default, (*rows, columns), numbers, wanted, x)
    picked = write(_aten.sum.dim_IntList, rows, picked, [1])
    largest = write(_ingot.largest.default, (*rows, 1), x)
    total = write(_ingot.log_total.default, rows, x, largest)
    each = write(_aten.sub.Tensor, rows, write(_aten.squeeze.dim, rows, largest, 1), picked)
    each = write(_aten.add.Tensor, rows, each, total)
    each = write(_ingot.nan_outside.default, rows, each, number, float(columns))
    return _of_rows(writer, write, each, target, ignored, reduction)


def _is_by_number(x, target, weight, reduction: int, smoothing: float) -> bool:
    """Of one row a class, without weights of classes."""
    plain = weight is None and smoothing == 0 and reduction in (_MEAN, _SUM)
    return plain and len(example(x).shape) == 2 and example(target).dtype == torch.int64


def _of_rows(writer: Writer, write: Callable, each, target, ignored: int, reduction: int):
    """Summed, or averaged, over the rows that are not ignored."""
    rows = tuple(example(each).shape)
    is_ignored = _flags(writer, _aten.eq.Scalar, rows, target, ignored)
    each = write(_aten.masked_fill.Scalar, rows, each, is_ignored, 0.0)
    loss = write(_aten.sum.dim_IntList, (), each, [0])
    if reduction == _SUM:
        return loss
    counted = _flags(writer, _aten.logical_not.default, rows, is_ignored)
    counted = write(_aten.to.dtype, rows, counted, torch.float32)
    return write(_aten.div.Tensor, (), loss, write(_aten.sum.dim_IntList, (), counted, [0]))


def _marked(writer: Writer, target: Callable, sizes: Sequence, *args: Any) -> torch.fx.Node:
    made = writer.call(target, sizes, *args)
    made.meta[LOSS] = True
    return made


def _condition(made: torch.fx.Node) -> torch.fx.Node:
    made.meta["val"] = made.meta["val"].to(torch.bool)
    return made


def _flags(writer: Writer, target: Callable, rows: tuple, *args: Any) -> torch.fx.Node:
    """One for each element of the batch."""
    return _aside(_condition(writer.call(target, rows, *args)))


def _aside(made: torch.fx.Node) -> torch.fx.Node:
    """Of each element of the batch, by PyTorch where it is of whole numbers."""
    made.meta |= {BATCHED: True, ASIDE: True}
    return made


_RULES: dict[Any, Callable] = {
    _aten.l1_loss.default: _of_elements(_distance),
    _aten.mse_loss.default: _of_elements(_square),
    _aten.smooth_l1_loss.default: _smooth_l1,
    _aten.huber_loss.default: _of_elements(_huber),
    _aten.kl_div.default: _of_elements(_divergence),
    _aten.binary_cross_entropy_with_logits.default: _with_logits,
    _aten.poisson_nll_loss.default: _poisson,
    _aten.triplet_margin_loss.default: _triplet,
    _aten.cross_entropy_loss.default: _cross_entropy,
}
_WITH_GRADIENT: dict[Any, Callable] = {_aten.cross_entropy_loss.default: _cross_entropy_to_derive}
