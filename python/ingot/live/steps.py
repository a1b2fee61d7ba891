"""The steps of a captured graph as one Python function: between kernels, the host's time is that of
a few thousand calls, of which an interpreter of steps would double the cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.captured import Captured, Region, Slot, TorchStep, slots_read

_aten = torch.ops.aten
# The same operator through PyTorch's own binding, which parses its arguments in half the time.
_BINDINGS = {
    _aten.add.Tensor: torch.add,
    _aten.batch_norm.default: torch.batch_norm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.contiguous.default: torch.Tensor.contiguous,
    _aten.conv2d.default: torch.conv2d,
    _aten.div.Tensor: torch.div,
    _aten.dropout.default: torch.dropout,
    _aten.einsum.default: torch._VF.einsum,
    _aten.embedding.default: torch.embedding,
    _aten.expand.default: torch.Tensor.expand,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.max_pool2d.default: torch.max_pool2d,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.permute.default: torch.permute,
    _aten.relu.default: torch.relu,
    _aten.reshape.default: torch.reshape,
    _aten.select.int: torch.select,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.sym_size.int: torch.Tensor.size,
    _aten.t.default: torch.t,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}


def function_of(captured: Captured, calls: Sequence[Callable | None]) -> Callable:
    """inputs, by position -> outputs, in a tuple. A list of inputs is emptied, and tensors are let
    go where they are read last. calls: what runs each step that is a region."""
    return _Writer(captured, calls).function()


class _Writer:
    def __init__(self, captured: Captured, calls: Sequence[Callable | None]):
        self.captured, self.calls = captured, calls
        self.names: dict[str, Any] = {}
        self.constants: set[int] = set()
        self.lines: list[str] = []

    def function(self) -> Callable:
        self._sources()
        last = self._last_reads()
        for at, (step, call) in enumerate(zip(self.captured.steps, self.calls)):
            self._step(at, step, call)
            known = dict.fromkeys([*slots_read(step), *_results(step)])
            gone = [f"v{slot}" for slot in known if last.get(slot, at) <= at]
            if gone:
                self.lines.append(f"del {', '.join(gone)}")
        outputs = "".join(f"{self._value(output)}, " for output in self.captured.outputs)
        self.lines.append(f"return ({outputs})")
        source = "def steps(args):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(source, "<steps of a graph that Ingot captured>", "exec"), self.names)
        return self.names["steps"]

    def _sources(self) -> None:
        for slot, source in enumerate(self.captured.sources):
            if source.kind == "constant":
                self.names[f"v{slot}"] = source.tensor
                self.constants.add(slot)
            else:
                self.lines.append(f"v{slot} = args[{source.index}]")
        self.lines.append("if type(args) is list: args.clear()")

    def _last_reads(self) -> dict[int, float]:
        """By slot, the last step that reads it; never, of what is to stay."""
        last: dict[int, float] = {}
        for at, step in enumerate(self.captured.steps):
            last.update(dict.fromkeys(slots_read(step), at))
        outputs = [o.index for o in self.captured.outputs if isinstance(o, Slot)]
        last.update(dict.fromkeys([*outputs, *self.constants], math.inf))
        return last

    def _step(self, at: int, step: Region | TorchStep, call: Callable | None) -> None:
        if call is not None:
            self.names[f"region_{at}"] = call
            leaves = "".join(f"v{slot}, " for slot in step.leaves)
            results = "".join(f"v{slot}, " for slot in step.results)
            given = f"{results}= " if results else ""  # none where it only moves statistics
            self.lines.append(f"{given}region_{at}(({leaves}))")
            return
        self.names[f"operator_{at}"] = _BINDINGS.get(step.target, step.target)
        values = [self._value(value) for value in step.args]
        values += [f"{name}={self._value(value)}" for name, value in step.kwargs.items()]
        self.lines.append(f"v{step.result} = operator_{at}({', '.join(values)})")

    def _value(self, value: Any) -> str:
        if isinstance(value, Slot):
            return f"v{value.index}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, tuple) and type(value) is tuple:
            return f"({''.join(f'{self._value(item)}, ' for item in value)})"
        if type(value) is dict:
            return f"{{{', '.join(f'{k!r}: {self._value(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._value, (value.start, value.stop, value.step)))})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"constant_{len(self.names)}"
        self.names[name] = value
        return name


def _results(step: Region | TorchStep) -> list[int]:
    return step.results if isinstance(step, Region) else [step.result]
