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
DECORATION = re.compile(r"^_?native_|_(legit|no_training|data|default|tensor|scalar)(?=_|$)")
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
        return tuple_text(items) if isinstance(value, tuple) else f"[{', '.join(items)}]"
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
    if target in _TENSOR_INFIX and len(args) == 2 and not kwargs and is_tensor(args[0]):
        return f"({texts[0]} {_TENSOR_INFIX[target]} {texts[1]})"
    if target is torch.ops.aten.t.default:
        return f"{texts[0]}.t()"
    if target is torch.ops.aten.reshape.default and not kwargs:
        return f"{texts[0]}.reshape({texts[1]})"
    if target is torch.ops.aten.sum.dim_IntList and len(args) in (2, 3) and not kwargs:
        return f"{texts[0]}.sum({', '.join(texts[1:])})"
    texts += [f"{key}={value_text(v, name_of, device)}" for key, v in kwargs.items()]
    return f"{_function_text(target)}({', '.join(texts)})"


def is_tensor(argument: Any) -> bool:
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


def assigned(targets: Sequence[str], text: str, indent: str) -> list[str]:
    """The statement that gives several names to the parts of a value."""
    lines = wrapped(f"{', '.join(targets)} = {text}", indent)
    if len(targets) == 1 or len(lines[0]) <= WIDTH:
        return lines
    names = textwrap.wrap(", ".join(targets) + ",", WIDTH - len(indent) - 4)
    return [f"{indent}(", *(f"{indent}    {n}" for n in names), *wrapped(f") = {text}", indent)]


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


def is_plain(text: str) -> bool:
    """A name, or an element of a result."""
    return re.fullmatch(r"[\w.]+(\[\d+\])*", text) is not None


def bare(text: str) -> str:
    """Without the brackets around an operation."""
    if not (text.startswith("(") and _outermost(text)[0] == 0):
        return text
    depth = [text[:at].count("(") - text[:at].count(")") for at, c in enumerate(text) if c == ","]
    return text if 1 in depth else text[1:-1]
