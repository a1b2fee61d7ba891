"""Parts of a forward for which it switches gradients or autocast off: `with torch.no_grad()` around
rotary embeddings, autocast kept from a sum. A switch says what the operators behind it do, and is
lost where they are cut apart: here each gets to say it by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ingot.capture.captured import CaptureError
from ingot.capture.nodes import LEFT_ALONE, WITHOUT_AUTOCAST, mutates
from ingot.live import vmapped
from ingot.live.unseen_writes import (
    OTHERWISE,
    UnseenWritesError,
    unseen_by_autograd,
    written_otherwise,
)

# Operators of Python's that write into their first operand.
_IN_PLACE = set("setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul".split())
_DETACHING = {"detach", torch.detach, torch.Tensor.detach, torch._C._autograd._get_data_attr}
# Words in the names of the functions that switch.
_GRADIENTS, _ENTER, _EXIT, INFERENCE = (
    "set_grad_enabled",
    "_enter_autocast",
    "_exit_autocast",
    "_enter_inference_mode",
)


class Runner(torch.fx.Interpreter):
    """Runs a graph of Dynamo's while it is traced anew: as it is, the tracer would note where
    autocast is entered, and not enter it, and `.data` would not follow what is written.
    watching: raises UnseenWritesError in the end where there are such writes."""

    def __init__(self, gm: torch.fx.GraphModule, watching: bool = False):
        super().__init__(gm)
        self._watching = watching
        self._standing_in = _copies_of_attributes(gm) if watching and may_write(gm) else {}

    def fetch_attr(self, target: str) -> Any:
        found = self._standing_in.get(target)
        return super().fetch_attr(target) if found is None else found

    def put_attributes_back(self, traced: torch.fx.GraphModule) -> None:
        """Into what was traced, for the copies that stood in for them."""
        own = {id(t): super(Runner, self).fetch_attr(at) for at, t in self._standing_in.items()}
        for held in (vars(traced), traced._buffers, traced._parameters):
            held.update({name: own[id(t)] for name, t in held.items() if id(t) in own})

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._entered: list[torch.autocast] = []
        self._unseen: list[str] = []
        self._otherwise: list[str] = []
        self._detached: list[Any] = []
        self._gradients = torch.is_grad_enabled()
        self._spans = vmapped.spans(self.module.graph)
        self._done: dict[torch.fx.Node, Any] = {}
        try:
            results = super().run(*args, **kwargs)
        finally:
            while self._entered:
                self._entered.pop().__exit__(None, None, None)
        if any(tensor._version for tensor in self._standing_in.values()):
            raise CaptureError("it writes into tensors that are no inputs of its graph")
        if self._unseen:
            raise UnseenWritesError([*self._unseen, *self._otherwise])
        if self._otherwise:
            raise UnseenWritesError(self._otherwise, OTHERWISE)
        return results

    def run_node(self, n: torch.fx.Node) -> Any:
        if n in self._spans:
            self._done = dict.fromkeys(self._spans[n])
            self._done |= vmapped.results_of(self.module, self._spans[n], self.env)
        if n in self._done:
            return self._done[n]
        if not self._watching or n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        given = [self.env[node] for node in n.all_input_nodes]
        if written_otherwise(n, given):
            self._otherwise.append(n.name)
        if n.target in _DETACHING:
            self._detached += given  # which nothing else may read
        known = (self.env.values(), self._detached)
        with unseen_by_autograd(given, known, self._gradients) as unseen:
            result = super().run_node(n)
        if unseen:
            self._unseen.append(n.name)
        return result

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is torch.amp.autocast_mode._enter_autocast:
            mode = torch.autocast(*args, **kwargs)
            mode.__enter__()
            self._entered.append(mode)
            return mode
        if target is torch.amp.autocast_mode._exit_autocast:
            self._entered.remove(args[0])
            args[0].__exit__(None, None, None)
            return None
        if target is torch._C._autograd._get_data_attr:  # of a tensor that stands for another
            return args[0].detach()
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if self._watching and not isinstance(self.fetch_attr(target), torch.fx.GraphModule):
            raise CaptureError(f"it calls {target} whole, whose state tracing would move")
        return super().call_module(target, args, kwargs)

    def call_method(self, target: str, args: tuple, kwargs: dict) -> Any:
        if target == "requires_grad_" and not self._gradients and _asks(*args[1:], **kwargs):
            raise CaptureError("its forward switches gradients on or off")
        return super().call_method(target, args, kwargs)


def may_write(gm: torch.fx.GraphModule) -> bool:
    """Whether some operator writes into what it is given, by its name."""
    return any(
        name.endswith("_") and not name.endswith("__") or name in _IN_PLACE or "out" in node.kwargs
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
        for name in [getattr(node.target, "__name__", str(node.target)).partition(".")[0]]
    )


def _copies_of_attributes(gm: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """Of tensors that a graph of Dynamo's holds itself, as an optimiser's step has its state:
    tracing runs operators on those, and what is written would be written twice."""
    paths = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    held = {path: operator.attrgetter(path)(gm) for path in paths}
    with _disable_current_modes():  # constants of a graph that was traced are traced again
        return {
            path: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for path, tensor in held.items()
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor)
        }


def _asks(requires_grad: bool = True) -> bool:
    return requires_grad


def settle(graph: torch.fx.Graph, values: Sequence[Any]) -> None:
    """Takes the switches out of an ATen graph, which was traced from these values with gradients on
    or off as they are now. Raises CaptureError for what only the whole forward can do."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not any(_switches(node, word) for node in nodes for word in _WORDS):
        return
    if torch.is_grad_enabled():
        _settle_gradients(graph)
    else:
        _settle_where_they_are_off(graph, values)
    _settle_autocast(graph)
    graph.lint()


_WORDS = {
    _GRADIENTS: "gradients",
    _ENTER: "autocast",
    INFERENCE: "inference mode",
}


def refuse(graph: torch.fx.Graph, *words: str) -> None:
    """Raises CaptureError where one of these is switched, or anything if none is named."""
    for node in graph.nodes:
        for word in words or _WORDS if node.op == "call_function" else ():
            if _switches(node, word):
                raise CaptureError(f"its forward switches {_WORDS[word]} on or off")


def _switches(node: torch.fx.Node, word: str) -> bool:
    return word in str(node.target)


def _settle_where_they_are_off(graph: torch.fx.Graph, values: Sequence[Any]) -> None:
    """Switched on, they are of what leaves compute that need one; of what stands before nothing
    has."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    leaves = {
        node
        for node, value in zip(inputs, values)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    now = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _switches(node, _GRADIENTS):
            now = bool(node.args[0])
            graph.erase_node(node)
        elif now and any(n in leaves or n.op == "get_attr" for n in node.all_input_nodes):
            raise CaptureError("its forward switches gradients on or off")


def _settle_gradients(graph: torch.fx.Graph) -> None:
    """What was computed without gradients is detached where operators with gradients read it."""
    now, without, switches = True, set(), []
    for node in graph.nodes:
        if node.op == "call_function" and _switches(node, _GRADIENTS):
            now = bool(node.args[0])
            switches.append(node)
        elif not now and node.op == "call_function":
            if mutates(node):
                raise CaptureError("its forward writes into a tensor with gradients switched off")
            without.add(node)
    for node in without:
        outside = [user for user in node.users if user not in without]
        value = node.meta.get("val")
        if not outside or not _has_gradient(value):
            continue
        if not isinstance(value, torch.Tensor):
            raise CaptureError("its forward switches gradients on or off")
        with graph.inserting_after(node):
            detached = graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = dict(node.meta)
        for user in outside:
            user.replace_input_with(node, detached)
    for node in switches:
        graph.erase_node(node)


def _has_gradient(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_gradient, value))
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _settle_autocast(graph: torch.fx.Graph) -> None:
    """Where autocast is on, operators kept from it are marked; elsewhere nothing is lost."""
    entered: list[torch.fx.Node] = []
    switches = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _switches(node, _ENTER):
            if _argument(node, 2, "enabled"):
                refuse(graph, _ENTER)
            entered.append(node)
        elif _switches(node, _EXIT):
            entered.remove(node.args[0])
        elif any(torch.is_autocast_enabled(_argument(each, 0, "device_type")) for each in entered):
            node.meta[WITHOUT_AUTOCAST] = node.meta[LEFT_ALONE] = True
            continue
        else:
            continue
        switches.append(node)
    for node in reversed(switches):
        graph.erase_node(node)


def _argument(node: torch.fx.Node, at: int, name: str) -> Any:
    return node.args[at] if len(node.args) > at else node.kwargs.get(name)


def kept_from_autocast(graph: torch.fx.Graph) -> list[str]:
    """Names of the nodes that PyTorch must run, since a region's derivative would be autocast's."""
    return [node.name for node in graph.nodes if WITHOUT_AUTOCAST in node.meta]
