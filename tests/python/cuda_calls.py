"""Runs programs on a GPU that does nothing (fake_cuda.c) and prints, as JSON, what a call asks of
the driver. A process of its own: the driver is loaded once. Started by test_cuda_calls.py."""

from __future__ import annotations

import ctypes
import json
import os
import sys

import ingot
import torch
from ingot.model_file import load_model_file
from ingot.runtime.library import Tensor, library
from ingot.runtime.program import Program

COUNTED = (
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent",
    "cuLaunchKernelEx",
    "cuTensorMapEncodeTiled",
    "cuModuleLoadData",
    "cuFuncSetAttribute",
    "cuStreamIsCapturing",
    "nvrtcCompileProgram",
    "cuStreamBeginCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecDestroy",
    "cuGraphLaunch",
)
SIZES = {"in_features": 512, "out_features": 512}
STREAM = 0x5000
MAPS = 3  # a product's first arguments: tensor maps of w, x and y


class Launch(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * MAPS),
    )


class Called:
    """A program with tensors at made-up addresses."""

    def __init__(self, fake: ctypes.CDLL, example: str, mode: str, batch: int, replay=False):
        self.fake = fake
        loaded = load_model_file(example, {**SIZES, "batch_size": batch})
        module = loaded.make_module().train(mode == "training")
        with torch.no_grad():
            optimised = ingot.optimize(module, loaded.make_inputs())
            optimised(*loaded.make_inputs())
        on_host = optimised._ingot.last.compiled.direct
        options = {"capabilities": {"replay": replay}}
        self.program = Program(on_host.graph, device="cuda", options=options)
        self.names = on_host.leaf_names
        count = len(self.names) + 1
        template = on_host.last_binding.template[-count * ctypes.sizeof(Tensor) :]
        self.tensors = (Tensor * count).from_buffer_copy(template)
        for index, tensor in enumerate(self.tensors):
            tensor.device, tensor.data = 0, 0x100000000 + index * 0x1000000
        self.program.prepare(batch, 0)

    def run(self, batch: int, workspace: int = 0x900000000) -> dict[str, int]:
        """What it asked for."""
        before = self.counts()
        loaded, size = library(), self.program.workspace_size(batch)
        loaded.check(
            loaded.ingot_program_run(
                self.program._handle,
                batch,
                ctypes.addressof(self.tensors),
                len(self.tensors),
                workspace,
                size,
                STREAM,
            )
        )
        return {name: n - before[name] for name, n in self.counts().items() if n != before[name]}

    def counts(self) -> dict[str, int]:
        return {name: self.fake.fake_calls(name.encode()) for name in COUNTED}

    def product_maps(self, batch: int, workspace: int) -> list[int]:
        """The addresses in the tensor maps of the next call's product, which follows one split."""
        self.fake.fake_record(self.counts()["cuLaunchKernelEx"] + 1)
        self.run(batch, workspace)
        launch = Launch.from_address(self.fake.fake_recorded())
        assert launch.stream == STREAM
        return list(launch.words)


def follow_addresses(called: Called, batch: int) -> bool:
    """Whether the product's tensor maps always name the weight, the packed input and the result
    where they are now."""
    weight, result = called.tensors[called.names.index("gemm.weight")], called.tensors[-1]
    for tensor in (called.tensors[0], result):
        tensor.sizes[0] = batch
    size = called.program.workspace_size(batch)
    for turn in range(40):
        weight.data = 0x100000000 + turn % 3 * 0x1000000
        result.data = 0x200000000 + turn % 5 * 0x1000000
        workspace = 0x900000000 + turn % 7 * 0x10000000
        w, x, y = called.product_maps(batch, workspace)
        if w != weight.data or y != result.data or not workspace <= x < workspace + size:
            return False
    return True


def replays(fake: ctypes.CDLL, example: str) -> dict:
    """Calls of a program that replays those that repeat."""
    called = Called(fake, example, "eval", 8192, replay=True)
    steady = [called.run(8192) for _ in range(20)]
    # A loop over batches: results alternate between two blocks.
    result = called.tensors[-1]
    alternating, followed = [], True
    for turn in range(40):
        result.data = 0x200000000 + turn % 2 * 0x1000000
        alternating.append(called.run(8192))
        followed = followed and called.product_maps(8192, 0x900000000)[2] == result.data
    # More different calls than are kept, then one inside a capture of the caller's.
    varied = []
    for turn in range(200):
        result.data = 0x300000000 + turn % 9 * 0x1000000
        varied.append(called.run(8192))
    for _ in range(20):
        called.run(8192)
    fake.fake_user_captures(1)
    captured = called.run(8192)
    fake.fake_user_captures(0)
    return {
        "steady": steady,
        "alternating": alternating,
        "followed": followed,
        "varied": varied,
        "captured": captured,
        "after": called.run(8192),
    }


def main() -> None:
    fake = ctypes.CDLL(os.environ["INGOT_LIBCUDA"])
    fake.fake_recorded.restype = ctypes.c_void_p
    fake.fake_record.restype, fake.fake_record.argtypes = None, (ctypes.c_long,)
    fake.fake_calls.restype, fake.fake_calls.argtypes = ctypes.c_long, (ctypes.c_char_p,)
    answers = {}
    for example in sys.argv[1:]:
        for mode in ("training", "eval"):
            called = Called(fake, example, mode, 512)
            first, second = called.run(512), called.run(512)
            called.tensors[-1].data += 0x100000
            moved = called.run(512)
            for tensor in (called.tensors[0], called.tensors[-1]):
                tensor.sizes[0] = 300
            name = f"{os.path.basename(example)} {mode}"
            answers[name] = {
                "first": first,
                "second": second,
                "result elsewhere": moved,
                "another batch": called.run(300),
            }
            if name == "gemm_scale_bn.py eval":  # the product itself stores the result
                answers["replays"] = replays(fake, example)
                answers[name]["addresses followed"] = follow_addresses(called, 8192)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
