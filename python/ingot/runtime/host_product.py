"""Lends PyTorch's own matrix product on the CPU to libingot.

fp32 and fp64 go straight to the BLAS inside PyTorch (`sgemm`, found by its symbol), which is what
`torch.nn.functional.linear` itself calls and costs no Python; every other dtype, and builds of
PyTorch that export no BLAS, go through `torch.mm(out=)`, some 5 µs a call.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

ARGUMENTS = (
    *(ctypes.c_int64,) * 3,
    *(ctypes.c_void_p, ctypes.c_int64) * 2,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_void_p,
)
PRODUCT = ctypes.CFUNCTYPE(ctypes.c_int, *ARGUMENTS)


class Blas(ctypes.Structure):
    """ingot_blas."""

    _fields_ = (
        ("sgemm", ctypes.c_void_p),
        ("dgemm", ctypes.c_void_p),
        ("integer_bytes", ctypes.c_int32),
        ("other", ctypes.c_void_p),
        ("other_context", ctypes.c_void_p),
    )


def find_blas() -> Blas | None:
    """The Fortran BLAS that PyTorch's library exports, with 64-bit integers where it has them."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        handle = ctypes.CDLL(str(library))
    except OSError:
        return None
    for suffix, integer_bytes in (("_64_", 8), ("_", 4)):
        symbols = [getattr(handle, f"{kind}gemm{suffix}", None) for kind in "sd"]
        if all(symbols):
            addresses = [ctypes.cast(symbol, ctypes.c_void_p).value for symbol in symbols]
            return Blas(*addresses, integer_bytes, None, None)
    return None


@functools.lru_cache(maxsize=256)
def _matrix(address: int, rows: int, columns: int, stride: int, dtype, transposed: bool = False):
    """A tensor over `rows` × `columns` elements at `address`, rows `stride` elements apart. It owns
    nothing, so it can serve every call with the same operand: making three takes 6 µs."""
    import torch

    elements = (rows - 1) * stride + columns
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    found = torch.frombuffer(memory, dtype=dtype, count=elements)
    found = found.as_strided((rows, columns), (stride, 1))
    return found.t() if transposed else found


def torch_product(m, n, k, a, lda, b, ldb, transpose_b, c, ldc, row, dtype, _context) -> int:
    """c = a·b, plus a row, by torch.mm(out=) or torch.addmm(out=): an ingot_product_fn. 0 on
    success."""
    try:
        import torch

        dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        if min(m, n, k) < 1 or not 0 <= dtype < len(dtypes):
            return 1
        kind = dtypes[dtype]
        with torch.inference_mode():
            left = _matrix(a, m, k, lda, kind)
            size = (n, k) if transpose_b else (k, n)
            right = _matrix(b, *size, ldb, kind, transpose_b != 0)
            result = _matrix(c, m, n, ldc, kind)
            if row:
                torch.addmm(_matrix(row, 1, n, n, kind), left, right, out=result)
            else:
                torch.mm(left, right, out=result)
        return 0
    except Exception:  # an exception cannot cross into C: the library's own product takes over
        return 1


_keep_alive: tuple = ()


def register(library) -> str:
    """Registers PyTorch's product with a loaded libingot and returns the name that it goes by."""
    global _keep_alive
    callback = PRODUCT(torch_product)
    blas = find_blas()
    if blas is None:
        name, function, context = "PyTorch (torch.mm)", callback, None
    else:
        blas.other = ctypes.cast(callback, ctypes.c_void_p)
        name, function, context = (
            "PyTorch (its BLAS)",
            library.ingot_blas_product,
            ctypes.addressof(blas),
        )
    # Programs under way may still use what was registered before: nothing is ever let go.
    _keep_alive = (*_keep_alive, callback, blas)
    library.check(
        library.ingot_set_host_product(
            name.encode(), ctypes.cast(function, ctypes.c_void_p), context
        )
    )
    return name
