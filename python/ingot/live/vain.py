"""Captures that are made in vain, and which calls are spared them.

Some are not called again: of sizes that change from call to call, as the length of a generating
model's cache does. Each costs a second or more, so after a few of them PyTorch runs calls of other
sizes, until those that are there were used; and one in some calls is captured all the same, since
which sizes come back is not known.

Others fail, by an error of TorchDynamo's own. After a few in a row PyTorch runs the next calls, and
twice as many after each further one.
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
# Captures that fail before calls are spared.
TRIES = 4


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
        self._failures: dict[types.CodeType, _Failures] = {}
        self._last_failed: types.CodeType | None = None

    def spares(self, code: types.CodeType) -> bool:
        """Whether PyTorch is to run this call as it is."""
        if code in self._failures and self._failures[code].spare():
            return not self._asked()
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

    def failed(self, code: types.CodeType) -> int:
        """How often in a row a capture has failed now."""
        self._last_failed = code
        return self._failures.setdefault(code, _Failures()).add(1)

    def forgive(self) -> None:
        """The last failure: the call itself has failed, whoever runs it."""
        if self._last_failed in self._failures:
            self._failures[self._last_failed].add(-1)

    def succeeded(self, code: types.CodeType) -> None:
        self._failures.pop(code, None)

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


class _Failures:
    """Of captures of one frame, one after the other; and calls that are still to be spared."""

    def __init__(self) -> None:
        self.times = self._spared = 0

    def add(self, times: int) -> int:
        self.times += times
        self._spared = _SPARED << (self.times - TRIES) if self.times >= TRIES else 0
        return self.times

    def spare(self) -> bool:
        self._spared -= 1
        return self._spared >= 0
