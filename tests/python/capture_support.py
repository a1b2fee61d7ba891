"""Runs a capture through the library's double-precision evaluator."""

from __future__ import annotations

import torch
from evaluator import evaluate_fp64
from ingot.capture import Captured, Region
from ingot.capture.captured import Slot, resolved
from ingot.model_capture import capture
from torch import nn
from torch.utils import _pytree as pytree


def run_fp64(captured: Captured, module: nn.Module, inputs) -> object:
    """What the capture computes, its regions evaluated by the reference and nothing rewritten."""
    values: list = [None] * captured.slots
    for slot, source in enumerate(captured.sources):
        values[slot] = _tensor(source, module, inputs)
    for step in captured.steps:
        if isinstance(step, Region):
            leaves = [values[slot] for slot in step.leaves]
            results = evaluate_fp64(step.graph, leaves, step.leaf_layouts, step.result_layouts)
            for slot, result, layout in zip(step.results, results, step.result_layouts):
                values[slot] = result.to(layout.dtype)
        else:
            args, kwargs = resolved((step.args, step.kwargs), values)
            values[step.result] = step.target(*args, **kwargs)
    outputs = [values[o.index] if isinstance(o, Slot) else o for o in captured.outputs]
    return pytree.tree_unflatten(outputs, captured.out_spec)


def _tensor(source, module: nn.Module, inputs) -> torch.Tensor:
    if source.kind == "input":
        return inputs[source.index]
    if source.kind == "constant":
        return source.tensor
    path, _, name = source.path.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if source.kind == "parameter" else owner._buffers)[name]


def check_capture(module: nn.Module, *inputs: torch.Tensor, batches=(3, 5)) -> Captured:
    """Captures in double precision and compares with PyTorch, for several batch sizes and with the
    updates of buffers."""
    import copy

    module = module.double()
    inputs = [t.double() if t.is_floating_point() else t for t in inputs]
    captured = capture(module, tuple(inputs))
    for batch in batches:
        fed = [resized(t, batch, inputs[0].shape[0]) for t in inputs]
        twin = copy.deepcopy(module)
        with torch.no_grad():
            expected = module(*fed)
            found = run_fp64(captured, twin, fed)
        same(found, expected)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(twin.get_buffer(name), buffer, msg=name)
        module.load_state_dict(twin.state_dict())
    return captured


def resized(tensor: torch.Tensor, batch: int, old: int) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.shape[0] != old:
        return tensor
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, *tensor.shape[1:])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def same(found, expected, rtol=1e-9, atol=1e-9) -> None:
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def whole(captured: Captured) -> bool:
    """Whether one region does everything."""
    return [type(step) for step in captured.steps] == [Region] and not captured.unsupported
