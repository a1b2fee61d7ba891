"""What a graph's node says of itself: its operator, its arguments, where the user wrote it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# Before the path of a module: what the frame that TorchDynamo captured calls the root.
_FRAME_LOCAL = re.compile(r"^L\['\w+'\]\.?")
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Whole numbers that fp32 holds one by one.
COUNTED_IN_FP32 = 1 << 24

# What a placeholder's meta says of a parameter: its path in the module.
PARAMETER = "ingot_parameter"
_CONVOLUTIONS = {
    f"aten::{name}"
    for name in (
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"
    ).split()
}
# In the meta of a view that must stay PyTorch's: rewriting leaves the node alone.
LEFT_ALONE = "ingot_left_alone"
# In the meta of a view that is no step: a result of the graph's, as those read it who get it.
RETURNED = "ingot_returned"
# In the meta of a node whose dimension 0 is the batch, where its operands do not tell.
BATCHED = "ingot_batched"
# In the meta of an operator that takes parts of samples for samples (windows of images, frames of
# videos): how many each sample of the graph's batch has.
PER_SAMPLE = "ingot_per_sample"
# In the meta of a slice that regions read where it lies, as a piece of the whole; in that of a
# concatenation whose parts a region writes where they belong.
PART, JOINED = "ingot_part", "ingot_joined"
# In the meta of what a loss was written as where gradients are needed: worth a region by itself.
LOSS = "ingot_loss"
# The operator of ours that an LSTM, a GRU or an RNN is in a captured graph (recurrent.py).
RECURRENT = "ingot::recurrent"
# In the meta of what was written for PyTorch to run: nothing of the user's was left to it.
ASIDE = "ingot_aside"
# In the meta of an operator upon a part of a concatenation: that operand, whose memory was the
# concatenation's.
OF_CONCATENATION = "ingot_of_concatenation"
# In the meta of a cast that autocast makes in front of one product: that product's name.
CAST_FOR = "ingot_cast_for"
# In the meta of a cast that autocast makes: no line of the model asks for it.
IMPLIED = "ingot_implied"
# In the meta of an operator that the forward keeps from the autocast around its call.
WITHOUT_AUTOCAST = "ingot_without_autocast"


def schema_name(target: Any) -> str:
    """ "aten::add", without overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", str(target))


def operator_name(node: torch.fx.Node) -> str:
    return schema_name(node.target).rpartition(":")[2]


def named_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments by the schema's names, defaults filled in."""
    schema = node.target._schema.arguments
    named = {}
    for index, argument in enumerate(schema):
        if index < len(node.args):
            named[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named


def reached(
    start: Iterable,
    further: Callable[[Any], Iterable],
    admitted: Callable[[Any], Any] = lambda each: True,
) -> Iterator:
    """`start`, and what `further` leads to from there, each once; only what is admitted."""
    ahead, seen = list(start), set()
    while ahead:
        each = ahead.pop()
        if each not in seen and admitted(each):
            seen.add(each)
            yield each
            ahead += further(each)


def names_four_dimensions(node: torch.fx.Node) -> bool:
    """Whether it says of its result how four or five dimensions are to lie."""
    formats = (torch.channels_last, torch.channels_last_3d)
    given = (*node.args, *node.kwargs.values())
    return any(isinstance(a, torch.memory_format) and a in formats for a in given)


def is_convolution(node: torch.fx.Node) -> bool:
    return schema_name(node.target) in _CONVOLUTIONS


def is_group_norm(node: torch.fx.Node) -> bool:
    return schema_name(node.target) == "aten::group_norm"


def is_row_norm(node: torch.fx.Node) -> bool:
    """Whether it norms each row of its last dimensions."""
    return schema_name(node.target) in ("aten::layer_norm", "aten::rms_norm")


def is_extremum_with_place(node: torch.fx.Node) -> bool:
    """`x.max(dim)`, a pair."""
    known = schema_name(node.target) in ("aten::max", "aten::min")
    return known and not isinstance(node.meta.get("val"), torch.Tensor)


def is_mean_of_rows(node: torch.fx.Node) -> bool:
    """As an RMS norm that is written by hand takes of squares."""
    if schema_name(node.target) != "aten::mean" or len(node.args) < 2:
        return False
    value = node.args[0].meta["val"]
    return dims_from_front(node.args[1], value) == [value.dim() - 1]


def dims_from_front(dims: int | Sequence[int] | None, value: torch.Tensor) -> list[int]:
    """What an operator's argument names of a tensor's dimensions; of a single number, which has
    none, PyTorch lets it name the first."""
    named = [dims] if isinstance(dims, int) else dims or ()
    return [dim % max(value.dim(), 1) for dim in named]


def is_softmax_of_rows(node: torch.fx.Node) -> bool:
    """Along the last dimension, as attention takes it of its scores."""
    if schema_name(node.target) not in ("aten::softmax", "aten::_safe_softmax"):
        return False
    dims = node.args[0].meta["val"].dim()
    return bool(dims) and node.args[1] % dims == dims - 1


def is_batch_norm(node: torch.fx.Node) -> bool:
    return schema_name(node.target) in ("ingot::batch_norm", "aten::batch_norm")


def moves_statistics(node: torch.fx.Node) -> bool:
    """Whether a norm writes its running statistics, which its schema does not say."""
    if schema_name(node.target) == "aten::instance_norm":
        arguments = named_arguments(node)
        return bool(arguments["use_input_stats"]) and arguments["running_mean"] is not None
    return is_batch_norm(node)


def mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What an operator writes into, as its schema says."""
    if not mutates(node):
        return []
    written = {
        argument.name
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    given = [value for name, value in named_arguments(node).items() if name in written]
    return [each for each in pytree.tree_leaves(given) if isinstance(each, torch.fx.Node)]


def hands_out_memory(node: torch.fx.Node) -> bool:
    """Whether what sees this tensor could write into it: the caller, or an operator in place."""
    for user in node.users:
        if user.op == "output" or mutates(user) or user.op != "call_function":
            return True
        views = not isinstance(user.target, torch._ops.OpOverload) or any(
            a.alias_info is not None for a in user.target._schema.arguments
        )
        if views and hands_out_memory(user):
            return True
    return False


def may_share_memory(node: torch.fx.Node) -> bool:
    """Whether its result may lie in the memory of what it is of: a view, or what was written."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


def lies_apart(node: torch.fx.Node) -> bool:
    """Whether nobody else sees, or could write into, the memory of what an operator gives."""
    if node.op != "call_function" or hands_out_memory(node):
        return False
    name, of = schema_name(node.target), next(iter(node.args), None)
    converts = name == "aten::to" and node.meta["val"].dtype != of.meta["val"].dtype
    if may_share_memory(node) and not converts:
        return False
    return not name.endswith("dropout") or lies_apart(of)  # which it is, where nothing is dropped


def is_random(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # Of ours PyTorch 2.6 takes no tags.
    return torch.Tag.nondeterministic_seeded in target.tags or schema_name(target) == RECURRENT


def is_made_from_nothing(node: torch.fx.Node) -> bool:
    """`torch.arange(8)`: a tensor of fixed values, which can be made once."""
    result = node.meta.get("val")
    return (
        isinstance(result, torch.Tensor)
        and isinstance(node.target, torch._ops.OpOverload)
        and not node.all_input_nodes
        and all(isinstance(size, int) for size in result.shape)
        and is_pure(node)
        and "empty" not in node.target.__name__
    )


def counts_from_zero(node: torch.fx.Node) -> bool:
    """`torch.arange(8.0)`, as far as fp32 counts."""
    if node.target is not torch.ops.aten.arange.default:
        return False
    made = node.meta["val"]
    return made.dtype == torch.float32 and made.numel() == node.args[0] <= COUNTED_IN_FP32


def is_pure(node: torch.fx.Node) -> bool:
    return not node.is_impure() and not is_random(node.target)


def computes(node: torch.fx.Node) -> bool:
    result = node.meta.get("val")
    return isinstance(result, (torch.Tensor, tuple, list))


def _origin(node: torch.fx.Node) -> str:
    """The path of the innermost module that the operator belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return _FRAME_LOCAL.sub("", path)


def is_users_own(path: str) -> bool:
    """Of a source file: neither PyTorch's nor ours."""
    return not path.startswith((_TORCH_FOLDER, _OWN_FOLDER, "torch/"))


def where(node: torch.fx.Node) -> str:
    """ "model.py:14": the innermost frame in the user's own files."""
    found = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        if not line.startswith('File "'):
            continue
        path, _, rest = line[len('File "') :].partition('", line ')
        if is_users_own(path):
            found = f"{os.path.basename(path)}:{rest.partition(',')[0]}"
    return found


def origin_or_name(node: torch.fx.Node) -> str:
    """The module's path; for an operator of the root's own forward, the parameter that it applies,
    or its own name."""
    path = _origin(node)
    if path:
        return path
    for argument in node.all_input_nodes:
        if PARAMETER in argument.meta:
            return argument.meta[PARAMETER]
    return operator_name(node)


def _label(node: torch.fx.Node) -> str:
    """What a reader would call an operator."""
    name = origin_or_name(node).rpartition(".")[2]
    return name if name and not name.isdigit() else operator_name(node)


def region_name(nodes: list[torch.fx.Node]) -> str:
    """ "gemm_scale_bn"."""
    labels = [_label(node) for node in nodes]
    short = [label for at, label in enumerate(labels) if at == 0 or label != labels[at - 1]]
    return "_".join(short[:6]) or "region"


def only(argument: Any, default: int | None = None) -> int | None:
    """The number that operators over one dimension take plainly or in a list."""
    if isinstance(argument, (list, tuple)):
        argument = argument[0] if argument else None
    return default if argument is None else argument


def of_each_dimension(argument: Any, dimensions: int) -> tuple[int, ...]:
    """The numbers that operators over several take plainly, once for all, or one by one."""
    if isinstance(argument, int):
        return (argument,) * dimensions
    return tuple(argument) * (dimensions if len(argument) == 1 else 1)
