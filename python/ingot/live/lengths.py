"""Sizes beside the batch's that change from call to call, as the length of a text does.

TorchDynamo makes a size symbolic once it has seen another one. A graph for one length alone may
take over more (the softmax of attention written by hand), one for all lengths is captured once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._guards import CompileContext

from ingot.capture.layout import is_symbolic
from ingot.live.tracing import changing_sizes, sizes_of_inputs, value_at_capture
from ingot.live.vain import USED

# By the frame that Dynamo captures: the captures so far, and by where a size comes from, those that
# a graph is for alone.
_known: dict[int, tuple[int, dict[tuple[str, int], set[int]]]] = {}
_MOST_FRAMES = 1024
# Captures of a frame from which on its lengths have changed more than once.
_OFTEN = 2


def are_marked(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> bool:
    """Whether the caller has asked for some to be kept: Dynamo raises where they are bound."""
    changing = changing_sizes(gm, examples)
    return any(
        place in changing
        and place[1] in getattr(value_at_capture(node), "_dynamo_dynamic_indices", ())
        for place, _, node in sizes_of_inputs(gm, examples)
    )


def changed_often(graphs: Iterable[Any]) -> bool:
    """graphs: what was captured before of the same model, with the calls of each."""
    if not torch._dynamo.config.assume_static_by_default:
        return True
    bound = (g for g in graphs if g.compiled is not None and g.compiled.bound_lengths)
    return any(graph.calls < USED for graph in bound)


def captured_often() -> bool:
    """The same where nobody knows the graphs captured before."""
    current = CompileContext.current_compile_id()
    return changed_often(()) or (current is not None and current.frame_compile_id >= _OFTEN)


def note(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
    """A graph was captured: lengths that are numbers are those that it is for."""
    known = _of_frame()
    for place, size, _ in sizes_of_inputs(gm, examples):
        if not is_symbolic(size):
            known[place].add(int(size))


def keep_apart(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
    """Guards that a call for which there is a graph of its own does not come to this one: its bits
    would depend on which of the two was called last."""
    known = _of_frame()
    for place, size in changing_sizes(gm, examples).items():
        for other in known.get(place, ()):
            if other != size.node.hint:
                bool(size != other)
        return  # one size tells them apart


def _of_frame() -> dict[tuple[str, int], set[int]]:
    current = CompileContext.current_compile_id()
    if current is None or current.frame_id is None:
        return defaultdict(set)
    capture = current.frame_compile_id
    before, found = _known.get(current.frame_id, (-1, None))
    if found is None or capture < before:
        found = defaultdict(set)  # torch._dynamo.reset() counts from 0 again
        while len(_known) >= _MOST_FRAMES:
            _known.pop(next(iter(_known)), None)
    _known[current.frame_id] = capture, found
    return found
