"""A captured forward, compiled and bound to the live module that it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot import policy
from ingot.capture.captured import Captured, Region, Slot, TorchStep
from ingot.runtime.library import STATUS_UNAVAILABLE, IngotError
from ingot.runtime.program import Binding, Program

# What torch.autograd.graph.increment_version() calls.
_increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)


def _increment_versions(tensors: list[torch.Tensor]) -> None:
    """As after an operator of PyTorch's that writes in place: autograd's check must see it."""
    try:
        _increment_version(tensors)
    except TypeError:  # PyTorch 2.4 takes one tensor
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
    except RuntimeError:
        # Tensors made in inference mode have no version.
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


class RefusedError(Exception):
    """The library cannot take a region; `nodes` maps graph nodes to the reason."""

    def __init__(self, nodes: dict[str, str]):
        super().__init__("; ".join(nodes.values()))
        self.nodes = nodes


class Compiled:
    """Runs a `Captured`: `tensors` are the call's tensors in order; returns what the module
    returns. Parameters and buffers are looked up in the module at every call."""

    def __init__(
        self,
        captured: Captured,
        module: nn.Module,
        device_type: str,
        precision: str | None,
        tf32: bool,
        options: dict | None = None,
    ):
        self.captured = captured
        self.programs: list[Program] = []
        for region in captured.regions:
            self.programs.append(_compile(region, device_type, precision, tf32, options))
        self._single = captured.out_spec.is_leaf() and isinstance(captured.outputs[0], Slot)
        self._plan_steps()
        self.reads_tensors_only = all(
            source.kind != "constant" or isinstance(source.tensor, torch.Tensor)
            for source in captured.sources
        )
        self.direct = self._direct_program()
        slots = range(len(captured.sources))
        if self.direct is not None:
            slots = captured.steps[0].leaves
        sources = [captured.sources[slot] for slot in slots]
        # What a call reads, looked up now: the tensors of `direct` in its order, else all.
        self.leaves = _reader([_lookup(source, module) for source in sources])
        self.inputs_read = {source.index for source in sources if source.kind == "input"}
        self._updated = [slots.index(slot) for slot in _updated_slots(captured)]

    # The common case: one region takes everything, and gives the only output.
    def _direct_program(self) -> Program | None:
        steps = self.captured.steps
        if len(steps) != 1 or not isinstance(steps[0], Region) or not self._single:
            return None
        region = steps[0]
        if region.results != [self.captured.outputs[0].index]:
            return None
        return self.programs[0]

    def run_direct(self, binding: Binding, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """With leaves that match a binding of `direct`."""
        result = self.direct.run_bound(binding, leaves)[0]
        if self._updated:
            _increment_versions([leaves[index] for index in self._updated])
        return result

    def run(self, tensors) -> Any:
        leaves = self.leaves(tensors)
        if self.direct is not None:
            return self.run_direct(self.direct.bind(leaves), leaves)
        return self.run_steps(leaves)

    def run_steps(self, sources: Sequence[torch.Tensor]) -> Any:
        """Region by region and operator by operator, from the tensors of all sources."""
        values: list[Any] = [*sources, *[None] * (self.captured.slots - len(sources))]
        for step, program, finished in self._steps:
            if program is not None:
                results = program.run([values[slot] for slot in step.leaves])
                for slot, result in zip(step.results, results):
                    values[slot] = result
            else:
                args, kwargs = _resolve((step.args, step.kwargs), values)
                values[step.result] = step.target(*args, **kwargs)
            for slot in finished:
                values[slot] = None
        if self._updated:
            _increment_versions([sources[index] for index in self._updated])
        outputs = [
            values[output.index] if isinstance(output, Slot) else output
            for output in self.captured.outputs
        ]
        return (
            outputs[0] if self._single else pytree.tree_unflatten(outputs, self.captured.out_spec)
        )

    def _plan_steps(self) -> None:
        """Each step with its program, and the slots that nothing reads after it."""
        last_use: dict[int, int] = {}
        for position, step in enumerate(self.captured.steps):
            for slot in _slots_read(step):
                last_use[slot] = position
        kept = {o.index for o in self.captured.outputs if isinstance(o, Slot)}
        programs = iter(self.programs)
        self._steps = []
        for position, step in enumerate(self.captured.steps):
            finished = [s for s, p in last_use.items() if p == position and s not in kept]
            program = next(programs) if isinstance(step, Region) else None
            self._steps.append((step, program, finished))


def _compile(region: Region, device_type, precision, tf32, options) -> Program:
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


def _lookup(source, module: nn.Module):
    """(members, key): `members[key]` is the source's tensor, or the call's tensor number `key`
    where members is None."""
    if source.kind == "input":
        return None, source.index
    if source.kind == "constant":
        return {"constant": source.tensor}, "constant"
    path, _, name = source.path.rpartition(".")
    owner = module.get_submodule(path)
    members = owner._parameters if source.kind == "parameter" else owner._buffers
    return members, name


def _reader(sources: Sequence[tuple[dict | None, Any]]) -> Callable[[tuple], tuple]:
    """A function that looks sources up, given the call's tensors. Compiled: it runs at every call,
    and a loop takes twice as long."""
    names = {f"m{i}": members for i, (members, _) in enumerate(sources) if members is not None}
    items = [
        f"{'tensors' if members is None else f'm{i}'}[{key!r}],"
        for i, (members, key) in enumerate(sources)
    ]
    return eval(f"lambda tensors: ({' '.join(items)})", names)


def _updated_slots(captured: Captured) -> list[int]:
    """Of the buffers that regions write in place."""
    updated = []
    for region in captured.regions:
        leaves = [v for v in region.graph["values"] if v["op"] in ("input", "parameter", "buffer")]
        position = {id(leaf): index for index, leaf in enumerate(leaves)}
        for value in region.graph["values"]:
            moves = value["op"] in ("batch_norm", "instance_norm")
            if moves and value["attributes"].get("training"):
                for argument in value["args"][3:]:
                    if argument >= 0:
                        leaf = region.graph["values"][argument]
                        updated.append(region.leaves[position[id(leaf)]])
    return updated


def _slots_read(step) -> list[int]:
    if isinstance(step, Region):
        return step.leaves
    found: list[int] = []

    def visit(value):
        if isinstance(value, Slot):
            found.append(value.index)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)

    assert isinstance(step, TorchStep)
    visit((step.args, step.kwargs))
    return found


def _resolve(value: Any, values: list) -> Any:
    if isinstance(value, Slot):
        return values[value.index]
    if isinstance(value, (list, tuple)):
        items = [_resolve(item, values) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: _resolve(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(v, values) for v in (value.start, value.stop, value.step)))
    return value
