"""The steps of a captured graph as statements of Python: regions, between them PyTorch's
operators."""

from __future__ import annotations

import operator

import torch

from ingot.capture import Captured
from ingot.capture.captured import Region, Slot, TorchStep, slots_read
from ingot.standalone.printing import Names, call_text, wrapped

_INLINE = (operator.getitem, torch.ops.aten.sym_size.int)


class StepPrinter:
    """texts: by slot how it is read, to be filled with those of the graph's sources; made: names of
    which a tensor is let go of behind the step that reads it last. names: those taken; device: an
    expression that stands for the device that the graph was captured on."""

    def __init__(self, captured: Captured, names: Names, device: str):
        self.captured, self.names, self.device = captured, names, device
        self.texts: dict[int, str] = {}
        self.made: set[str] = set()
        self.last_use = self._last_uses()

    def statements(self, indent: str) -> list[str]:
        body: list[str] = []
        for position, step in enumerate(self.captured.steps):
            if isinstance(step, Region):
                body += self._run(step, indent)
            elif _is_inline(step):
                self.texts[step.result] = self._operation(step)
                continue
            else:
                body += self._operate(step, position, indent)
            finished = [
                self.texts[slot]
                for slot, last in self.last_use.items()
                if last == position and self.texts.get(slot) in self.made
            ]
            if finished and position < len(self.captured.steps) - 1:
                body += wrapped(f"del {', '.join(finished)}", indent)
        return body

    def _run(self, step: Region, indent: str) -> list[str]:
        raise NotImplementedError

    def _operate(self, step: TorchStep, position: int, indent: str) -> list[str]:
        text = self._operation(step)
        return wrapped(f"{self._result(step)} = {text}", indent)

    def _operation(self, step: TorchStep) -> str:
        return call_text(step.target, step.args, step.kwargs, self._text, self.device)

    def _result(self, step: TorchStep) -> str:
        name = self.texts[step.result] = self.names.new(self._wanted(step.result, step.what))
        self.made.add(name)
        return name

    def _results(self, step: Region) -> list[str]:
        made = zip(step.results, step.graph["results"])
        results = [self.names.new(self._wanted(slot, result["name"])) for slot, result in made]
        self.made |= set(results)
        self.texts.update(zip(step.results, results, strict=True))
        return results

    def _wanted(self, slot: int, name: str) -> str:
        """What to call a step's result, which the graph calls so."""
        return name

    def _text(self, slot: Slot) -> str:
        return self.texts[slot.index]

    def _last_uses(self) -> dict[int, int]:
        """By slot the last step that reads it, through texts that stand in for it as well."""
        kept = {o.index for o in self.captured.outputs if isinstance(o, Slot)}
        last: dict[int, int] = {}
        inside: dict[int, set[int]] = {}
        for position, step in enumerate(self.captured.steps):
            read = set(slots_read(step))
            for slot in list(read):
                read |= inside.get(slot, set())
            if not isinstance(step, Region) and _is_inline(step):
                inside[step.result] = read
                if step.result in kept:
                    kept |= read
            last.update(dict.fromkeys(read, position))
        return {slot: at for slot, at in last.items() if slot not in kept}


def _is_inline(step: TorchStep) -> bool:
    return step.target in _INLINE or not step.what
