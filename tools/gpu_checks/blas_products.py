"""The products that check_blas.py asks for: PyTorch's, and cublasLt's that PyTorch has no name for.

A shape is (m, n, k, batches, how): y [m, n] = x [m, k] · w. `how` says how x and w are stored, "n"
as they are, "t" transposed, or "own" for xᵀx; behind that where: "off 4" (bytes that they begin
behind a multiple of 16), "wide" (rows one element wider). "lt FORM" is a call of cublasLtMatmul on
w stored along k, with the epilogue, order or operand of that name. "array nt" is a batch by arrays
of pointers, "array nt added" one that is added to half of what was there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

COMPUTE_32F, R_32F = 68, 0
# Attributes of cublasLt.h.
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS, BIAS_STRIDE = 3, 4, 7, 8, 10
ORDER, BATCHES, STRIDE = 1, 5, 6
GELU, GELU_BIAS = 32, 36
BETA = 0.5


class NotSupportedError(Exception):
    """What the library itself does not multiply."""


def stored(rows: int, columns: int, batches: int, transposed: bool, device: str, where: str = ""):
    """Random values."""
    import torch

    size = (columns, rows) if transposed else (rows, columns)
    skipped = int(where.removeprefix("off ")) // 4 if where.startswith("off") else 0
    leading = size[1] + (where == "wide")
    memory = torch.randn(batches * size[0] * leading + skipped, device=device)[skipped:]
    made = memory.view(batches, size[0], leading)[:, :, : size[1]]
    made = made if batches > 1 else made[0]
    return made.transpose(-1, -2) if transposed else made


def operands(shape: tuple, device: str) -> tuple:
    import torch

    m, n, k, batches, how = shape
    torch.manual_seed(1)
    if how == "own":  # xᵀx
        x = stored(k, m, 1, False, device)
        return x.t(), x
    if how.startswith("lt"):
        how = "nt"
    how = how.removeprefix("array ").removesuffix(" added")
    where = how[3:]
    x = stored(m, k, batches, how[0] == "t", device, where)
    return x, stored(k, n, batches, how[1] == "t", device, where)


def product(shape: tuple, device: str) -> tuple[Callable, Callable]:
    """What multiplies into one result and returns it, and what says the truth of some of its rows,
    in fp64."""
    import torch

    x, w = operands(shape, device)
    if shape[4].startswith("lt"):
        library = ctypes.CDLL(library_path()) if device == "cuda" else None
        return lt_product(shape[4][3:], x, w, library)
    if shape[4].startswith("array"):
        library = ctypes.CDLL(library_path("libcublas.so")) if device == "cuda" else None
        return array_product(x, w, shape[4].endswith("added"), library)
    out = x @ w
    return (
        lambda: torch.matmul(x, w, out=out),
        lambda rows: x[..., rows, :].double() @ w.double(),
    )


# cublasLt ----------------------------------------------------------------------------------------


def library_path(name: str = "libcublasLt.so") -> str:
    """Of the one that PyTorch has loaded; whoever stands before it is asked first."""
    import torch  # noqa: F401

    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if name in line}
    return min(paths, default="")


class Matmul:
    """A descriptor with its layouts: D = epilogue(A · B + beta · C)."""

    def __init__(self, library: ctypes.CDLL, by_rows: bool) -> None:
        self.library, self.by_rows = library, by_rows
        self.handle, self.how, self.kept = c_void_p(), c_void_p(), []
        self._ask("cublasLtCreate", byref(self.handle))
        self._ask("cublasLtMatmulDescCreate", byref(self.how), c_int(COMPUTE_32F), c_int(R_32F))

    def _ask(self, name: str, *arguments) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise NotSupportedError(f"{name}: status {status}")

    def describe(self, which: int, value) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._ask("cublasLtMatmulDescSetAttribute", self.how, c_int(which), byref(value), size)

    def layout(self, tensor) -> c_void_p:
        """Of a tensor by rows, which by columns is its transpose."""
        *batches, rows, columns = tensor.shape
        extents = (rows, columns) if self.by_rows else (columns, rows)
        made, leading = c_void_p(), c_int64(tensor.stride(-2))
        arguments = (c_int(R_32F), *map(c_uint64, extents), leading)
        self._ask("cublasLtMatrixLayoutCreate", byref(made), *arguments)
        attributes = [(ORDER, c_int32(int(self.by_rows)))]
        if batches:
            attributes += [(BATCHES, c_int32(batches[0])), (STRIDE, c_int64(tensor.stride(0)))]
        for which, value in attributes:
            size = c_size_t(ctypes.sizeof(value))
            self._ask("cublasLtMatrixLayoutSetAttribute", made, c_int(which), byref(value), size)
        return made

    def bind(self, a, b, c, d, beta: float) -> Callable:
        import torch

        self.kept += [a, b, c, d]
        layouts = [self.layout(each) for each in (a, b, c, d)]
        at = [c_void_p(each.data_ptr()) for each in (a, b, c, d)]
        one, two = c_float(1.0), c_float(beta)

        def call():
            stream = c_void_p(torch.cuda.current_stream().cuda_stream if d.is_cuda else None)
            pairs = [part for pair in zip(at, layouts) for part in pair]
            given = [self.handle, self.how, byref(one), *pairs[:4], byref(two), *pairs[4:]]
            self._ask("cublasLtMatmul", *given, None, None, c_size_t(0), stream)
            return d

        return call


def lt_product(form: str, x, w, library: ctypes.CDLL | None) -> tuple[Callable, Callable]:
    """w as PyTorch's linear has it, transposed: its memory is [n, k]. PyTorch stands for a library
    that is not there."""
    import torch

    weight, batches = w.transpose(-1, -2), x.shape[:-2]
    m, n = x.shape[-2], w.shape[-1]
    out = x.new_empty(*batches, m, n)
    added = torch.randn_like(out) if form == "apart" else out
    bias = torch.randn_like(out[..., 0, :]) if "bias" in form else None
    beta = BETA if form == "apart" else 0.0

    def finished(value, rows):
        if beta:
            value = value + beta * added[..., rows, :].double()
        if bias is not None:
            value = value + bias.double()[..., None, :]
        return torch.nn.functional.gelu(value, approximate="tanh") if "gelu" in form else value

    def truth(rows):
        return finished(x[..., rows, :].double() @ w.double(), rows)

    if library is None:
        return (lambda: out.copy_(truth(slice(None)))), truth
    matmul = Matmul(library, by_rows=form == "rows")
    # By columns the result is its transpose: w's rows times x's.
    matmul.describe(TRANSPOSE_B if matmul.by_rows else TRANSPOSE_A, c_int32(1))
    if "gelu" in form:
        matmul.describe(EPILOGUE, c_uint32(GELU if bias is None else GELU_BIAS))
    if bias is not None:
        matmul.kept.append(bias)
        matmul.describe(BIAS, c_void_p(bias.data_ptr()))
        if batches:
            matmul.describe(BIAS_STRIDE, c_int64(n))
    first, second = (x, weight) if matmul.by_rows else (weight, x)
    return matmul.bind(first, second, added, out, beta), truth


# scalars on the device ---------------------------------------------------------------------------


def product_with_device_scalars(x, w, y, alpha: float, beta: float, graph: bool):
    """alpha · x · w + beta · y by cublasSgemm that reads both scalars where the GPU has them; in a
    CUDA graph that is captured before they have their values."""
    import torch

    library, handle = ctypes.CDLL(library_path("libcublas.so")), c_void_p()
    scalars = torch.tensor([7.0, 7.0] if graph else [alpha, beta], device=x.device)
    one, two = (c_void_p(scalars[i].data_ptr()) for i in range(2))
    (m, k), n, out = x.shape, w.shape[-1], y.clone()
    at_device = c_int(1)
    if library.cublasCreate_v2(byref(handle)) or library.cublasSetPointerMode_v2(handle, at_device):
        raise NotSupportedError("cublasCreate")

    def call():
        library.cublasSetStream_v2(handle, c_void_p(torch.cuda.current_stream().cuda_stream))
        at = [c_void_p(each.data_ptr()) for each in (w, x, out)]
        given = [handle, *map(c_int, (0, 0, n, m, k)), one, at[0], c_int(n), at[1], c_int(k), two]
        if library.cublasSgemm_v2(*given, at[2], c_int(n)) != 0:
            raise NotSupportedError("cublasSgemm")

    if graph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        side.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            call()
        out.copy_(y)
        scalars.copy_(torch.tensor([alpha, beta]))
        captured.replay()
    else:
        call()
    torch.cuda.synchronize()
    library.cublasDestroy_v2(handle)
    return out


# batches by pointers -----------------------------------------------------------------------------


def array_product(x, w, adds: bool, library: ctypes.CDLL | None) -> tuple[Callable, Callable]:
    """y = x · w (+ y / 2 once) by cublasSgemmBatched, for matrices in no order."""
    import torch

    batches, m, k = x.shape
    n, beta = w.shape[-1], BETA if adds else 0.0
    out = x.new_empty(batches, m, n).normal_() if adds else x.new_full((batches, m, n), torch.nan)
    kept = out.clone()

    def truth(rows):
        product = x[:, rows].double() @ w.double()
        return product + beta * kept[:, rows].double() if adds else product

    if library is None:
        return (lambda: out.copy_(truth(slice(None)))), truth
    order = torch.randperm(batches).tolist()
    arrays = [
        torch.tensor([each[i].data_ptr() for i in order], dtype=torch.int64, device=out.device)
        for each in (w, x, out)
    ]
    # By columns the result is its transpose: w's times x's.
    turned = [int(each.stride(-1) != 1) for each in (w, x)]
    leading = [each.stride(-1) if turn else each.stride(-2) for each, turn in zip((w, x), turned)]
    handle, one, two = c_void_p(), c_float(1.0), c_float(beta)
    if library.cublasCreate_v2(byref(handle)) != 0:
        raise NotSupportedError("cublasCreate")

    def call():
        library.cublasSetStream_v2(handle, c_void_p(torch.cuda.current_stream().cuda_stream))
        at = [c_void_p(each.data_ptr()) for each in arrays]
        given = [handle, *map(c_int, (*turned, n, m, k)), byref(one)]
        given += [at[0], c_int(leading[0]), at[1], c_int(leading[1]), byref(two), at[2], c_int(n)]
        if library.cublasSgemmBatched(*given, c_int(batches)) != 0:
            raise NotSupportedError("cublasSgemmBatched")
        return out

    return call, truth
