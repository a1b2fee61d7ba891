"""Runs programs on a GPU that does nothing (fake_cuda.c) and prints, as JSON, what a call asks of
the driver. A process of its own: the driver is loaded once. Started by test_cuda_calls.py."""

from __future__ import annotations

import ctypes
import json
import os
import sys

import torch
from ingot.model_capture import capture
from ingot.model_file import load_model_file
from ingot.runtime.library import Call, Tensor, library
from ingot.runtime.program import Program
from ingot.runtime.signature import BATCH, DTYPE_CODES

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
SAMPLES = 2048  # of which the product packs its samples first
MAPS = 3  # a product's first arguments: tensor maps of w, x and y


class Launch(ctypes.Structure):
    _fields_ = (
        ("stream", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * MAPS),
    )


class Called:
    """A program with tensors at made-up addresses."""

    def __init__(
        self,
        fake: ctypes.CDLL,
        example: str,
        mode: str,
        batch: int,
        replay: bool = False,
        precision: str = "fp32",
    ):
        self.fake = fake
        loaded = load_model_file(example, {**SIZES, "batch_size": batch})
        module = loaded.make_module().train(mode == "training")
        (region,) = capture(module, tuple(loaded.make_inputs())).regions
        options = {"capabilities": {"replay": replay}}
        self.program = Program(region.graph, device="cuda", precision=precision, options=options)
        self.names = self.program.leaf_names
        bound = [*self.program.signature.leaves, *self.program.signature.results]
        self.tensors = (Tensor * len(bound))()
        for index, (entry, tensor) in enumerate(zip(self.tensors, bound)):
            sizes = [batch if extent == BATCH else extent for extent in tensor.shape]
            entry.sizes[:], entry.strides[:] = sizes, torch.empty(sizes, device="meta").stride()
            entry.dtype, entry.device = DTYPE_CODES[tensor.dtype], 0
            entry.data = 0x100000000 + index * 0x1000000
        self.program.prepare(batch, 0)

    def run(self, batch: int, workspace: int = 0x900000000, frozen: int = 0) -> dict[str, int]:
        """What it asked for."""
        before = self.counts()
        call = Call(
            program=self.program._handle,
            batch=batch,
            tensors=ctypes.addressof(self.tensors),
            count=len(self.tensors),
            workspace=workspace,
            workspace_bytes=self.program.workspace_size(batch),
            frozen=frozen,
            frozen_bytes=self.frozen_bytes(),
            stream=STREAM,
        )
        loaded = library()
        loaded.check(loaded.ingot_program_call(ctypes.addressof(call)))
        return {name: n - before[name] for name, n in self.counts().items() if n != before[name]}

    def freeze(self, batch: int, frozen: int) -> None:
        loaded = library()
        loaded.check(
            loaded.ingot_program_freeze(
                self.program._handle,
                batch,
                ctypes.addressof(self.tensors),
                len(self.tensors),
                frozen,
                self.frozen_bytes(),
                STREAM,
            )
        )

    def frozen_bytes(self) -> int:
        size, loaded = ctypes.c_size_t(), library()
        loaded.check(loaded.ingot_program_frozen_size(self.program._handle, ctypes.byref(size)))
        return size.value

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
    called = Called(fake, example, "eval", SAMPLES, replay=True)
    steady = [called.run(SAMPLES) for _ in range(20)]
    # A loop over batches: results alternate between two blocks.
    result = called.tensors[-1]
    alternating, followed = [], True
    for turn in range(40):
        result.data = 0x200000000 + turn % 2 * 0x1000000
        alternating.append(called.run(SAMPLES))
        followed = followed and called.product_maps(SAMPLES, 0x900000000)[2] == result.data
    # Layers that share a program.
    layers = []
    for turn in range(48 * 6):
        result.data = 0x400000000 + turn % 48 * 0x1000000
        layers.append(called.run(SAMPLES))
    # More different calls than are kept, then one inside a capture of the caller's.
    varied = []
    for turn in range(600):
        result.data = 0x500000000 + turn % 140 * 0x1000000
        varied.append(called.run(SAMPLES))
    for _ in range(20):
        called.run(SAMPLES)
    fake.fake_user_captures(1)
    captured = called.run(SAMPLES)
    fake.fake_user_captures(0)
    return {
        "steady": steady,
        "alternating": alternating,
        "followed": followed,
        "layers": layers,
        "varied": varied,
        "captured": captured,
        "after": called.run(SAMPLES),
    }


def packed_weights(fake: ctypes.CDLL, example: str, precision: str) -> dict[str, bool]:
    """Whether a call's product reads the packed weight that it is given."""
    batch, frozen = SAMPLES, 0x700000000
    called = Called(fake, example, "eval", batch, replay=True, precision=precision)
    weight = called.tensors[called.names.index("gemm.weight")]

    def reads_packed(place: int, times: int = 1) -> bool:
        workspace = 0x900000000 + place * 0x10000000
        for _ in range(times):
            asked = called.run(batch, workspace, frozen)
        # The product is the last launch.
        last = asked.get("cuLaunchKernelEx", 2) - 1
        fake.fake_record(called.counts()["cuLaunchKernelEx"] + last)
        called.run(batch, workspace, frozen)
        fake.fake_record(-1)
        address = Launch.from_address(fake.fake_recorded()).words[0]
        return frozen <= address < frozen + called.frozen_bytes()

    def transpose() -> None:
        strides = weight.strides
        strides[1], strides[3] = strides[3], strides[1]

    answers = {"never packed": reads_packed(0)}
    called.freeze(batch, frozen)
    answers["packed"] = reads_packed(1)
    transpose()
    answers["transposed"] = reads_packed(2)
    called.freeze(batch, frozen)
    answers["transposed, packed again"] = reads_packed(3)
    transpose()
    answers["transposed back"] = reads_packed(4)
    called.freeze(batch, frozen)
    weight.data += 0x1000000
    answers["moved"] = reads_packed(5)
    weight.data -= 0x1000000
    answers["replayed"] = reads_packed(6, times=20)
    transpose()
    called.freeze(batch, frozen)
    transpose()
    answers["replayed, packed otherwise since"] = reads_packed(6)
    other = frozen + 0x40000000
    for memory in (frozen, other):
        called.freeze(batch, memory)
    steady = [called.run(batch, 0x990000000, frozen) for _ in range(20)]
    answers["replayed, in its own memory"] = "cuGraphLaunch" in steady[-1]
    answers["replayed, in other memory"] = "cuGraphLaunch" in called.run(batch, 0x990000000, other)
    return answers


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
            while called.program.compile_another(512):
                pass
            for tensor in (called.tensors[0], called.tensors[-1]):
                tensor.sizes[0] = 300
            name = f"{os.path.basename(example)} {mode}"
            answers[name] = {
                "first": first,
                "second": second,
                "result elsewhere": moved,
                "first of another batch": called.run(300),
                "another batch": called.run(300),
            }
            if name == "gemm_scale_bn.py eval":  # the product itself stores the result
                answers["replays"] = replays(fake, example)
                for precision in ("fp32", "high"):
                    packed = packed_weights(fake, example, precision)
                    answers[f"packed weights, {precision}"] = packed
                answers[name]["addresses followed"] = follow_addresses(called, SAMPLES)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
