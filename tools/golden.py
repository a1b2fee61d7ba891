"""Compares two builds of libingot in one process: the same bits, the same launches, no more memory,
no more time.

    tools/golden.py OLD.so NEW.so                    outputs on the CPU
    tools/golden.py OLD.so NEW.so --device cuda      outputs on the GPU
    tools/golden.py OLD.so NEW.so --launches         what a GPU would be asked to do; needs none
    tools/golden.py OLD.so NEW.so --device cuda --time      calls of both, taken in turns

Over the models of examples and tests/models, in both modes, each region that is captured of them is
compiled by both builds for every batch size and precision, and run on the same tensors, with frozen
weights too. Digests of all that a run writes must agree, and no workspace may grow. For a change of
the inside that is to change nothing: nothing is compared with a file, so that any machine will do.

--launches runs on tests/python/fake_cuda.c, which writes launches down: kernels with their texts,
grids, shared memory, attributes and every byte of their arguments. --only TEXT picks models whose
name contains it. Exit status: 0 where nothing differs, 1 where something does.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("python", "tools", "tools/gpu_checks", "tests/python"):
    sys.path.insert(0, str(ROOT / folder))

import fake_cuda  # noqa: E402
import torch  # noqa: E402
from runner import DTYPES, LEAVES, Library, describe, make_leaves  # noqa: E402

MODES = ("training", "eval")
BATCHES = {"cpu": (1, 3, 67), "cuda": (1, 67, 1024)}
PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "high", "ieee", "tf32", "bf16", "fp16")}
LAUNCH_BATCHES = (1, 67, 1000, 16384)
ROUNDS = 30


@dataclass(frozen=True)
class Case:
    name: str
    graph: dict


def cases(only: str, dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    """The regions of every model, in both modes."""
    from gpu_stages.examples import settings_for
    from ingot.capture import Region
    from ingot.model_capture import capture
    from ingot.model_file import load_model_file

    paths = sorted((ROOT / "examples").glob("*.py")) + sorted((ROOT / "tests/models").glob("*.py"))
    for path in paths:
        if only not in path.stem:
            continue
        overrides = settings_for(path, 0) if path.parent.name == "examples" else {}
        loaded = load_model_file(path, overrides)
        for mode in MODES:
            module = loaded.make_module().train(mode == "training").to(dtype)
            inputs = [
                t.to(dtype) if t.is_floating_point() else t
                for t in loaded.make_inputs()
                if isinstance(t, torch.Tensor)
            ]
            regions = [s for s in capture(module, tuple(inputs)).steps if isinstance(s, Region)]
            for number, region in enumerate(regions):
                suffix = f" {number}" if len(regions) > 1 else ""
                yield Case(f"{path.stem} {mode}{suffix}", region.graph)


def results_like(graph: dict, explained: dict, batch: int, device: str) -> list[torch.Tensor]:
    """Poisoned: an element that is never written shows."""
    before = explained["graph"]["before"]["json"]
    made = []
    for result in before["results"]:
        value = before["values"][result["value"]]
        shape = [batch if extent == "B" else extent for extent in value["shape"]]
        dtype = DTYPES[value["dtype"]]
        poison = float("nan") if dtype.is_floating_point else 7
        made.append(torch.full(shape, poison, dtype=torch.float64).to(dtype).to(device))
    return made


def digest(tensors: list[torch.Tensor]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hashed.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


class Build:
    """One libingot and the programs that it compiled."""

    def __init__(self, path: str):
        self.library = Library(path)

    def program(self, case: Case, device: str, precision: str):
        return self.library.program(
            case.graph, device=device, precision=precision, capabilities={"replay": False}
        )

    def frozen_size(self, program) -> int:
        size = ctypes.c_size_t()
        self.library.call("ingot_program_frozen_size", program.handle, ctypes.byref(size))
        return size.value

    def outputs(self, program, case: Case, batch: int, device: str) -> dict[str, object]:
        """Digests of what runs write, and the memory that they take."""
        leaves = make_leaves(case.graph, batch, 1, device)
        explained = program.explain(batch)
        found: dict[str, object] = {}
        workspace = program.workspace(batch, device)
        results = results_like(case.graph, explained, batch, device)
        program.run(batch, leaves, results, workspace)
        found["run"] = digest([*results, *leaves])
        found["bytes"] = workspace.numel()
        size = self.frozen_size(program)
        if size:
            leaves = make_leaves(case.graph, batch, 1, device)
            results = results_like(case.graph, explained, batch, device)
            self.run_frozen(program, batch, leaves, results, workspace, size)
            found["frozen"] = digest([*results, *leaves])
        found["frozen bytes"] = size
        return found

    def run_frozen(self, program, batch, leaves, results, workspace, size: int) -> None:
        frozen = torch.empty(size + 256, dtype=torch.uint8, device=workspace.device)
        kept = ctypes.c_void_p(frozen.data_ptr() + -frozen.data_ptr() % 256)
        tensors = describe([*leaves, *results])
        on = torch.cuda.current_stream().cuda_stream if workspace.is_cuda else None
        head = (program.handle, ctypes.c_int64(batch), tensors, len(tensors))
        stream, bytes_kept = ctypes.c_void_p(on), ctypes.c_size_t(size)
        self.library.call("ingot_program_freeze", *head, kept, bytes_kept, stream)
        memory = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(workspace.numel())
        self.library.call("ingot_program_run_frozen", *head, *memory, kept, bytes_kept, stream)


def attempt(action):
    """What it gives, or the library's message."""
    try:
        return action()
    except RuntimeError as error:
        return {"error": str(error)}


def differences(old: dict, new: dict) -> list[str]:
    """Outputs and launches must agree; memory may shrink."""
    wrong = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        grows = key.endswith("bytes") and None not in (before, after) and after <= before
        if before != after and not grows:
            wrong.append(f"{key}: {before} before, {after} now")
    return wrong


def both(old: Build, new: Build, case: Case, device: str, precision: str) -> tuple:
    """Their programs; or None, and what the builds said against it."""
    programs, refused = [], []
    for build in (old, new):
        made = attempt(lambda b=build: b.program(case, device, precision))
        refused.append(made if isinstance(made, dict) else {})
        programs.append(made)
    return (None, refused) if any(refused) else (programs, None)


def compare_outputs(old: Build, new: Build, case: Case, device: str) -> Iterator[tuple]:
    for precision in PRECISIONS[device]:
        programs, refused = both(old, new, case, device, precision)
        if programs is None:
            yield f"{case.name}, {precision}", differences(*refused)
            continue
        for batch in BATCHES[device]:
            found = [
                attempt(lambda b=b, p=p, n=batch: b.outputs(p, case, n, device))
                for b, p in zip((old, new), programs)
            ]
            yield f"{case.name}, {precision}, batch {batch}", differences(*found)


# Launches ----------------------------------------------------------------------------------------


class Addresses:
    """Tensors of a call at made-up addresses: dense ones, or such that kernels treat otherwise."""

    LAYOUTS = ("dense", "wider rows", "unaligned", "features first")

    def __init__(self, case: Case, explained: dict, batch: int, layout: str):
        leaves = [v for v in case.graph["values"] if v["op"] in LEAVES]
        before = explained["graph"]["before"]["json"]
        results = [before["values"][r["value"]] for r in before["results"]]
        self.tensors = describe([torch.empty(0, 1, 1, 1)] * (len(leaves) + len(results)))
        for number, value in enumerate([*leaves, *results]):
            entry = self.tensors[number]
            sizes = [batch if extent == "B" else extent for extent in value["shape"]]
            dtype = DTYPES[value["dtype"]]
            entry.sizes[:], entry.strides[:] = sizes, self.strides(sizes, layout, value["op"])
            entry.data = 0x100000000 * (number + 1) + (4 if layout == "unaligned" else 0)
            entry.dtype = list(DTYPES.values()).index(dtype)
            entry.device = 0

    @staticmethod
    def strides(sizes: list[int], layout: str, op: str) -> list[int]:
        order = [3, 2, 1, 0]
        if layout == "features first" and op in ("parameter", "input"):
            order = [0, 1, 2, 3]
        strides, step = [0] * 4, 1
        for axis in order:
            strides[axis] = step
            step *= sizes[axis]
            if layout == "wider rows" and axis == 3 and op == "input":
                step += 8
        return strides


class Recorder:
    """Launches of calls on the GPU that does nothing."""

    def __init__(self, fake: Path):
        self.fake = ctypes.CDLL(str(fake))
        self.fake.fake_log_end.restype = ctypes.c_char_p

    def launches(self, build: Build, program, addresses: Addresses, batch: int) -> dict:
        head = (program.handle, ctypes.c_int64(batch), addresses.tensors, len(addresses.tensors))
        workspace = program_workspace(build, program, batch)
        memory = ctypes.c_void_p(0x9000000000), ctypes.c_size_t(workspace)
        stream, frozen = ctypes.c_void_p(0x5000), ctypes.c_void_p(0xA000000000)
        size = build.frozen_size(program)
        found: dict[str, object] = {"bytes": workspace, "frozen bytes": size}
        call = build.library.call
        found["run"] = self.log(lambda: call("ingot_program_run", *head, *memory, stream))
        if size:
            kept = frozen, ctypes.c_size_t(size)
            found["freeze"] = self.log(lambda: call("ingot_program_freeze", *head, *kept, stream))
            found["frozen"] = self.log(
                lambda: call("ingot_program_run_frozen", *head, *memory, *kept, stream)
            )
        return found

    def log(self, action) -> str:
        self.fake.fake_log_start()
        said = ""
        try:
            action()
        except RuntimeError as error:
            said = str(error)
        return self.fake.fake_log_end().decode() + said


def program_workspace(build: Build, program, batch: int) -> int:
    size = ctypes.c_size_t()
    build.library.call(
        "ingot_program_workspace_size", program.handle, ctypes.c_int64(batch), ctypes.byref(size)
    )
    return size.value


def compare_launches(old: Build, new: Build, case: Case, recorder: Recorder) -> Iterator[tuple]:
    for precision in PRECISIONS["cuda"]:
        programs, refused = both(old, new, case, "cuda", precision)
        if programs is None:
            yield f"{case.name}, {precision}", differences(*refused)
            continue
        for batch in LAUNCH_BATCHES:
            explained = programs[0].explain(batch)
            for layout in Addresses.LAYOUTS:
                addresses = Addresses(case, explained, batch, layout)
                found = [
                    recorder.launches(b, p, addresses, batch) for b, p in zip((old, new), programs)
                ]
                yield f"{case.name}, {precision}, batch {batch}, {layout}", differences(*found)


# Times -------------------------------------------------------------------------------------------


def compare_times(old: Build, new: Build, case: Case, device: str) -> Iterator[tuple]:
    """Median over rounds of new over old, the two taken in turns."""
    from statistics import median

    from ingot.bench.timers import timer_for

    batch = BATCHES[device][-1]
    timer = timer_for(torch.device(device))
    calls = []
    for build in (old, new):
        program = build.program(case, device, "fp32")
        leaves = make_leaves(case.graph, batch, 1, device)
        results = results_like(case.graph, program.explain(batch), batch, device)
        workspace = program.workspace(batch, device)
        calls.append(
            lambda _, p=program, a=(batch, leaves, results, workspace): p.run(*a)  # noqa: B023
        )
        calls[-1](0)
    ratios = []
    for number in range(ROUNDS):
        seconds = {}
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[which] = timer.time_calls(calls[which], 1, True)[0]
        ratios.append(seconds[1] / seconds[0])
    ratio = median(ratios)
    print(f"{case.name}, batch {batch}: {ratio:.3f} of the old time")
    yield case.name, [f"{ratio:.3f} of the old time"] if ratio > 1.02 else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of PyTorch's exporter, about itself
    with tempfile.TemporaryDirectory() as folder:
        if options.launches:
            fake = fake_cuda.build(Path(folder))
            for which in fake_cuda.VARIABLES:
                os.environ[which] = str(fake)
            os.environ["INGOT_CACHE_DIR"] = folder
            recorder = Recorder(fake)
        elif options.device == "cuda":
            from ingot.runtime.library import make_cuda_libraries_visible

            make_cuda_libraries_visible()
        old, new = Build(options.old), Build(options.new)
        compared = failed = 0
        dtypes = (torch.float32, torch.bfloat16) if options.launches else (torch.float32,)
        for dtype in dtypes:
            for case in cases(options.only, dtype):
                if options.launches:
                    found = compare_launches(old, new, case, recorder)
                elif options.time:
                    found = compare_times(old, new, case, options.device)
                else:
                    found = compare_outputs(old, new, case, options.device)
                for name, wrong in found:
                    compared += 1
                    failed += bool(wrong)
                    if wrong:
                        print(f"{name}, {dtype}: " + "; ".join(wrong))
    print(f"{compared} compared, {failed} differ")
    return 1 if failed or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
