"""The products that no region takes: those that contract the batch, batches of matrices that are
not the batch's, and operands of which nothing says where a batch would lie.

A graph of Ingot's has one symbolic extent, which is not contracted: so each pair of other extents
has a program of its own, in which the rows of a product, or the matrices of a batch, are "B".
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ingot.capture.captured import Captured, Slot, TorchStep
from ingot.live import policy
from ingot.live.releases import unseen
from ingot.runtime.layouts import LeafLayout, ResultLayout, memory_holds
from ingot.runtime.library import IngotError
from ingot.runtime.program import Program
from ingot.runtime.signature import BATCH

_aten = torch.ops.aten
# Multiplications from which a launch of Ingot's product costs less than PyTorch's.
LEAST_WORK = 1 << 24
_MOST_PROGRAMS = 256

_functorch_is_active = torch._C._are_functorch_transforms_active
# Of a tensor: whether it is many, of `is_grads_batched=True`. Nothing but the tensor tells.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def with_own_products(captured: Captured, precision: str) -> Captured:
    """The same with products in the place of those that would be PyTorch's."""
    steps = [
        replace(step, target=product, args=(precision, *step.args)) if _is_product(step) else step
        for step in captured.steps
    ]
    taken = {(step.what, step.where) for step in captured.steps if _is_product(step)}
    left = [item for item in captured.unsupported if (item.what, item.where) not in taken]
    return replace(captured, steps=steps, unsupported=left)


def _is_product(step: object) -> bool:
    return (
        isinstance(step, TorchStep)
        and step.target in (_aten.mm.default, _aten.bmm.default)
        and len(step.args) == 2
        and all(isinstance(argument, Slot) for argument in step.args)
        and not step.kwargs
    )


def transposed_product(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """aᵀ·b for a [K, M] and b [K, N]: dense [M, N]."""
    return product(precision, a.t(), b)


def product(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a·b for [M, K] and [K, N], or for a batch of such, by Ingot where that gains something.
    PyTorch's autograd differentiates it."""
    multiply = _multiplication(precision, a, b) if pays(a, b) else None
    if multiply is None:
        return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Product.apply(precision, multiply, a, b)
    return multiply(a, b)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, precision, multiply, a, b):
        ctx.precision = precision
        *_, for_a, for_b = ctx.needs_input_grad
        ctx.save_for_backward(a if for_b else None, b if for_a else None)
        return multiply(a, b)

    @staticmethod
    @unseen
    def backward(ctx, gradient):
        (a, b), (*_, for_a, for_b) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            None,
            None,
            product(ctx.precision, gradient, b.mT) if for_a else None,
            product(ctx.precision, a.mT, gradient) if for_b else None,
        )


def pays(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether Ingot multiplies faster. The CPU's products of fp32, and those of two 16-bit
    operands, are the library's either way; operands that do not fit get PyTorch's own error."""
    return (
        a.is_cuda
        and b.device == a.device
        and a.dim() == b.dim() in (2, 3)
        and a.shape[:-2] == b.shape[:-2]
        and a.size(-1) == b.size(-2)
        and gains(a, b)
        and memory_holds(a)
        and memory_holds(b)
        and not _functorch_is_active()
        and not (is_batched(a) or is_batched(b))
    )


def gains(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and a.numel() * b.size(-1) >= LEAST_WORK


def _multiplication(precision: str, a: torch.Tensor, b: torch.Tensor) -> Callable | None:
    """What multiplies; None: PyTorch. (A step with TF32 may have hundreds of products for which
    there is no program: those, and their gradients, are not to go through a function of ours.)"""
    if a.dim() == 3 and (a.size(0) == 1 or b.stride(0) == 0):
        return partial(_as_rows, precision)
    program = _programs.of(precision, a, b, a.device.type)
    return None if program is None else partial(run, program)


def _as_rows(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By one matrix for the whole batch, which then is more rows."""
    rows, matrix = a.reshape(-1, a.size(2)), b[0]
    multiply = _multiplication(precision, rows, matrix) or torch.mm
    return multiply(rows, matrix).view(a.size(0), a.size(1), b.size(2))


def run(program: Program, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return program.run([_as_matrices(a), _as_matrices(b)])[0]


def compile_product(precision: str, a: torch.Tensor, b: torch.Tensor, device_type: str) -> None:
    """Compiles ahead what a·b will need on such a device; a and b may hold nothing."""
    if gains(a, b):
        program = _programs.of(precision, a, b, device_type)
        if program is not None:
            program.compile_for([_as_matrices(a), _as_matrices(b)])


def program_of(
    precision: str, a: torch.Tensor, b: torch.Tensor, device_type: str | None = None
) -> Program:
    """For products like a·b with any number of rows; of batches, for any number of them."""
    graph, leaves, result = graph_of(a, b)
    # No standalone file has this product, whose bits would have to be the same: matrices may be
    # multiplied as they lie, by far the faster way to a weight's gradient over many samples.
    return Program(
        graph,
        device=device_type or a.device.type,
        precision=precision,
        leaf_layouts=leaves,
        result_layouts=[result],
        options={"streamed": True},
    )


def graph_of(a: torch.Tensor, b: torch.Tensor) -> tuple[dict, list[LeafLayout], ResultLayout]:
    """Of a product like a·b, its rows (of batches, the matrices) being the graph's batch."""
    (contracted, columns), flipped = b.shape[-2:], _columns_first(b)
    batched = a.dim() == 3
    rows, dtype = a.size(1) if batched else 1, "f32"
    right = [columns, 1, contracted] if flipped else [contracted, 1, columns]
    graph = {
        "ingot_graph": 1,
        "name": "batched_product" if batched else "product",
        "values": [
            {"op": "input", "name": "a", "dtype": dtype, "shape": ["B", rows, 1, contracted]},
            {"op": "input", "name": "b", "dtype": dtype, "shape": ["B" if batched else 1, *right]},
            {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": flipped}},
        ],
        "results": [{"value": 2, "name": "product"}],
        "updates": [],
    }
    if batched:
        leaves = [
            LeafLayout((0, 1, None, 2)),
            LeafLayout((0, 2, None, 1) if flipped else (0, 1, None, 2)),
        ]
        result = ResultLayout(
            (BATCH, rows, columns), ((0,), (1,), (3,)), (BATCH, rows, 1, columns), a.dtype
        )
    else:
        leaves = [
            LeafLayout((0, None, None, 1)),
            LeafLayout((None, 1, None, 0) if flipped else (None, 0, None, 1)),
        ]
        result = ResultLayout((BATCH, columns), ((0,), (3,)), (BATCH, 1, 1, columns), a.dtype)
    return graph, leaves, result


def _is_pytorchs(program: Program, entries: int) -> bool:
    """Whether it would run the same product of cuBLAS as PyTorch, which calls it with less ado."""
    pytorchs = f"cuBLASLt ({'tf32' if policy.tf32_allowed() else 'ieee fp32'})"
    sweeps = program.explain(entries)["executable"].get("sweeps", [])
    return any(sweep.get("provider") == pytorchs for sweep in sweeps)


class _Programs:
    """Those used last, for numbers of rows (of matrices, in a batch) up to the next power of two.
    None: PyTorch's product is to run."""

    def __init__(self):
        self._known: OrderedDict[tuple, Program | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(
        self, precision: str, a: torch.Tensor, b: torch.Tensor, device_type: str
    ) -> Program | None:
        rows = a.size(1) if a.dim() == 3 else None
        entries = a.size(0)
        size = (entries - 1).bit_length()
        switches = precision, policy.tf32_allowed(), device_type
        key = (switches, size, rows, *b.shape[-2:], _columns_first(b))
        with self._lock:
            if key not in self._known:
                self._known[key] = self._made(precision, a, b, device_type)
                if len(self._known) > _MOST_PROGRAMS:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    @staticmethod
    def _made(precision: str, a: torch.Tensor, b: torch.Tensor, device_type: str) -> Program | None:
        try:
            program = program_of(precision, a, b, device_type)
            return None if _is_pytorchs(program, a.size(0)) else program
        except IngotError:
            return None


_programs = _Programs()


def _columns_first(matrix: torch.Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    """With strides that a product reads without a copy: expanded tensors and windows are copied."""
    (rows, columns), (down, along) = tensor.shape[-2:], tensor.stride()[-2:]
    dense = (along == 1 and down >= columns) or (down == 1 and along >= rows)
    return tensor if dense else tensor.contiguous()
