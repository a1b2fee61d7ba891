"""What TorchDynamo has seen change from call to call, for each module alone.

Dynamo keeps the sizes and numbers of earlier calls by a function's place in its file, for all
modules of a class: a second one, with a longer sequence or more heads, would be captured for any
length and any number of heads at its first call, which takes over less.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch._dynamo.pgo as pgo

from ingot.live.backward import compile_lock

_STATE = "_CODE_STATE"


class SeenSizes:
    """Of one module's calls."""

    def __init__(self) -> None:
        self._of_all: Any = None
        self._own: Any = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While Dynamo captures one of its calls."""
        if not hasattr(pgo, _STATE):  # another release: as Dynamo does it
            yield
            return
        with compile_lock:
            of_all = pgo.get_code_state()
            if of_all is not self._of_all:  # at first, and after torch._dynamo.reset()
                self._of_all, self._own = of_all, defaultdict(of_all.default_factory)
            setattr(pgo, _STATE, self._own)
            try:
                yield
            finally:
                setattr(pgo, _STATE, of_all)
