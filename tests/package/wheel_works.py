"""Run by the Python that a wheel was installed for, with no PyTorch: the library computes."""

from __future__ import annotations

import ctypes
import json

import ingot
import numpy as np
from ingot.runtime.library import Tensor, find_library, library

GRAPH = {
    "ingot_graph": 1,
    "name": "softmax_of_relu",
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 40]},
        {"op": "relu", "args": [0]},
        {"op": "softmax", "args": [1]},
    ],
    "results": [{"value": 2, "name": "y"}],
    "updates": [],
}


def tensor(values: np.ndarray) -> Tensor:
    rows, features = values.shape
    made = Tensor()
    made.data = values.ctypes.data
    made.sizes[:] = [rows, 1, 1, features]
    made.strides[:] = [features, features, features, 1]
    made.dtype, made.device = 0, -1
    return made


def computed(x: np.ndarray) -> np.ndarray:
    own, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    text, options = json.dumps(GRAPH).encode(), json.dumps({"device": "cpu"}).encode()
    own.check(own.ingot_program_create(text, options, ctypes.byref(program)))
    own.check(own.ingot_program_workspace_size(program, len(x), ctypes.byref(size)))
    raw = np.zeros(size.value + 256, np.uint8)
    place = raw.ctypes.data + -raw.ctypes.data % 256
    y = np.zeros_like(x)
    tensors = (Tensor * 2)(tensor(x), tensor(y))
    own.check(own.ingot_program_run(program, len(x), tensors, 2, place, size.value, None))
    own.ingot_program_destroy(program)
    return y


def main() -> None:
    assert "site-packages" in str(find_library()), find_library()
    assert library().version == ingot.__version__
    x = np.random.default_rng(1).normal(size=(23, 40)).astype(np.float32)
    exact = np.exp(np.maximum(x.astype(np.float64), 0))
    exact /= exact.sum(axis=1, keepdims=True)
    error = np.linalg.norm(computed(x) - exact) / np.linalg.norm(exact)
    assert error < 3e-7, error
    print(f"computes a softmax with an error of {error:.1e}")


main()
