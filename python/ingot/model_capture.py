"""What TorchDynamo makes of a model's forward, for commands that show it or write it to a file.

The same graph as the live front's, asked for once and never run: a stand-in for the module is
called with blank tensors, and Dynamo's bytecode gets blank tensors where a graph's results would
be. Where they come out again says how the model's result is put together.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot.capture.captured import Captured, CaptureError, Source
from ingot.capture.custom_ops import batch_norm_forward, is_plain_batch_norm
from ingot.capture.feed import Feed, Placeholder, batched_inputs
from ingot.capture.gains import joins_parts
from ingot.capture.importer import import_graph
from ingot.capture.nodes import PARAMETER, mutates
from ingot.live import dynamo, switches
from ingot.live.memory import views_among_results
from ingot.live.pieces import compile_pieces, has_pieces
from ingot.live.returned import readers_of_results
from ingot.live.tracing import feed_of

_aten = torch.ops.aten
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set)
_INTERNAL = frozenset(nn.Module().__dict__) | {"forward"}


def capture(
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    refused: dict[str, str] | None = None,
    gradients: bool = False,
    device_type: str | None = None,
) -> Captured:
    """A module's forward as one graph, cut into regions, with its training flags as they are.

    example_inputs: a call's arguments, tensors on the module's device; only their shapes, dtypes
    and strides matter, and of the batch size only whether it is there. refused: graph nodes that
    PyTorch must run (`node` among a region's operators), with the reason. gradients: as
    import_graph has it. device_type: where the module is to run, in place of where it is. Raises
    CaptureError with the reason where PyTorch must run all of it.
    """
    feed = captured_graph(module, example_inputs, gradients=gradients, device_type=device_type)
    feed.joins_parts = joins_parts(feed.device_type, gradients)
    if gradients:
        refused = {**dict.fromkeys(readers_of_results(feed), ""), **(refused or {})}
    return import_whole(feed, refused=refused, gradients=gradients)


def import_whole(
    feed: Feed, *, refused: dict[str, str] | None = None, gradients: bool = False
) -> Captured:
    """Regions and steps of a module's graph; may be asked for more than once."""
    shared = dict.fromkeys(views_among_results(feed.graph), "")
    return import_graph(feed, refused={**shared, **(refused or {})}, gradients=gradients)


def captured_graph(
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    gradients: bool = False,
    device_type: str | None = None,
) -> Feed:
    """The graph of a module's forward, for any batch size; where the module depends on the number
    itself, for the batch size given. gradients: for calls with gradients on. device_type: as
    `capture` has it. Raises CaptureError.
    """
    leaves, spec = pytree.tree_flatten(tuple(example_inputs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    batched, size = batched_inputs(tensors)
    if any(batched):
        stand_in = _stand_in_batch(tensors, size)
        with contextlib.suppress(dynamo.NotWholeError):  # it may be the size that does not fit
            found = _Capture(module, leaves, spec, stand_in, gradients, device_type)
            if found.for_any_batch:
                found.settle()
                return found.feed
    found = _Capture(module, leaves, spec, None, gradients, device_type)
    found.settle()
    return found.feed


def capture_in_pieces(
    module: nn.Module, example_inputs: Sequence[Any], device_type: str | None = None
) -> list[Captured]:
    """The graphs of a forward that is not one, as far as a call with these inputs goes through
    them. PyTorch runs the call, on copies. device_type: as `capture` has it. Raises CaptureError
    where that fails."""
    found: list[Captured] = []

    def piece(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable:
        with contextlib.suppress(CaptureError):
            feed = feed_of(gm, examples, device_type=device_type)
            feed.joins_parts = joins_parts(feed.device_type, gradients=False)
            found.append(import_whole(feed))
        return gm.forward

    def backend(gm: torch.fx.GraphModule, examples: list) -> Callable:
        return compile_pieces(gm, examples, piece)

    try:
        twin, inputs = copy.deepcopy((module, list(example_inputs)))
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if _is_tensor(leaf)]
        for tensor, batched in zip(tensors, batched_inputs(tensors)[0]):
            if batched:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with torch.no_grad():
            dynamo.run_in_pieces(_forward, backend, twin, [], *inputs)
    except Exception as error:  # whatever the model's code raises
        raise CaptureError(f"it cannot be run in pieces: {error!r}") from error
    return found


def _stand_in_batch(tensors: list[torch.Tensor], size: int) -> int:
    """A batch size that equals no other extent, near the call's, by which it is decided what pays.
    Dynamo specialises on 0 and 1."""
    taken = {0, 1, *(extent for tensor in tensors for extent in tensor.shape[1:])}
    return next(candidate for candidate in itertools.count(size) if candidate not in taken)


class _Capture:
    """One call of a module's stand-in. batch: the size of the stand-ins' for its inputs, which is
    to stay symbolic; None: that of the inputs.

    feed: its graph; for_any_batch: whether no batch size was decided upon.
    """

    feed: Feed
    for_any_batch = False

    def __init__(
        self,
        module: nn.Module,
        leaves: list,
        spec: Any,
        batch: int | None,
        gradients: bool,
        device_type: str | None,
    ):
        self.module, self.gradients, self.device_type = module, gradients, device_type
        self.tensors, batched, leaves = _stand_ins(leaves, batch)
        self._problem: CaptureError | None = None
        self._given: Sequence[Any] | None = None  # what the graph is called with
        self._results: list[torch.Tensor] = []
        self._twin = stand_in_for(module)
        self._before = _attributes(self._twin)
        arguments = pytree.tree_unflatten(leaves, spec)
        with torch.set_grad_enabled(gradients), _no_choice_of_convolutions():
            self._result = dynamo.run_whole(
                _forward, self._backend, self._twin, batched, *arguments
            )
        if self._problem is not None:
            raise self._problem

    def settle(self) -> None:
        """Gives the graph the names that the module has. Raises CaptureError where the call does
        more than the graph says."""
        if self._given is None:
            raise CaptureError("it computes nothing with tensors")
        _check_attributes(self._before, _attributes(self._twin))
        self._sources = _names_of_tensors(self.module)
        self._name_sources()
        self._name_sizes()
        self._name_results(self._result)
        _check_writes(self.feed)

    def _backend(self, gm: torch.fx.GraphModule, examples: list) -> Callable:
        try:
            if has_pieces(gm):
                raise dynamo.NotWholeError(
                    "its forward calls torch.utils.checkpoint or a torch.autograd.Function, which "
                    "have a backward of their own"
                )
            switches.refuse(gm.graph)
            self.feed = feed_of(gm, examples, device_type=self.device_type)
            self.for_any_batch = _is_for_any_batch(gm)
        except CaptureError as problem:
            self._problem = problem
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        self._results = [torch.empty(0, device="meta") for _ in output.args[0]]

        def run(*given: Any) -> list[torch.Tensor]:
            self._given = given
            return self._results

        return run

    # Names -------------------------------------------------------------------------------------

    def _name_sources(self) -> None:
        """Inputs of the graph by what they are to a reader of the model."""
        nodes = list(self.feed.placeholders)
        for node, tensor in zip(nodes, self._given, strict=True):
            if isinstance(tensor, torch.Tensor):
                batched = self.feed.placeholders[node].batched
                known = self.feed.placeholders[node] = self._placeholder(node, tensor)
                known.batched = batched
                known.requires_grad = self._may_require_grad(known, tensor)
                known.assumed = known.source.kind == "input"
                if known.source.kind == "parameter":
                    node.meta[PARAMETER] = known.source.path

    def _may_require_grad(self, known: Placeholder, tensor: torch.Tensor) -> bool:
        """Of an input the caller says so, at each call."""
        may = tensor.requires_grad or known.source.kind == "input"
        return self.gradients and may and tensor.is_floating_point()

    def _placeholder(self, node: torch.fx.Node, tensor: torch.Tensor) -> Placeholder:
        for index, own in enumerate(self.tensors):
            if tensor is own:
                source = Source("input", f"input {index}", index)
                return Placeholder(source, ("input", f"input_{index}"))
        role = self._sources.get(id(tensor))
        if role is not None:
            return Placeholder(Source(*role), role)
        if isinstance(tensor, nn.Parameter):
            raise CaptureError(f"no module has registered a parameter that it reads ({node.name})")
        path = self.feed.placeholders[node].source.path if node in self.feed.placeholders else ""
        if attribute(self.module, path) is not tensor:
            path = node.name
        return Placeholder(Source("constant", path, tensor=tensor), ("buffer", path))

    def _name_sizes(self) -> None:
        """Numbers that Dynamo passes beside the tensors whose sizes they are."""
        graph = self.feed.graph
        nodes = list(self.feed.placeholders)
        inner = next(node for node in graph.nodes if node.op != "placeholder")
        for node, number in zip(nodes, self._given, strict=True):
            if isinstance(number, torch.Tensor):
                continue
            value = node.meta.get("val")
            holder = next(((n, d) for n in nodes for d in _places(n, value)), None)
            if holder is None:
                raise CaptureError("its graph takes a number that is no tensor's size")
            if node.users:
                with graph.inserting_before(inner):
                    size = graph.call_function(_aten.sym_size.int, holder)
                size.meta["val"] = value
                node.replace_all_uses_with(size)
            graph.erase_node(node)
            del self.feed.placeholders[node]

    def _name_results(self, result: Any) -> None:
        """Outputs in the order of the result's leaves."""
        (output,) = (node for node in self.feed.graph.nodes if node.op == "output")
        made = {id(tensor): node for tensor, node in zip(self._results, output.args[0])}
        given = {
            id(tensor): node
            for node, tensor in zip(self.feed.placeholders, filter(_is_tensor, self._given))
        }
        leaves, self.feed.out_spec = pytree.tree_flatten(result)
        found = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) not in _PLAIN:
                    raise CaptureError(
                        f"its output holds a {type(leaf).__name__}, which is neither a tensor nor "
                        "a plain number"
                    )
                self.feed.constant_outputs[index] = leaf
                continue
            node = made.get(id(leaf), given.get(id(leaf)))
            if node is None:
                node = given[id(leaf)] = self._further_input(leaf)
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise CaptureError("its output holds a number that depends on its inputs")
            found.append(node)
        output.args = (tuple(found),)

    def _further_input(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Of a tensor that is returned as it is, and not read."""
        graph = self.feed.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(f"returned_{len(self.feed.placeholders)}")
        node.meta["val"] = tensor
        self.feed.placeholders[node] = self._placeholder(node, tensor)
        return node


def _forward(module: nn.Module, batched: list[torch.Tensor], *arguments: Any) -> Any:
    # For Dynamo, their sizes are one symbol from here on.
    for tensor in batched[1:]:
        if tensor.shape[0] != batched[0].shape[0]:
            raise ValueError("batches of different sizes")
    return module.forward(*arguments)


@contextlib.contextmanager
def _no_choice_of_convolutions() -> Iterator[None]:
    """Choosing a CPU's kernel for one, PyTorch would ask whether the batch is below 16."""
    before = torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_nnpack_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_nnpack_enabled(before[1])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _stand_ins(leaves: list, batch: int | None) -> tuple[list, list, list]:
    """Tensors without data like those among the leaves; of these, those whose batch size is
    symbolic; the leaves with them. No two are one tensor, which Dynamo would take for granted."""
    has_batch = iter(batched_inputs([leaf for leaf in leaves if _is_tensor(leaf)])[0])
    tensors, batched, found = [], [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            symbolic = next(has_batch) and batch is not None
            leaf = _blank(leaf, batch if symbolic else None)
            tensors.append(leaf)
            if symbolic:
                torch._dynamo.maybe_mark_dynamic(leaf, 0)
                batched.append(leaf)
        found.append(leaf)
    return tensors, batched, found


def _blank(tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
    sizes = list(tensor.shape)
    if batch is not None:
        sizes[0] = batch
    if tensor.is_contiguous():
        return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _is_for_any_batch(gm: torch.fx.GraphModule) -> bool:
    """Whether nothing so far has asked for more than that the one symbolic size is two or more."""
    values = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    symbols, environments = set(), []
    for value in filter(_is_tensor, values):
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                symbols |= size.node.expr.free_symbols
                environments.append(size.node.shape_env)
    if len(symbols) != 1:
        return False
    environment = environments[0]
    asked = (environment.replace(guard.expr) for guard in environment.guards)
    return not any(symbols & getattr(expression, "free_symbols", set()) for expression in asked)


def _places(node: torch.fx.Node, number: Any) -> list[int]:
    """Dimensions whose size it is."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(number, torch.SymInt):
        return []
    return [
        d
        for d, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt) and size.node.expr == number.node.expr
    ]


def _check_writes(feed: Feed) -> None:
    for node in feed.graph.nodes:
        if node.op == "call_function" and mutates(node):
            source = feed.placeholders[node.args[0]].source
            what = "its input" if source.kind == "input" else source.path
            raise CaptureError(f"its forward writes into {what}")


# The module ---------------------------------------------------------------------------------------


def stand_in_for(module: nn.Module) -> nn.Module:
    """A copy of the module tree that shares tensors, and attributes other than plain containers.

    The forward of a batch norm whose momentum is None reads a number from a tensor, which no graph
    holds: there the operator of ours stands for it."""
    copies: dict[int, nn.Module] = {}

    def copied(original: nn.Module) -> nn.Module:
        known = copies.get(id(original))
        if known is not None:
            return known
        twin = copies[id(original)] = original.__new__(type(original))
        for name, value in original.__dict__.items():
            twin.__dict__[name] = value.copy() if type(value) in _CONTAINERS else value
        twin._modules = {
            name: None if child is None else copied(child)
            for name, child in original._modules.items()
        }
        if is_plain_batch_norm(original) and original.momentum is None:
            twin.__dict__["forward"] = types.MethodType(batch_norm_forward, twin)
        return twin

    return copied(module)


def _attributes(root: nn.Module) -> dict[tuple[str, str], tuple]:
    """What each module of a tree holds; of containers the items."""
    found = {}
    for path, part in root.named_modules():
        held = {n: v for n, v in part.__dict__.items() if n not in _INTERNAL}
        for name, value in {**held, **part._parameters, **part._buffers}.items():
            if type(value) is dict:
                items = tuple(itertools.chain(*value.items()))
            else:
                items = tuple(value) if type(value) in _CONTAINERS else (value,)
            found[path, name] = items
    return found


def _check_attributes(before: dict, after: dict) -> None:
    for path, name in {**before, **after}:
        old, new = before.get((path, name), ()), after.get((path, name), ())
        if len(old) != len(new) or any(map(_differ, old, new)):
            raise dynamo.NotWholeError(
                f"its forward changes {name!r} of {path or 'the module itself'}, which a captured "
                "graph would not repeat"
            )


def _differ(old: Any, new: Any) -> bool:
    return old is not new and not (type(old) is type(new) and type(old) in _PLAIN and old == new)


def _names_of_tensors(module: nn.Module) -> dict[int, tuple[str, str]]:
    """("parameter" or "buffer", path) by a tensor's id; of several paths the first."""
    found: dict[int, tuple[str, str]] = {}
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for path, tensor in named:
            found.setdefault(id(tensor), (kind, path))
    return found


def attribute(module: nn.Module, path: str) -> Any:
    """None where the module has no such."""
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
