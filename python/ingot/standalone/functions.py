"""Graphs of operators as functions of Python: what a region is by PyTorch's, and its derivative."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ingot.capture.nodes import mutates, reached, schema_name
from ingot.capture.products import PRODUCTS
from ingot.standalone.printing import (
    ATEN,
    DECORATION,
    WIDTH,
    Names,
    UnprintableError,
    assigned,
    bare,
    call_text,
    is_plain,
    is_tensor,
    tuple_text,
    value_text,
    wrapped,
)

_aten = torch.ops.aten
_ALWAYS = ("",)
_VIEWS = {
    _aten.t.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
}


class FunctionPrinter:
    """A graph of operators as the body of a function.

    arguments: names of the graph's inputs. results: what is returned, where that is not the graph's
    own. needs: for each of the graph's results the condition
    under which it is wanted ("" for always): what only such results depend on is computed under it.
    free: whether memory is let go of as soon as nothing reads it any more, that of the arguments,
    too, but for those that are held elsewhere.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        arguments: Sequence[str],
        needs: Sequence[str] | None = None,
        results: Sequence[Any] | None = None,
        free: bool = False,
        held: Sequence[str] = (),
    ):
        self.graph, self.free, self.held = graph, free, held
        self.names = Names([*arguments, "torch", ATEN, "needs", "given", "unused"])
        self.texts: dict[torch.fx.Node, str] = {}
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.texts.update(zip(inputs, arguments, strict=True))
        # Under which conditions a variable is there.
        self.blocks: dict[torch.fx.Node, tuple[str, ...]] = dict.fromkeys(inputs, _ALWAYS)
        self.output = next(n for n in graph.nodes if n.op == "output")
        results = self.output.args[0] if results is None else results
        self.results = list(results) if isinstance(results, (list, tuple)) else [results]
        self.needs = list(needs) if needs else [""] * len(self.results)
        self.guards = self._guards()
        self.order = {node: at for at, node in enumerate(graph.nodes)}
        self.late = self._late() if free else set()
        # What is not read may not be given.
        tensors = [t for n, t in self.texts.items() if n.users and is_tensor(n)]
        lasting = [t for t in tensors if t in self.held or not free]
        self.device = f"{(lasting or tensors)[0]}.device" if tensors else ""
        self.first: list[str] = []
        if self.device and not lasting and any(map(_names_a_device, graph.nodes)):
            # The tensor may be let go of before it is asked.
            self.first, self.device = [f"device = {self.device}"], self.names.new("device")

    def lines(self, indent: str = "") -> list[str]:
        body = [indent + line for line in self.first]
        current = _ALWAYS
        for node in self.graph.nodes:
            if not self._is_wanted(node) or node in self.blocks:
                continue
            text = self._text(node)
            if self._is_inlined(node, text):
                self.texts[node] = text
                continue
            guard = self.guards[node]
            if guard not in (current, _ALWAYS):
                body += wrapped(f"if {any_of(guard)}:", indent)
            current = guard
            body += self._statement(node, text, indent + ("" if guard == _ALWAYS else "    "))
        return [*body, *self._return(indent)]

    def _is_wanted(self, node: torch.fx.Node) -> bool:
        return node.op in ("call_function", "get_attr") and bool(self.guards.get(node))

    def _statement(self, node: torch.fx.Node, text: str, pad: str) -> list[str]:
        targets = self._variables(node)
        line = f"{targets[0]} = {bare(text)}"
        fits = len(targets) == 1 and len(pad + line) <= WIDTH
        lines = wrapped(line, pad) if fits else assigned(targets, text, pad)
        finished = self._finished(node) if self.free else []
        if "unused" in targets:
            finished.append("unused")
        if finished:
            lines += wrapped(f"del {', '.join(finished)}", pad)
        return lines

    def _variables(self, node: torch.fx.Node) -> list[str]:
        """Names what a statement makes: its parts where that is a tuple."""
        block, name = self.guards[node], DECORATION.sub("", node.name)
        self.blocks[node] = block
        items: dict[int, torch.fx.Node] = {}
        for user in node.users:
            if user.target is operator.getitem and self._is_wanted(user):
                items.setdefault(user.args[1], user)
        value = node.meta.get("val")
        alone = len(items) == sum(map(self._is_wanted, node.users))
        several = isinstance(value, (tuple, list)) and len(value) > 1
        if not (self.free and items and alone and several):
            self.texts[node] = self.names.new(name)
            return [self.texts[node]]
        if name.endswith("_backward"):
            name = "d_" + name.removesuffix("_backward")
        for at, item in sorted(items.items()):
            self.blocks[item] = block
            self.texts[item] = self.names.new(f"{name}_{at}" if len(items) > 1 else name)
        return [self.texts[items[at]] if at in items else "unused" for at in range(len(value))]

    def _return(self, indent: str) -> list[str]:
        returned = self._returned()
        line = f"{indent}return {tuple_text(returned)}"
        if len(line) <= WIDTH:
            return [line]
        items: list[str] = []
        for text in returned:
            if is_plain(text) and items and all(map(is_plain, items[-1].strip(", ").split(", "))):
                items[-1] += f" {text},"
                if len(items[-1]) > WIDTH:
                    items[-1:] = [items[-1][: -len(text) - 2], f"{indent}    {text},"]
            else:
                items += wrapped(f"{bare(text)},", indent + "    ")
        return [f"{indent}return (", *items, f"{indent})"]

    def _finished(self, node: torch.fx.Node) -> list[str]:
        """Variables that nothing reads behind this statement: their memory is let go of."""
        return [
            self.texts[read]
            for read in self._variables_read(node)
            if self._is_freed(read, node)
            and all(self._stated(user) in self.blocks for user in self._readers(read))
        ]

    def _variables_read(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """By a statement, in what stands in it, too."""
        is_variable = self.blocks.__contains__
        found = reached(
            node.all_input_nodes, lambda read: () if is_variable(read) else read.all_input_nodes
        )
        return list(filter(is_variable, found))

    def _is_freed(self, read: torch.fx.Node, node: torch.fx.Node) -> bool:
        """Whether a variable is there wherever the node is computed, and nobody else's."""
        block = self.blocks[read]
        there = block == _ALWAYS or set(self.guards[node]) <= set(block)
        return there and self.texts[read] not in self.held

    def _readers(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        for user in node.users:
            if user.op == "output" or self._is_wanted(user):
                yield user

    def _stated(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node in whose statement a node stands."""
        while node.op == "call_function" and node not in self.blocks:
            readers = list(self._readers(node))
            if len(readers) != 1:
                break
            (node,) = readers
        return node

    def _returned(self) -> list[str]:
        found = []
        for result, need in zip(self.results, self.needs):
            if not isinstance(result, torch.fx.Node):
                found.append(value_text(result, self.texts.get))
            elif not need or self._is_there(result):
                found.append(self.texts[result])  # autograd drops what was not asked for
            else:
                found.append(f"{bare(self.texts[result])} if {need} else None")
        return found

    def _is_there(self, node: torch.fx.Node) -> bool:
        """Whether it is computed, or given, whatever is wanted."""
        while node.target is operator.getitem and node not in self.blocks:
            node = node.args[0]
        return self.blocks.get(node) == _ALWAYS

    def _guards(self) -> dict[torch.fx.Node, tuple[str, ...]]:
        """For every node that is wanted: ("",), or the conditions of which one must hold."""
        found: dict[torch.fx.Node, set[str]] = {}
        for result, need in zip(self.results, self.needs):
            if isinstance(result, torch.fx.Node):
                found.setdefault(result, set()).add(need)
        for node in reversed(self.graph.nodes):
            for argument in node.all_input_nodes if node.op != "output" else ():
                found.setdefault(argument, set()).update(found.get(node, ()))
        order = {need: at for at, need in enumerate(self.needs)}
        every = {need for need, r in zip(self.needs, self.results) if r is not None}
        return {
            node: _ALWAYS if "" in own or own == every else tuple(sorted(own, key=order.get))
            for node, own in found.items()
        }

    def _text(self, node: torch.fx.Node) -> str:
        if node.op == "get_attr":
            raise UnprintableError(f"the constant {node.target}")
        return call_text(node.target, node.args, node.kwargs, self.texts.__getitem__, self.device)

    def _is_inlined(self, node: torch.fx.Node, text: str) -> bool:
        """Whether its text stands where it is used, which also lets go of it early."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target is operator.getitem and source in self.blocks:
            return True
        if len(node.users) != 1:
            return False
        user = next(iter(node.users))
        if _times_read(user, node) != 1:
            return False
        if self.free and self._is_returned(node) and not self._may_be_late(node):
            return False
        if user.op == "output":
            return self.results.count(node) == 1 and len(text) <= 84
        if self.free and node.target not in _VIEWS and self._holds_longer(node, user):
            return False
        return self.guards.get(user) == self.guards[node] and len(text) <= 60

    def _holds_longer(self, node: torch.fx.Node, user: torch.fx.Node) -> bool:
        """Whether less lies there at once where the node has a statement of its own: what it reads
        is let go of behind that, or it lies there while the user's other operands are computed."""
        ends = any(
            self._is_freed(read, node)
            and not _is_small(read)
            and not any(self.order[other] >= self.order[user] for other in self._readers(read))
            for read in self._variables_read(node)
        )
        beside = any(
            other.op == "call_function" and not _is_small(other) and len(other.users) == 1
            for other in user.all_input_nodes
            if other is not node
        )
        return (ends and not _is_small(user)) or (beside and not _is_small(node))

    def _is_returned(self, node: torch.fx.Node) -> bool:
        """Whether it, or a view of it, is a result and nothing else."""
        while node.op != "output":
            if len(node.users) != 1:
                return False
            (node,) = node.users
            if node.op != "output" and node.target not in _VIEWS:
                return False
        return True

    def _may_be_late(self, node: torch.fx.Node) -> bool:
        """Whether it may be computed where results are returned, as a view may of what is."""
        while node.target in _VIEWS and node not in self.late:
            (node, *_) = node.all_input_nodes
            if node in self.blocks:
                return True
        return node in self.late

    def _late(self) -> set[torch.fx.Node]:
        """Results that are computed last, where nothing is left to be let go of: products of what
        nothing but results is computed from, and what reads no more than these do."""
        wanted = filter(self._is_wanted, self.graph.nodes)
        results = [n for n in wanted if n.target not in _VIEWS and self._is_returned(n)]
        last = set(results)
        products = {
            node
            for node in results
            if schema_name(node.target) in PRODUCTS
            and all(self._readers_behind_views(tensor) <= last for tensor in _read(node))
        }
        read = {tensor for product in products for tensor in _read(product)}
        return {node for node in results if node in products or _read(node) <= read}

    def _readers_behind_views(self, node: torch.fx.Node) -> set[torch.fx.Node]:
        found: set[torch.fx.Node] = set()
        for user in self._readers(node):
            if user.target in _VIEWS:
                found |= self._readers_behind_views(user)
            elif user.op != "output":
                found.add(user)
        return found


def _names_a_device(node: torch.fx.Node) -> bool:
    return any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values()))


def any_of(needs: Sequence[str]) -> str:
    places = [int(found.group()) for need in needs if (found := re.search(r"\d+", need))]
    first, behind = min(places), max(places) + 1
    if len(needs) < 3 or behind - first != len(needs):
        return " or ".join(needs)
    return f"any(needs[{first or ''}:{behind}])"


def _is_small(node: torch.fx.Node) -> bool:
    """A number for each sample, or each feature, at most."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return all(sum(not _is_one(size) for size in tensor.shape) < 2 for tensor in tensors)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1  # asking a symbol would bind it


def _read(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What it is computed from, views set aside."""
    found = set()
    for tensor in node.all_input_nodes:
        while tensor.target in _VIEWS:
            (tensor, *_) = tensor.all_input_nodes
        found.add(tensor)
    return found


def _times_read(user: torch.fx.Node, node: torch.fx.Node) -> int:
    found = []
    torch.fx.node.map_arg((user.args, user.kwargs), found.append)
    return found.count(node)


def compute_late(graph: torch.fx.Graph) -> None:
    """Moves what is computed to where it is read first, unless more would lie there until then: of
    what it is computed from, and nothing reads later, than what it makes."""
    if any(map(mutates, graph.nodes)):
        return
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        users = [user for user in node.users if user.op != "output"]
        if node.op != "call_function" or not users:
            continue
        first = min(users, key=order.__getitem__)
        held = [
            read
            for read in node.all_input_nodes
            if not _is_small(read) and all(order[user] < order[first] for user in read.users)
        ]
        if len(held) <= int(node.target not in _VIEWS and not _is_small(node)):
            first.prepend(node)
            order = {each: at for at, each in enumerate(graph.nodes)}


def simplify(graph: torch.fx.Graph) -> None:
    """Takes out what changes nothing: detached values, transposes of transposes, views that keep
    the shape."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        same = node.target is aten.detach.default
        if node.target is aten.permute.default and list(node.args[1]) == [1, 0]:
            node.target, node.args = aten.t.default, (source,)
        if node.target is aten.t.default and source.target is aten.t.default:
            source, same = source.all_input_nodes[0], True
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            before, after = source.meta.get("val"), node.meta.get("val")
            same = before is not None and after is not None and _same_shape(before, after)
            if not same and source.target is aten.sum.dim_IntList and len(source.users) == 1:
                same = _sums_without_extents(source, after)
        if same:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _sums_without_extents(node: torch.fx.Node, wanted: torch.Tensor | None) -> bool:
    """A sum that keeps extents of 1, which a view takes away, is made one that does not."""
    value, axes, kept = (*node.args, False)[:3]
    whole = value.meta.get("val")
    if not kept or len(node.args) > 3 or node.kwargs or wanted is None or whole is None:
        return False
    summed = {axis % whole.dim() for axis in axes}
    if [str(s) for at, s in enumerate(whole.shape) if at not in summed] != list(
        map(str, wanted.shape)
    ):
        return False
    node.args, node.meta["val"] = (value, axes), wanted
    return True


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also symbolically; asking a symbol would bind it."""
    return [str(s) for s in a.shape] == [str(s) for s in b.shape]
