"""Process-wide switches of PyTorch's and Python's, which a candidate may not leave changed: other
code of the same program would compute, record, warn or print otherwise."""

from __future__ import annotations

import ctypes
import operator
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import backends
from torch.nn.modules import module as modules

# Environment variables that change what PyTorch, its libraries or Python compute.
_NUMERIC_VARIABLES = (
    "CUBLAS_",
    "CUDA_LAUNCH_BLOCKING",
    "CUDNN_",
    "LD_PRELOAD",
    "MKL_",
    "NVIDIA_TF32",
    "OMP_",
    "PYTHON",
    "TORCH_ALLOW_TF32",
)
_LIBRARIES_L2 = 16 << 20
_LIMIT_PERSISTING_L2 = 6
# Of `fp32_precision` under torch.backends, from PyTorch 2.9 on.
_WITH_PRECISION = (
    "cuda.matmul",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
# Loading a file may import packages, some of which do so and are not the candidate's own.
ONLY_BY_CALLS = ("warnings",)


def process_settings() -> dict:
    """The switches as they are, by their names."""
    settings = {}
    for name, read in _READERS.items():
        try:
            settings[name] = read()
        except Exception as error:
            settings[name] = type(error).__name__
    return settings


def differences(before: dict, after: dict, but: Iterable[str] = ()) -> list:
    """What is unlike, e.g. ["threads: 2 → 1"]; of a dict its unlike entries. but: names that are
    not compared."""
    found = []
    for name, old in before.items():
        new = after[name]
        if name in but or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            names = [n for n in {**old, **new} if old.get(n) != new.get(n)]
            found += [f"{name} {n}: {old.get(n)} → {new.get(n)}" for n in names]
        else:
            found.append(f"{name}: {old} → {new}")
    return found


def without_own(changes: list, own: dict) -> list:
    """Of `differences` those after which a setting is not as in `own`, the settings of a process
    that runs the original: what that changes, the candidate may."""
    known = []
    for name, value in own.items():
        entries = {f"{name} {n}": v for n, v in value.items()} if isinstance(value, dict) else {}
        known += [(f"{n}: ", f" → {v}") for n, v in {**entries, name: value}.items()]
    return [
        change
        for change in changes
        if not any(change.startswith(name) and change.endswith(value) for name, value in known)
    ]


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0


def _persisting_l2() -> int:
    """Bytes of L2 that survive eviction (cuCtxGetLimit), where they are more than the libraries
    behind PyTorch set aside when they start (11.25 MiB were seen)."""
    if not torch.cuda.is_initialized():
        return 0
    size = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuCtxGetLimit(ctypes.byref(size), _LIMIT_PERSISTING_L2) or size.value
    return found if found > _LIBRARIES_L2 else 0


def _unless_missing(names: str, owner: Any = torch) -> Any:
    """What lies there, called where it is a function; None in a PyTorch that has no such thing."""
    try:
        found = operator.attrgetter(names)(owner)
    except AttributeError:
        return None
    return found() if callable(found) else found


def _precision(where: str) -> str | None:
    """Where none is set, fp32 is what it says: a candidate that turns allow_tf32 on and off again
    leaves "ieee" there, and nobody's results changed."""
    found = _unless_missing(f"{where}.fp32_precision".lstrip("."), backends)
    return "ieee" if found == "none" else found


def _blanket_warnings() -> list:
    """What is done with all warnings alike."""
    return [
        action
        for action, message, category, module, _ in warnings.filters
        if message is None and category is Warning and module is None
    ]


def _global_hooks() -> dict:
    """Of torch.nn.Module's, how many, and the numbers by which the latest are known."""
    hooks = {n[8:]: v for n, v in vars(modules).items() if n.startswith("_global_")}
    return {n: [len(v), *list(v)[-1:]] if isinstance(v, dict) else v for n, v in hooks.items()}


_READERS = {
    "default dtype": lambda: str(torch.get_default_dtype()),
    "default device": lambda: str(torch.get_default_device()),
    "float32 matmul precision": lambda: torch.get_float32_matmul_precision(),
    "fp32_precision": lambda: {n or "of all": _precision(n) for n in ("", *_WITH_PRECISION)},
    "cuda.matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
    "fp16 reduced-precision reduction": (
        lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "fp16 accumulation": lambda: _unless_missing("cuda.matmul.allow_fp16_accumulation", backends),
    "deterministic algorithms": lambda: [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ],
    "fill uninitialized memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
    "threads": lambda: torch.get_num_threads(),
    "threads between operators": lambda: torch.get_num_interop_threads(),
    "gradient mode": lambda: [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
    "autocast's types": lambda: [str(torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
    "bf16 reduced-precision reduction": (
        lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cudnn": lambda: [
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
    ],
    "mkldnn": lambda: {
        "enabled": backends.mkldnn.enabled,
        "deterministic": _unless_missing("mkldnn.deterministic", backends),
        "allow_tf32": _unless_missing("mkldnn.allow_tf32", backends),
    },
    "attention": lambda: {
        "flash": backends.cuda.flash_sdp_enabled(),
        "memory-efficient": backends.cuda.mem_efficient_sdp_enabled(),
        "math": backends.cuda.math_sdp_enabled(),
        "cudnn": _unless_missing("cuda.cudnn_sdp_enabled", backends),
        "fast path": _unless_missing("mha.get_fastpath_enabled", backends),
    },
    "opt_einsum": lambda: [backends.opt_einsum.enabled, backends.opt_einsum.strategy],
    "quantized engine": lambda: backends.quantized.engine,
    "anomaly detection": lambda: [
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    ],
    "autograd's threads": lambda: _unless_missing("_C._is_multithreading_enabled"),
    "hooks on saved tensors": lambda: repr(
        torch._C._autograd._top_saved_tensors_default_hooks(True)
    ),
    "hooks of all modules": _global_hooks,
    "warnings": lambda: [*_blanket_warnings(), torch.is_warn_always_enabled()],
    "print options": lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
    "modes that rewrite calls": lambda: [
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    ],
    "default generator": lambda: id(torch.default_generator),
    "environment": lambda: {
        name: value for name, value in os.environ.items() if name.startswith(_NUMERIC_VARIABLES)
    },
    "CUDA stream": _current_stream,
    "L2 set aside": _persisting_l2,
    "flush denormals": lambda: bool((torch.tensor([1e-310]).double() * 1.0 == 0).item()),
}
