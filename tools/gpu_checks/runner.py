"""Runs graphs through libingot on a GPU (ctypes and PyTorch tensors), and in fp64 on the host."""

from __future__ import annotations

import ctypes
import json

import torch

DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16}
DTYPES |= {"bf16": torch.bfloat16, "i64": torch.int64, "bool": torch.bool}
CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
CODES |= {torch.int64: 4, torch.bool: 5}
LEAVES = ("input", "parameter", "buffer")


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
    )


def describe(tensors: list[torch.Tensor]):
    array = (Tensor * len(tensors))()
    for entry, t in zip(array, tensors, strict=True):
        entry.data = t.data_ptr()
        entry.sizes[:] = t.shape
        entry.strides[:] = t.stride()
        entry.dtype = CODES[t.dtype]
        entry.device = t.device.index if t.is_cuda else -1
    return array


def graph_text(graph: dict) -> bytes:
    return json.dumps({k: v for k, v in graph.items() if k != "result_shapes"}).encode()


class Library:
    def __init__(self, path: str):
        self.lib = ctypes.CDLL(path)
        self.lib.ingot_last_error.restype = ctypes.c_char_p

    def call(self, function: str, *arguments):
        if getattr(self.lib, function)(*arguments) != 0:
            raise RuntimeError(f"{function}: {self.lib.ingot_last_error().decode()}")

    def program(self, graph: dict, **options) -> Program:
        return Program(self, graph, {"device": "cuda", **options})


class Program:
    def __init__(self, library: Library, graph: dict, options: dict):
        self.library, self.graph = library, graph
        self.handle = ctypes.c_void_p()
        library.call(
            "ingot_program_create",
            graph_text(graph),
            json.dumps(options).encode(),
            ctypes.byref(self.handle),
        )

    def __del__(self):
        if self.handle:
            self.library.lib.ingot_program_destroy(self.handle)

    def explain(self, batch: int) -> dict:
        text = ctypes.c_char_p()
        self.library.call(
            "ingot_program_explain", self.handle, ctypes.c_int64(batch), ctypes.byref(text)
        )
        return json.loads(text.value)

    def prepare(self, batch: int, device: int = 0) -> None:
        self.library.call("ingot_program_prepare", self.handle, ctypes.c_int64(batch), device)

    def workspace(self, batch: int, device="cuda") -> torch.Tensor:
        size = ctypes.c_size_t()
        self.library.call(
            "ingot_program_workspace_size", self.handle, ctypes.c_int64(batch), ctypes.byref(size)
        )
        memory = torch.full((size.value + 256,), 0xFF, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % 256
        return memory[start : start + size.value]

    def bound(self, batch: int, leaves, results, workspace):
        """A call with everything described beforehand: what it costs is the library's own."""
        tensors = describe([*leaves, *results])
        arguments = (
            self.handle,
            ctypes.c_int64(batch),
            tensors,
            len(tensors),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(workspace.numel()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        function = self.library.lib.ingot_program_run
        return lambda: function(*arguments)

    def run(self, batch: int, leaves, results, workspace, stream=None) -> None:
        tensors = describe([*leaves, *results])
        if workspace.is_cuda:
            stream = (stream or torch.cuda.current_stream()).cuda_stream
        self.library.call(
            "ingot_program_run",
            self.handle,
            ctypes.c_int64(batch),
            tensors,
            len(tensors),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(workspace.numel()),
            ctypes.c_void_p(stream),
        )


def make_leaves(graph: dict, batch: int, seed: int, device="cuda") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    leaves = []
    for value in graph["values"]:
        if value["op"] not in LEAVES:
            continue
        shape = [batch if extent == "B" else extent for extent in value["shape"]]
        dtype = DTYPES[value["dtype"]]
        if dtype == torch.int64:
            t = torch.randint(0, 7, shape, generator=generator)
        else:
            t = torch.rand(shape, generator=generator)
            if "weight" in value["name"]:
                t = (t - 0.5) / shape[3] ** 0.5
        leaves.append(t.to(dtype).to(device))
    return leaves


def empty_results(graph: dict, batch: int, device="cuda") -> list[torch.Tensor]:
    """Poisoned: an element that is never written shows."""
    results = []
    for shape, dtype in graph["result_shapes"]:
        extents = [batch if extent == "B" else extent for extent in shape]
        poison = -7777777 if dtype == "i64" else float("nan")
        results.append(torch.full(extents, poison, dtype=DTYPES[dtype], device=device))
    return results


def evaluate(library: Library, graph: dict, batch: int, leaves):
    """Results and leaves (buffers updated) in fp64 on the host."""
    host = [t.cpu().double() if t.is_floating_point() else t.cpu().clone() for t in leaves]
    results = [t.double() for t in empty_results(graph, batch, "cpu")]
    tensors = describe([*host, *results])
    library.call(
        "ingot_evaluate_fp64",
        graph_text(graph),
        ctypes.c_int64(batch),
        tensors,
        len(tensors),
    )
    return results, host
