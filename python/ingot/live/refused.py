"""Calls that PyTorch refuses by an error of its own, as of a wrong shape. TorchDynamo meets the
error when it captures them, each time anew, in some 30 ms, and keeps 250 KB of it. So the
original's forward runs the next ones of the kind, until one of them is not refused.
"""

from __future__ import annotations

from collections.abc import Hashable

_MOST_KINDS = 64
# Calls of other kinds in a row after which none is looked for any more.
_FORGOTTEN = 256


class RefusedCalls:
    """kinds: none, as a rule, which is asked at each call."""

    def __init__(self) -> None:
        self.kinds: set[Hashable] = set()
        self._others = 0

    def add(self, kind: Hashable) -> None:
        if len(self.kinds) >= _MOST_KINDS:
            self.kinds.clear()
        self.kinds.add(kind)
        self._others = 0

    def drop(self, kind: Hashable) -> None:
        self.kinds.discard(kind)

    def hold(self, kind: Hashable) -> bool:
        if kind in self.kinds:
            self._others = 0
            return True
        self._others += 1
        if self._others > _FORGOTTEN:
            self.kinds.clear()
        return False
