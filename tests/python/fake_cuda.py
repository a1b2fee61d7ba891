"""Builds fake_cuda.c, which stands for libcuda, NVRTC and cuBLASLt."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VARIABLES = ("INGOT_LIBCUDA", "INGOT_NVRTC", "INGOT_CUBLASLT")

# The sizes of this tree's kernel arguments, as options of a compiler.
_SIZES = """
#include <cstdio>
#include "product/hopper/args.cuh"
#include "product/portable/args.cuh"
#include "product/split.cuh"

int main() {
  using namespace ingot;
  std::printf("-DPRODUCT_ARGS=%zu -DSPLIT_ARGS=%zu -DPACKED_OPERANDS=%zu -DTENSOR=40",
              sizeof(hopper::ProductArgs), sizeof(SplitArgs), sizeof(portable::PackedOperands));
}
"""


def build(folder: Path) -> Path:
    """Needs gcc and g++."""
    sizes, fake = folder / "sizes", folder / "fake_cuda.so"
    command = ["g++", "-std=c++20", "-I", ROOT / "kernels", "-x", "c++", "-", "-o", sizes]
    subprocess.run(command, input=_SIZES, text=True, check=True)
    options = subprocess.run([sizes], capture_output=True, text=True, check=True).stdout.split()
    text = HERE / "fake_cuda.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", *options, "-o", fake, text], check=True)
    return fake
