"""What a capture gives: regions that Ingot runs, steps that PyTorch runs, and what feeds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ingot.capture.reference import Reference
from ingot.runtime.layouts import LeafLayout, TensorLayout


class CaptureError(RuntimeError):
    """PyTorch must run all of a graph or module; the message says why, for the user."""


class NothingToGainError(CaptureError):
    """PyTorch runs it as fast."""


@dataclass(frozen=True)
class Source:
    """A tensor from outside the graph.

    kind: "input" (index: its position among the call's tensors), "parameter" or "buffer" (path:
    its name in the module), "constant" (tensor: one that the graph or the model's code holds).
    """

    kind: str
    path: str
    index: int = -1
    tensor: torch.Tensor | None = None


@dataclass(frozen=True)
class Slot:
    """A reference to a value of the run: its index in the list of values."""

    index: int


@dataclass(frozen=True)
class Unsupported:
    """Something that PyTorch runs; what: the operator, where: "model.py:14", why."""

    what: str
    where: str
    why: str


@dataclass
class Region:
    """A graph that Ingot runs. leaves, results: slots, in the graph's order; the graph may have
    further results, which backward reads. Several of its results may be parts of one tensor, which
    then is one of the region's (a JoinedLayout). reference: the same by PyTorch's operators;
    written, written_leaves: places of results, and of leaves, of which backward reads copies, since
    the caller may write into them before; written_inputs: of leaves, where these have no gradient,
    tables: where these are of inference mode, too, which can be kept for no backward pass. same: of
    results that are earlier ones in other dimensions, the earlier one's place: nobody writes into
    either, so that both may lie in the same memory. streamed: whether products had better read
    their operands as these lie (wide_samples.py). per_sample: how many samples of the region each
    of the graph's has, windows of an image, say.
    """

    graph: dict
    leaves: list[int]
    results: list[int]
    leaf_layouts: list[LeafLayout]
    result_layouts: list[TensorLayout]
    # One {what, where} for each operator of the module that the region stands for.
    operators: list[dict]
    reference: Reference
    written: frozenset[int] = frozenset()
    written_leaves: frozenset[int] = frozenset()
    written_inputs: frozenset[int] = frozenset()
    tables: frozenset[int] = frozenset()
    same: dict[int, int] = field(default_factory=dict)
    streamed: bool = False
    per_sample: int = 1


@dataclass
class TorchStep:
    """An operator that PyTorch runs; args and kwargs hold `Slot`s."""

    target: Callable
    args: tuple
    kwargs: dict
    result: int
    what: str = ""
    where: str = ""


@dataclass
class Captured:
    """A module's forward for one combination of training flags.

    sources fill the first slots of a run, steps the following ones; outputs: slots, or values that
    do not depend on the inputs. static_batch: the only batch size that this is for, or None.
    delegate_batches: batch sizes for which PyTorch's own forward must answer (with its own error).
    """

    sources: list[Source]
    steps: list[Region | TorchStep]
    slots: int
    outputs: list[Any]
    out_spec: Any
    static_batch: int | None = None
    delegate_batches: frozenset = frozenset({0})
    unsupported: list[Unsupported] = field(default_factory=list)

    @property
    def regions(self) -> list[Region]:
        return [step for step in self.steps if isinstance(step, Region)]


def slots_read(step: Region | TorchStep) -> list[int]:
    if isinstance(step, Region):
        return step.leaves
    found: list[int] = []

    def visit(value):
        if isinstance(value, Slot):
            found.append(value.index)

    map_aggregate((step.args, step.kwargs), visit)
    return found


def resolved(value: Any, values: list) -> Any:
    """With tensors in the place of slots."""
    return map_aggregate(value, lambda v: values[v.index] if isinstance(v, Slot) else v)
