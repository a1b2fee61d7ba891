"""Which chains around norms over features (residual sums, layer and RMS norms, gates, casts), and
around the softmax of attention that is written by hand, are worth a region without a product, where
gradients are needed.

In 16 bits and in TF32 the products of a network are often PyTorch's (host_time.py): dropout stands
behind them, or a region would have too little besides. What stands between two of them PyTorch runs
operator by operator; under autocast it casts what a norm writes once for each product that reads
it, and the gradient of each back. A region makes two sweeps of all that, or three where parameters
have gradients.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

import torch

from ingot.capture.layout import elements, result_bytes
from ingot.capture.nodes import (
    CAST_FOR,
    is_mean_of_rows,
    is_row_norm,
    is_softmax_of_rows,
    schema_name,
)
from ingot.capture.surgery import write_cast
from ingot.capture.table import CASTS, CHANGES_NOTHING, is_half

if TYPE_CHECKING:
    from ingot.capture.cutting import Cut

# How often PyTorch's backward reads or writes a tensor of the result's size (of factors: below).
_BACKWARD_PASSES = {
    "aten::add": 0,
    "aten::sub": 0,
    "aten::neg": 2,
    "aten::layer_norm": 5,
    "aten::rms_norm": 5,
    "aten::pow": 7,
    "aten::rsqrt": 7,
    "aten::mean": 1,
    "aten::mul": 0,
    "aten::masked_fill": 3,
    "aten::where": 3,
    **{f"aten::{name}": 3 for name in "softmax relu silu gelu sigmoid tanh".split()},
    # And what looks for rows of -inf: of its passes PyTorch's forward has five more.
    "aten::_safe_softmax": 8,
}
# Of a factor's gradient: what is read beside, and written; of a smaller one it is summed up.
_OF_FACTOR, _OF_SMALL_FACTOR = 2, 4
# A gradient that comes from several sides is added up: reads and writes for each but the first.
_OF_ANOTHER_READER = 3
# Of a training step: seconds of an H200's host for an operator of PyTorch's and for a region, and
# bytes a second of the GPU. (A BERT's step under autocast: some 340 operators, 21 ms, of which the
# GPU is busy for 10. On an H100, chains of a BERT's alone, of which half save four operators and
# half eight: 0.98 of eager's time; of a Llama's in TF32, of eleven: 0.81, without them 0.92. On
# H200s, 49 of a perceptron's in TF32, of four: 30 and 90 µs a region more than eager, two hosts.)
OPERATOR_SECONDS, REGION_SECONDS, BYTES_A_SECOND = 40e-6, 200e-6, 4e12
# PyTorch's safe softmax is five, of which autograd sees one.
_OPERATORS_OF = {"aten::_safe_softmax": 2}
# For tests: every chain on every device.
takes_everything = False


def is_known(node: torch.fx.Node) -> bool:
    name = schema_name(node.target)
    return name in _BACKWARD_PASSES or name in CASTS or name in CHANGES_NOTHING


def may_be_taken(cut: Cut) -> bool:
    """Whether such chains are looked for."""
    return cut.gradients and cut.feed.trains_chains and are_taken_on(cut.device_type)


def are_taken_on(device_type: str) -> bool:
    return takes_everything or device_type == "cuda"


def pays(cut: Cut, chain: list[torch.fx.Node]) -> bool:
    """chain: what hangs together in a region, of operators that are known."""
    computing = [node for node in chain if cut.computes(node)]
    work = [node for node in computing if schema_name(node.target) not in CASTS]
    if len(work) < 2 or not may_be_taken(cut) or not _is_of_tokens(work):
        return False
    if takes_everything:
        return True
    # In fp32 regions have the products, but for those of attention's scores and values.
    if not cut.multiplies_in_few_bits and not any(map(is_softmax_of_rows, work)):
        return False
    host = host_seconds(cut, chain)
    if cut.waits_for_host:
        return host > 0
    return bytes_saved(cut, chain) / BYTES_A_SECOND + min(host, 0.0) > 0


def host_seconds_saved(cut: Cut) -> float:
    """Of a training step, by the regions that hold such a chain and no product."""
    if not may_be_taken(cut):
        return 0.0
    by_level: dict[int, list[torch.fx.Node]] = {}
    for node, level in cut.taken.items():
        if not cut.has_product(level):
            by_level.setdefault(level, []).append(node)
    chains = (nodes for nodes in by_level.values() if any(map(_norms_rows, nodes)))
    return sum(max(host_seconds(cut, chain), 0.0) for chain in chains)


def _norms_rows(node: torch.fx.Node) -> bool:
    return is_row_norm(node) or is_mean_of_rows(node) or is_softmax_of_rows(node)


def host_seconds(cut: Cut, chain: list[torch.fx.Node]) -> float:
    """That a region saves the host of PyTorch's operators."""
    if cut.feed.is_replayed:
        return 0.0
    return OPERATOR_SECONDS * operators(cut, chain) - REGION_SECONDS


def operators(cut: Cut, chain: list[torch.fx.Node]) -> int:
    """PyTorch's, with the sums of gradients that come from several sides."""
    names = [schema_name(node.target) for node in chain if cut.computes(node)]
    own = sum(_OPERATORS_OF.get(name, name not in CHANGES_NOTHING) for name in names)
    return own + sum(_further_gradients(cut, chain).values())


def _further_gradients(cut: Cut, chain: list[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """Of what the chain computes and reads: how many gradients are added to the first."""
    own = set(chain)
    leaves = {source for node in chain for source in node.all_input_nodes} - own
    found = {}
    for node in (*filter(cut.computes, chain), *leaves):
        if node in cut.needing:
            readers = sum(user in own for user in node.users)
            found[node] = max(readers + (node in own and not own.issuperset(node.users)) - 1, 0)
    return found


def _is_of_tokens(work: list[torch.fx.Node]) -> bool:
    """Whether it norms features, or gates them: what has channels belongs to convolutions."""
    if any(map(_norms_rows, work)):
        return True
    return all(_is_of_features(node) for node in work)


def _is_of_features(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() in (2, 3)


def bytes_saved(cut: Cut, chain: list[torch.fx.Node]) -> float:
    """Over forward and backward, by a region that holds the chain."""
    computing = [node for node in chain if cut.computes(node)]
    theirs = sum(map(_forward_bytes, computing))
    theirs += sum(_backward_bytes(node, cut.needing) for node in computing if node in cut.needing)
    own = set(chain)
    leaves = {s for node in chain for s in node.all_input_nodes if s not in own}
    further = _further_gradients(cut, chain).items()
    theirs += sum(count * _OF_ANOTHER_READER * result_bytes(node) for node, count in further)
    results = [node for node in computing if not own.issuperset(node.users)]
    read, written = sum(map(result_bytes, leaves)), sum(map(result_bytes, results))
    times = 2 if any(map(_is_parameter, leaves & cut.needing)) else 1
    ours = read + written
    ours += times * (read + written) + sum(map(result_bytes, leaves & cut.needing))
    return float(theirs - ours)


def _is_parameter(leaf: torch.fx.Node) -> bool:
    return leaf.op in ("placeholder", "get_attr")


def _forward_bytes(node: torch.fx.Node) -> int:
    return result_bytes(node) + sum(map(result_bytes, node.all_input_nodes))


def _backward_bytes(node: torch.fx.Node, needing: Container[torch.fx.Node]) -> float:
    name, size = schema_name(node.target), result_bytes(node)
    if name in CASTS:
        return _forward_bytes(node)
    passes = _BACKWARD_PASSES.get(name, 0)
    if name != "aten::mul":
        return passes * max(size, *map(result_bytes, node.all_input_nodes))
    for factor in node.all_input_nodes:
        if factor in needing:
            small = elements(factor.meta.get("val")) < elements(node.meta.get("val"))
            passes += _OF_SMALL_FACTOR if small else _OF_FACTOR
    return passes * size


def cast_in_front(products: Iterable[torch.fx.Node], taken: Container[torch.fx.Node]) -> None:
    """Writes the casts that autocast makes of what PyTorch's products read, where a region computes
    it, so that it writes it in 16 bits. One for each product: their gradients are added up in the
    operand's dtype, as eager's are."""
    for product in products:
        dtype = product.meta["val"].dtype
        for operand in product.all_input_nodes:
            value = operand.meta.get("val")
            if operand not in taken or not is_half(product.meta["val"]):
                continue
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                write_cast(operand, dtype, [product]).meta[CAST_FOR] = product.name
