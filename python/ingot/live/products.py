"""The products of backward passes that no region takes: those that contract the batch.

dW = dYᵀ·X sums over the rows of a batch. A graph of Ingot's has one symbolic extent, which is not
contracted: so each batch size has a program of its own, in which the rows of dYᵀ are "B".
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from ingot.runtime.library import IngotError
from ingot.runtime.program import BATCH, LeafLayout, Program, ResultLayout

# Multiplications from which a launch of Ingot's product costs less than PyTorch's.
_LEAST_WORK = 1 << 24
_MOST_PROGRAMS = 256


def transposed_product(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aᵀ·b for a [K, M] and b [K, N]: dense [M, N]."""
    return product(precision, a.t(), b)


def product(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a·b for matrices [M, K] and [K, N], by Ingot where that gains something."""
    if pays(a, b):
        program = _programs.of(precision, a, b)
        if program is not None:
            return run(program, a, b)
    return torch.mm(a, b)


def pays(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether Ingot multiplies faster. The CPU's products of fp32, and those of two 16-bit
    operands, are the library's either way."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.float32
        and a.size(0) * a.size(1) * b.size(1) >= _LEAST_WORK
    )


def run(program: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return program.run([_as_matrix(a), _as_matrix(b)])[0]


def program_of(precision: str, a: torch.Tensor, b: torch.Tensor) -> Program:
    """For products like a·b with any number of rows."""
    (contracted, columns), flipped = b.shape, _columns_first(b)
    dtype = "f32"
    graph = {
        "ingot_graph": 1,
        "name": "product",
        "values": [
            {"op": "input", "name": "a", "dtype": dtype, "shape": ["B", 1, 1, contracted]},
            {
                "op": "input",
                "name": "b",
                "dtype": dtype,
                "shape": [1, columns, 1, contracted] if flipped else [1, contracted, 1, columns],
            },
            {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": flipped}},
        ],
        "results": [{"value": 2, "name": "product"}],
        "updates": [],
    }
    across = LeafLayout((None, 1, None, 0) if flipped else (None, 0, None, 1))
    result = ResultLayout((BATCH, columns), ((0,), (3,)), (BATCH, 1, 1, columns), a.dtype)
    return Program(
        graph,
        device=a.device.type,
        precision=precision,
        leaf_layouts=[LeafLayout((0, None, None, 1)), across],
        result_layouts=[result],
    )


class _Programs:
    """Those used last. None: the library has none."""

    def __init__(self):
        self._known: OrderedDict[tuple, Program | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, precision: str, a: torch.Tensor, b: torch.Tensor) -> Program | None:
        key = (precision, a.device.type, *b.shape, _columns_first(b))
        with self._lock:
            if key not in self._known:
                try:
                    self._known[key] = program_of(precision, a, b)
                except IngotError:
                    self._known[key] = None
                if len(self._known) > _MOST_PROGRAMS:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]


_programs = _Programs()


def _columns_first(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) != 1


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """With strides that a product reads without a copy: expanded tensors and windows are copied."""
    (rows, columns), (down, along) = tensor.shape, tensor.stride()
    dense = (along == 1 and down >= columns) or (down == 1 and along >= rows)
    return tensor if dense else tensor.contiguous()
