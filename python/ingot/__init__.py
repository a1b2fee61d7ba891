"""Ingot: an optimising compiler for the chains that people put behind a PyTorch linear layer."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = [
    "IngotError",
    "IngotWarning",
    "OptimizedModule",
    "TunedProduct",
    "disable",
    "enable",
    "fast_products",
    "optimize",
    "tune",
]

_HOMES = {
    "IngotError": "ingot.runtime.library",
    "IngotWarning": "ingot.runtime.library",
    "OptimizedModule": "ingot.live.module",
    "TunedProduct": "ingot.tuning",
    "disable": "ingot.any_program",
    "enable": "ingot.any_program",
    "fast_products": "ingot.any_program",
    "optimize": "ingot.live.module",
    "tune": "ingot.tuning",
}


def __getattr__(name: str) -> Any:
    # PyTorch is imported when it is first needed: `ingot doctor` works without it.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
