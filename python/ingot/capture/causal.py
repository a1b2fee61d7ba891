"""Whether a mask over tokens is the causal one: nn.TransformerEncoder and nn.TransformerDecoder ask
that of its values at each call that does not say `is_causal`.

TorchDynamo cannot capture what hangs on values: it breaks the graph, and the encoder is PyTorch's
with all that it calls. While Dynamo captures for Ingot the answer is no, and attention reads the
mask, which gives the same results in more time, and other random numbers. A mask that the forward
makes is compared when it is captured. One that comes from outside is compared then, too, and again
at each call that brings another tensor; where the answer is no longer yes, PyTorch runs the graph
by the mask.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import transformer

from ingot.capture import encoder_layer
from ingot.capture.captured import CaptureError
from ingot.capture.folding import constant_nodes, evaluated
from ingot.capture.layout import written
from ingot.capture.nodes import named_arguments, schema_name

_ASKING = (transformer.TransformerEncoder, transformer.TransformerDecoder)
_aten = torch.ops.aten
ATTENTION = _aten.scaled_dot_product_attention.default
# What gives a mask of the same rows and columns.
_FRAMING = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.expand.default,
    _aten.unsqueeze.default,
    _aten.view.default,
}
# What gives the same numbers.
_COPYING = {"aten::to", "aten::_to_copy", "aten::clone", "aten::detach", "aten::lift_fresh_copy"}
_MOST_ELEMENTS = 1 << 24


class AskedInVainError(CaptureError):
    """The answer that was put off matters, and is not known."""


class _PutOff(threading.local):
    on = False
    asked = False


_put_off = _PutOff()


@torch.compiler.assume_constant_result
def _is_put_off() -> bool:
    _put_off.asked = _put_off.asked or _put_off.on
    return _put_off.on


def _with_answer(original: Callable) -> Callable:
    def detect(mask, is_causal=None, size=None):
        if is_causal is None and mask is not None and _is_put_off():
            return False
        return original(mask, is_causal, size)

    return detect


@functools.cache
def _replace_question() -> None:
    """For good, since Dynamo's guards hold on to the function; it answers as ever otherwise."""
    name = "_detect_is_causal_mask"
    original = getattr(transformer, name, None)
    if original is not None:
        setattr(transformer, name, _with_answer(original))


@contextlib.contextmanager
def question_put_off(yes: bool = True) -> Iterator[None]:
    """Within it this thread's captures answer no."""
    _replace_question()
    before = _put_off.on, _put_off.asked
    _put_off.on, _put_off.asked = yes, False
    try:
        yield
    finally:
        _put_off.on, _put_off.asked = before


def was_asked() -> bool:
    """Of what is being captured."""
    return _put_off.asked


# In a graph --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attention:
    """By a mask. base: what the mask is made of, by views; hides: whether it is true (or not 0)
    where a token must not be seen, not where it may."""

    node: torch.fx.Node
    base: torch.fx.Node
    hides: bool
    asks: bool  # belongs to a module that asks
    drops: bool

    @property
    def is_native(self) -> bool:
        return self.node.target is encoder_layer.NATIVE_ATTENTION

    def become_causal(self) -> None:
        if self.is_native:
            encoder_layer.make_causal(self.node)
        else:
            args = self.node.args
            dropout_p = named_arguments(self.node)["dropout_p"]
            self.node.args = (*args[:3], None, dropout_p, True, *args[6:])


def take_causal_masks(graph: torch.fx.Graph) -> None:
    """Attentions by a causal mask that the graph makes become causal ones: where the answer was put
    off, and those that drop nothing (their way would draw other random numbers)."""
    attentions = list(_attentions_by_mask(graph))
    constant = constant_nodes(graph) if attentions else set()
    known: dict[tuple[torch.fx.Node, bool], bool] = {}
    for each in attentions:
        mask = each.base, each.hides
        if each.drops and not each.asks:
            continue
        if mask not in known:
            known[mask] = _is_written_causal(*mask) or (
                each.base in constant and _is_causal_constant(*mask)
            )
        if known[mask]:
            each.become_causal()


def take_causal_inputs(
    graph: torch.fx.Graph, values: dict[torch.fx.Node, torch.Tensor]
) -> list[torch.fx.Node]:
    """The same of masks that are inputs of the graph, of which the call that is captured has these
    values. Returns those that must be causal at each call; raises AskedInVainError where a mask is
    neither an input nor a constant."""
    found = []
    attentions = list(_attentions_by_mask(graph)) if _put_off.asked else []
    constant = constant_nodes(graph) if attentions else set()
    for each in attentions:
        # With a mask of padding on top of it PyTorch attends by the mask, whatever the answer.
        if not each.asks or each.base in constant or each.base.target is _aten.add.Tensor:
            continue
        if each.base in values:
            value = values[each.base]
            if is_causal(value, hides=True) and (each.hides or value.dtype is not torch.bool):
                each.become_causal()
                found.append(each.base)
        elif not each.is_native:
            raise AskedInVainError("a mask over tokens is computed from what a call brings")
    return list(dict.fromkeys(found))


def _attentions_by_mask(graph: torch.fx.Graph) -> Iterator[_Attention]:
    for node in graph.nodes:
        native = node.target is encoder_layer.NATIVE_ATTENTION
        if not native and node.target is not ATTENTION:
            continue
        given = named_arguments(node)
        mask = given["mask" if native else "attn_mask"]
        if not isinstance(mask, torch.fx.Node) or given.get("is_causal"):
            continue
        tokens = [given[name].meta["val"].shape[-2] for name in ("query", "key")]
        if len(set(map(written, (*tokens, *_matrix(mask))))) == 1:
            base, hides = _made_of(mask)
            drops = not native and given["dropout_p"] > 0
            yield _Attention(node, base, hides or native, _asks(node), drops)


def _is_front(node: torch.fx.Node) -> bool:
    """mask[:length]: of a causal mask a causal one, where it is square."""
    if node.target is not _aten.slice.Tensor:
        return False
    given = named_arguments(node)
    return given["start"] in (None, 0) and given["step"] == 1


def _matrix(mask: torch.fx.Node) -> torch.Size:
    return mask.meta["val"].shape[-2:]


def _asks(node: torch.fx.Node) -> bool:
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(isinstance(each[1], type) and issubclass(each[1], _ASKING) for each in stack)


def _made_of(mask: torch.fx.Node) -> tuple[torch.fx.Node, bool]:
    """(base, hides) of _Attention."""
    while mask.target in _FRAMING or _is_front(mask):
        read = mask.all_input_nodes[0]
        same = list(map(written, _matrix(read))) == list(map(written, _matrix(mask)))
        if not same and mask.target in _FRAMING:
            break
        mask = read
    if mask.target is _aten.masked_fill.Scalar and mask.args[2] == float("-inf"):
        zeros, hidden = mask.args[:2]
        if zeros.target is _aten.zeros_like.default and zeros.args[0] is hidden:
            return _made_of(hidden)[0], True
    return mask, False


def _is_written_causal(base: torch.fx.Node, hides: bool) -> bool:
    """As nn.Transformer.generate_square_subsequent_mask writes it, or as the lower triangle that is
    seen, of any length."""
    triangle = _copied(base)
    if triangle.target is _aten.tril.default and triangle.args[1:] in ((), (0,)):
        ones = _copied(triangle.args[0]).target is _aten.ones.default
        return ones and not hides and base.meta["val"].dtype is torch.bool
    if triangle.target is not _aten.triu.default or triangle.args[1:] != (1,):
        return False
    filled = _copied(triangle.args[0])
    if filled.target is not _aten.full.default:
        return False
    if base.meta["val"].dtype is torch.bool:
        return hides and filled.args[1] is True and filled.meta["val"].dtype is torch.bool
    return filled.args[1] == float("-inf")


def _copied(node: torch.fx.Node) -> torch.fx.Node:
    while schema_name(node.target) in _COPYING:
        node = node.all_input_nodes[0]
    return node


def _is_causal_constant(base: torch.fx.Node, hides: bool) -> bool:
    if base.meta["val"].numel() > _MOST_ELEMENTS:
        return False
    return is_causal(evaluated(base, {}, "cpu"), hides)


# Of values ---------------------------------------------------------------------------------------


def is_causal(mask: torch.Tensor, hides: bool = False) -> bool:
    """Whether a matrix is a causal mask: of numbers to be added, or, if it is of bools, true where
    a token is seen (hides: hidden). Waits for the device."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    wanted = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype is not torch.bool:
        wanted = torch.zeros_like(mask).masked_fill(wanted, float("-inf"))
    elif not hides:
        wanted = ~wanted
    return torch.equal(mask, wanted)


def while_causal(run: Callable, otherwise: Callable, places: Sequence[int]) -> Callable:
    """run(*arguments) where the masks at these places among them are causal."""
    known: dict[int, tuple[weakref.ref, int]] = {}

    def holds(place: int, mask: torch.Tensor) -> bool:
        version = None if mask.is_inference() else mask._version
        seen, seen_version = known.get(place, (None, None))
        if seen is not None and seen() is mask and version == seen_version is not None:
            return True
        if not is_causal(mask, hides=True):
            return False
        known[place] = weakref.ref(mask), version
        return True

    def call(*args: Any) -> Any:
        if all(holds(place, args[place]) for place in places):
            return run(*args)
        return otherwise(*args)

    return call
