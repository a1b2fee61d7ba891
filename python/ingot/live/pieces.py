"""Graphs cut at operators that have a backward of their own.

TorchDynamo captures `torch.utils.checkpoint.checkpoint` as one operator, whose body is a graph of
its own, and leaves it to a partitioner behind the backend to compute the body again in backward.
Run as it is, that operator keeps what eager would drop: PyTorch's own checkpoint runs the bodies,
which are captured like any graph. A `torch.autograd.Function` of the user's is such an operator
too, with a graph for each direction: traced through, its backward would be lost. PyTorch runs it.
So it does with a Python function that stands in the graph whole (`torch.compiler.allow_in_graph`,
what DTensors are made by), which may hold such a one or put hooks on its tensors; with writes that
autograd does not see; and it puts hooks on the tensors that they are for.
"""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from ingot.capture.captured import Unsupported
from ingot.capture.nodes import where
from ingot.live import functions, hooks, vmapped
from ingot.live.returned import INNER

# Of a piece without data, and of what it is called with: what runs it.
CompilePiece = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable]


def has_pieces(gm: torch.fx.GraphModule) -> bool:
    return any(_is_apart(node) for node in gm.graph.nodes)


def has_pieces_inside(gm: torch.fx.GraphModule) -> bool:
    """In the graph of a branch or a loop, or in one under torch.vmap, where it cannot be cut."""
    return any(has_pieces(part) for part in gm.modules() if isinstance(part, torch.fx.GraphModule))


def compile_pieces(
    gm: torch.fx.GraphModule,
    examples: Sequence[Any],
    compile_piece: CompilePiece,
    apart: Container[torch.fx.Node] = (),
    run_apart: CompilePiece | None = None,
) -> Callable:
    """The whole graph, or what is between the operators at which it is cut, and inside checkpoints.
    examples: what Dynamo hands to a backend for the graph's inputs; apart: further nodes at which
    it is cut, which `run_apart` compiles."""
    hooks.restore(gm)
    functions.restore(gm)
    if not apart and not has_pieces(gm) or _cannot_be_cut(gm, examples):
        return compile_piece(gm, examples)
    nodes = list(_elements_first(gm.graph.nodes))
    inputs = [node for node in nodes if node.op == "placeholder"]
    values = {node: node.meta.get("example_value") for node in nodes}
    values.update(zip(inputs, examples))
    (results,) = next(node for node in nodes if node.op == "output").args
    steps = []
    for part in _parts(nodes, apart):
        kind = _KINDS.get(part[0].target, _function_step if _is_apart(part[0]) else _piece_step)
        steps.append(kind(gm, part, values, run_apart if part[0] in apart else compile_piece))
    last = {node: at for at, step in enumerate(steps) for node in step.inputs}
    last.update(dict.fromkeys(_nodes_of(results), len(steps)))

    def run(*args: Any) -> Any:
        known = dict(zip(inputs, args))
        del args
        for at, step in enumerate(steps):
            given = [known[node] for node in step.inputs]
            for node in step.inputs:
                if last[node] == at:
                    known.pop(node, None)
            known.update(zip(step.results, step.run(*given)))
            del given
        return torch.fx.graph.map_arg(results, known.__getitem__)

    return run


@dataclass(frozen=True)
class _Step:
    run: Callable  # gives a sequence
    inputs: list[torch.fx.Node]
    results: list[torch.fx.Node]


def _is_apart(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target in _KINDS or _is_whole(node)


def _is_whole(node: torch.fx.Node) -> bool:
    """A Python function that Dynamo did not look into: gradients may go another way inside."""
    if node.op != "call_function" or not torch.is_grad_enabled():
        return False
    target = node.target
    is_named = isinstance(target, (types.FunctionType, types.MethodType, type))
    home = (target if is_named else type(target)).__module__ or ""
    if home in _WRAPPERS or home.startswith("torch.distributed."):
        return True
    return home.partition(".")[0] not in _OF_OPERATORS


# Packages whose functions in graphs are made of PyTorch's operators, all of which are traced; and
# the modules of Dynamo's of which that is not so: they wrap what makes DTensors, functions that are
# allowed, and the `apply` of a torch.autograd.Function.
_OF_OPERATORS = {"torch", "ingot", "einops", "builtins", "operator", "_operator", "math"}
_WRAPPERS = {f"torch._dynamo.variables.{name}" for name in ("torch", "tensor", "misc")}
_APPLY = "trampoline_autograd_apply"


def left_whole(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Iterator[Unsupported]:
    """What the graph is cut at that holds operators of PyTorch's."""
    for node in [] if _cannot_be_cut(gm, examples) else gm.graph.nodes:
        if _is_whole(node):
            name = re.sub("^prim[ _]", "", getattr(node.target, "__name__", ""))
            what = "a torch.autograd.Function" if name == _APPLY else f"the function {name}"
            yield Unsupported(what, where(node), "its gradients may be its own")


def _cannot_be_cut(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> bool:
    if not any(map(_is_whole, gm.graph.nodes)):
        return False
    return bool(vmapped.spans(gm.graph)) or any(map(is_traceable_wrapper_subclass, examples))


def _elements_first(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """Nodes in an order in which what takes an element of a tuple is next to the tuple, so that
    none is cut off from it."""
    for node in nodes:
        if not _is_element(node):
            ahead = [node]
            while ahead:
                yield (each := ahead.pop(0))
                ahead += filter(_is_element, each.users)


def _is_element(node: torch.fx.Node) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[0], torch.fx.Node):
        return False
    return isinstance(node.args[1], int) and isinstance(
        node.args[0].meta.get("example_value"), (tuple, list)
    )


def _parts(
    nodes: list[torch.fx.Node], apart: Container[torch.fx.Node]
) -> Iterator[list[torch.fx.Node]]:
    """Operators that are apart by their kind, each with what takes its results apart; what is
    `apart`, and what is between all of these."""
    between: list[torch.fx.Node] = []
    for node in nodes:
        if between and (between[0] in apart) != (node in apart):
            yield between
            between = []
        if _is_apart(node):
            if between:
                yield between
            between = []
            yield [node, *(user for user in node.users if _takes_apart(user))]
        elif node.op not in ("placeholder", "get_attr", "output") and not _takes_apart(node):
            between.append(node)
    if between:
        yield between


def _takes_apart(node: torch.fx.Node) -> bool:
    """A result of a tuple."""
    if node.target is not operator.getitem or not _is_apart(node.args[0]):
        return False
    return not isinstance(node.args[0].meta.get("example_value"), torch.Tensor)


def _nodes_of(argument: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.graph.map_arg(argument, found.append)
    return found


def _handed_out(gm: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """What a user gets of a graph, or of a part of one."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    inner = gm.meta.get(INNER, ())
    return {node for at, node in enumerate(output.args[0]) if at not in inner}


def _piece_step(gm, part: list, values: dict, compile_piece: CompilePiece) -> _Step:
    inside = set(part)
    read = (source for node in part for source in node.all_input_nodes)
    inputs = list(dict.fromkeys(n for n in read if n not in inside and n.op != "get_attr"))
    results = [node for node in part if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies = {node: _known_as(node, graph.placeholder(node.name)) for node in inputs}

    def copied(node: torch.fx.Node) -> torch.fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    graph.output(tuple(copied(node) for node in [*part, *results])[len(part) :])
    piece = torch.fx.GraphModule(gm, graph)
    known = _handed_out(gm)
    piece.meta[INNER] = {at for at, node in enumerate(results) if node not in known}
    run = compile_piece(piece, [values[node] for node in inputs])
    return _Step(run, inputs, results)


def _known_as(node: torch.fx.Node, placeholder: torch.fx.Node) -> torch.fx.Node:
    """A graph's input that knows where Dynamo had the tensor from that `node` gives it."""
    placeholder.meta = {**node.meta, **placeholder.meta}
    if hasattr(node, "_dynamo_source"):
        placeholder._dynamo_source = node._dynamo_source
    return placeholder


def _checkpoint_step(gm, part: list, values: dict, compile_piece: CompilePiece) -> _Step:
    node, *taken = part
    body = getattr(gm, node.args[0].target)
    settings, named = tag_activation_checkpoint.divide_kwargs(node.kwargs)
    arguments = [*node.args[1:], *named.values()]
    context = body.meta.get("_checkpoint_context_fn")
    if context is None and all(isinstance(each, torch.fx.Node) for each in arguments):
        placeholders = [each for each in body.graph.nodes if each.op == "placeholder"]
        for own, outer in zip(placeholders, arguments):
            _known_as(outer, own)
        known = _handed_out(gm)
        handed_out = {each.args[1] for each in taken if each in known}
        (results,) = next(each for each in body.graph.nodes if each.op == "output").args
        body.meta[INNER] = set(range(len(results))) - handed_out
        run = compile_pieces(body, [values[each] for each in arguments], compile_piece)
    else:  # a choice of operators to keep, by what PyTorch runs
        run = body.forward
        settings = {**settings, **({} if context is None else {"context_fn": context})}
    # What Dynamo captured has no side effects: either way computes the same, and this one serves
    # torch.autograd.grad as well.
    settings = {**settings, "use_reentrant": False}
    again = functools.partial(checkpoint, run, **settings)
    inputs = list(dict.fromkeys(_nodes_of(arguments)))

    def run_step(*given: Any) -> list:
        known = dict(zip(inputs, given))
        results = again(*torch.fx.graph.map_arg(tuple(arguments), known.__getitem__))
        return [results[each.args[1]] for each in taken]

    return _Step(run_step, inputs, taken)


def _function_step(gm, part: list, values: dict, compile_piece: CompilePiece) -> _Step:
    node, *taken = part
    inputs = [each for each in node.all_input_nodes if each.op != "get_attr"]
    bodies = {e: getattr(gm, e.target) for e in node.all_input_nodes if e.op == "get_attr"}
    is_whole = _is_whole(node)

    def run(*given: Any) -> list:
        known = {**bodies, **dict(zip(inputs, given))}
        args, kwargs = torch.fx.graph.map_arg((node.args, node.kwargs), known.__getitem__)
        result = node.target(*args, **kwargs)
        if is_whole:
            result = functions.waited_for(result)
        return [result[each.args[1]] for each in taken] if taken else [result]

    return _Step(run, inputs, taken or [node])


_KINDS = {
    tag_activation_checkpoint: _checkpoint_step,
    functions.FUNCTION: _function_step,
    functions.apply: _function_step,
    hooks.anchored: _function_step,
    hooks.hooked: _function_step,
}
