"""Measures the error of fp32 products against K and against dynamic range, on a GPU.

Beside Ingot's fp32 product: cuBLAS in fp32, cuBLAS in TF32, and the naive split (the same fp16
halves, multiplied by the library as one product with K three times as long, so that the tensor
cores' own sums are never promoted).

python error_curves.py path/to/libingot.so [--out bench/results/error-curves/GPU.json] [--draws 3]

Writes one JSON object: for each curve its points, for each point the relative Frobenius error and
the worst row's relative error against fp64, the median over draws. tools/plot_errors.py draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from graphs import Graph, linear
from runner import Library, empty_results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from ingot.bench.records import source_hash, write_whole  # noqa: E402
from ingot.bench.suite import machine_name  # noqa: E402

ROWS, COLUMNS = 1024, 1024
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
RANGE_K = 4096
SPREADS = [0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
OUTLIERS = [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]

Operands = tuple[torch.Tensor, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def uniform_and_weight(k: int, generator: torch.Generator) -> Operands:
    """torch.rand and what nn.Linear starts from."""
    x = torch.rand(ROWS, k, generator=generator, device=generator.device)
    w = torch.rand(COLUMNS, k, generator=generator, device=generator.device)
    return x, (2 * w - 1) / k**0.5


def spread_elements(bits: int, generator: torch.Generator) -> Operands:
    """Every element of x scaled by a power of two from 2^-bits to 2^bits."""
    x, w = uniform_and_weight(RANGE_K, generator)
    exponents = torch.randint(
        -bits, bits + 1, x.shape, generator=generator, device=generator.device
    )
    return torch.ldexp(x, exponents), w


def outlier_meets_zero(bits: int, generator: torch.Generator) -> Operands:
    """One element of each row of x is 2^bits and meets a zero weight, so that only the small ones
    count."""
    x, w = uniform_and_weight(RANGE_K, generator)
    x[:, RANGE_K // 2] = 2.0**bits
    w[:, RANGE_K // 2] = 0
    return x, w


CURVES = {
    "length": (LENGTHS, uniform_and_weight),
    "spread": (SPREADS, spread_elements),
    "outlier": (OUTLIERS, outlier_meets_zero),
}


def with_tf32(allowed: bool) -> Product:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            return x @ w.t()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return product


def halves(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp16 high and low parts of v with each row's maximum scaled into [2^14, 2^15), and the
    exponents of those scales."""
    exponent = 15 - torch.frexp(v.abs().amax(dim=1, keepdim=True)).exponent
    scaled = torch.ldexp(v, exponent)
    high = scaled.half()
    return high, (scaled - high.float()).half(), exponent


def naive_split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x_high, x_low, x_exponent = halves(x)
    w_high, w_low, w_exponent = halves(w)
    left = torch.cat([x_high, x_low, x_high], dim=1)
    right = torch.cat([w_high, w_high, w_low], dim=1).t()
    if left.is_cuda:
        y = torch.mm(left, right, out_dtype=torch.float32)
    else:
        y = left.float() @ right.float()
    return torch.ldexp(torch.ldexp(y, -x_exponent), -w_exponent.t())


class IngotProduct:
    """Through the library, one program for each K."""

    def __init__(self, library: Library, device: str, cache: str):
        self._library, self._device, self._cache = library, device, cache
        self._programs: dict[int, tuple] = {}

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        batch, k = x.shape
        if k not in self._programs:
            graph = Graph("product")
            graph.result(linear(graph, k, w.shape[0], bias=False), ["B", 1, 1, w.shape[0]])
            program = self._library.program(
                graph.json(), cache_dir=self._cache, device=self._device
            )
            program.prepare(batch, 0 if self._device == "cuda" else -1)
            self._programs[k] = graph.json(), program
        graph, program = self._programs[k]
        leaves = [x.view(batch, 1, 1, k), w.view(1, w.shape[0], 1, k)]
        results = empty_results(graph, batch, self._device)
        workspace = program.workspace(batch, self._device)
        program.run(batch, leaves, results, workspace)
        return results[0].view(batch, -1)


def errors(truth: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    difference = got.double() - truth
    rows = difference.norm(dim=1) / truth.norm(dim=1)
    return (difference.norm() / truth.norm()).item(), rows.max().item()


def measure(products: dict[str, Product], draw, value: int, draws: int, device: str) -> dict:
    """One point of a curve."""
    found: dict[str, list] = {name: [] for name in products}
    for number in range(draws):
        x, w = draw(value, torch.Generator(device).manual_seed(1000 * value + number))
        truth = x.double() @ w.double().t()
        for name, product in products.items():
            found[name].append(errors(truth, product(x, w)))
    return {
        "at": value,
        "frobenius": {n: statistics.median(e for e, _ in v) for n, v in found.items()},
        "worst_row": {n: statistics.median(r for _, r in v) for n, v in found.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    parser.add_argument("--seconds", type=float, default=30.0, help="fewer draws beyond this")
    parser.add_argument("--cache", default="/tmp/ingot-check-cache")
    arguments = parser.parse_args()
    name = machine_name(torch.device(arguments.device))
    out = arguments.out or ROOT / "bench" / "results" / "error-curves" / f"{name}.json"
    products: dict[str, Product] = {
        "Ingot fp32": IngotProduct(
            Library(os.path.abspath(arguments.library)), arguments.device, arguments.cache
        ),
        "cuBLAS fp32": with_tf32(False),
        "TF32": with_tf32(True),
        "naive split": naive_split,
    }
    begun = time.monotonic()
    curves = {}
    for curve, (values, draw) in CURVES.items():
        curves[curve] = []
        for value in values:
            late = time.monotonic() - begun > arguments.seconds
            draws = 1 if late else arguments.draws
            curves[curve].append(measure(products, draw, value, draws, arguments.device))
            point = curves[curve][-1]["frobenius"]
            print(
                f"{curve:8} {value:6} " + "  ".join(f"{n} {e:.2e}" for n, e in point.items()),
                flush=True,
            )
    result = {
        "machine": name,
        "rows": ROWS,
        "columns": COLUMNS,
        "range_k": RANGE_K,
        "draws": arguments.draws,
        "source_hash": source_hash(ROOT),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "curves": curves,
    }
    write_whole(out, json.dumps(result, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.1f} s, written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
