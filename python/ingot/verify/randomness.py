"""Where the parent's random numbers come from, and which of them the worker is told."""

from __future__ import annotations

import hashlib
import secrets


class Randomness:
    """Seeds by purpose. The worker is told those of `construction` and of `calls`, from which
    nobody can reach the others: inputs, parameters and sizes come from a secret through a hash."""

    def __init__(self, seed: int | None) -> None:
        """seed: None takes a fresh secret; a number makes the run repeatable."""
        self._secret = secrets.token_bytes(32) if seed is None else f"seed {seed}".encode()
        self._taken: dict = {}
        self.construction = self.next("construction")

    def next(self, purpose: str) -> int:
        count = self._taken[purpose] = self._taken.get(purpose, 0) + 1
        text = self._secret + f"|{purpose}|{count}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") >> 1

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.next("sizes") % (high - low + 1)
