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

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ingot.capture.layout import has_channels_last
from ingot.capture.nodes import operator_name, schema_name
from ingot.capture.table import HALVES

if TYPE_CHECKING:
    from ingot.capture.cutting import Cut
    from ingot.capture.feed import Feed

# Bytes that a chain must save, over forward and backward: some 50 µs of an H200, since a region's
# two passes cost the host that much more than PyTorch's operators (49 of them cost ResNet-50 2.7 to
# 3 ms of a step that takes 17, of which PyTorch's host needs 14 in bf16 and 12 in TF32).
_LEAST_SAVED = 200e6
# Not on a GPU until they were measured there.
takes_channels_last = False
# A ResNet-50's step under bf16 autocast, whose time is the host's, gained nothing (0.995 of
# eager's) and took 2 % more memory at its peak (1343 MB, eager 1316; H200): PyTorch's until that is
# understood.
takes_halves = False

_NORM = "ingot::batch_norm"
# How often a tensor of the result's size is read or written by PyTorch's operator, and not by a
# region that has the operator inside: forward and backward.
_SAVED = {_NORM: 0, "aten::add": 3, "aten::sub": 3}
_POINTWISE = """
    relu silu gelu hardswish hardsigmoid hardtanh relu6 leaky_relu mish elu softplus sigmoid tanh
    mul div neg
"""
_SAVED |= {f"aten::{name}": 5 for name in _POINTWISE.split()}
_PASSES = {f"aten::{name}" for name in ("to", "_to_copy", "contiguous", "clone", "dropout")}

# Alone, without gradients: what could be taken, and what is, with the fewest bytes of its largest
# operand from which on.
EVERYTHING = """
    softmax _softmax log_softmax _log_softmax logsumexp layer_norm group_norm instance_norm rms_norm
    sum mean amax amin max min argmax argmin linalg_vector_norm norm var std
""".split()
ALONE: dict[str, float] = dict.fromkeys(EVERYTHING, 8e6)
least_of_loss = 8e6
least_of_windows = 16e6  # the parts' views are some 20 µs of the host's time
# On a CPU none was seen to pay.
takes_alone_on_cpu = False


def pays_alone(node: torch.fx.Node) -> bool:
    """Whether an operator is worth a region of its own, where no gradients are needed."""
    least = ALONE.get(operator_name(node)) if node.op == "call_function" else None
    return least is not None and _most_bytes(node) >= least


def pays_as_loss(node: torch.fx.Node) -> bool:
    """Whether a loss is worth a region, where no gradients are needed."""
    return _most_bytes(node) >= least_of_loss


def pays_as_windows(node: torch.fx.Node) -> bool:
    """Whether a pooling is worth being taken apart, where no gradients are needed."""
    return _most_bytes(node) >= least_of_windows


def _most_bytes(node: torch.fx.Node) -> float:
    """Of its largest operand, where it may be taken alone."""
    operands = [source.meta.get("val") for source in node.all_input_nodes]
    operands = [value for value in operands if isinstance(value, torch.Tensor)]
    if not operands or (operands[0].device.type == "cpu" and not takes_alone_on_cpu):
        return 0
    return max(map(_bytes, operands))


def least_saved(device_type: str) -> float:
    """On a CPU, where a pass over memory is most of what an operator costs and PyTorch's are made
    for its caches, none was seen to pay."""
    return _LEAST_SAVED if device_type == "cuda" else float("inf")


def may_pay(feed: Feed) -> bool:
    norms = any(schema_name(node.target) == _NORM for node in feed.graph.nodes)
    return norms and feed.trains_chains and least_saved(feed.device_type) < float("inf")


def without_gain(cut: Cut, nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Of the nodes of a region without a product, those that PyTorch is to run."""
    found: set[torch.fx.Node] = set()
    for chain in _chains(nodes):
        computing = [node for node in chain if cut.computes(node)]
        strange = {node for node in computing if not _is_known(node)}
        if computing and (strange or not _pays(cut, computing)):
            found |= strange or set(chain)  # what is left without those is looked at again
    return found


def _is_known(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    return name in _PASSES or name in _SAVED


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


def _pays(cut: Cut, computing: list[torch.fx.Node]) -> bool:
    computing = [n for n in computing if schema_name(n.target) not in _PASSES]
    norms = [n for n in computing if schema_name(n.target) == _NORM]
    if len(computing) < 2 or not norms or not cut.feed.trains_chains:
        return False
    if any(cut.is_moved_elsewhere(norm) for norm in norms):
        return False
    inputs = [source for node in computing for source in node.all_input_nodes]
    if not takes_channels_last and any(map(has_channels_last, inputs)):
        return False
    if not takes_halves and any(_is_half(source.meta.get("val")) for source in inputs):
        return False
    saved = sum(_SAVED[schema_name(n.target)] * _bytes(n.meta.get("val")) for n in computing)
    return saved >= least_saved(cut.device_type)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALVES


def _bytes(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        return 0
    count = tensor.element_size()
    for size in tensor.shape:
        count *= int(size.node.hint) if isinstance(size, torch.SymInt) else size
    return count
