"""Operators of a captured graph as lines of Python."""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ingot.capture.captured import Slot
from ingot.capture.custom_ops import run_batch_norm

# What PyTorch's names of operators carry beside what they do.
_DECORATION = re.compile(r"^_?native_|_(legit|no_training|default|tensor|scalar)(?=_|$)")
ATEN = "_ingot_aten"
BATCH_NORM = "_ingot_batch_norm"
WIDTH = 100

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
# Operators of two tensors, or of a tensor and a number, that Python writes as one.
_TENSOR_INFIX = {
    torch.ops.aten.add.Tensor: "+",
    torch.ops.aten.sub.Tensor: "-",
    torch.ops.aten.mul.Tensor: "*",
    torch.ops.aten.div.Tensor: "/",
    torch.ops.aten.mm.default: "@",
}


class UnprintableError(Exception):
    """Something that has no text; the message says what."""


class Names:
    """Identifiers that are not taken yet."""

    def __init__(self, taken: Sequence[str] = ()):
        self.taken = set(taken)

    def new(self, wanted: str) -> str:
        base = re.sub(r"\W", "_", wanted, flags=re.ASCII).lstrip("_0123456789") or "value"
        name, count = base, 1
        while name in self.taken or keyword.iskeyword(name) or hasattr(builtins, name):
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


def value_text(value: Any, name_of: Callable[[Any], str], device: str = "") -> str:
    """device: an expression that stands for the device that a graph was captured on."""
    if isinstance(value, (torch.fx.Node, Slot)):
        return name_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "torch.nan" if math.isnan(value) else "torch.inf" if value > 0 else "-torch.inf"
    if value is None or type(value) in (bool, int, float, str, complex):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = [value_text(item, name_of, device) for item in value]
        if isinstance(value, tuple):
            return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
        return "[" + ", ".join(items) + "]"
    if isinstance(value, slice):
        parts = [value_text(v, name_of, device) for v in (value.start, value.stop, value.step)]
        return f"slice({', '.join(parts)})"
    if isinstance(value, torch.device) and device:
        return device
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise UnprintableError(f"the argument {value!r}")


def call_text(target: Any, args: tuple, kwargs: dict, name_of, device: str = "") -> str:
    texts = [value_text(argument, name_of, device) for argument in args]
    if target is operator.getitem:
        return f"{texts[0]}[{texts[1]}]"
    if target in _INFIX:
        return f"({texts[0]} {_INFIX[target]} {texts[1]})"
    if target is torch.ops.aten.sym_size.int:
        return f"{texts[0]}.size({texts[1]})"
    if target in _TENSOR_INFIX and len(args) == 2 and not kwargs and _is_tensor(args[0]):
        return f"({texts[0]} {_TENSOR_INFIX[target]} {texts[1]})"
    if target is torch.ops.aten.t.default:
        return f"{texts[0]}.t()"
    if target is torch.ops.aten.sum.dim_IntList and len(args) == 2 and not kwargs:
        return f"{texts[0]}.sum({texts[1]})"
    texts += [f"{key}={value_text(v, name_of, device)}" for key, v in kwargs.items()]
    return f"{_function_text(target)}({', '.join(texts)})"


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and isinstance(
        argument.meta.get("val"), torch.Tensor
    )


def _function_text(target: Any) -> str:
    if target is run_batch_norm:
        return BATCH_NORM
    if isinstance(target, torch._ops.OpOverload):
        library, _, name = target._schema.name.partition("::")
        owner = ATEN if library == "aten" else f"torch.ops.{library}"
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        return f"{owner}.{name}{overload}"
    name = getattr(target, "__name__", "")
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    raise UnprintableError(f"the function {target!r}")


def wrapped(line: str, indent: str) -> list[str]:
    """A statement over several lines where it is too long for one: broken inside its outermost
    brackets."""
    line = indent + line
    if len(line) <= WIDTH:
        return [line]
    opening, closing = _outermost(line)
    if opening is None:
        return [line]
    inner = textwrap.wrap(
        line[opening + 1 : closing],
        WIDTH - len(indent) - 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if re.search(r"""(['"])[^'"]* [^'"]*\1""", line):
        inner = [line[opening + 1 : closing].strip()]  # no text may be broken
    return [
        line[: opening + 1],
        *(f"{indent}    {part}" for part in inner),
        indent + line[closing:],
    ]


def _outermost(line: str) -> tuple[int | None, int]:
    """The last pair of brackets that is in no other and ends the line."""
    closing = len(line.rstrip(":")) - 1
    if closing < 0 or line[closing] not in ")]}":
        return None, 0
    depth = 0
    for at in range(closing, -1, -1):
        if line[at] in ")]}":
            depth += 1
        elif line[at] in "([{":
            depth -= 1
            if depth == 0:
                return at, closing
    return None, 0


def tuple_text(items: Sequence[str]) -> str:
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"


def _is_plain(text: str) -> bool:
    """A name, or an element of a result."""
    return re.fullmatch(r"[\w.]+(\[\d+\])*", text) is not None


def _bare(text: str) -> str:
    """Without the brackets around an operation."""
    if not (text.startswith("(") and _outermost(text)[0] == 0):
        return text
    depth = [text[:at].count("(") - text[:at].count(")") for at, c in enumerate(text) if c == ","]
    return text if 1 in depth else text[1:-1]


class FunctionPrinter:
    """A graph of operators as the body of a function.

    arguments: names of the graph's inputs. results: what is returned, where that is not the graph's
    own. needs: for each of the graph's results the condition
    under which it is wanted ("" for always): what only such results depend on is computed under it.
    free: whether memory is let go of as soon as nothing reads it any more.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        arguments: Sequence[str],
        needs: Sequence[str] | None = None,
        results: Sequence[Any] | None = None,
        constant_text: Callable[[torch.Tensor], str] | None = None,
        free: bool = False,
    ):
        self.graph, self.constant_text, self.free = graph, constant_text, free
        self.statements: dict[torch.fx.Node, int] = {}
        self.names = Names([*arguments, "torch", ATEN, "needs"])
        self.texts: dict[torch.fx.Node, str] = {}
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.texts.update(zip(inputs, arguments, strict=True))
        self.output = next(n for n in graph.nodes if n.op == "output")
        results = self.output.args[0] if results is None else results
        self.results = list(results) if isinstance(results, (list, tuple)) else [results]
        self.needs = list(needs) if needs else [""] * len(self.results)
        # What is not read may not be given.
        tensors = [t for n, t in self.texts.items() if n.users and _is_tensor(n)]
        self.device = f"{tensors[0]}.device" if tensors else ""

    def lines(self, indent: str = "") -> list[str]:
        guards = self._guards()
        body: list[str] = []
        current: tuple[str, ...] = ("",)
        for node in self.graph.nodes:
            if node.op not in ("call_function", "get_attr") or not guards.get(node):
                continue
            text = self._text(node)
            if self._inlined(node, text, guards):
                self.texts[node] = text
                continue
            guard = guards[node]
            if guard != current and guard != ("",):
                body += wrapped(f"if {' or '.join(guard)}:", indent)
            current = guard
            pad = indent + ("    " if guard != ("",) else "")
            self.texts[node] = self.names.new(_DECORATION.sub("", node.name))
            line = f"{self.texts[node]} = {_bare(text)}"
            fits = len(pad + line) <= WIDTH
            body += wrapped(line if fits else f"{self.texts[node]} = {text}", pad)
            if finished := self._finished(node, guards):
                body += wrapped(f"del {', '.join(finished)}", pad)
        returned = self._returned(guards)
        line = f"{indent}return {tuple_text(returned)}"
        if len(line) <= WIDTH:
            return [*body, line]
        items: list[str] = []
        for text in returned:
            if _is_plain(text) and items and all(map(_is_plain, items[-1].strip(", ").split(", "))):
                items[-1] += f" {text},"
                if len(items[-1]) > WIDTH:
                    items[-1:] = [items[-1][: -len(text) - 2], f"{indent}    {text},"]
            else:
                items += wrapped(f"{_bare(text)},", indent + "    ")
        return [*body, f"{indent}return (", *items, f"{indent})"]

    def _finished(self, node: torch.fx.Node, guards) -> list[str]:
        """Variables that nothing reads behind this statement: their memory is let go of."""
        self.statements[node] = len(self.statements)
        if not self.free:
            return []
        found, ahead = [], list(node.all_input_nodes)
        while ahead:
            read = ahead.pop()
            if read in self.statements:
                last = all(self._stated(user) in self.statements for user in read.users)
                if last and guards[read] == guards[node] and self.texts[read] not in found:
                    found.append(self.texts[read])
            elif read.op == "call_function":
                ahead += read.all_input_nodes  # it stands in this statement
        return found

    def _stated(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node in whose statement a node stands."""
        while node.op == "call_function" and node not in self.statements and node.users:
            user = next(iter(node.users))
            if len(node.users) != 1:
                break
            node = user
        return node

    def _returned(self, guards) -> list[str]:
        found = []
        for result, need in zip(self.results, self.needs):
            if not isinstance(result, torch.fx.Node):
                found.append(value_text(result, self.texts.get))
            elif not need or self._is_there(result, guards):
                found.append(self.texts[result])  # autograd drops what was not asked for
            else:
                found.append(f"{_bare(self.texts[result])} if {need} else None")
        return found

    def _is_there(self, node: torch.fx.Node, guards) -> bool:
        """Whether it is computed, or given, whatever is wanted."""
        while node.target is operator.getitem:
            node = node.args[0]
        return guards.get(node) == ("",) and (node.op == "placeholder" or node in self.statements)

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
            node: ("",) if "" in own or own == every else tuple(sorted(own, key=order.get))
            for node, own in found.items()
        }

    def _text(self, node: torch.fx.Node) -> str:
        if node.op == "get_attr":
            constant = self.graph.owning_module
            for part in str(node.target).split("."):
                constant = getattr(constant, part)
            if self.constant_text is None:
                raise UnprintableError(f"the constant {node.target}")
            return self.constant_text(constant)
        return call_text(node.target, node.args, node.kwargs, self.texts.__getitem__, self.device)

    def _inlined(self, node: torch.fx.Node, text: str, guards) -> bool:
        """Whether its text stands where it is used, which also lets go of it early."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target is operator.getitem and source in self.statements:
            return True
        if len(node.users) != 1:
            return False
        user = next(iter(node.users))
        if _times_read(user, node) != 1:
            return False
        if user.op == "output":
            return self.results.count(node) == 1 and len(text) <= 84
        return guards.get(user) == guards[node] and len(text) <= 60


def _times_read(user: torch.fx.Node, node: torch.fx.Node) -> int:
    found = []
    torch.fx.node.map_arg((user.args, user.kwargs), found.append)
    return found.count(node)


def simplify(graph: torch.fx.Graph) -> None:
    """Takes out what changes nothing: detached values, transposes of transposes, views that keep
    the shape."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        source = node.all_input_nodes[0]
        same = node.target is aten.detach.default
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
