"""What a call on a GPU asks of the driver, which is most of its host time: launches, and next to
nothing beside them. The GPU is one that does nothing; a real one is timed by
tools/gpu_checks/check_latency.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fake_cuda
import pytest
from ingot.runtime.library import find_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Split of the input, product, merging of its statistics, finishing sweep; in eval mode there are no
# statistics, and the product's epilogue does all but the softmax.
LAUNCHES = {
    "gemm_scale_bn.py training": 4,
    "gemm_scale_bn.py eval": 2,
    "gemm_bn_scale_softmax.py training": 4,
    "gemm_bn_scale_softmax.py eval": 3,
}


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> Path:
    if None in (shutil.which("gcc"), shutil.which("g++")):
        pytest.skip("needs a compiler of C and C++")
    return fake_cuda.build(tmp_path_factory.mktemp("cuda"))


def run(command: list, fake: Path, **environment: str) -> subprocess.CompletedProcess:
    """On the GPU that does nothing."""
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "INGOT_LIBRARY": str(find_library()),
            **dict.fromkeys(fake_cuda.VARIABLES, str(fake)),
            "INGOT_CACHE_DIR": str(fake.parent / "cache"),
            **environment,
        },
        check=False,
    )


@pytest.fixture(scope="module")
def asked(fake) -> dict:
    models = [ROOT / "examples" / name for name in ("gemm_scale_bn.py", "gemm_bn_scale_softmax.py")]
    answer = run([HERE / "cuda_calls.py", *models], fake)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", LAUNCHES)
def test_a_call_is_its_launches(asked, model):
    steady = {"cuCtxGetCurrent": 1, "cuLaunchKernelEx": LAUNCHES[model]}
    first = asked[model]["first"]
    assert first.pop("cuTensorMapEncodeTiled", 0) <= 3
    assert first == steady  # all else was prepared
    assert asked[model]["second"] == steady


@pytest.mark.parametrize("model", LAUNCHES)
@pytest.mark.parametrize("change", ["result elsewhere", "another batch"])
def test_what_changes_is_described_anew_and_nothing_else(asked, model, change):
    changed = asked[model][change]
    assert changed.pop("cuTensorMapEncodeTiled", 0) <= 3
    assert changed == {"cuCtxGetCurrent": 1, "cuLaunchKernelEx": LAUNCHES[model]}


@pytest.mark.parametrize("model", LAUNCHES)
def test_another_batch_loads_what_it_needs_and_compiles_nothing(asked, model):
    first = asked[model]["first of another batch"]
    assert first["cuModuleLoadData"] >= 1 and "nvrtcCompileProgram" not in first


def test_kept_tensor_maps_follow_the_tensors(asked):
    assert asked["gemm_scale_bn.py eval"]["addresses followed"]


@pytest.mark.parametrize("precision", ["fp32", "high"])
def test_packed_weights_serve_what_they_were_packed_from_alone(asked, precision):
    """By address and layout: Python's own look at them is not the last."""
    assert asked[f"packed weights, {precision}"] == {
        "never packed": False,
        "packed": True,
        "transposed": False,
        "transposed, packed again": True,
        "transposed back": False,
        "moved": False,
        "replayed": True,
        "replayed, packed otherwise since": False,
        "replayed, in its own memory": True,
        "replayed, in other memory": False,
    }


def launched(calls: list[dict]) -> set[tuple[int, int]]:
    """(kernels, graphs) that the calls launched."""
    return {(call.get("cuLaunchKernelEx", 0), call.get("cuGraphLaunch", 0)) for call in calls}


def test_calls_that_repeat_are_replayed(asked):
    steady = asked["replays"]["steady"]
    assert launched(steady[:3]) == {(2, 0)}
    assert steady[3]["cuGraphInstantiateWithFlags"] == 1 and launched([steady[3]]) == {(0, 1)}
    replay = {"cuCtxGetCurrent": 1, "cuStreamIsCapturing": 1, "cuGraphLaunch": 1}
    assert all(call == replay for call in steady[4:])


def test_calls_that_alternate_are_replayed(asked):
    assert launched(asked["replays"]["alternating"][-10:]) == {(0, 1)}
    assert asked["replays"]["followed"]


def test_layers_that_share_a_program_are_replayed(asked):
    assert launched(asked["replays"]["layers"][4 * 48 :]) == {(0, 1)}


def test_calls_that_vary_are_not_captured(asked):
    varied = asked["replays"]["varied"]
    assert launched(varied) == {(2, 0)}
    assert not any("cuStreamBeginCapture" in call for call in varied)
    assert sum(call.get("cuGraphExecDestroy", 0) for call in varied) > 0


def test_captures_of_the_caller_see_the_kernels(asked):
    assert launched([asked["replays"]["captured"]]) == {(2, 0)}
    assert launched([asked["replays"]["after"]]) == {(0, 1)}


AHEAD = """
import ctypes, json, os, threading
from ingot.runtime.program import Program

fake = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
fake.fake_calls.restype, fake.fake_calls.argtypes = ctypes.c_long, (ctypes.c_char_p,)
graph = {
    "ingot_graph": 1,
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 512]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 512, 1, 512]},
        {"op": "linear", "args": [0, 1, -1]},
        {"op": "softmax", "args": [2], "attributes": {"axes": ["features"]}},
    ],
    "results": [{"value": 3, "name": "y"}],
}
programs = [Program(graph, device="cuda") for _ in range(4)]

def asked():
    return [fake.fake_calls(name) for name in (b"nvrtcCompileProgram", b"cuModuleLoadData")]

threads = [threading.Thread(target=p.compile, args=(8192,)) for p in programs for _ in range(2)]
for each in (threading.Thread.start, threading.Thread.join):
    for thread in threads:
        each(thread)
compiled = asked()
for program in programs:
    program.prepare(8192, 0)
print(json.dumps([compiled, asked()]))
"""


def test_equal_kernels_are_compiled_once_and_ahead_of_their_loading(fake, tmp_path):
    answer = run(["-c", AHEAD], fake, INGOT_CACHE_DIR=str(tmp_path), FAKE_NVRTC_MS="100")
    assert answer.returncode == 0, answer.stderr
    (compiled, loaded), (compiled_after, loaded_after) = json.loads(answer.stdout)
    assert compiled >= 2 and loaded == 0
    assert compiled_after == compiled and loaded_after == 4 * compiled


OTHER_SIZES = (
    AHEAD.partition("threads =")[0].replace("range(4)", "range(1)")
    + """
(program,) = programs
program.compile(8192)
needed, _ = asked()
another = 0
while program.compile_another(8192):
    another += 1
compiled, _ = asked()
for batch in (1, 16, 100, 1000, 5000, 8192, 40000):
    program.prepare(batch, 0)
print(json.dumps([needed, another, compiled, asked()[0]]))
"""
)


def test_a_call_compiles_what_it_needs_and_other_batch_sizes_wait_for_nothing(fake, tmp_path):
    answer = run(["-c", OTHER_SIZES], fake, INGOT_CACHE_DIR=str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    needed, another, compiled, after = json.loads(answer.stdout)
    assert 2 <= needed <= 4  # a packing or two, the product, the softmax behind it
    assert another >= 3 and compiled == needed + another
    assert after == compiled


AS_LAID_OUT = """
import ctypes, json, os
import torch
from ingot.live import products
from ingot.runtime.library import library

fake = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
fake.fake_calls.restype, fake.fake_calls.argtypes = ctypes.c_long, (ctypes.c_char_p,)
a, b = torch.empty(4096, 768, device="meta").t(), torch.empty(4096, 1024, device="meta")
products.compile_product("fp32", a, b, "cuda")
compiled = fake.fake_calls(b"nvrtcCompileProgram")
program = products._programs.of("fp32", a, b, "cuda")
tensors, batch, *_ = program._laid_out([a, b])
for at, entry in enumerate(tensors):
    entry.data, entry.device = (1 + at) << 40, 0
size = program.workspace_size(batch)
library().check(
    library().ingot_program_run(
        program._handle, batch, tensors, len(tensors), 0x900000000, size, None
    )
)
print(json.dumps([compiled, fake.fake_calls(b"nvrtcCompileProgram")]))
"""


def test_a_product_over_the_batch_is_compiled_ahead_as_its_operands_lie(fake, tmp_path):
    answer = run(["-c", AS_LAID_OUT], fake, INGOT_CACHE_DIR=str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    compiled, after = json.loads(answer.stdout)
    assert compiled >= 2 and after == compiled


AT_ONCE = (
    AS_LAID_OUT.replace('products.compile_product("fp32", a, b, "cuda")', "")
    .replace("library().check(", "import time\nbegun = time.monotonic()\nlibrary().check(")
    .replace("[compiled, ", "[time.monotonic() - begun, ")
)


@pytest.mark.alone
def test_what_a_call_finds_missing_is_compiled_side_by_side(fake, tmp_path):
    answer = run(["-c", AT_ONCE], fake, INGOT_CACHE_DIR=str(tmp_path), FAKE_NVRTC_MS="500")
    assert answer.returncode == 0, answer.stderr
    seconds, compiled = json.loads(answer.stdout)
    assert compiled >= 2 and seconds < 0.5 * compiled - 0.2


LAYOUTS = """
import ctypes, json, os
from ingot.runtime.library import Tensor, library

fake = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
fake.fake_calls.restype, fake.fake_calls.argtypes = ctypes.c_long, (ctypes.c_char_p,)
size, own, program = 4096, library(), ctypes.c_void_p()
graph = {
    "ingot_graph": 1,
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, size]},
        {"op": "input", "name": "w", "dtype": "f32", "shape": [1, size, 1, size]},
        {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": True}},
    ],
    "results": [{"value": 2, "name": "y"}],
}
options = {"device": "cuda", "streamed": True, "capabilities": {"replay": False}}
texts = (json.dumps(value).encode() for value in (graph, options))
own.check(own.ingot_program_create(*texts, ctypes.byref(program)))
tensors, prepare, bytes = (Tensor * 3)(), own._handle.ingot_program_prepare_call, ctypes.c_size_t()
prepare.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
found = []
for address in (0x200000000, 0x200000004):  # of the weight
    for number, (rows, tensor) in enumerate(zip((size, 1, size), tensors)):
        tensor.sizes[:] = [rows, 1 if number != 1 else size, 1, size]
        tensor.strides[:] = [size, size, 0, 1]
        tensor.data = address if number == 1 else 0x300000000 + number * 0x10000000
    own.check(prepare(program, size, tensors, 3, ctypes.byref(bytes)))

    def asked():
        return [fake.fake_calls(name) for name in (b"cuModuleLoadData", b"cuLaunchKernelEx")]

    def run(given):
        return own.ingot_program_run(program, size, tensors, 3, 0x900000000, given, None)

    before, less = asked(), run(bytes.value - 1)
    assert b"ingot_program_prepare_call" in own._handle.ingot_last_error()
    own.check(run(bytes.value))
    found.append([bytes.value, less, *(a - b for a, b in zip(asked(), before))])
print(json.dumps(found))
"""


def test_a_call_is_prepared_for_its_own_layout(fake):
    """A weight at an odd address is packed by a kernel of its own, into memory of its own."""
    answer = run(["-c", LAYOUTS], fake)
    assert answer.returncode == 0, answer.stderr
    packed, invalid = 4096 * 4096 * 4 + 4096 * 4, 1
    assert json.loads(answer.stdout) == [[packed, invalid, 0, 2], [2 * packed, invalid, 0, 3]]


WITHOUT_CUBLASLT = """
from ingot.runtime.library import IngotError
from ingot.runtime.program import Program

graph = {
    "ingot_graph": 1,
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 8]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 5, 1, 8]},
        {"op": "linear", "args": [0, 1, -1]},
    ],
    "results": [{"value": 2, "name": "y"}],
}
program = Program(graph, device="cuda", precision="ieee")
for _ in range(2):
    try:
        program.prepare(4, 0)
    except IngotError as error:
        print(error.status, error)
"""


def test_a_cublaslt_that_is_missing_or_does_not_start_is_an_error(fake, tmp_path):
    # A real one, where there is one, does not start on this GPU.
    answer = run(["-c", WITHOUT_CUBLASLT], fake, INGOT_CUBLASLT=str(tmp_path / "none.so"))
    assert answer.returncode == 0, answer.stderr
    said = answer.stdout.splitlines()
    assert len(said) == 2 and all(" cuBLASLt" in line for line in said)


HASH = (
    WITHOUT_CUBLASLT.partition("program =")[0]
    + """
program = Program(graph, device="cuda", options={"sm": 90})
print(program.explain(1000)["executable"]["program"]["hash"], program.signature.hash)
"""
)


def test_the_launch_program_is_the_same_with_a_gpu_and_without(fake, tmp_path):
    here = run(["-c", HASH], fake)
    none = run(["-c", HASH], fake, INGOT_LIBCUDA=str(tmp_path / "none.so"))
    assert here.returncode == none.returncode == 0, here.stderr + none.stderr
    assert here.stdout == none.stdout


TURNED = """
import ctypes, json, os
import torch
from ingot.runtime.library import Call, Tensor, library
from ingot.runtime.program import Program

fake = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
fake.fake_log_end.restype = ctypes.c_char_p
rows = ["B", 196, 1, 768]
graph = {
    "ingot_graph": 1,
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": rows},
        {"op": "input", "name": "t", "dtype": "f32", "shape": rows},
        {"op": "add", "args": [0, 1], "origin": "add"},
        {"op": "layer_norm", "args": [2], "origin": "norm", "attributes": {"axes": ["features"]}},
    ],
    "results": [{"value": 3, "name": "y"}],
}
program = Program(graph, device="cuda")
program.prepare(64, 0)
dense, turned = (196 * 768, 768, 768, 1), (196 * 768, 1, 1, 196)
launched = []
for strides, shift in ((dense, 0), (turned, 0), (turned, 0), (dense, 0), (dense, 4)):
    tensors = (Tensor * 3)()
    for number, entry in enumerate(tensors):
        entry.sizes[:] = 64, 196, 1, 768
        entry.strides[:] = strides if number == 1 else dense
        entry.data = 0x100000000 * (number + 1) + (shift if number == 1 else 0)
    fake.fake_log_start()
    call = Call(
        program=program._handle, batch=64, tensors=ctypes.addressof(tensors), count=3,
        workspace=0x900000000, workspace_bytes=program.workspace_size(64), stream=0x5000,
    )
    library().check(library().ingot_program_call(ctypes.addressof(call)))
    (line,) = fake.fake_log_end().decode().splitlines()
    name, _, _, blocks, _, threads, *_ = line.split()
    launched.append((name, int(blocks), int(threads)))
print(json.dumps(launched))
"""


def test_operands_that_lie_turned_have_a_kernel_of_their_own(fake):
    """4 rows a block of 256 threads, whose text is written when such a call comes."""
    answer = run(["-c", TURNED], fake)
    assert answer.returncode == 0, answer.stderr
    plain, turned, again, back, unaligned = json.loads(answer.stdout)
    assert turned == again == ["fused_add_norm_turned", 64 * 196 // 4, 256]
    assert plain == back and plain[0] == "fused_add_norm"
    assert unaligned[0] == "fused_add_norm_unaligned"


ARRAYS = """
import ctypes, json, os
from ctypes import c_float, c_int64, c_void_p
from ingot.runtime.library import library

class Array(ctypes.Structure):
    _fields_ = [("matrices", c_void_p), ("leading", c_int64), ("dense", c_void_p)]
    _fields_ += [(name, c_int64) for name in ("dense_leading", "count", "lines", "length")]

fake = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
fake.fake_calls.restype, fake.fake_calls.argtypes = ctypes.c_long, (ctypes.c_char_p,)
fake.fake_log_end.restype = ctypes.c_char_p
own = library()
ingot, array = own._handle, Array(0x1000, 700, 0x2000, 600, 64, 512, 600)
own.check(ingot.ingot_matrix_array_prepare(0))
compiled = fake.fake_calls(b"nvrtcCompileProgram")
fake.fake_log_start()
own.check(ingot.ingot_matrix_array_gather(ctypes.byref(array), 0, c_void_p(0x5000)))
scale = c_float(1.0), c_float(2.0), c_void_p(0x3000), None
own.check(ingot.ingot_matrix_array_scatter(ctypes.byref(array), *scale, 0, c_void_p(0x5000)))
log = fake.fake_log_end().decode()
print(json.dumps([log.splitlines(), fake.fake_calls(b"nvrtcCompileProgram") - compiled]))
"""


def test_arrays_of_matrices_are_copied_by_a_warp_a_piece(fake):
    answer = run(["-c", ARRAYS], fake)
    assert answer.returncode == 0, answer.stderr
    lines, compiled = json.loads(answer.stdout)
    assert compiled == 0  # prepared
    array = "1000 0 2bc 0 2000 0 258 0 40 0 200 258"
    blocks = 64 * 512 * 3 // 8  # three pieces a line, eight warps a block
    for line, name, arguments in zip(
        lines,
        ("gather_matrices", "scatter_products"),
        (f" | {array}", f" | {array} | 3f800000 40000000 3000 0 0 0"),
        strict=True,
    ):
        assert line.startswith(f"{name} of ")
        assert line.endswith(f", {blocks} x 256 threads, 0 bytes{arguments}")


MEMORY = """
import ctypes, json, os
from ingot.runtime.library import Tensor, library

own = library()

def asked(size, rows, k, along_k, address, gap):
    shape = [1, size, 1, k] if along_k else [1, k, 1, size]
    graph = {"ingot_graph": 1, "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, k]},
        {"op": "input", "name": "w", "dtype": "f32", "shape": shape},
        {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": along_k}},
    ], "results": [{"value": 2, "name": "y"}]}
    options = {"device": "cuda", "streamed": True, "capabilities": {"replay": False}}
    program, bytes = ctypes.c_void_p(), ctypes.c_size_t()
    texts = (json.dumps(value).encode() for value in (graph, options))
    own.check(own.ingot_program_create(*texts, ctypes.byref(program)))
    tensors = (Tensor * 3)()
    for tensor, sizes, wider in zip(tensors, ([rows, 1, 1, k], shape, [rows, 1, 1, size]), (0, gap, 0)):
        width = sizes[3] + wider
        tensor.sizes[:] = sizes
        tensor.strides[:] = [width, width if sizes[1] > 1 else 0, 0, 1]
        tensor.data = 0x200000000
    tensors[1].data += address
    prepare = own._handle.ingot_program_prepare_call
    own.check(prepare(program, ctypes.c_int64(rows), tensors, 3, ctypes.byref(bytes)))
    return bytes.value

layouts = [(along, address, gap) for along in (False, True) for address, gap in ((0, 0), (4, 0), (0, 2))]
print(json.dumps([[asked(4096, 4096, 4096, *layout) for layout in layouts],
                  asked(64, 64, 1024, True, 0, 0)]))
"""  # noqa: E501


def test_a_call_takes_the_memory_of_its_own_layout(fake):
    """A weight that cannot be read as it lies is packed; a product that is streamed packs none."""
    answer = run(["-c", MEMORY], fake)
    assert answer.returncode == 0, answer.stderr
    packed, (large, streamed) = 4096 * 4096 * 4 + 4096 * 4, json.loads(answer.stdout)
    assert large == [packed, 2 * packed, 2 * packed] * 2
    assert streamed < 8 << 20
