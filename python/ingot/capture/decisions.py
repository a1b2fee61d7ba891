"""What a forward pass decided: comparisons and roundings to whole numbers, whose results jump where
an operand moves by the last bit.

Backward computes again what forward did not store, from numbers that were rounded where they were
stored, or by another kernel: what decides anew may decide otherwise, and then the gradient is that
of a branch which was not taken. So decisions are stored, of which eager keeps each too, and what a
maximum is of, which backward would find equal to no element of what it computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from ingot.capture.nodes import schema_name
from ingot.capture.products import PRODUCTS
from ingot.capture.table import HALVES, SHAPE_OPERATORS

_COMPARISONS = {f"aten::{name}" for name in "lt le gt ge eq ne".split()}
_ROUNDINGS = {f"aten::{name}" for name in "floor ceil trunc round sign sgn".split()}
# Of flags.
_LOGICAL = {
    f"aten::{name}"
    for name in (
        "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not __and__ __or__"
    ).split()
}
# What rounds nothing, and gives the same bits at each time.
_EXACT = {
    f"aten::{name}"
    for name in "relu neg abs clamp maximum minimum amax amin max min where masked_fill".split()
}

# Backward gives their gradient to what is equal to them.
_EXTREMA = {f"aten::{name}" for name in "amax amin max min".split()}


def computes_alike(device_type: str) -> bool:
    """Whether another kernel gives an expression the same bits. nvcc makes one rounding of a
    product and a sum, or two, by what else reads the product."""
    return device_type == "cpu"


def compared_with(extremum: torch.fx.Node) -> torch.fx.Node | None:
    """What backward compares with the largest or smallest of it; None for any other operator, and
    for those that say where it lies."""
    value, given = extremum.meta.get("val"), extremum.all_input_nodes
    is_one = schema_name(extremum.target) in _EXTREMA and len(given) == 1
    return given[0] if is_one and isinstance(value, torch.Tensor) else None


def decides(node: torch.fx.Node) -> bool:
    """Whether it is, or is put together from, comparisons or roundings, and something but further
    such reads it."""
    name = schema_name(node.target)
    if name in _LOGICAL:
        read = {schema_name(argument.target) for argument in node.all_input_nodes}
        return bool(read & (_COMPARISONS | _LOGICAL)) and _is_read(node)
    return _rounds(node, name) or (name in _COMPARISONS and _is_read(node))


def _rounds(node: torch.fx.Node, name: str) -> bool:
    return name in _ROUNDINGS or (name == "aten::div" and "rounding_mode" in node.kwargs)


def _is_read(flag: torch.fx.Node) -> bool:
    return any(schema_name(user.target) not in _LOGICAL for user in flag.users)


def is_repeated(node: torch.fx.Node, inside: Callable, stored: Callable) -> bool:
    """Whether computing a decision again decides the same, since all that it reads is found with
    the very bits that forward had. inside: whether a node is the region's; stored: whether the
    region stores it."""
    return all(is_exact(argument, inside, stored) for argument in node.all_input_nodes)


def is_exact(node: torch.fx.Node, inside: Callable, stored: Callable) -> bool:
    """Whether computing it again gives the same bits."""
    if not inside(node):
        return True
    name = schema_name(node.target)
    if name in PRODUCTS or stored(node):  # what follows in 16 bits reads what was not rounded
        return stored(node) and node.meta["val"].dtype not in HALVES
    known = name in _EXACT | _COMPARISONS | _LOGICAL | SHAPE_OPERATORS
    known = known or node.target is operator.getitem
    return known and all(is_exact(a, inside, stored) for a in node.all_input_nodes)
