"""Writes that autograd does not see: into a parameter or an activation with gradients switched
off, through `.data` or what was detached. What was written goes on to have the derivative of what
it was. No graph without writes says so: PyTorch runs these operators as they are written, and
graphs are cut at them.

A write into what has no derivative (a buffer, with gradients switched off) is none of these. But a
few operators are, whose derivative in place is another one than that of what takes their place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch

from ingot.capture.captured import CaptureError

_UNSEEN = "its forward writes into a tensor unseen by autograd"
OTHERWISE = "in place its derivative is another one"
# Out of place these give what has no derivative. In place a comparison's and a draw's is zero, and
# a logical operator's that of what was there before.
_WITH_OTHER_DERIVATIVES = frozenset(
    """
    eq_ ge_ greater_ greater_equal_ gt_ le_ less_ less_equal_ lt_ ne_ not_equal_
    logical_and_ logical_not_ logical_or_ logical_xor_ bernoulli_ normal_
    """.split()
)


class UnseenWritesError(CaptureError):
    """nodes: names of the operators of Dynamo's graph that write so."""

    def __init__(self, nodes: Sequence[str], why: str = _UNSEEN):
        super().__init__(why)
        self.nodes = frozenset(nodes)


def written_otherwise(node: torch.fx.Node, given: Sequence[Any]) -> bool:
    """Whether PyTorch alone has the derivative of what an operator writes. given: the values of its
    inputs."""
    name = getattr(node.target, "__name__", node.target)
    return (
        name in _WITH_OTHER_DERIVATIVES
        and isinstance(given[0], torch.Tensor)
        and given[0].requires_grad
        and torch.is_grad_enabled()
    )


@contextlib.contextmanager
def unseen_by_autograd(
    given: Sequence[Any], known: Sequence[Iterable[Any]], gradients: bool
) -> Iterator[list[torch.Tensor]]:
    """Gives a list that is filled with the tensors among `given` that are written inside, unseen.
    known: what else there is; gradients: whether any are wanted."""
    unseen: list[torch.Tensor] = []
    tensors = [v for v in given if isinstance(v, torch.Tensor) and not v.is_inference()]
    before = [(tensor._version, _memory(tensor), tensor.grad_fn) for tensor in tensors]
    yield unseen
    for tensor, (version, memory, function) in zip(tensors, before):
        if _memory(tensor) != memory or tensor._version < version:  # `tensor.data = other`
            unseen.append(tensor)
        elif tensor._version > version and gradients and not _is_seen(tensor, function, known):
            unseen.append(tensor)


def _is_seen(tensor: torch.Tensor, function: Any, known: Sequence[Iterable[Any]]) -> bool:
    """Whether all that has its memory has a derivative if the tensor itself has one now, and the
    same: what was detached goes its own way. function: of autograd's, that gave the tensor before
    the write; one that is seen puts another there. (An operator may switch gradients off inside: an
    embedding with `max_norm` does.)"""
    if not torch.is_grad_enabled() and tensor.requires_grad:
        return False
    if function is not None and tensor.grad_fn is function:
        return False
    return all(
        other.requires_grad == tensor.requires_grad
        and (_base(other) is _base(tensor) or not tensor.requires_grad)
        for other in itertools.chain.from_iterable(known)
        if isinstance(other, torch.Tensor) and _memory(other) == _memory(tensor)
    )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd takes it for a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _memory(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def parts_to_run_apart(
    nodes: Sequence[torch.fx.Node], writes: Container[str]
) -> set[torch.fx.Node] | None:
    """What PyTorch runs as it is written: these writes, the views that they write through, and all
    for which gradients are switched off together with one of them. None where that has no end."""
    found: set[torch.fx.Node] = set()
    span: list[torch.fx.Node] = []
    for node in nodes:
        switches = node.target is torch._C._set_grad_enabled
        if span or switches:
            span.append(node)
        if node.name in writes:
            found.update(_written_through(node))
        if switches and node.args[0]:
            if not found.isdisjoint(span):
                found.update(span)
            span = []
    return found if found.isdisjoint(span) else None


def _written_through(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The node, and before it what has the same memory as something that it was made from."""
    yield node
    for source in node.all_input_nodes:
        of = source.meta.get("example_value")
        before = [n.meta.get("example_value") for n in source.all_input_nodes]
        if any(_share_memory(of, other) for other in before):
            yield from _written_through(source)


def _share_memory(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and _memory(a) is not None and _memory(a) == _memory(b)
