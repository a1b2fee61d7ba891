"""What eager PyTorch keeps for its backward pass."""

from __future__ import annotations

import torch

from ingot.capture.backward_operators import BY_RESULT
from ingot.capture.layout import hint
from ingot.capture.nodes import LOSS, OF_CONCATENATION, schema_name
from ingot.capture.products import KEEPING_OPERANDS, PRODUCTS
from ingot.capture.table import CASTS, COPYING, SHAPE_OPERATORS

# For whose derivatives eager keeps what they are applied to.
_KEPT_BY_EAGER = {
    *PRODUCTS,
    *KEEPING_OPERANDS,
    *("aten::pow", "aten::rms_norm", "aten::group_norm", "ingot::batch_norm"),
}
# As those, but that backward may find in another way than by what they are applied to.
_READ_BY_EAGER = {
    f"aten::{name}"
    for name in (
        "abs acos amax amin asin atan atan2 batch_norm celu clamp cos cosh elu erf glu hardsigmoid "
        "hardswish hardtanh instance_norm leaky_relu linalg_vector_norm log log10 log1p log2 "
        "log_sigmoid logsumexp max maximum min minimum norm prelu relu6 selu sin sinh softplus "
        "softsign std tan threshold var"
    ).split()
}
# These only for the gradient of the other operand.
_READ_FOR_THE_OTHER = {"aten::mul", "aten::div", "aten::addcmul", "aten::addcdiv", "aten::dot"}
# For whose derivatives eager keeps places, and no operand.
_PLACES_ALONE = {torch.ops.aten.max.dim, torch.ops.aten.min.dim}
# Which operand says where, and is kept for that; of the others nothing is.
MASKS = {"aten::where": 0, "aten::masked_fill": 1}


def is_view(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    return name in SHAPE_OPERATORS and name not in COPYING


def keeps_operand(node: torch.fx.Node) -> bool:
    """Whether eager keeps, for its derivative, what it is applied to."""
    name, operands = schema_name(node.target), node.all_input_nodes
    squares = name == "aten::mul" and len(operands) == 1 and node.args[0] is node.args[1]
    return squares or name in _KEPT_BY_EAGER


def is_eagers_too(node: torch.fx.Node, needing: set[torch.fx.Node]) -> bool:
    """Whether eager keeps the memory of what is handed out or comes in, and refuses it once
    written; or a loss is of it: a copy of logits would take as long as the loss does. needing: what
    has a gradient."""
    return (node in needing and node.target in BY_RESULT) or any(
        _is_of_loss(user)
        or (user in needing and _keeps(user, node, needing))
        or (is_view(user) and is_eagers_too(user, needing))
        for user in node.users
    )


def _is_of_loss(user: torch.fx.Node) -> bool:
    casts = schema_name(user.target) in CASTS
    return LOSS in user.meta or (casts and any(LOSS in below.meta for below in user.users))


def _keeps(user: torch.fx.Node, node: torch.fx.Node, needing: set[torch.fx.Node]) -> bool:
    """Whether eager's derivative of an operator reads this one of its operands."""
    name = schema_name(user.target)
    if user.meta.get(OF_CONCATENATION) is node:
        return False
    if name in PRODUCTS:
        alone = _is_cast_inside(user, node) and node not in needing
        copied = alone or _is_copied(user, node)
        return not copied and multiplies_what_needs(user, node, needing)
    if name == "aten::rms_norm" and node not in needing:
        return node.meta["val"].device.type != "cpu"  # where it is taken apart
    if user.target in _PLACES_ALONE:
        return False
    if name in _READ_FOR_THE_OTHER:
        others = (other for other in user.all_input_nodes if other is not node)
        return keeps_operand(user) or not needing.isdisjoint(others)
    mask = MASKS.get(name)
    is_mask = mask is not None and len(user.args) > mask and user.args[mask] is node
    return is_mask or keeps_operand(user) or name in _READ_BY_EAGER


def multiplies_what_needs(
    product: torch.fx.Node, node: torch.fx.Node, needing: set[torch.fx.Node]
) -> bool:
    """Whether a product's derivative reads a matrix: for the gradient of the other one."""
    name = schema_name(product.target)
    if name == "aten::einsum":
        matrices = list(product.args[1])
    else:
        first = 1 if name in ("aten::addmm", "aten::baddbmm") else 0
        matrices = list(product.args[first : first + 2])
    return node in matrices and any(
        other in needing for at, other in enumerate(matrices) if at != matrices.index(node)
    )


def _is_copied(product: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether a matrix times a batch of matrices, which eager turns, keeps the batch as a copy."""
    if schema_name(product.target) != "aten::matmul" or product.args[1] is not node:
        return False
    left, right = (matrix.meta["val"] for matrix in product.args)
    if left.dim() != 2 or right.dim() < 3:
        return False
    turned = right.mT
    both = zip(map(hint, turned.shape[:-1]), map(hint, turned.stride()))
    rows = [(size, stride) for size, stride in both if size != 1]  # which it makes one dimension
    return any(stride != size * below for (_, stride), (size, below) in zip(rows, rows[1:]))


def _is_cast_inside(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether autocast keeps a copy of an operand, in 16 bits."""
    return user.meta["val"].dtype != node.meta["val"].dtype
