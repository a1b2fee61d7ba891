"""Captures that are not called again: of sizes that change from call to call, as the length of a
generating model's cache does. Each costs a second or more, so after a few of them PyTorch runs
calls of other sizes, until those that are there were used; and one in some calls is captured all
the same, since which sizes come back is not known.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator

# Calls of a capture that was worth it; captures that were not, at which it ends; calls that PyTorch
# runs then before another is captured.
USED = 3
_MOST_IN_VAIN, _SPARED = 6, 64


class CapturesInVain:
    """Of one module, by the code of the frames that are captured.

    graphs(): all that were captured so far, each with its `calls`, counted up to USED, and
    `compiled`. asked(): whether this call was made to capture. warn: is told once.
    """

    def __init__(
        self, graphs: Callable[[], list], asked: Callable[[], bool], warn: Callable[[str], None]
    ):
        self._graphs, self._asked, self._warn = graphs, asked, warn
        self._of_code: dict[types.CodeType, list[weakref.ref]] = {}
        self._spared: dict[types.CodeType, int] = {}

    def spares(self, code: types.CodeType) -> bool:
        """Whether PyTorch is to run this call as it is."""
        in_vain = sum(graph.calls < USED for graph in self._alive(code))
        if in_vain < _MOST_IN_VAIN or self._asked():
            return False
        self._spared[code] = (self._spared.get(code, 0) + 1) % _SPARED
        if not self._spared[code]:
            return False
        self._warn(
            f"PyTorch runs calls that are unlike those before: {in_vain} captures, which take a "
            "second or more each, were hardly called again. TORCH_LOGS=recompiles tells what "
            "changes from call to call: pad to a few lengths, or keep it"
        )
        return True

    def knows(self, code: types.CodeType) -> bool:
        """Whether a graph was captured for it."""
        return bool(self._alive(code))

    def _alive(self, code: types.CodeType) -> list:
        return [found for ref in self._of_code.get(code, ()) if (found := ref()) is not None]

    @contextlib.contextmanager
    def noting(self, code: types.CodeType) -> Iterator[None]:
        """What is captured within is for this code."""
        before = len(self._graphs())
        yield
        made = [graph for graph in self._graphs()[before:] if graph.compiled is not None]
        self._of_code.setdefault(code, []).extend(map(weakref.ref, made))
