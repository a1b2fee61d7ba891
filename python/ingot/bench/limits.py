"""The time below which no version of a model can fall, from rates measured in the same run.

Limit = the larger of the products' operations over the best half-precision rate that PyTorch's own
library reaches here (three times the operations under `fp32`, whose split product needs three; once
under `tf32`, which one product of scaled fp16 serves), and the least bytes over copy bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from .timers import timer_for

# Half-precision products per product, by policy and by the model's own type.
SPLIT_PRODUCTS = {"fp32": 3.0, "ieee": 3.0, "high": 2.0, "tf32": 1.0, "fp16": 1.0, "bf16": 1.0}
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_REPEATS = 5
_CPU_ROWS = 512


@dataclass(frozen=True)
class Rates:
    """Best half-precision rate of a product of this shape (flop/s), copy bandwidth (bytes read and
    written a second)."""

    product: float
    copy: float


def measure_product_rate(m: int, k: int, n: int, device: torch.device) -> float:
    """flop/s of the best half-precision product, at this shape and (on a GPU) at a large square
    one. A CPU without matrix units multiplies fp32 fastest: three times that rate then counts, so
    that the limit of `fp32` is one fp32 product."""
    shapes = {(m, k, n)}
    factors = {torch.float16: 1.0, torch.bfloat16: 1.0}
    if device.type == "cuda":
        shapes.add((8192, 8192, 8192))
    else:
        shapes = {(min(m, _CPU_ROWS), k, n)}
        factors = {torch.float32: 3.0}
        if torch.backends.mkldnn.is_available() and _has_amx():
            factors[torch.bfloat16] = 1.0
    best = 0.0
    timer = timer_for(device)
    for dtype, factor in factors.items():
        for rows, inner, columns in shapes:
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(columns, inner, device=device).to(dtype).t()
            timer.time_calls(lambda _, a=a, b=b: a @ b, 2, False)
            seconds = median(timer.time_calls(lambda _, a=a, b=b: a @ b, _REPEATS, False))
            best = max(best, factor * 2.0 * rows * inner * columns / seconds)
    return best


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def measure_copy_rate(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    timer = timer_for(device)
    timer.time_calls(lambda _: target.copy_(source), 2, False)
    seconds = median(timer.time_calls(lambda _: target.copy_(source), _REPEATS, False))
    return 2.0 * source.numel() * 4 / seconds


def fewest_bytes(inputs: list, module: torch.nn.Module, outputs: list) -> int:
    """Every input, parameter and output moved once."""
    tensors = [t for t in [*inputs, *outputs] if isinstance(t, torch.Tensor)]
    tensors += list(module.parameters())
    return sum(t.numel() * t.element_size() for t in tensors)


def product_flops(module: torch.nn.Module, inputs: list) -> int:
    """Operations of the matrix products in one call, counted on tensors without data."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(*inputs)
    return int(counter.get_total_flops())


def limit_seconds(flops: float, moved: float, rates: Rates, precision: str) -> float:
    compute = SPLIT_PRODUCTS[precision] * flops / rates.product if flops else 0.0
    return max(compute, moved / rates.copy)


def model_limit(module: torch.nn.Module, inputs: list, rates: Rates, precision: str) -> float:
    """Seconds of one call of a module that returns one tensor or several."""
    with torch.no_grad():
        result = module(*inputs)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    moved = fewest_bytes(inputs, module, outputs)
    return limit_seconds(product_flops(module, inputs), moved, rates, precision)
