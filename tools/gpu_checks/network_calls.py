"""A call of a network in a mode and a setting, as it is or replayed by a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

SEED = 11
# Before a capture, on a stream of its own: what is compiled, measured and set up by calls.
_WARMUPS = 4


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def in_dtype_of(setting: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if setting == "bf16_weights" and tensor.is_floating_point() else tensor


class Call:
    """One call of a module in a mode: its outputs, and in training the gradients and buffers."""

    def __init__(self, mode: str, setting: str, inputs: Any, weights: list | None = None):
        self.training, self.setting, self.weights = mode == "training", setting, weights
        self.inputs = pytree.tree_map(lambda tensor: in_dtype_of(setting, tensor), inputs)

    def forward(self, module: Callable) -> Any:
        args, kwargs = self.inputs, {}
        if isinstance(self.inputs, dict):
            args, kwargs = (), self.inputs
        device = tensors_of(self.inputs)[0].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.setting == "bf16"):
            return module(*args, **kwargs)

    def run(self, module: nn.Module, step: Callable | None = None) -> list[torch.Tensor]:
        """step: the callable in the module's place (its torch.compile)."""
        called = module if step is None else step  # some modules have no truth
        if not self.training:
            with torch.no_grad():
                return tensors_of(self.forward(called))
        module.zero_grad(set_to_none=True)
        results = [t for t in tensors_of(self.forward(called)) if t.requires_grad]
        weights = self.weights or [torch.ones_like(r) for r in results]
        torch.autograd.backward(results, [w.to(r.dtype) for w, r in zip(weights, results)])
        return [r.detach() for r in results]

    def everything(self, module: nn.Module, step: Callable | None = None) -> dict:
        """By name, all that a call leaves."""
        torch.manual_seed(SEED)
        found = {f"output {i}": r for i, r in enumerate(self.run(module, step))}
        if self.training:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    found[f"gradient of {name}"] = parameter.grad
            found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
        return found


class CapturedCall(Call):
    """As a Call; the first one of a module captures it, the others replay the graph. Results and
    gradients lie where every replay writes them."""

    def __init__(self, mode: str, setting: str, inputs: Any, weights: list | None = None):
        super().__init__(mode, setting, inputs, weights)
        self._graphs: dict[nn.Module, tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}

    def run(self, module: nn.Module, step: Callable | None = None) -> list[torch.Tensor]:
        if module not in self._graphs:
            self._graphs[module] = self._captured(module, step)
        graph, results = self._graphs[module]
        graph.replay()
        return results

    def _captured(self, module: nn.Module, step: Callable | None) -> tuple:
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                super().run(module, step)
        torch.cuda.current_stream().wait_stream(side)
        module.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = super().run(module, step)
        for name, buffer in module.named_buffers():  # which the first calls have moved
            buffer.copy_(before[name])
        return graph, results
