"""What differs between the releases of PyTorch that are served (2.6 and later)."""

from __future__ import annotations

import torch
from torch.fx import _symbolic_trace


def _is_tracing() -> bool:
    return _symbolic_trace.is_fx_tracing() and not torch.compiler.is_compiling()


# Whether torch.fx traces something, in any thread.
fx_is_tracing = getattr(_symbolic_trace, "is_fx_symbolic_tracing", _is_tracing)
