"""The body of ModelNew.forward: which regions run and what PyTorch does between them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot.capture import Captured
from ingot.capture.captured import Region
from ingot.model_capture import attribute
from ingot.standalone.constants import Constants
from ingot.standalone.printing import Names, UnprintableError, tuple_text, value_text, wrapped
from ingot.standalone.regions import FileRegion
from ingot.standalone.steps import StepPrinter

_INDEXED = (nn.Sequential, nn.ModuleList, nn.ParameterList)
_KEYED = (nn.ModuleDict, nn.ParameterDict)


class Signature:
    """A forward's arguments: those of the call that was captured, by name where they have one."""

    def __init__(self, forward: Any, inputs: Sequence[Any]):
        own, *parameters = inspect.signature(forward).parameters.values()
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.owner = own.name
        self.simple = len(parameters) == len(inputs) and all(
            p.kind is plain and p.default is inspect.Parameter.empty for p in parameters
        )
        names = Names([self.owner, "torch", "args", "kwargs"])
        found = [p.name for p in parameters if p.kind is plain][: len(inputs)]
        self.simple = self.simple and "torch" not in found  # whose dtypes the text reads
        if self.simple:
            self.names = found
            names.taken |= set(found)
        else:
            found += ["value"] * (len(inputs) - len(found))
            self.names = [names.new(name) for name in found]
        # Every leaf of the arguments, in the order of the capture's.
        self.leaves: list[tuple[str, Any]] = []
        for name, value in zip(self.names, inputs, strict=True):
            self._add(name, value)
        self.tensors = [text for text, value in self.leaves if isinstance(value, torch.Tensor)]

    def _add(self, text: str, value: Any) -> None:
        if type(value) in (tuple, list):
            for index, item in enumerate(value):
                self._add(f"{text}[{index}]", item)
        elif type(value) is dict:
            for key, item in value.items():
                self._add(f"{text}[{key!r}]", item)
        else:
            self.leaves.append((text, value))

    def header(self) -> str:
        arguments = self.names if self.simple else ["*args", "**kwargs"]
        return f"def forward({', '.join([self.owner, *arguments])}):"

    def original(self) -> str:
        arguments = self.names if self.simple else ["*args", "**kwargs"]
        return f"super().forward({', '.join(arguments)})"

    def unpacked(self) -> list[str]:
        """Statements that name the arguments."""
        return [] if self.simple else [f"{tuple_text(self.names)[1:-1]} = args"]

    def declined(self, batches: Sequence[int], only: int | None, batched: str) -> str:
        """The condition under which the original's forward runs. batches: batch sizes for which it
        does; only: the one size for which it does not, if there is one; batched: a tensor of that
        size, "" where none has one."""
        terms = [] if self.simple else [f"len(args) != {len(self.names)} or kwargs"]
        tensors, lengths = [], []
        for text, value in self.leaves:
            text = self._given(text)
            if isinstance(value, torch.Tensor):
                tensors.append(text)
                if value.dim() == 1:  # whose length the kernels have built in
                    lengths.append(f"{text}.shape != ({len(value)},)")
            else:
                terms.append(f"{text} != {value_text(value, str)}")
        # Behind which all of them are known to be tensors.
        terms.append(f"_ingot_declines({', '.join([self.owner, *tensors])})")
        terms += lengths
        if batched and batches:
            texts = value_text(tuple(sorted(batches)), str)
            compared = f"in {texts}" if len(batches) > 1 else f"== {batches[0]}"
            terms.append(f"{self._given(batched)}.shape[0] {compared}")
        if batched and only:
            terms.append(f"{self._given(batched)}.shape[0] != {only}")
        return " or ".join(terms)

    def _given(self, text: str) -> str:
        """An argument as the forward has it before it knows what else was given."""
        if self.simple:
            return text
        return re.sub(r"^\w+", lambda m: f"args[{self.names.index(m[0])}]", text)


def access(module: nn.Module, path: str, owner: str = "self") -> str:
    """An expression for a submodule, parameter, buffer or attribute."""
    text, here = owner, module
    for part in path.split(".") if path else ():
        if isinstance(here, _INDEXED) and part.isdigit():
            text += f"[{part}]"
        elif isinstance(here, _KEYED):
            text += f"[{part!r}]"
        elif part.isidentifier():
            text += f".{part}"
        else:
            text = f"getattr({text}, {part!r})"
        here = getattr(here, part)
    return text


class ForwardPrinter(StepPrinter):
    """One mode's run: `regions` are the file's, for each of the capture's in order."""

    def __init__(
        self,
        captured: Captured,
        regions: Sequence[FileRegion],
        module: nn.Module,
        signature: Signature,
        constants: Constants,
    ):
        names = Names([signature.owner, *signature.names, "torch"])
        super().__init__(captured, names, f"{signature.tensors[0]}.device")
        self.module, self.signature, self.constants = module, signature, constants
        self.regions = iter(regions)
        for slot, source in enumerate(captured.sources):
            self.texts[slot] = self._source(source)

    def lines(self, indent: str) -> list[str]:
        return [*self.statements(indent), *wrapped(f"return {self._returned()}", indent)]

    def _run(self, step: Region, indent: str) -> list[str]:
        region = next(self.regions)
        single = [getattr(o, "index", None) for o in self.captured.outputs] == step.results
        leaves = ", ".join(self.texts[slot] for slot in step.leaves)
        call = f"{region.class_name}.run({leaves})"
        if single and len(step.results) == 1:
            self.texts[step.results[0]] = call
            return []
        results = self._results(step)
        return wrapped(f"{', '.join(results)} = {call}" if results else call, indent)

    def _source(self, source) -> str:
        if source.kind == "input":
            return self.signature.tensors[source.index]
        if source.kind == "constant":
            found = attribute(self.module, source.path)
            if isinstance(found, torch.Tensor):
                return access(self.module, source.path, self.signature.owner)
            if not isinstance(source.tensor, torch.Tensor):
                raise UnprintableError(f"the constant {source.path}")
            return self.constants.text(source.tensor, self.device)
        return access(self.module, source.path, self.signature.owner)

    def _returned(self) -> str:
        outputs = [_Text(value_text(o, self._text)) for o in self.captured.outputs]
        return _structure(pytree.tree_unflatten(outputs, self.captured.out_spec))


class _Text:
    def __init__(self, text: str):
        self.text = text


def _structure(value: Any) -> str:
    if isinstance(value, _Text):
        return value.text
    if type(value) in (tuple, list):
        items = [_structure(item) for item in value]
        return tuple_text(items) if type(value) is tuple else f"[{', '.join(items)}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{k!r}: {_structure(v)}" for k, v in value.items()) + "}"
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and fields:
        given = ", ".join(f"{name}={_structure(item)}" for name, item in zip(fields, value))
        return f"{type(value).__qualname__}({given})"
    if value is None or type(value) in (bool, int, float, str):
        return value_text(value, str)
    raise UnprintableError(f"a result of type {type(value).__name__}")
