"""Which precision a call's products have: the caller's choice, else PyTorch's own switches."""

from __future__ import annotations

import os

import torch

PRECISIONS = ("fp32", "ieee", "high", "tf32", "bf16", "fp16")

MODES = ("default",)
# Not among them until they are proven on a GPU.
_TRIED = ("reduce-overhead",)

# From 2.9 on there are two sets of switches. The old one's getter takes a fifth of the time, but
# raises once the two disagree; the new one's answers for both.
_new_getter = getattr(torch._C, "_get_fp32_precision_getter", None)
_old_getter = getattr(torch._C, "_get_cublas_allow_tf32", None)
_old_answers = _old_getter is not None


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")


def without_mode(options: dict | None) -> tuple[dict, bool]:
    """Options of programs, and whether calls are to be replayed by CUDA graphs. Raises ValueError
    for another mode."""
    rest = dict(options or {})
    mode = rest.pop("mode", None) or "default"
    known = MODES + (_TRIED if os.environ.get("INGOT_MODES") == "all" else ())
    if mode not in known:
        raise ValueError(f"Ingot has no mode {mode!r}, only options")
    return rest, mode == "reduce-overhead"


def tf32_allowed() -> bool:
    """Whether PyTorch's matrix products of float32 may round their operands to TF32."""
    global _old_answers
    if _old_answers:
        try:
            return _old_getter()
        except RuntimeError:
            if _new_getter is None:
                raise
            _old_answers = False
    return _new_getter("cuda", "matmul") == "tf32"


def ambient(device_type: str) -> tuple:
    """The settings around a call that decide what its graph computes: autocast's dtype, and for
    CUDA whether TF32 is allowed."""
    autocast = None
    if torch.is_autocast_enabled(device_type):
        autocast = torch.get_autocast_dtype(device_type)
    return autocast, device_type == "cuda" and tf32_allowed()


def candidates(precision: str | None, tf32: bool) -> tuple[str, ...]:
    """Policies to try in order; a later one where the library does not offer an earlier one."""
    if precision is not None:
        return (precision,)
    return ("tf32",) if tf32 else ("fp32",)
