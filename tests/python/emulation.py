"""Generated CUDA sweeps executed without a GPU: their text, and the headers of kernels/ that it
includes, compiled by the host's compiler (tests/emulator), launched as the program says, in memory
that nothing has written. Products are the library's, and here PyTorch's in fp64; kernels of Ingot's
own products, which need tensor cores, are not run."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from ingot.runtime.layouts import ResultLayout, concrete
from ingot.runtime.program import Program
from ingot.runtime.signature import TORCH_DTYPES, TensorSignature

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "emulator"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared"]
# An expression and its functions are as written: nothing is contracted, inlined across libraries or
# shared between them, since kernels of one name may be several.
KERNEL_FLAGS = ["-ffp-contract=off", "-fno-strict-aliasing", "-fvisibility=hidden"]
UNIQUE = ["-fno-gnu-unique"]
OPTIONS = {
    "sm": 90,
    "capabilities": {
        "hopper_product": False,
        "portable_product": False,
        "describe_arguments": True,
    },
}
OWN_PRODUCTS = {"sm": 90, "capabilities": {"describe_arguments": True}}
_TENSOR_BYTES = 40  # an address and four strides
_ERROR, _ERROR_IN_16_BITS = 2e-5, 2e-2  # relative; the second where a graph has such values
_NEIGHBOURS = 0.02  # of whole numbers: which of two values is larger may be a matter of rounding
_NONE, _TENSOR, _WORKSPACE = range(3)  # Address::Base
_ALIGNMENT = 256
_IDENTITY = ((0,), (1,), (2,), (3,))
_CALLS = """
namespace {
template <class... A, std::size_t... I>
void apply(void (*kernel)(A...), void** given, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_cvref_t<A>*>(given[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** given) {
  apply(kernel, given, std::index_sequence_for<A...>{});
}
}  // namespace
"""


def check(graph: dict, batch: int) -> None:
    """Its kernels give what the CPU's program gives, of random numbers."""
    leaves = leaves_of(graph, batch)
    found = sum(run(graph, leaves, batch), [])
    _compare(found, sum(run_on_cpu(graph, leaves), []), graph)


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor], graph: dict) -> None:
    name = graph["name"]
    dtypes = [(v.get("attributes") or v).get("dtype", v.get("dtype")) for v in graph["values"]]
    allowed = _ERROR_IN_16_BITS if {"f16", "bf16"}.intersection(dtypes) else _ERROR
    for ours, theirs in zip(found, expected, strict=True):
        if not ours.is_floating_point():
            assert int((ours != theirs).sum()) <= _NEIGHBOURS * ours.numel(), name
            continue
        assert torch.equal(ours.isnan(), theirs.isnan()), name
        error, size = (
            value.nan_to_num(0.0, 0.0, 0.0).norm()
            for value in (ours.double() - theirs.double(), theirs.double())
        )
        assert error <= allowed * size + 1e-30, name


def check_packed(graph: dict, batch: int) -> int:
    """Sweeps that pack what one of Ingot's own products reads give it right. (They can also store
    it as it is, which is looked at; the halves are not.) How many there are before a product."""
    program = _program(graph, own_products=True)
    explained = program.explain(batch)
    executable, planned = explained["executable"], explained["graph"]["after"]["json"]
    kernels, leaves = _kernels(executable), leaves_of(graph, batch)
    memory = _Memory([*leaves, *_results(program, batch)], executable["workspace_bytes"])
    found = 0
    for step in executable["program"]["steps"]:
        if step["kind"] != "sweep":
            break
        slots = memory.slots(step)
        if not step["kernel"].endswith("_packed"):
            _launch(step, slots, kernels[step["kernel"]])
            continue
        value, at, packed = _packed(kernels[step["kernel"]][0], batch)
        tensor = struct.pack("Q4q", packed.data_ptr(), *packed.stride())
        _launch(step, slots, kernels[step["kernel"]], {0: (at, tensor), -1: (0, b"\1")})
        _compare([packed], _value_of(planned, value, leaves), graph)
        found += 1
    return found


def _packed(text: str, batch: int) -> tuple[int, int, torch.Tensor]:
    """(number of the packed value, where its tensor is among the operands, room for it)."""
    place = re.search(r"return operands\.(v(\d+)_\w+)\.at<f32>", text)
    operands = re.findall(r"Tensor (\w+);  // \w+ \[(.*)\]", text)
    at = [name for name, _ in operands].index(place[1])
    sizes = [batch if size == "B" else int(size) for size in operands[at][1].split(", ")]
    return int(place[2]), at * _TENSOR_BYTES, torch.full(sizes, float("nan"))


def _value_of(graph: dict, value: int, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """By the CPU's program."""
    values = graph["values"][: value + 1]
    known = sum(v["op"] in ("input", "parameter", "buffer") for v in values)
    part = {**graph, "values": values, "updates": []}
    part["results"] = [{"name": "value", "value": value}]
    return run_on_cpu(part, leaves[:known])[0]


def run(graph: dict, leaves: list[torch.Tensor], batch: int) -> tuple[list, list]:
    """(results, leaves as they are afterwards) of a graph's kernels. leaves: by the graph's four
    axes, dense, of this batch size."""
    program = _program(graph)
    executable = program.explain(batch)["executable"]
    kernels = _kernels(executable)
    leaves, results = [leaf.clone() for leaf in leaves], _results(program, batch)
    memory = _Memory([*leaves, *results], executable["workspace_bytes"])
    for step in executable["program"]["steps"]:
        if step["kind"] == "library_product":
            _multiply(step, [where for _, where in memory.slots(step)])
        else:
            _launch(step, memory.slots(step), kernels[step["kernel"]])
    return results, leaves


class _Memory:
    """A call's tensors, and its workspace, into which nothing has been written."""

    def __init__(self, tensors: list[torch.Tensor], workspace_bytes: int) -> None:
        self._tensors = tensors
        self._memory = torch.full((workspace_bytes + 2 * _ALIGNMENT,), 255, dtype=torch.uint8)
        self._workspace = _aligned(self._memory.data_ptr(), _ALIGNMENT)

    def slots(self, step: dict) -> list[tuple[int, int]]:
        """(where in the arguments, address)."""
        return [(at, self._address(*place)) for at, *place in step["arguments"]["slots"]]

    def _address(self, base: int, tensor: int, offset: int) -> int:
        if base == _NONE:
            return 0
        assert base in (_TENSOR, _WORKSPACE)
        start = self._tensors[tensor].data_ptr() if base == _TENSOR else self._workspace
        return start + offset


def _kernels(executable: dict) -> dict[str, tuple[str, tuple]]:
    return {
        entry: (kernel["text"], tuple(kernel["entries"]))
        for sweep in executable["sweeps"]
        for kernel in sweep["kernels"]
        for entry in kernel.get("entries", ())
    }


def kernels_of(graph: dict, batch: int) -> list[str]:
    """Their text."""
    executable = _program(graph).explain(batch)["executable"]
    return [text for text, _ in _kernels(executable).values()]


def run_on_cpu(graph: dict, leaves: list[torch.Tensor]) -> tuple[list, list]:
    """The same by the CPU's program."""
    results = _program(graph).signature.results
    layouts = [ResultLayout(r.shape, _IDENTITY, r.shape, r.dtype) for r in results]
    program = Program(graph, device="cpu", precision="ieee", result_layouts=layouts)
    leaves = [leaf.clone() for leaf in leaves]
    return program.run(leaves), leaves


def leaves_of(graph: dict, batch: int) -> list[torch.Tensor]:
    """Numbers for them, the same ones for the same graph."""
    signature = _program(graph).signature
    values = [v for v in graph["values"] if v["op"] in ("input", "parameter", "buffer")]
    generator = torch.Generator().manual_seed(7)
    return [_filled(*pair, batch, generator) for pair in zip(signature.leaves, values)]


def _program(graph: dict, own_products: bool = False) -> Program:
    options = OWN_PRODUCTS if own_products else OPTIONS
    precision = "fp32" if own_products else "ieee"
    return Program(graph, device="cuda", precision=precision, options=options)


def _filled(
    leaf: TensorSignature, value: dict, batch: int, generator: torch.Generator
) -> torch.Tensor:
    sizes = concrete(leaf.shape, batch)
    if value.get("attributes", {}).get("positions"):
        return torch.arange(sizes[-1], dtype=leaf.dtype).reshape(sizes)
    if leaf.dtype == torch.bool:
        return torch.rand(sizes, generator=generator) < 0.5
    if leaf.dtype == torch.int64:  # classes, or places
        return torch.randint(0, 9, sizes, generator=generator)
    numbers = torch.randn(sizes, generator=generator)
    if "var" in leaf.name:
        numbers = numbers.abs() + 0.5
    return numbers.to(leaf.dtype)


def _results(program: Program, batch: int) -> list[torch.Tensor]:
    """Room for them."""
    return [
        torch.full(
            concrete(result.shape, batch),
            float("nan") if result.dtype.is_floating_point else 1,
            dtype=result.dtype,
        )
        for result in program.signature.results
    ]


def _aligned(address: int, alignment: int) -> int:
    return (address + alignment - 1) // alignment * alignment


def _multiply(step: dict, addresses: list[int]) -> None:
    batches, m, n, k = (step[name] for name in ("batches", "m", "n", "k"))
    dtypes = TORCH_DTYPES[step["operands"]], TORCH_DTYPES[step["result"]]
    strides = step["strides"]
    x = _seen(addresses[0], (batches, m, k), strides["x"], dtypes[0])
    w = _seen(addresses[1], (batches, n, k), strides["w"], dtypes[0])
    y = _seen(addresses[2], (batches, m, n), strides["y"], dtypes[1])
    product = x.double() @ w.double().mT
    if step["bias"]:
        product += _seen(addresses[4], (n,), (1,), dtypes[1]).double()
    y.copy_(product)


def _seen(address: int, sizes: tuple, strides: tuple, dtype: torch.dtype) -> torch.Tensor:
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def _launch(
    step: dict,
    slots: list[tuple[int, int]],
    kernel: tuple[str, tuple],
    changed: dict[int, tuple[int, bytes]] | None = None,
) -> None:
    """changed: by the number of an argument, bytes to put into it from a place on."""
    arguments, alignment = step["arguments"], 64
    assert not arguments["tensor_maps"]
    given = bytearray(bytes.fromhex(arguments["bytes"]))
    for at, where in slots:
        given[at : at + 8] = where.to_bytes(8, "little")
    for number, (at, value) in (changed or {}).items():
        at += arguments["starts"][number]
        given[at : at + len(value)] = value
    memory = ctypes.create_string_buffer(len(given) + alignment)
    start = _aligned(ctypes.addressof(memory), alignment)
    ctypes.memmove(start, bytes(given), len(given))
    pointers = (ctypes.c_void_p * len(arguments["starts"]))(
        *(start + at for at in arguments["starts"])
    )
    function = getattr(_library(*kernel), f"call_{step['kernel']}")
    ended = _scheduler().run_kernel(
        ctypes.cast(function, ctypes.c_void_p),
        pointers,
        ctypes.c_int64(step["blocks"]),
        ctypes.c_int(step["threads"]),
        ctypes.c_size_t(step["shared_bytes"]),
    )
    assert ended, f"{step['kernel']}: its threads wait for one another"


# Compiling --------------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    """Headers for the host's compiler, and what it makes of kernels."""
    folder = Path(tempfile.mkdtemp(prefix="ingot-emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for part in ("common", "product", "sweeps"):
        for file in (ROOT / "kernels" / part).glob("*.*"):
            target = folder / part / file.name
            target.parent.mkdir(exist_ok=True)
            own = EMULATOR / part / file.name
            target.write_text(own.read_text() if own.exists() else _for_host(file.read_text()))
    return folder


_ASM = re.compile(r'asm\s*(?:volatile\s*)?\(\s*((?:"[^"]*"\s*)+):(.*?)\);', re.DOTALL)


def _for_host(text: str) -> str:
    """Instructions as calls of functions of their names, of their results and then their operands;
    what is of devices that are not emulated stays in branches that are not compiled."""

    def called(match: re.Match) -> str:
        name = re.sub(r"\W", "_", match[1].strip('"').split()[0].rstrip(";"))
        operands = re.findall(r'"=?\w"\s*\((.*?)\)(?=\s*(?:[,:]|$))', match[2], re.DOTALL)
        return f"emulator::{name}({', '.join(operands)});"

    text = re.sub(r"extern __shared__ __align__\(\d+\)", "extern EMULATOR_API", text)
    return re.sub(r"(?m)^#\s*pragma unroll.*$|_Pragma\(\"unroll\"\)", "", _ASM.sub(called, text))


@cache
def _scheduler() -> ctypes.CDLL:
    library = _folder() / "scheduler.so"
    _compile(EMULATOR / "scheduler.cpp", library, [])
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def _library(text: str, entries: tuple) -> ctypes.CDLL:
    calls = (
        f'extern "C" EMULATOR_API void call_{entry}(void** given) {{ call({entry}, given); }}'
        for entry in entries
    )
    source = "\n".join(['#include "cuda_on_host.h"', _for_host(text), _CALLS, *calls])
    _scheduler()
    stem = _folder() / hashlib.sha1(source.encode()).hexdigest()
    stem.with_suffix(".cpp").write_text(source)
    _compile(stem.with_suffix(".cpp"), stem.with_suffix(".so"), KERNEL_FLAGS + _unique())
    return ctypes.CDLL(str(stem.with_suffix(".so")))


@cache
def _unique() -> list[str]:
    """GCC makes variables of templates' functions one for all libraries of a process."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    return [] if "clang" in version.stdout else UNIQUE


def _compile(source: Path, library: Path, flags: list[str]) -> None:
    command = [COMPILER, *FLAGS, *flags, f"-I{EMULATOR}", f"-I{_folder()}", str(source)]
    made = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]
