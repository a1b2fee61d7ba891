"""ATen graphs, and the same without writes into tensors but the last ones: into the inputs that a
forward changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ingot.capture.captured import CaptureError
from ingot.capture.nodes import schema_name
from ingot.live import switches

_aten = torch.ops.aten
# Out of place these give a contiguous tensor, in place they leave the strides that there are.
_CONTIGUOUS_OUT_OF_PLACE = {
    f"aten::{name}_"
    for name in """
        masked_fill masked_scatter cumsum cumprod tril triu renorm scatter scatter_add
        scatter_reduce index_add index_reduce
    """.split()
}


def traced(function: Callable, values: Sequence[Any]) -> torch.fx.GraphModule:
    """To ATen as autograd sees it: linear, batch_norm and the like stay whole."""
    return make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*values)


def without_writes(gm: torch.fx.GraphModule, values: Sequence[Any]) -> torch.fx.GraphModule:
    """gm: a graph of traced(), from the same values."""
    run = _Runner(gm).run
    try:
        made = traced(_functional(run), values)
    except RuntimeError:
        made = traced(_functional(run, whole=False), values)
    for node in list(made.graph.nodes):
        if node.target is _aten._assert_tensor_metadata.default:
            made.graph.erase_node(node)
        elif node.target is _aten.clone.default and draws(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
        elif torch.is_grad_enabled():
            _refuse_wrong_derivative(schema_name(node.target) or "")
    return made


def _refuse_wrong_derivative(name: str) -> None:
    """Of operators that take a write's place, where PyTorch's is not the write's."""
    if name.startswith("aten::rrelu_with_noise"):  # reads the noise that it was given, not drew
        raise CaptureError("a leaky ReLU of random slopes writes what its derivative reads")
    if name == "aten::as_strided_scatter":  # gives zeros for what was not written
        raise CaptureError("its forward writes through as_strided()")


class _Runner(switches.Runner):
    """With what the mode that takes writes away gets wrong put otherwise."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is _aten.rrelu_.default:
            return args[0].copy_(_aten.rrelu.default(*args, **kwargs))
        if schema_name(target) in _CONTIGUOUS_OUT_OF_PLACE and not args[0].is_contiguous():
            operator = getattr(getattr(_aten, target._opname[:-1]), target._overloadname)
            return args[0].copy_(operator(*args, **kwargs))
        result = super().call_function(target, args, kwargs)
        if target is _aten.dropout.default and _is_on(*args, **kwargs):
            return result.clone()  # it refuses writes into what dropout gives
        return result


def draws(node: torch.fx.Node) -> bool:
    return node.target is _aten.dropout.default and _is_on(*node.args, **node.kwargs)


def _is_on(input: Any, p: float, train: bool) -> bool:
    return bool(train) and p > 0


def _functional(function: Callable, whole: bool = True) -> Callable:
    """whole: operators that are made of others (attention, dropout) stay what they are, as they do
    without writes; that mode of PyTorch's refuses some writes."""

    def functional(*args: Any) -> Any:
        with FunctionalTensorMode(pre_dispatch=True, export=whole):
            wrapped = [FunctionalTensor.to_functional(a) if _is_tensor(a) else a for a in args]
            results = function(*wrapped)
        written = {}
        for given, after in zip(args, wrapped):
            if _is_tensor(given):
                torch._sync(after)
                changed = torch._from_functional_tensor(after.elem)
                if changed is not given:
                    given.copy_(changed)
                    written[id(after)] = given, after
        return pytree.tree_map_only(FunctionalTensor, lambda t: _result(t, written), results)

    return functional


def _result(tensor: FunctionalTensor, written: dict[int, tuple]) -> torch.Tensor:
    """What stands for a result of the forward. An input that it wrote into stays that input."""
    if id(tensor) in written:
        return written[id(tensor)][0]
    memory = tensor.untyped_storage()._cdata
    if any(after.untyped_storage()._cdata == memory for _, after in written.values()):
        raise CaptureError("a result is a view of an input that its forward writes into")
    return _unwrapped(tensor)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _unwrapped(tensor: FunctionalTensor) -> torch.Tensor:
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)
