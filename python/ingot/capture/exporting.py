"""From a live module to an ATen graph: torch.export on a small stand-in batch.

The module is captured through a shallow copy of its tree, which shares parameters and buffers, so
that nothing is patched in the module that the user (or another thread) holds.
"""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot.capture.captured import CaptureError
from ingot.capture.custom_ops import batch_norm_forward, is_plain_batch_norm
from ingot.capture.feed import batched_inputs

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass
class Exported:
    """An ATen graph of a module.

    program: the ExportedProgram; its inputs are the module's tensors in pytree order. batch: the
    symbol of the batch size as it appears in sizes, or None where the graph is for one batch size.
    static_batch: that size.
    """

    program: Any
    batch: Any | None
    static_batch: int | None
    batched: tuple[bool, ...]
    out_spec: Any
    constant_outputs: dict[int, Any]


def shallow_copy(module: nn.Module, forward: Callable | None = None) -> nn.Module:
    """A copy of the module tree that shares parameters, buffers and attributes. Batch norms carry
    the operator of ours; `forward` (unbound) replaces the root's."""
    copies: dict[int, nn.Module] = {}

    def copy(original: nn.Module) -> nn.Module:
        known = copies.get(id(original))
        if known is not None:
            return known
        twin = original.__new__(_exportable_class(type(original)))
        copies[id(original)] = twin
        state = dict(original.__dict__)
        for container in ("_parameters", "_buffers", "_modules"):
            state[container] = type(state[container])(state[container])
        twin.__dict__.update(state)
        for name, child in original._modules.items():
            if child is not None:
                twin._modules[name] = copy(child)
        if is_plain_batch_norm(original):
            twin.__dict__["forward"] = types.MethodType(batch_norm_forward, twin)
        return twin

    root = copy(module)
    if forward is not None:
        root.__dict__["forward"] = types.MethodType(forward, root)
    # The root's hooks run around the optimised call; here they would run twice.
    for name in _HOOKS:
        if name in root.__dict__:
            root.__dict__[name] = OrderedDict()
    return root


class _Outputs:
    """Filled while the module is traced. Not attributes of the module: export restores those."""

    spec: Any = None
    constants: dict[int, Any]


class _Flat(nn.Module):
    """Takes the tensors among a call's arguments and gives the tensors among its outputs."""

    def __init__(self, model: nn.Module, leaves: list, spec: Any):
        super().__init__()
        self.model = model
        self._leaves, self._spec = leaves, spec
        self._outputs = _Outputs()

    def forward(self, *tensors):
        feed = iter(tensors)
        leaves = [next(feed) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        before = {name: _plain_attributes(m) for name, m in self.model.named_modules()}
        outputs, self._outputs.spec = pytree.tree_flatten(self.model(*args, **kwargs))
        for name, m in self.model.named_modules():
            if _plain_attributes(m) != before.get(name):
                raise CaptureError(
                    f"its forward changes attributes of {name or 'the module itself'}, which a "
                    "captured graph would not repeat"
                )
        results, constants = [], {}
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                results.append(output)
            elif output is None or type(output) in (bool, int, float, str):
                constants[index] = output
            else:
                raise CaptureError(
                    f"its output holds a {type(output).__name__}, which is neither a tensor nor a "
                    "plain number"
                )
        self._outputs.constants = constants
        return tuple(results)


def _stand_in_batch(tensors: list[torch.Tensor]) -> int:
    """A small batch size that equals no other extent: export specialises on 0 and 1."""
    taken = {size for tensor in tensors for size in tensor.shape[1:]}
    return next(size for size in (5, 7, 11, 13, 17, 19, 23, 29, 31, 37) if size not in taken)


def _example(tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
    sizes = list(tensor.shape)
    if batch is not None:
        sizes[0] = batch
    if tensor.is_contiguous():
        return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def export_module(
    module: nn.Module,
    args: tuple,
    kwargs: dict | None = None,
    forward: Callable | None = None,
) -> Exported:
    """Exports with a symbolic batch size; where the module depends on the number itself, for the
    batch size given. Raises CaptureError."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise CaptureError("it takes no tensors")
    batched, size = batched_inputs(tensors)
    problem: BaseException | None = None
    if any(batched):
        stand_in = _stand_in_batch(tensors)
        examples = [_example(t, stand_in if b else None) for t, b in zip(tensors, batched)]
        dimension = torch.export.Dim("batch", min=2)
        shapes = tuple({0: dimension} if b else None for b in batched)
        try:
            outputs, program = _export(module, leaves, spec, forward, examples, (shapes,))
        except CaptureError:
            raise
        except Exception as error:  # export raises many kinds
            problem = error
        else:
            symbol = _batch_symbol(program, batched)
            return Exported(program, symbol, None, batched, outputs.spec, outputs.constants)
    examples = [_example(t, None) for t in tensors]
    try:
        outputs, program = _export(module, leaves, spec, forward, examples, None)
    except CaptureError:
        raise
    except Exception as error:
        first = _first_line(problem or error)
        raise CaptureError(f"torch.export refuses it: {first}") from error
    return Exported(program, None, size, batched, outputs.spec, outputs.constants)


def _export(module, leaves, spec, forward, examples, dynamic_shapes):
    twin = shallow_copy(module, forward)
    flat = _Flat(twin, leaves, spec)
    flat.training = module.training
    try:
        with torch.no_grad():
            program = _trace(flat, tuple(examples), dynamic_shapes)
    finally:
        # Bound methods make cycles, which would keep the parameters until a collection.
        for m in twin.modules():
            m.__dict__.pop("forward", None)
    return flat._outputs, program


def _exportable_class(cls: type) -> type:
    """PyTorch 2.4 exports through subclasses made on the fly, which slots forbid: there the nearest
    base without them stands in. For what `optimize` made that is the model's own class."""
    if _version() >= (2, 5):
        return cls
    return next(c for c in cls.__mro__ if not any(vars(b).get("__slots__") for b in c.__mro__))


def _trace(flat, examples, dynamic_shapes):
    export = torch.export
    if _version() < (2, 5):
        # The public function decomposes, and nothing public keeps linear and the like whole.
        from torch.export import _trace as traced

        with warnings.catch_warnings():
            # Said of every submodule, and of our own batch norm.
            warnings.filterwarnings("ignore", "Unable to find the path of the module")
            warnings.filterwarnings("ignore", "At pre-dispatch tracing")
            return traced._export(
                flat, examples, dynamic_shapes=dynamic_shapes, strict=False, pre_dispatch=True
            )
    if not hasattr(export, "export_for_training") or _version() >= (2, 7):
        return export.export(flat, examples, dynamic_shapes=dynamic_shapes, strict=False)
    # Up to 2.6, export() decomposes and this keeps linear, layer_norm and the like whole.
    return export.export_for_training(flat, examples, dynamic_shapes=dynamic_shapes, strict=False)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


_INTERNAL = frozenset(nn.Module().__dict__) | {"forward"}


def _plain_attributes(module: nn.Module) -> dict:
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in _INTERNAL and isinstance(value, (bool, int, float, str, type(None)))
    }


def _batch_symbol(program, batched):
    users = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind.name == "USER_INPUT"
    ]
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name, is_batched in zip(users, batched):
        if is_batched:
            size = by_name[name].meta["val"].shape[0]
            if isinstance(size, torch.SymInt):
                return size.node.expr
    raise CaptureError("its batch dimension did not stay symbolic")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
