"""What the importer reads: an ATen graph with what its inputs are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ingot.capture.captured import Source
from ingot.capture.nodes import mutates
from ingot.capture.shared_masks import converted_mask

_aten = torch.ops.aten
# What reads of a tensor no more than how large it is.
MEASURING = {
    getattr(_aten, name).default
    for name in (
        "empty_like full_like ones_like zeros_like rand_like randn_like "
        "new_empty new_full new_ones new_zeros"
    ).split()
}
_WITHOUT_GRADIENT = {_aten.detach.default, converted_mask, *MEASURING}


@dataclass
class Placeholder:
    """What feeds an input of a graph. role: the operator and name of the leaf that it becomes;
    batched: whether dimension 0 is the batch, where sizes do not tell; requires_grad: as a tensor
    says; assumed: it may as well require none; positions: it holds 0, 1, 2, ..."""

    source: Source
    role: tuple[str, str]
    batched: bool = False
    requires_grad: bool = False
    assumed: bool = False
    positions: bool = False


@dataclass
class Feed:
    """An ATen graph with what its inputs are.

    attributes: the module whose attributes its get_attr nodes name; batch: the symbol of the batch
    size in the sizes of its values, or None where they are numbers; static_batch: the only size
    that the graph is for, or None; out_spec, constant_outputs: how a module's result is put
    together from the graph's outputs; rewritten: whether the graph has been brought into the form
    that the importer reads; lays_out: whether dimensions of results lie in memory in the order that
    PyTorch gives them; example_batch: the batch size of the call that it was traced for, if known;
    trains_chains: whether chains without a product may be taken where gradients are needed, since
    what runs them has derivatives that are regions; staged: whether a region ends after a few
    products one behind another; tf32: whether products of fp32 may be TF32's, by PyTorch too;
    causal_inputs: places of inputs that are taken for causal masks; only_planned: it is for a
    device that need not be there, so that what it makes of numbers is made on the CPU; joins_parts:
    whether regions may read parts of tensors, and write their results into parts of one;
    weighs_steps: whether on a CPU a region with gradients must gain what it costs the host, as in a
    live module's calls; has_lengths: whether sizes beside the batch's may be symbolic, too; apart:
    places of inputs, with whether each is written, of which none that is may share memory with
    another; shares_masks: whether attentions' masks of flags may be converted by an operator of
    Ingot's, which standalone files do not have; is_replayed: whether CUDA graphs replay its calls,
    which then never wait for the host.
    """

    graph: torch.fx.Graph
    attributes: nn.Module
    placeholders: dict[torch.fx.Node, Placeholder]
    device_type: str
    batch: Any | None = None
    static_batch: int | None = None
    out_spec: Any = None
    constant_outputs: dict[int, Any] = field(default_factory=dict)
    rewritten: bool = False
    lays_out: bool = False
    example_batch: int | None = None
    trains_chains: bool = False
    staged: bool = False
    tf32: bool = False
    causal_inputs: list[int] = field(default_factory=list)
    only_planned: bool = False
    joins_parts: bool = False
    weighs_steps: bool = False
    has_lengths: bool = False
    apart: dict[int, bool] = field(default_factory=dict)
    shares_masks: bool = False
    is_replayed: bool = False


def device_type_of(values: list) -> str:
    """Of the tensors that a call passes."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return max(tensors, key=lambda tensor: tensor.dim()).device.type if tensors else "cpu"


def batched_inputs(tensors: list[torch.Tensor]) -> tuple[tuple[bool, ...], int]:
    """Which tensors carry the batch on their first dimension, and its size: that of the first
    tensor with two dimensions or more (else with one)."""
    leading = next((t for t in tensors if t.dim() >= 2), None)
    if leading is None:
        return tuple(False for _ in tensors), 1
    size = leading.size(0)
    return tuple(t.dim() >= 2 and t.size(0) == size for t in tensors), size


def needing_gradients(feed: Feed, assumed: bool = True) -> set[torch.fx.Node]:
    """Nodes whose tensors autograd would say to require a gradient. assumed: whether inputs count
    of which that is only assumed."""
    found = {
        node
        for node, known in feed.placeholders.items()
        if known.requires_grad and (assumed or not known.assumed)
    }
    for node in feed.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            continue
        if node.target in _WITHOUT_GRADIENT or node.op != "call_function":
            continue
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found


def differentiated(graph: torch.fx.Graph, needing: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """Of the nodes with a gradient those through which one goes, from a result or what is written:
    of what ends at a `detach()` eager keeps nothing."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in needing and (
            mutates(node) or any(user.op == "output" or user in found for user in node.users)
        ):
            found.add(node)
    return found
