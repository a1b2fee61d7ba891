"""What a call's workspace holds of the library's products: what the algorithms use that are chosen
for them, at its end (a GPU that does nothing, and a library that says what it likes)."""

import json

import pytest
import test_cuda_calls

fake = test_cuda_calls.fake

CALLS = """
import ctypes, json, os
from ingot.runtime.library import Tensor, library

own, fake = library(), ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
fake.fake_log_end.restype = ctypes.c_char_p

def called(behind):
    values = [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 512]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 1024, 1, 512]},
        {"op": "linear", "args": [0, 1, -1]},
        *([{"op": "relu", "args": [2]}] if behind else []),
    ]
    graph = {"ingot_graph": 1, "values": values, "results": [{"value": len(values) - 1, "name": "y"}]}
    options = {"device": "cuda", "precision": "ieee", "capabilities": {"replay": False}}
    program, bytes = ctypes.c_void_p(), ctypes.c_size_t()
    texts = (json.dumps(value).encode() for value in (graph, options))
    own.check(own.ingot_program_create(*texts, ctypes.byref(program)))
    most = ctypes.c_size_t()
    own.check(own.ingot_program_workspace_size(program, ctypes.c_int64(64), ctypes.byref(most)))
    tensors = (Tensor * 3)()
    for at, (rows, middle, columns) in enumerate(((64, 1, 512), (1, 1024, 512), (64, 1, 1024))):
        tensors[at].sizes[:] = rows, middle, 1, columns
        tensors[at].strides[:] = middle * columns, columns, columns, 1
        tensors[at].data = 0x100000000 * (at + 1)
    batch, stream = ctypes.c_int64(64), ctypes.c_void_p(0x5000)
    own.check(own._handle.ingot_program_prepare_call(program, batch, tensors, 3, ctypes.byref(bytes)))
    def status(size):
        memory = ctypes.c_void_p(0x900000000)
        return own._handle.ingot_program_run(
            program, batch, tensors, 3, memory, ctypes.c_size_t(size), stream)
    fake.fake_log_start()
    few = status(bytes.value - 1) if bytes.value else None
    enough = status(bytes.value)
    (line,) = [l for l in fake.fake_log_end().decode().splitlines() if l.startswith("cublasLtMatmul")]
    return bytes.value, most.value, few, enough, line.partition(" with ")[2].partition(" bytes")[0]

print(json.dumps([called(behind) for behind in (False, True)]))
"""  # noqa: E501


@pytest.mark.parametrize("used", [0, 1000, 4 << 20])
def test_it_is_what_the_algorithm_uses(used, fake):
    answer = test_cuda_calls.run(["-c", CALLS], fake, FAKE_LIBRARY_WORKSPACE=str(used))
    assert answer.returncode == 0, answer.stderr
    for product, (asked, most, few, enough, given) in zip(
        (0, 64 * 1024 * 4), json.loads(answer.stdout), strict=True
    ):
        assert asked == product + used
        assert most >= product + (32 << 20)  # of any algorithm's
        assert enough == 0 and few != 0
        place = hex(0x900000000 + product) if used else "(nil)"
        assert given == f"{place}, {used}"
