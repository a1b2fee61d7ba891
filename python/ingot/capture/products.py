"""Rows of the table: matrix products among ATen's operators, and what is one in disguise."""

from __future__ import annotations

import string

from ingot.capture.layout import (
    Leaf,
    UnfitError,
    Value,
    product,
    relabel_drop,
    relabel_insert,
    relabel_permute,
)
from ingot.capture.pointwise import pointwise
from ingot.capture.reductions import reduced_along
from ingot.capture.region import Operand
from ingot.capture.table import FLOATING, Call, row

# Whose results a backward pass can read instead of computing them again.
PRODUCTS = frozenset(
    f"aten::{name}" for name in "linear mm bmm matmul mv addmm baddbmm einsum".split()
)
# Whose derivatives read none of their operands.
PASSING_ON = frozenset(("aten::add", "aten::sub", "aten::neg"))
# Whose derivatives read no more than sizes.
REGROUPED_OR_SUMMED = frozenset(("aten::cat", "aten::sum", "aten::mean"))
# Whose derivatives read their operand, not their result: PyTorch keeps it even where the result is
# kept too.
KEEPING_OPERANDS = frozenset(("aten::gelu", "aten::silu", "aten::mish", "aten::layer_norm"))


def _check_dtypes(call: Call, *operands: Operand) -> None:
    """Fake tensors let a product of different dtypes pass; PyTorch's kernels refuse it."""
    if not call.autocast and len({operand.dtype for operand in operands}) > 1:
        raise UnfitError("operands of different dtypes")


def _matmul(call: Call, a: Operand, b: Operand, transposed: bool) -> Value:
    """a [..., K] times b [K, N] (transposed: [N, K]), or both with a batch in front."""
    region = call.region
    _check_dtypes(call, a, b)
    if len(a.sizes) == 2 and len(b.sizes) == 3 and b.sizes[0] == -1:
        if a.sizes[0] < 0:
            raise UnfitError("the batch size appears twice")  # each entry's row with every matrix
        a = relabel_insert(a, 0)
    a = region.materialise(a)
    if call.dtype in FLOATING:
        a = region.cast(a, call.dtype)
    if len(a.sizes) < 1 or len(b.sizes) not in (2, 3):
        raise UnfitError("a product of other than matrices")
    contracted, columns = (b.sizes[-1], b.sizes[-2]) if transposed else (b.sizes[-2], b.sizes[-1])
    if contracted < 0 or columns < 0:
        raise UnfitError("a product over, or with as many columns as, the batch")
    a_id, lead_dims, rows = _rows_by_features(call, a)
    if len(b.sizes) == 3 and (len(a.sizes) != 3 or {a.sizes[0], b.sizes[0]} not in ({-1}, {1, -1})):
        raise UnfitError("a batched product over other than the batch")
    b_id, transpose_b = _right_operand(call, b, transposed)
    identity = region.emit("matmul", [a_id, b_id], {"transpose_b": transpose_b})
    extents, sizes = (a.extents[0], rows, 1, columns), (*a.sizes[:-1], columns)
    if len(b.sizes) == 3 and a.sizes[0] == 1:
        # One matrix before a batch of others.
        extents, sizes, lead_dims = (-1, *extents[1:]), (-1, *sizes[1:]), ((0,), *lead_dims[1:])
    dims = (*lead_dims, (3,) if columns != 1 else ())
    return Value(identity, extents, dims, sizes, call.dtype or a.dtype)


def _rows_by_features(call: Call, a: Value):
    """`a` as [batch, rows, 1, K]: id, axes of the result's leading dimensions, rows; and the rows
    and groups of the result, among which two leading dimensions share those rows."""
    for size, run in zip(a.sizes, a.dims):
        if product([a.extents[axis] for axis in run]) != size:
            raise UnfitError("an expanded tensor")
    lead = [axis for run in a.dims[:-1] for axis in run if a.extents[axis] != 1]
    last = [axis for axis in a.dims[-1] if a.extents[axis] != 1]
    features = product([a.extents[axis] for axis in last])
    if features < 0:
        raise UnfitError("a product over the batch")
    rest = [axis for axis in lead if axis != 0]
    rows = product([a.extents[axis] for axis in rest])
    if lead != sorted(lead) or (last and lead and last[0] < lead[-1]):
        raise UnfitError("a product of transposed elements")
    identity = call.region.view(a, (a.extents[0], rows, 1, features))
    dims = []
    for run in a.dims[:-1]:
        own = [axis for axis in run if a.extents[axis] != 1]
        inner = [axis for axis in own if axis != 0]
        if inner and inner != rest:
            raise UnfitError("a product whose rows lie on several dimensions")
        dims.append((*own[: len(own) - len(inner)], 1) if inner else tuple(own))
    return identity, tuple(dims), rows


def _right_operand(call: Call, b: Operand, transposed: bool):
    region = call.region
    if isinstance(b, Leaf):
        # Row-major as it lies in memory: [N, 1, K] with transpose_b, or [K, 1, N].
        order = [own[0] if isinstance(own, tuple) else own for own in b.order[-2:]]
        flip = None not in order and order[0] > order[1]
        matrix = ((3,), (1,)) if flip else ((1,), (3,))
        dims = (((0,),) if len(b.sizes) == 3 else ()) + matrix
        extents = [1, 1, 1, 1]
        for size, (axis,) in zip(b.sizes, dims):
            extents[axis] = size
        if len(b.sizes) == 3 and extents[0] not in (1, -1):
            raise UnfitError("a batched product over other than the batch")
        identity = region.leaf(b, dims, tuple(extents))
        value = Value(identity, tuple(extents), dims, b.sizes, b.dtype)
    else:
        value, matrix = b, b.dims[-2:]
        if matrix not in (((1,), (3,)), ((3,), (1,))) or (
            len(b.sizes) == 3 and b.dims[0] not in ((0,), ())
        ):
            raise UnfitError("a product whose right operand does not lie on rows and features")
        flip = matrix == ((3,), (1,))
    if call.dtype in FLOATING:
        value = region.cast(value, call.dtype)
    return value.id, transposed != flip


def _with_bias(call: Call, value: Value, bias: Operand | None) -> Value:
    if bias is None:
        return value
    _check_dtypes(call, value, bias)
    return pointwise(call, "add", [value, bias])


@row("aten::linear")
def _linear(call: Call) -> Value:
    value = _matmul(call, call.tensor("input"), call.tensor("weight"), True)
    return _with_bias(call, value, call.get("bias"))


@row("aten::mm", "aten::bmm")
def _mm(call: Call) -> Value:
    return _matmul(call, call.tensor("self"), call.tensor("mat2"), False)


@row("aten::matmul", "aten::mv")
def _matmul_row(call: Call) -> Value:
    a, b = call.tensor("self"), call.tensor("vec" if call["name"] == "aten::mv" else "other")
    if len(b.sizes) != 1:
        return _matmul(call, a, b, False)
    product_value = _matmul(call, a, relabel_insert(b, 1), False)
    return relabel_drop(product_value, [-1])


@row("aten::addmm", "aten::baddbmm")
def _addmm(call: Call) -> Value:
    names = ("mat1", "mat2") if call["name"] == "aten::addmm" else ("batch1", "batch2")
    value = _matmul(call, *(call.tensor(name) for name in names), False)
    if call.number("alpha", 1) != 1:
        value = pointwise(call, "mul", [value, call.number("alpha")])
    bias = call.tensor("self")
    if call.number("beta", 1) != 1:
        bias = pointwise(call, "mul", [bias, call.number("beta")])
    return _with_bias(call, value, bias)


@row("aten::einsum")
def _einsum(call: Call) -> Operand:
    """The products among einsums: one index of both operands disappears, the second operand has at
    most the batch beside it and an index of its own."""
    equation, operands = call["equation"].replace(" ", ""), call["tensors"]
    if len(operands) != 2 or not all(isinstance(o, (Value, Leaf)) for o in operands):
        raise UnfitError("an einsum of other than two tensors")
    if not any(size < 0 for size in operands[0].sizes):
        equation, operands = _swapped(equation), operands[::-1]
    first, second, out = _indices(equation, [len(operand.sizes) for operand in operands])
    contracted = [i for i in first if i in second and i not in out]
    shared = [i for i in first if i in second and i in out]
    own = [i for i in second if i not in first]
    kept = [i for i in first if i not in contracted]
    if (
        any(len(set(indices)) != len(indices) for indices in (first, second, out))
        or (len(contracted), len(own)) != (1, 1)
        or sorted(out) != sorted(kept + own)
        or shared not in ([], first[:1])
    ):
        raise UnfitError(f"'{equation}', which is not a product of rows with a matrix")
    a = relabel_permute(operands[0], [first.index(i) for i in kept + contracted])
    b = relabel_permute(operands[1], [second.index(i) for i in shared + own + contracted])
    value = _matmul(call, a, b, True)
    return relabel_permute(value, [(kept + own).index(i) for i in out])


def _swapped(equation: str) -> str:
    operands, arrow, out = equation.partition("->")
    first, _, second = operands.partition(",")
    return f"{second},{first}{arrow}{out}"


def _indices(equation: str, ranks: list[int]) -> tuple[list[str], list[str], list[str]]:
    """The letters of both operands and of the result; "..." stands for letters not used, as many as
    an operand's rank leaves."""
    operands, arrow, out = equation.partition("->")
    texts = operands.split(",")
    if not arrow or len(texts) != 2:
        raise UnfitError(f"'{equation}', which does not name its result's indices")
    letters = [c for c in string.ascii_letters if c not in equation]
    spread = max(
        (rank - len(text) + 3 for text, rank in zip(texts, ranks) if "..." in text), default=0
    )
    filled = []
    for text, rank in zip([*texts, out], [*ranks, None]):
        count = spread if rank is None else rank - len(text) + 3
        filled.append(list(text.replace("...", "".join(letters[spread - count : spread]))))
    return tuple(filled)


@row("aten::_weight_norm")
def _weight_norm(call: Call) -> Value:
    """v·(g / ‖v‖) for each row (dim 0) or column (dim 1) of a matrix."""
    v, dim = call.value("v"), call.get("dim", 0)
    if len(v.sizes) != 2 or dim not in (0, 1):
        raise UnfitError("a norm of other than a matrix's rows or columns")
    call.arguments = {**call.arguments, "self": v, "keepdim": True}
    length = reduced_along(call, "norm", 1 - dim, {"p": 2})
    return pointwise(call, "mul", [v, pointwise(call, "div", [call["g"], length])])
