"""Calls of cuBLAS as a program makes them, in a process that test_blas.py starts with or without
libingot_blas.so in front. `python blas_calls.py NAME`: prints what NAME found, as JSON."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
from ctypes import c_float, c_int, c_int64, c_longlong, c_void_p

import numpy as np

FP32, HALF = 0, 2
COMPUTE_32F, PEDANTIC, FAST_TF32, FAST_BF16 = 68, 69, 77, 75


class Cublas:
    """What the process finds under cuBLAS's names, with a handle."""

    def __init__(self, name: str = "libcublas.so.13") -> None:
        self.library = ctypes.CDLL(name)
        self.library.fake_calls.restype = ctypes.c_long
        self.library.fake_arguments.restype = ctypes.POINTER(c_int64)
        self.handle = c_void_p()
        self.library.cublasCreate_v2(ctypes.byref(self.handle))

    def calls(self, name: str) -> int:
        return self.library.fake_calls(name.encode())

    def arguments(self, name: str, count: int) -> list:
        return self.library.fake_arguments(name.encode())[:count]

    def call(self, name: str, *arguments) -> int:
        return getattr(self.library, name)(self.handle, *arguments)


class Matrix:
    """Rows × columns in memory with a wider leading dimension, column-major (order 0) or, as its
    transpose, row-major; `entries` of them behind one another."""

    def __init__(
        self, random, rows: int, columns: int, gap: int = 0, order: int = 0, entries: int = 1
    ) -> None:
        self.leading, self.order, self.rows = rows + gap, order, rows
        self.stride = columns * self.leading
        self.storage = random.standard_normal((entries * columns, self.leading), dtype=np.float32)
        self.value = self.entry(0)
        self.pointer = c_void_p(self.storage.ctypes.data)

    def entry(self, number: int) -> np.ndarray:
        columns = self.stride // self.leading
        stored = self.storage[number * columns : (number + 1) * columns, : self.rows]
        return stored.T if self.order == 0 else stored


def operand(random, operation: int, rows: int, columns: int, gap: int) -> Matrix:
    shape = (columns, rows) if operation else (rows, columns)
    return Matrix(random, *shape, gap)


def applied(operation: int, matrix: Matrix) -> np.ndarray:
    value = matrix.value.astype(np.float64)
    return value.T if operation else value


def gemm_arguments(name: str, ta, tb, m, n, k, alpha, a, b, beta, c, compute=COMPUTE_32F):
    integer = c_int64 if name.endswith("_64") else c_int
    plain = "Ex" not in name
    kind = [] if plain else [c_int(FP32)]
    la, lb, lc = (integer(x.leading) for x in (a, b, c))
    found = [ta, tb, integer(m), integer(n), integer(k), ctypes.byref(alpha)]
    found += [a.pointer, *kind, la, b.pointer, *kind, lb, ctypes.byref(beta), c.pointer, *kind, lc]
    return found if plain else [*found, compute, -1]


def products() -> dict:
    """Every transposition, every entry point, several scalars and leading dimensions."""
    blas, random, worst, count = Cublas(), np.random.default_rng(1), 0.0, 0
    names = ("cublasSgemm_v2", "cublasSgemm_v2_64", "cublasGemmEx", "cublasGemmEx_64")
    shapes = ((512, 640, 704), (513, 387, 1101), (384, 1030, 640))
    scalars = ((1.0, 0.0), (1.0, 1.0), (-0.5, 0.75))
    cases = itertools.product(itertools.product((0, 1, 2), (0, 1)), shapes, scalars)
    for (name, gap), ((ta, tb), (m, n, k), (alpha, beta)) in zip(
        itertools.cycle(zip(names, (0, 4, 5, 0))), cases
    ):
        a, b = operand(random, ta, m, k, gap), operand(random, tb, k, n, 2 * gap)
        c = Matrix(random, m, n, 3 * gap)
        if beta == 0:
            c.storage[:] = np.nan  # BLAS does not read it
        kept = c.storage.copy()
        truth = alpha * applied(ta, a) @ applied(tb, b)
        if beta:
            truth += beta * c.value.astype(np.float64)
        given = gemm_arguments(name, ta, tb, m, n, k, c_float(alpha), a, b, c_float(beta), c)
        assert blas.call(name, *given) == 0
        worst = max(worst, float(np.linalg.norm(c.value - truth) / np.linalg.norm(truth)))
        # What lies between the columns is another's.
        assert np.array_equal(c.storage[:, m:], kept[:, m:], equal_nan=True)
        count += 1
    return {"worst": worst, "count": count, "library": sum(blas.calls(name) for name in names)}


def strided_arguments(name, m, n, k, a, sa, b, sb, c, sc, batches, alpha, beta, ex=(), la=0):
    integer = c_int64 if name.endswith("_64") else c_int
    kind = [c_int(FP32)] if ex else []
    pointers = (c_void_p(x.ctypes.data) for x in (a, b, c))
    pa, pb, pc = pointers
    found = [0, 0, integer(m), integer(n), integer(k), ctypes.byref(alpha)]
    found += [pa, *kind, integer(m), c_longlong(sa), pb, *kind, integer(k), c_longlong(sb)]
    found += [ctypes.byref(beta), pc, *kind, integer(m), c_longlong(sc), integer(batches), *ex]
    return found


def batches() -> dict:
    """Strided batches: of large products, and of one weight with many inputs."""
    blas, random, errors = Cublas(), np.random.default_rng(2), []
    one, half = c_float(1.0), c_float(0.5)
    # m, n, k, products, which operand they share, how much further apart C's columns lie
    cases = (
        ("cublasSgemmStridedBatched", 512, 384, 512, 3, "", 0, ()),
        ("cublasSgemmStridedBatched_64", 512, 160, 704, 4, "a", 0, ()),
        ("cublasGemmStridedBatchedEx", 260, 130, 1025, 8, "", 4, (COMPUTE_32F, -1)),
        ("cublasGemmStridedBatchedEx_64", 512, 160, 704, 4, "b", 0, (COMPUTE_32F, -1)),
    )
    launches = []
    for name, m, n, k, count, shared, gap, ex in cases:
        a = random.standard_normal((1 if shared == "a" else count, k, m), dtype=np.float32)
        b = random.standard_normal((1 if shared == "b" else count, n, k), dtype=np.float32)
        wide = random.standard_normal((count, n, m + gap), dtype=np.float32)
        c, kept = wide[:, :, :m], wide.copy()
        truth = b.astype(np.float64) @ a.astype(np.float64) + 0.5 * c.astype(np.float64)
        strides = (0 if shared == "a" else m * k, 0 if shared == "b" else k * n, (m + gap) * n)
        given = strided_arguments(
            name, m, n, k, a, strides[0], b, strides[1], wide, strides[2], count, one, half, ex
        )
        given[-3 - len(ex)].value = m + gap  # the leading dimension of C
        assert blas.call(name, *given) == 0
        errors.append(float(np.linalg.norm(c - truth) / np.linalg.norm(truth)))
        assert np.array_equal(wide[:, :, m:], kept[:, :, m:])
        launches.append(ingot_runs())
    return {
        "worst": max(errors),
        "library": [blas.calls(case[0]) for case in cases],
        "launches": launches,
    }


class Scattered:
    """Matrices at any addresses, in no order, and the array of these."""

    def __init__(self, random, count: int, rows: int, columns: int, gap: int) -> None:
        self.leading, stride = rows + gap, columns * (rows + gap) + 3
        self.storage = random.standard_normal(count * stride, dtype=np.float32)
        starts = [stride * int(place) for place in random.permutation(count)]
        self.lines = [
            self.storage[start : start + columns * self.leading].reshape(columns, self.leading)
            for start in starts
        ]
        self.values = [lines[:, :rows].T for lines in self.lines]
        self.array = np.array([lines.ctypes.data for lines in self.lines], dtype=np.uint64)
        self.pointer = c_void_p(self.array.ctypes.data)

    def operands(self, operation: int) -> list:
        return [(v.T if operation else v).astype(np.float64) for v in self.values]

    def gaps(self) -> np.ndarray:
        """The memory, with what the matrices hold taken out."""
        kept = [v.copy() for v in self.values]
        for value in self.values:
            value[:] = 0
        found = self.storage.copy()
        for value, old in zip(self.values, kept):
            value[:] = old
        return found


def by_pointers(blas: Cublas, name: str, **how) -> dict:
    """A batch by arrays of pointers; its largest error."""
    random, ta, tb = np.random.default_rng(how.get("seed", 9)), how.get("ta", 0), how.get("tb", 0)
    m, n, k, count = how.get("shape", (768, 704, 832, 8))
    a = Scattered(random, count, *((k, m) if ta else (m, k)), how.get("gap", 0))
    b = Scattered(random, count, *((n, k) if tb else (k, n)), 2 * how.get("gap", 0))
    c = Scattered(random, count, m, n, 3 * how.get("gap", 0))
    alpha, beta = how.get("scalars", (1.0, 0.0))
    if beta == 0:
        for value in c.values:
            value[:] = np.nan
    if alpha == 0:
        a.values[0][0, 0] = np.nan
    truth = [beta * v.astype(np.float64) if beta else np.zeros((m, n)) for v in c.values]
    if alpha:
        pairs = zip(a.operands(ta), b.operands(tb))
        truth = [t + alpha * x @ y for t, (x, y) in zip(truth, pairs)]
    if how.get("inf"):
        a.values[1][0, 0] = np.inf
    integer, ex = c_int64 if name.endswith("_64") else c_int, "Ex" in name
    kind = [c_int(FP32)] if ex else []
    scale, add = c_float(alpha), c_float(beta)
    blas.library.cublasSetPointerMode_v2(blas.handle, how.get("mode", 0))
    given = [ta, tb, integer(m), integer(n), integer(k), ctypes.byref(scale)]
    given += [a.pointer, *kind, integer(a.leading), b.pointer, *kind, integer(b.leading)]
    given += [ctypes.byref(add), c.pointer, *kind, integer(c.leading), integer(count)]
    gaps, before = c.gaps(), blas.calls(name)
    kept = c.storage.copy()
    assert blas.call(name, *given, *((COMPUTE_32F, -1) if ex else ())) == 0
    assert np.array_equal(c.gaps(), gaps)
    if blas.calls(name) != before:  # the fake computes none of these
        assert np.array_equal(c.storage, kept, equal_nan=True)
        return {"library": 1}
    if how.get("inf"):
        found = np.isfinite(np.stack(c.values))
        assert not found[1, 0].any() and found[1, 1:].all() and found[[0, 2]].all()
        return {"library": 0, "error": 0.0}
    found, truth = np.stack(c.values), np.stack(truth)
    error = np.linalg.norm(found - truth) / max(np.linalg.norm(truth), 1e-30)
    return {"library": 0, "error": float(error)}


POINTERS = ("cublasSgemmBatched", "cublasSgemmBatched_64")
POINTERS += ("cublasGemmBatchedEx", "cublasGemmBatchedEx_64")


def pointers() -> dict:
    """Batches by pointers: every entry point, transpositions, scalars, leading dimensions."""
    blas, names = Cublas(), itertools.cycle(POINTERS)
    scalars = ((1.0, 0.0), (-0.5, 0.75), (1.0, 1.0))
    cases = [
        {"ta": ta, "tb": tb, "scalars": pair, "gap": gap}
        for (ta, tb, gap), pair in zip(((0, 0, 0), (1, 0, 1), (0, 1, 4), (2, 2, 3)), 2 * scalars)
    ]
    for pair in ((0.5, 0.0), (2.0, -1.0), (0.0, 0.5), (0.0, 0.0)):
        cases.append({"scalars": pair, "mode": 1})
    cases += [{"shape": (1027, 1025, 1030, 3), "gap": 1}, {"inf": True}]
    found = [by_pointers(blas, name, **case) for name, case in zip(names, cases)]
    library = [by_pointers(blas, next(names), **case) for case in POINTERS_LEFT]
    blas.library.cublasSetMathMode(blas.handle, 3)
    library.append(by_pointers(blas, "cublasSgemmBatched"))  # TF32
    return {"taken": found, "left": library}


# Too small; alpha zero on the host.
POINTERS_LEFT = ({"shape": (256, 256, 256, 64)}, {"scalars": (0.0, 0.5)})


def pointers_fail() -> dict:
    """Of a batch by pointers that fails nothing is done."""
    blas = Cublas()
    return {"found": [by_pointers(blas, name) for name in POINTERS[:2]]}


def pointers_captured() -> dict:
    blas, driver = Cublas(), fake_driver()
    stream = c_void_p(256)
    blas.library.cublasSetStream_v2(blas.handle, stream)
    found = []
    for captured in (True, False, True):
        graph = c_void_p(driver.fake_begin_capture(stream, None)) if captured else None
        found.append(by_pointers(blas, "cublasSgemmBatched"))
        if graph:
            driver.fake_end_capture()
    return {"found": found}


def ingot_runs() -> int:
    return fake_ingot().fake_runs()


def fake_ingot() -> ctypes.CDLL:
    """That of this process, which libingot_blas.so opened."""
    library = ctypes.CDLL(os.environ["INGOT_LIBRARY"])
    library.fake_runs.restype = ctypes.c_long
    library.fake_workspace.restype = c_void_p
    return library


def fake_driver() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
    library.fake_begin_capture.restype = c_void_p
    library.fake_freed.restype = ctypes.c_long
    return library


def second_fails() -> dict:
    """The second product of a batch cannot be launched: the library does it, and none twice. The
    results lie apart, so that each has a launch."""
    blas, random, name = Cublas(), np.random.default_rng(3), "cublasSgemmStridedBatched"
    m = n = k = 1024
    a, b = (random.standard_normal((3, m, m), dtype=np.float32) for _ in range(2))
    apart = random.standard_normal((3, m + 1, m), dtype=np.float32)
    c = apart[:, :m]
    truth = b.astype(np.float64) @ a.astype(np.float64) + 0.5 * c.astype(np.float64)
    one, half = c_float(1.0), c_float(0.5)
    given = strided_arguments(name, m, n, k, a, m * k, b, k * n, c, m * (n + 1), 3, one, half)
    assert blas.call(name, *given) == 0
    error = float(np.linalg.norm(c - truth) / np.linalg.norm(truth))
    return {"worst": error, "batches": blas.arguments(name, 18)[17], "calls": blas.calls(name)}


def number(value) -> int:
    """An argument as the fake keeps it."""
    if isinstance(value, int):
        return value
    if hasattr(value, "_obj"):  # byref
        return ctypes.addressof(value._obj)
    return value.value or 0


def handed_on() -> dict:
    """Calls that must reach the library with every argument as it was, and with its answer."""
    blas, random = Cublas(), np.random.default_rng(4)
    m, n, k = 300, 280, 2600
    a, b, c = Matrix(random, m, k), Matrix(random, k, n), Matrix(random, m, n)
    one, zero = c_float(1.0), c_float(0.0)
    wrong = []

    def check(what: str, name: str, given: list, status: int = 0) -> None:
        before = blas.calls(name)
        answer = blas.call(name, *given)
        expected = [blas.handle.value or 0, *map(number, given)]
        kept = blas.arguments(name, len(expected))
        if (answer, blas.calls(name), kept) != (status, before + 1, expected):
            wrong.append([what, name, answer, kept, expected])

    def gemm(name, scale=one, add=zero, ta=0, tb=0, shape=(m, n, k), **more):
        return gemm_arguments(name, ta, tb, *shape, scale, a, b, add, c, **more)

    library, handle = blas.library, blas.handle
    for suffix in ("", "_64"):
        plain, general = "cublasSgemm_v2" + suffix, "cublasGemmEx" + suffix
        for mode in (1, 2, 4):
            library.cublasSetMathMode(handle, mode)
            check(f"math mode {mode}", plain, gemm(plain))
            check(f"math mode {mode}", general, gemm(general))
        library.cublasSetMathMode(handle, 0)
        library.cublasSetStream_v2(handle, c_void_p(0xBAD))
        check("a stream of another context", plain, gemm(plain))
        library.cublasSetStream_v2(handle, None)
        check("alpha zero", plain, gemm(plain, scale=zero))
        check("alpha NaN", plain, gemm(plain, scale=c_float(float("nan"))))
        check("small", plain, gemm(plain, shape=(64, 64, 64)))
        check("empty", plain, gemm(plain, shape=(0, n, k)))
        check("negative", plain, gemm(plain, shape=(-3, n, k)), status=7)
        for compute in (PEDANTIC, FAST_BF16, 64, 78):
            check(f"compute {compute}", general, gemm(general, compute=compute))
        for position in (7, 10, 14):
            given = gemm(general)
            given[position] = c_int(HALF)
            check(f"type at {position}", general, given)
        strided, several = (
            "cublasSgemmStridedBatched" + suffix,
            "cublasGemmStridedBatchedEx" + suffix,
        )
        arrays = (a.storage, m * 4, b.storage, 8, c.storage, 16)
        given = strided_arguments(strided, 16, 16, 16, *arrays, 2, one, zero)
        check("small batch", strided, given)
        given = strided_arguments(several, 16, 16, 16, *arrays, 2, one, zero, (COMPUTE_32F, -1))
        check("small batch", several, given)
        given[7] = c_int(HALF)
        check("half batch", several, given)
        check("half batch", several, given)
        integer = c_int64 if suffix else c_int
        lists = [c_void_p(4096), c_void_p(8192), c_void_p(12288)]
        given = [0, 1, integer(300), integer(300), integer(300), ctypes.byref(one)]
        given += [lists[0], integer(300), lists[1], integer(300), ctypes.byref(zero)]
        check(
            "pointers", "cublasSgemmBatched" + suffix, [*given, lists[2], integer(300), integer(9)]
        )
        given = [1, 0, integer(300), integer(300), integer(300), ctypes.byref(one), lists[0], FP32]
        given += [integer(300), lists[1], FP32, integer(300), ctypes.byref(zero), lists[2], FP32]
        given += [integer(300), integer(9), COMPUTE_32F, -1]
        check("pointers", "cublasGemmBatchedEx" + suffix, given)
    blas.handle = c_void_p()
    check("no handle", "cublasSgemm_v2", gemm("cublasSgemm_v2"), status=1)
    return {"wrong": wrong}


def one_product(blas: Cublas | None = None, m: int = 512, n: int = 512, k: int = 896) -> dict:
    blas, random = blas or Cublas(), np.random.default_rng(5)
    a, b, c = Matrix(random, k, m), Matrix(random, k, n), Matrix(random, m, n)
    truth = applied(1, a) @ applied(0, b)
    one, zero = c_float(1.0), c_float(0.0)
    given = gemm_arguments("cublasSgemm_v2", 1, 0, m, n, k, one, a, b, zero, c)
    assert blas.call("cublasSgemm_v2", *given) == 0
    error = float(np.linalg.norm(c.value - truth) / np.linalg.norm(truth))
    return {"worst": error, "library": blas.calls("cublasSgemm_v2")}


def two_copies() -> dict:
    """Handles of one copy mean nothing to the other: the second is left alone."""
    found = [one_product(Cublas(f"libcublas.so.{version}")) for version in (12, 13, 12)]
    return {"library": [case["library"] for case in found], "worst": found[1]["worst"]}


def ingots_own() -> dict:
    """What the program and what libingot.so find under one name."""
    library = ctypes.CDLL("libcublasLt.so.13")
    found = ctypes.cast(library.cublasLtMatmul, c_void_p)
    ingot = ctypes.CDLL(os.environ["INGOT_LIBRARY"])
    return {"same": ingot.fake_finds(c_void_p(library._handle), found)}


def repeated() -> dict:
    """Whoever was refused memory goes on being served, by the library."""
    blas = Cublas()
    return {
        "worst": max(one_product(blas)["worst"] for _ in range(3)),
        "library": blas.calls("cublasSgemm_v2"),
    }


def device_scalars() -> dict:
    """alpha and beta where the device has them, zeros among them; and more of them than kernels are
    made for, on the host."""
    blas, random, worst = Cublas(), np.random.default_rng(7), 0.0
    m, n, k = 512, 384, 1216
    a, b = Matrix(random, m, k), Matrix(random, k, n)
    product = applied(0, a) @ applied(0, b)
    several = [(1.0, 0.0), (0.5, -2.0), (0.0, 0.75), (0.0, 0.0), (float("inf"), 1.0)]
    cases = [(1, pair) for pair in several]
    cases += [(0, (1 + i / 64, beta)) for i in range(20) for beta in (0.0, 0.5)]
    for mode, (alpha, beta) in cases:
        c = Matrix(random, m, n)
        if beta == 0:
            c.storage[:] = np.nan
        truth = alpha * product if alpha else 0 * product
        truth = truth + beta * c.value.astype(np.float64) if beta else truth
        blas.library.cublasSetPointerMode_v2(blas.handle, mode)
        given = gemm_arguments(
            "cublasSgemm_v2", 0, 0, m, n, k, c_float(alpha), a, b, c_float(beta), c
        )
        assert blas.call("cublasSgemm_v2", *given) == 0
        if np.isinf(alpha):
            assert np.array_equal(c.value, truth)
        else:
            worst = max(worst, float(np.linalg.norm(c.value - truth)))
    return {"worst": worst / float(np.linalg.norm(product)), "count": len(cases),
            "library": blas.calls("cublasSgemm_v2")}  # fmt: skip


def captures() -> dict:
    """Where products work whose streams are captured: `place` numbers the workspaces."""
    blas, driver, found = Cublas(), fake_driver(), {}
    places: list = []
    first, second = c_void_p(256), c_void_p(512)

    def place(stream, size: int = 512) -> int:
        blas.library.cublasSetStream_v2(blas.handle, stream)
        before = ingot_runs()
        assert one_product(blas, n=size)["worst"] < 1e-6
        if ingot_runs() == before:
            return -1
        where = fake_ingot().fake_workspace()
        if where not in places:
            places.append(where)
        return places.index(where)

    def captured(*products) -> tuple:
        graph = c_void_p(driver.fake_begin_capture(first, second))
        answer = [place(*product) for product in products]
        driver.fake_end_capture()
        return graph, answer

    new, found["new"] = captured((first,))
    found["eager"] = [place(first), place(first, 2048), place(second)]
    one, found["one"] = captured((first,), (first,), (second,), (first,))
    two, found["two"] = captured((first,), (first, 2048), (first,))
    found["eager again"] = [place(first), place(second)]
    driver.fake_destroy_graph(one)
    three, found["three"] = captured((first,), (second,))
    driver.fake_destroy_graph(two)
    driver.fake_destroy_graph(three)
    driver.fake_destroy_graph(new)
    found["four"] = captured((first, 2048))[1]
    found["library"] = blas.calls("cublasSgemm_v2")
    return found


def fills_up() -> dict:
    """The program comes to need the card that had room before."""
    blas, driver, name = Cublas(), fake_driver(), "cublasSgemm_v2"
    random, taken = np.random.default_rng(8), []
    a, b, c = (Matrix(random, 1024, 1024) for _ in range(3))
    given = gemm_arguments(name, 0, 0, 1024, 1024, 1024, c_float(1.0), a, b, c_float(0.0), c)

    def some(count: int) -> None:
        before = blas.calls(name)
        for _ in range(count):
            assert blas.call(name, *given) == 0
        taken.append(count - (blas.calls(name) - before))

    some(300)
    driver.fake_fill(95)
    before = driver.fake_freed()
    some(100)  # what is held may stay: 5 % are left
    driver.fake_fill(98)
    some(250)
    freed = driver.fake_freed() - before
    driver.fake_fill(0)
    some(1100)
    return {"taken": taken, "freed": freed}


def tf32() -> dict:
    blas = Cublas()
    blas.library.cublasSetMathMode(blas.handle, 3)
    return one_product(blas, 2048, 2048, 2048)  # smaller ones are the library's


def lt_layout(library, matrix: Matrix, kind: int, batches: int, stride: int) -> c_void_p:
    layout, rows, columns = c_void_p(), *matrix.value.shape
    extents = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), c_int64(matrix.leading))
    library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), c_int(kind), *extents)
    for which, value in ((1, c_int(matrix.order)), (5, c_int(batches)), (6, c_int64(stride))):
        size = c_int64(ctypes.sizeof(value))
        library.cublasLtMatrixLayoutSetAttribute(layout, which, ctypes.byref(value), size)
    return layout


def gelu(value: np.ndarray) -> np.ndarray:
    return 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)))


def matmul(**change) -> dict:
    """cublasLtMatmul with attributes changed; its error, and how often the library was called."""
    library, random = ctypes.CDLL("libcublasLt.so.13"), np.random.default_rng(6)
    library.fake_calls.restype = ctypes.c_long
    m, n, k = 512, 384, 1216
    batches, epilogue = change.get("batches", 1), change.get("epilogue", 1)
    orders = change.get("orders", (change.get("order", 0),) * 4)
    # Of a batch, memory that is a matrix with the products behind one another.
    a, b, c, d = (
        Matrix(random, *(shape if order == 0 else shape[::-1]), gap, order, batches)
        for shape, gap, order in zip(
            ((k, m), (k, n), (m, n), (m, n)), (0, 4, change.get("gap", 0), 0), orders
        )
    )
    if change.get("in_place", True):
        d = c
    if change.get("nan"):  # of what is not added
        c.storage[:] = np.nan
    own = change.get("bias_stride", 0)
    bias = random.standard_normal(m + own * (batches - 1), dtype=np.float32)
    how = c_void_p()
    library.cublasLtMatmulDescCreate(ctypes.byref(how), change.get("compute", COMPUTE_32F), FP32)

    def describe(which: int, value) -> None:
        library.cublasLtMatmulDescSetAttribute(
            how, which, ctypes.byref(value), ctypes.sizeof(value)
        )

    describe(3, c_int(1))
    describe(7, c_int(epilogue))
    describe(8, c_void_p(bias.ctypes.data))
    describe(10, c_int64(own))
    describe(2, c_int(change.get("pointer_mode", 0)))
    kind = change.get("type", FP32)
    layouts = [lt_layout(library, each, kind, batches, each.stride) for each in (a, b, c, d)]
    alpha, beta = c_float(1.0), c_float(change.get("beta", 0.0))
    truth = []
    for number in range(batches):
        left, right, added = (each.entry(number).astype(np.float64) for each in (a, b, c))
        value = left.T @ right
        if beta.value:
            value = value + beta.value * added
        if epilogue & 4:
            value = value + bias[number * own : number * own + m, None]
        value = np.maximum(value, 0) if epilogue & 2 else value
        truth.append(gelu(value) if epilogue & 32 else value)
    kept = c.storage.copy()
    given = [c_void_p(1), how, ctypes.byref(alpha), a.pointer, layouts[0], b.pointer, layouts[1]]
    given += [ctypes.byref(beta), c.pointer, layouts[2], d.pointer, layouts[3]]
    given += [None, None, ctypes.c_size_t(0), None]
    assert library.cublasLtMatmul(*given) == 0
    assert d is c or np.array_equal(c.storage, kept, equal_nan=True)
    found = np.stack([d.entry(number) for number in range(batches)])
    error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    return {"error": error, "library": library.fake_calls(b"cublasLtMatmul")}


def lt() -> dict:
    taken = ({}, {"beta": 0.5}, {"epilogue": 4}, {"epilogue": 2}, {"epilogue": 6, "beta": 1.0})
    taken += ({"pointer_mode": 1}, {"pointer_mode": 1, "beta": -1.5})
    taken += ({"epilogue": 32}, {"epilogue": 36, "beta": 0.5})
    # By rows: all of them, or some.
    taken += ({"order": 1}, {"order": 1, "beta": 0.5, "epilogue": 2}, {"orders": (1, 0, 0, 0)})
    taken += ({"orders": (0, 1, 1, 1), "beta": 1.0}, {"orders": (1, 1, 0, 0), "epilogue": 36})
    apart = {"beta": 0.75, "in_place": False, "gap": 5}
    taken += (apart, {**apart, "epilogue": 36}, {**apart, "order": 1}, {**apart, "pointer_mode": 1})
    # Beta is zero on the device, where nobody has looked.
    taken += ({"pointer_mode": 1, "nan": 1}, {**apart, "beta": 0.0, "pointer_mode": 1, "nan": 1})
    batch = {"batches": 3, "epilogue": 36}
    taken += (batch, {**batch, "bias_stride": 512}, {**batch, "bias_stride": 520, **apart})
    errors = [matmul(**change) for change in taken]
    left = (
        {"epilogue": 164},
        {"compute": PEDANTIC},
        {"type": HALF},
        {"order": 2},
        {"order": 1, "epilogue": 4},  # its bias is of a row
        {**apart, "orders": (0, 0, 1, 0)},
    )
    library = [matmul(**change)["library"] for change in left]
    return {"taken": errors, "left": library}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
