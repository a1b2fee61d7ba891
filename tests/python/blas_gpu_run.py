"""Prints the largest error of what check_blas.py asks cublasLt for on a GPU. Started by
test_blas.py, with a driver and an Ingot that compute on the host."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))

import blas_products

FORMS = (("gelu", 1), ("gelu bias", 1), ("rows", 1), ("apart", 1), ("gelu bias", 3), ("apart", 3))


class Matmul(blas_products.Matmul):
    def _ask(self, name: str, *arguments) -> None:
        if name != "cublasLtCreate":  # which alone would need a GPU
            super()._ask(name, *arguments)


def main() -> None:
    blas_products.Matmul = Matmul
    path = blas_products.library_path()
    if not path:
        print("no library")
        return
    library, worst = ctypes.CDLL(path), 0.0
    for form, entries in FORMS:
        x, w = blas_products.operands((384, 512, 1216, entries, f"lt {form}"), "cpu")
        multiply, truth = blas_products.lt_product(form, x, w, library)
        found, right = multiply().double(), truth(slice(None))
        worst = max(worst, float((found - right).norm() / right.norm()))
    print(worst)


if __name__ == "__main__":
    main()
