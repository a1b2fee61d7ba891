"""What is timed against what: eager, eager with TF32, torch.compile, and a candidate."""

from __future__ import annotations

from collections.abc import Callable

import torch

Subject = Callable[[int], object]

EAGER = "eager"
EAGER_TF32 = "eager TF32"
COMPILE = "torch.compile"


def calls(module: Callable, input_sets: list) -> Subject:
    """Calls the module without gradients, on one set of inputs after the other."""

    def call(i: int) -> object:
        with torch.no_grad():
            return module(*input_sets[i % len(input_sets)])

    return call


def with_tf32(subject: Subject) -> Subject:
    def call(i: int) -> object:
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_tf32
        matmul.allow_tf32 = True
        try:
            return subject(i)
        finally:
            matmul.allow_tf32 = before

    return call


def compile_mode(device: torch.device) -> str:
    return "max-autotune" if device.type == "cuda" else "default"


def baselines(
    module: torch.nn.Module, input_sets: list, device: torch.device, compiled: bool, tf32: bool
) -> dict[str, Subject]:
    """The subjects that a candidate is measured against."""
    subjects = {EAGER: calls(module, input_sets)}
    if tf32 and device.type == "cuda":
        subjects[EAGER_TF32] = with_tf32(calls(module, input_sets))
    if compiled:
        subjects[COMPILE] = compiled_by_torch(module, input_sets, device)
    return subjects


def compiled_by_torch(module: torch.nn.Module, input_sets: list, device: torch.device) -> Subject:
    torch._dynamo.reset()
    return calls(torch.compile(module, mode=compile_mode(device), dynamic=False), input_sets)


class WeightChanger:
    """Gives the module's matrices other values before each call, so that nothing derived from them
    earlier can serve: two sets of values take turns."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._parameters: list = []
        seen: set = set()
        for module in modules:
            for parameter in module.parameters():
                if parameter.dim() >= 2 and id(parameter) not in seen:
                    seen.add(id(parameter))
                    own = parameter.detach().clone()
                    self._parameters.append((parameter, own, own * 1.01))

    def __call__(self, i: int) -> None:
        with torch.no_grad():
            for parameter, even, odd in self._parameters:
                parameter.copy_(odd if i % 2 else even)
