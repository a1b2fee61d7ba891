"""A captured graph, compiled: regions run by Ingot, between them operators run by PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from ingot.capture.captured import Captured, CaptureError, Region, Slot
from ingot.live import policy
from ingot.live.gradients import RegionCall
from ingot.live.products import product
from ingot.live.steps import function_of
from ingot.runtime.library import STATUS_UNAVAILABLE, IngotError
from ingot.runtime.program import Program


class RefusedError(CaptureError):
    """The library cannot take a region; `nodes` maps graph nodes to the reason."""

    def __init__(self, nodes: dict[str, str]):
        super().__init__("; ".join(nodes.values()))
        self.nodes = nodes


class Compiled:
    """Takes a graph's inputs, by position, and gives its outputs, in a tuple. A list of inputs is
    emptied, so that tensors are freed where they are read last.

    Operators of PyTorch's run under its autograd; regions are functions of it where a tensor that
    they read needs a gradient. causal_inputs: places of inputs that must be causal masks; apart,
    example_batch: as a feed has them; bound_lengths: whether it is for one of several sizes.
    """

    def __init__(
        self,
        captured: Captured,
        device_type: str,
        precision: str | None,
        tf32: bool,
        options: dict | None = None,
    ):
        self.captured, self.device_type = captured, device_type
        self.causal_inputs: list[int] = []
        self.apart: dict[int, bool] = {}
        self.example_batch: int | None = None
        self.bound_lengths = False
        self.programs: list[Program] = []
        for region in captured.regions:
            self.programs.append(_compile(region, device_type, precision, tf32, options))
        programs = iter(self.programs)

        def backward(captured: Captured) -> Compiled:
            return Compiled(captured, device_type, precision, tf32, options)

        shared: dict[Any, Any] = {}
        self.calls = [
            RegionCall(step, next(programs), backward, shared) if isinstance(step, Region) else None
            for step in captured.steps
        ]
        self.run = self._single_region() or function_of(captured, self.calls)

    def for_batch(self, batch: int) -> list[tuple[Program, int]]:
        """Programs, each with its batch size where the graph's is `batch`."""
        regions = self.captured.regions
        return [(p, batch * region.per_sample) for region, p in zip(regions, self.programs)]

    @property
    def takes_something(self) -> bool:
        """Whether anything of the graph is Ingot's."""
        steps = self.captured.steps
        return any(isinstance(step, Region) or step.target is product for step in steps)

    def _single_region(self) -> Callable | None:
        """The common case: one region takes everything and gives all outputs."""
        steps, outputs = self.captured.steps, self.captured.outputs
        if len(steps) != 1 or not isinstance(steps[0], Region):
            return None
        region = steps[0]
        if region.results != [o.index if isinstance(o, Slot) else None for o in outputs]:
            return None
        sources = [self.captured.sources[slot] for slot in region.leaves]
        if any(source.kind == "constant" for source in sources):
            return None
        leaves, call = _reader([source.index for source in sources]), self.calls[0]
        return lambda args: call(leaves(args))


def _reader(indices: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda args: tuple(args[i] for i in indices)


def _compile(region: Region, device_type, precision, tf32, options) -> Program:
    if region.streamed:
        options = {**(options or {}), "streamed": True}
    problem: IngotError | None = None
    for candidate in policy.candidates(precision, tf32):
        try:
            return Program(
                region.graph,
                device=device_type,
                precision=candidate,
                leaf_layouts=region.leaf_layouts,
                result_layouts=region.result_layouts,
                options=options,
                same_results=region.same,
            )
        except IngotError as error:
            if error.status == STATUS_UNAVAILABLE:
                raise
            problem = error
    raise RefusedError(_blamed(region, str(problem)))


def _blamed(region: Region, message: str) -> dict[str, str]:
    """The operators whose line the library's message names; all of the region's if none."""
    named = [
        operator
        for operator in region.operators
        if operator["where"] and operator["where"] in message
    ]
    exact = [operator for operator in named if operator["what"] in message]
    return {operator["node"]: message for operator in exact or named or region.operators}
