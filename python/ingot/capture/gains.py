"""Which chains without a product are worth a region where gradients are needed, and which operators
are worth one alone where they are not.

PyTorch runs such a chain operator by operator, forward and backward, each a pass or more over
memory. A region makes one of them, but costs more of the host's time than any of PyTorch's, and its
derivative must be one that the importer takes whole. So chains of the operators named here are
taken, from so many bytes on that the passes saved count for more.

Of a single operator PyTorch's kernel makes the passes that it takes. Those named here take more
than the bytes ask for, or more time over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ingot.capture import token_chains
from ingot.capture.layout import (
    has_channels_last,
    hint,
    may_lie_channels_last,
    result_bytes,
    size_in_bytes,
)
from ingot.capture.nodes import (
    JOINED,
    LOSS,
    dims_from_front,
    is_extremum_with_place,
    is_group_norm,
    named_arguments,
    operator_name,
    schema_name,
)
from ingot.capture.normalisations import is_norm_in_parts
from ingot.capture.table import is_half

if TYPE_CHECKING:
    from ingot.capture.cutting import Cut
    from ingot.capture.feed import Feed

# Bytes that a chain must save, over forward and backward: some 50 µs of an H200, since a region's
# two passes cost the host that much more than PyTorch's operators (49 of them cost ResNet-50 2.7 to
# 3 ms of a step that takes 17, of which PyTorch's host needs 14 in bf16 and 12 in TF32).
_LEAST_SAVED = 200e6
# The same of a step for which PyTorch's host needs about as long as the GPU. (H200s, whose hosts
# vary: ResNet-50's step in TF32 took 1.13 to 1.14 of eager's time with 16 regions that saved 400 MB
# each: 15.2 ms of kernels for 16.6, 25 ms of the host for the 14 to 22 of eager; two: 1.00.
# A GoogLeNet's in fp32 took 1.16 with six.)
_LEAST_SAVED_OF_HOST = 1e9
# PyTorch's batch norm has a block a channel, on so many multiprocessors; what it makes of a tensor,
# forward and backward. (H200: 103 MB in 16 channels 3.1 ms, in 64 0.85, in 256 0.30.)
_MULTIPROCESSORS, _NORM_PASSES = 132, 8
# Whether chains of batch norms are whose channels lie innermost: PyTorch has good kernels for them;
# single blocks gained (0.87 to 1.00 of eager's time on an H100), ResNet-50 lost (1.10 and 1.42).
takes_channels_last = False

_BATCH_NORM, _GROUP_NORM = "ingot::batch_norm", "aten::group_norm"
_NORMS = {_BATCH_NORM, _GROUP_NORM}
# How often a tensor of the result's size is read or written by PyTorch's operator, and not by a
# region that has the operator inside: forward and backward.
_SAVED = {_BATCH_NORM: 0, _GROUP_NORM: 2, "aten::add": 3, "aten::sub": 3, "aten::cat": 4}
# A cast between 16 and 32 bits, in tensors of 32; PyTorch's copies of images around a group norm
# whose channels lie innermost, there and back.
_SAVED_BY_CAST, _SAVED_BY_TURNS = 3, 6
# Of group norms whose channels lie innermost, statistics of channels, one for each sample: of fewer
# the blocks of a backward pass, 32 a block, are too few (of 512, and 33 MB each, it was measured).
_LEAST_OF_CHANNELS = 512
_POINTWISE = """
    relu silu gelu hardswish hardsigmoid hardtanh relu6 leaky_relu mish elu softplus sigmoid tanh
    mul div neg
"""
_SAVED |= {f"aten::{name}": 5 for name in _POINTWISE.split()}
# The largest of many, in tensors of the size of these: read, put into zeros, and read there again.
_SAVED_BY_EXTREMUM = 3
_PASSES = {f"aten::{name}" for name in ("to", "_to_copy", "contiguous", "clone", "dropout")}

# Where no gradients are needed: whether everything is taken alone that can be, for measurements and
# tests; else on a GPU, from so many bytes of an operator's largest operand on, which are where its
# time saved counts for more than the host's.
takes_everything = False
_LEAST_OF_LOSS = 32e6
_LEAST_OF_LOSSES = {"cross_entropy_loss": 200e6}  # small sums beside it, and what PyTorch finds
_LEAST_OF_WINDOWS = 16e6  # the parts' views are some 20 µs of the host's time
# Of a result that PyTorch wants turned (H100, a group norm of tokens and SiLU: of 42 MB in fp32
# 0.78, in fp16 0.89 of eager's time, of 21 MB 1.05 and 1.07, of 10 MB 1.39).
_LEAST_TURNED = 40e6
# PyTorch's softmax reads rows of more once again, as it does what does not lie in rows.
_SHARED_ROW = 48 * 1024


def _rows_are_long(node: torch.fx.Node) -> bool:
    """PyTorch's kernel keeps shorter rows."""
    value = node.args[0].meta["val"]
    (dim,) = dims_from_front(node.args[1], value)
    lies_in_rows = dim == value.dim() - 1
    return not lies_in_rows or value.shape[dim] * value.element_size() > _SHARED_ROW


def _gives_values_alone(node: torch.fx.Node) -> bool:
    """Not where they lie."""
    return all(user.args[1] == 0 or not user.users for user in node.users)


def _normalises_planes(node: torch.fx.Node) -> bool:
    """By statistics of the batch, of channels that lie apart."""
    training = named_arguments(node)["training"]
    return bool(training) and not has_channels_last(node.args[0])


def _lies_as_wanted(node: torch.fx.Node) -> bool:
    """A group norm in parts makes the passes that PyTorch's does, if its result is turned."""
    return not is_norm_in_parts(node) or may_lie_channels_last(node)


def _always(node: torch.fx.Node) -> bool:
    return True


# Alone: what PyTorch's own kernel takes 1.35 times or more of what a copy of its bytes takes, ours
# less (H200, tools/gpu_checks/time_operators.py), with the fewest bytes of its largest operand. Of
# sums and means PyTorch's are as good.
_ALONE: dict[str, tuple[float, Callable[[torch.fx.Node], bool]]] = {
    "softmax": (32e6, _rows_are_long),
    "log_softmax": (32e6, _rows_are_long),
    "logsumexp": (32e6, _always),
    "layer_norm": (128e6, _always),
    "rms_norm": (128e6, _always),
    "group_norm": (32e6, _lies_as_wanted),
    "instance_norm": (64e6, _always),
    "batch_norm": (128e6, _normalises_planes),
    "cumsum": (16e6, _always),
    "amax": (128e6, _always),
    "amin": (128e6, _always),
    "max": (128e6, _gives_values_alone),
    "min": (128e6, _gives_values_alone),
    "argmax": (128e6, _always),
    "argmin": (128e6, _always),
}


# Seconds that PyTorch's kernels of these take for each element of a row (H200, rows of 262144 to
# 2^20): one block has all of it, so that a few long rows leave most multiprocessors idle.
_OF_ONE_BLOCK = {
    "softmax": 0.23e-9,
    "log_softmax": 0.21e-9,
    "layer_norm": 0.97e-9,
    "rms_norm": 0.43e-9,
    "group_norm": 0.40e-9,
    "instance_norm": 0.74e-9,
}
# What must be saved of that, for the host's time, and bytes that ours moves in a second.
_LEAST_SECONDS, _BYTES_A_SECOND = 30e-6, 3e12


def pays_alone(node: torch.fx.Node) -> bool:
    """Whether an operator is worth a region of its own, where no gradients are needed."""
    if node.op != "call_function" or operator_name(node) not in _ALONE:
        return False
    least, fits = _ALONE[operator_name(node)]
    if _takes_batch_away(node) or not _has_bytes(node, 0 if _keeps_a_block_long(node) else least):
        return False
    return takes_everything or fits(node)


def _keeps_a_block_long(node: torch.fx.Node) -> bool:
    seconds, value = _OF_ONE_BLOCK.get(operator_name(node)), node.args[0].meta["val"]
    if seconds is None or not _elements_of_row(node):
        return False
    ours = 2 * size_in_bytes(value) / _BYTES_A_SECOND
    return _elements_of_row(node) * seconds - ours > _LEAST_SECONDS


def _elements_of_row(node: torch.fx.Node) -> int:
    """Of those in _OF_ONE_BLOCK; 0: its rows do not lie one element after another."""
    name, sizes = operator_name(node), [hint(size) for size in node.args[0].meta["val"].shape]
    if name in ("softmax", "log_softmax"):
        return sizes[-1] if sizes and node.args[1] % len(sizes) == len(sizes) - 1 else 0
    if name in ("layer_norm", "rms_norm"):
        return math.prod(sizes[-len(node.args[1]) :])
    groups = node.args[1] if name == "group_norm" else sizes[1]
    return math.prod(sizes[1:]) // max(groups, 1)


def _takes_batch_away(node: torch.fx.Node) -> bool:
    """A sweep over the batch merges what it finds of each column in a pass of its own."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    arguments = named_arguments(node)
    if "dim" not in arguments:
        return operator_name(node) in ("max", "min")  # of all elements, or of two tensors
    dims = dims_from_front(arguments["dim"], node.args[0].meta["val"])
    return not dims or 0 in dims


def pays_as_loss(node: torch.fx.Node) -> bool:
    """Whether a loss is worth a region, where no gradients are needed."""
    return _has_bytes(node, _LEAST_OF_LOSSES.get(operator_name(node), _LEAST_OF_LOSS))


def pays_as_windows(node: torch.fx.Node) -> bool:
    """Whether a pooling is worth being taken apart, where no gradients are needed."""
    return _has_bytes(node, _LEAST_OF_WINDOWS)


def _has_bytes(node: torch.fx.Node, least: float) -> bool:
    """Of its largest operand, on a GPU. On a CPU nothing was seen to pay."""
    operands = [source.meta.get("val") for source in node.all_input_nodes]
    operands = [value for value in operands if isinstance(value, torch.Tensor)]
    if not operands or takes_everything:
        return bool(operands)
    return operands[0].device.type != "cpu" and max(map(size_in_bytes, operands)) >= least


def turns_too_little(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a region of these nodes holds a group norm in parts whose result PyTorch wants
    turned, in a copy of its own, and is too small to gain that."""
    own = set(nodes)
    if takes_everything or not any(map(is_norm_in_parts, own)):
        return False
    results = [node for node in own if not own.issuperset(node.users)]
    turned = [node.meta.get("val") for node in results if not may_lie_channels_last(node)]
    return any(size_in_bytes(value) < _LEAST_TURNED for value in turned)


def least_saved(device_type: str, nears_host: bool = False) -> float:
    """On a CPU, where a pass over memory is most of what an operator costs and PyTorch's are made
    for its caches, none was seen to pay. nears_host: as Cut has it."""
    if device_type != "cuda":
        return float("inf")
    return _LEAST_SAVED_OF_HOST if nears_host else _LEAST_SAVED


def may_pay(feed: Feed) -> bool:
    norms = any(schema_name(node.target) in _NORMS for node in feed.graph.nodes)
    return norms and feed.trains_chains and least_saved(feed.device_type) < float("inf")


def without_gain(cut: Cut, nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Of the nodes of a region without a product, those that PyTorch is to run."""
    found: set[torch.fx.Node] = set()
    for chain in _chains(nodes):
        computing = [node for node in chain if cut.computes(node)]
        if any(LOSS in node.meta for node in computing):
            continue
        is_known, pays = _is_known, _pays
        if token_chains.may_be_taken(cut) and not any(map(_is_of_images, computing)):
            is_known, pays = token_chains.is_known, token_chains.pays
        strange = {node for node in computing if not is_known(node)}
        # Copies alone would each have a function of autograd's, in the place of PyTorch's clone.
        if strange or not computing or not pays(cut, chain):
            found |= strange or set(chain)  # what is left without those is looked at again
    return found


def _is_of_images(node: torch.fx.Node) -> bool:
    return schema_name(node.target) in _NORMS or JOINED in node.meta


def _is_known(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    return name in _PASSES or name in _SAVED or is_extremum_with_place(node)


def _chains(nodes: Iterable[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """What hangs together within a region."""
    own = list(nodes)
    chain_of = {node: [node] for node in own}
    for node in own:
        for argument in node.all_input_nodes:
            other = chain_of.get(argument)
            if other is None or other is chain_of[node]:
                continue
            other += chain_of[node]
            for member in chain_of[node]:
                chain_of[member] = other
    return list({id(chain): chain for chain in chain_of.values()}.values())


def joins_parts(device_type: str, gradients: bool) -> bool:
    """Whether what is computed part by part may be put together by regions (joining.py)."""
    if device_type != "cpu":
        return True
    return takes_everything and not (gradients and least_saved(device_type) == float("inf"))


def _pays(cut: Cut, chain: list[torch.fx.Node]) -> bool:
    computing = [n for n in chain if cut.computes(n) and schema_name(n.target) not in _PASSES]
    if any(JOINED in node.meta for node in computing):
        # In PyTorch's operators' place, of which there are more than a region's launches cost.
        return True
    norms = [n for n in computing if schema_name(n.target) in _NORMS]
    if not norms or not cut.feed.trains_chains:
        return False
    if len(computing) < 2 and not _saved_by_blocks(norms[0]):
        return False
    if any(cut.is_moved_elsewhere(norm) for norm in norms):
        return False
    inputs = [source for node in computing for source in node.all_input_nodes]
    of_groups = all(map(is_group_norm, norms))
    if not (of_groups or takes_channels_last) and any(map(has_channels_last, inputs)):
        return False
    turned = [norm for norm in norms if is_group_norm(norm) and has_channels_last(norm.args[0])]
    if turned and not (all(map(_has_channels, turned)) and _lies_as_pytorchs(chain)):
        return False
    if any(is_half(source.meta.get("val")) for source in inputs) and cut.waits_for_host:
        return False
    around = sum(map(_saved_around_norm, norms)) + sum(map(_saved_by_cast, chain))
    return bytes_saved(computing) + around >= least_saved(cut.device_type, cut.nears_host)


def _has_channels(norm: torch.fx.Node) -> bool:
    samples, channels = norm.meta["val"].shape[:2]
    return hint(samples) * hint(channels) >= _LEAST_OF_CHANNELS


def _lies_as_pytorchs(chain: list[torch.fx.Node]) -> bool:
    """Whether no result has to be turned to lie as PyTorch's: what reads it gives a gradient that
    lies so, too."""
    own = set(chain)
    results = [node for node in chain if not own.issuperset(node.users)]
    return all(
        has_channels_last(node) or may_lie_channels_last(node)
        for node in results
        if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dim() > 2
    )


def _saved_around_norm(norm: torch.fx.Node) -> float:
    """Of what PyTorch does in front of a group norm, and the same backward: autocast's cast of what
    comes in 16 bits, and a copy whose channels lie outermost."""
    if not is_group_norm(norm):
        return 0.0
    x, value = norm.args[0], norm.meta["val"]
    casts = is_half(x.meta.get("val")) and not is_half(value)
    turns = _SAVED_BY_TURNS * has_channels_last(x)
    return float((turns + _SAVED_BY_CAST * casts) * size_in_bytes(value))


def _saved_by_blocks(node: torch.fx.Node) -> float:
    """Of the time that PyTorch's batch norm takes because it has fewer channels than the GPU has
    multiprocessors, which then wait."""
    if schema_name(node.target) != _BATCH_NORM or not _normalises_planes(node):
        return 0.0
    value = node.meta["val"]
    idle = _MULTIPROCESSORS / max(hint(value.shape[1]), 1) - 1
    return max(idle, 0.0) * _NORM_PASSES * size_in_bytes(value)


def _saved_by_cast(node: torch.fx.Node) -> float:
    if schema_name(node.target) not in ("aten::to", "aten::_to_copy"):
        return 0.0
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    widest = max(map(size_in_bytes, (before, after)))
    return float(_SAVED_BY_CAST * widest * (is_half(before) != is_half(after)))


def bytes_saved(nodes: Iterable[torch.fx.Node]) -> float:
    """By a region that holds the nodes, forward and backward, as far as it is known of them."""
    return float(sum(map(_saved_by_operator, nodes)))


def _saved_by_operator(node: torch.fx.Node) -> float:
    if is_extremum_with_place(node):
        return float(_SAVED_BY_EXTREMUM * result_bytes(node.args[0]))
    times = _SAVED.get(schema_name(node.target), 0)
    return _saved_by_blocks(node) + (times and times * result_bytes(node))
