"""Checks standalone files on a GPU: their bits, gradients and speed against the library's.

python check_standalone.py [MODEL ...] [--portable] [--small] [--no-timing | --times-only]

For each bundled model (default: all; a path names any other) writes the standalone file, compiles
it, and compares its ModelNew with ingot.optimize's on equal modules: outputs and buffers bitwise,
in training and eval mode, with gradients on and off, at several batch sizes, on strided inputs and
in a captured CUDA graph; gradients, first and second, with eager's in double precision; the peak
memory of a training step with eager's. Then times the original, the library and the file, side by
side in a fresh process: interleaved rounds with cold L2. --portable compiles for compute capability
8.0 with PTX, so that the portable product runs whatever the GPU.
Needs INGOT_LIBRARY or an installed package. Prints one line a case; exit status 1 if bits differ,
gradients are off, memory is above eager's and the library's, the median of a forward is above 1.01
times the library's or that of a step above 1.02 times, or anything above 1.02 times eager's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

SMALL = {"batch_size": 67, "in_features": 136, "hidden_features": 92, "out_features": 64}
_WORKSPACE = 1 << 20  # of tiny models' products, in bytes
PORTABLE = {"capabilities": {"hopper_product": False, "portable_product": True}}


def prepared(path: Path, overrides: dict, folder: Path, portable: bool):
    """(the original's file, the standalone file as a module, seconds of compilation)."""
    from ingot.model_file import constants_of, load_model_file
    from ingot.standalone_writer import Standalone

    known = constants_of(path.read_text(encoding="utf-8"), str(path))
    overrides = {k: v for k, v in overrides.items() if k in known}
    if overrides and "residual" in path.stem:
        overrides["out_features"] = overrides["in_features"]
    original = load_model_file(path, overrides)
    file = folder / f"{path.stem}_new.py"
    file.write_text(Standalone(original).render(), encoding="utf-8")
    new = load_model_file(file, class_name="ModelNew")
    namespace = sys.modules[new.Model.__module__]
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    if portable:
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0+PTX"
    begun = time.monotonic()
    namespace._ingot_extension(namespace._INGOT_PLAIN)
    return original, new, time.monotonic() - begun


def same(a, b) -> bool:
    def bits(t):
        return t.contiguous().view(torch.uint8) if t.is_floating_point() else t

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def alike(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """The same bits; or, with a tolerance, a small relative Frobenius difference."""
    if same(a, b) or tolerance == 0:
        return same(a, b)
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


def differences(label: str, ours, theirs, inputs, tolerance: float) -> list[str]:
    """Of one call each: outputs, then buffers."""
    first, second = ours(*inputs), theirs(*inputs)
    found = [] if alike(first, second, tolerance) else [f"{label}: other output bits"]
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        if not alike(a, b, tolerance):
            found.append(f"{label}: {name} has other bits")
    return found


def check_captured(ours, theirs, inputs, tolerance: float) -> list[str]:
    expected = theirs(*inputs)
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        result = ours(*inputs)
    result.fill_(-1)
    captured.replay()
    torch.cuda.synchronize()
    return [] if alike(result, expected, tolerance) else ["a captured graph gives other bits"]


def check_gradients(label: str, reference, ours, inputs, again: bool) -> list[str]:
    """Derivatives, with `again` second ones, too, against eager's in double precision, beside its
    own error."""

    def taken(module, dtype):
        module = copy.deepcopy(module).to(dtype)
        given = [t.to(dtype).requires_grad_() for t in inputs]
        wanted = [*given, *module.parameters()]
        output = module(*given)
        generator = torch.Generator("cuda").manual_seed(5)
        along = torch.randn(output.shape, device="cuda", generator=generator).to(dtype)
        if not again:
            return torch.autograd.grad(output, wanted, along, allow_unused=True)
        first = torch.autograd.grad(output, wanted, along, create_graph=True, allow_unused=True)
        kept = [g for g in first if g is not None]
        second = torch.autograd.grad(sum((g * g).sum() for g in kept), wanted, allow_unused=True)
        output = module(*given)
        plain = torch.autograd.grad(output, wanted, along, allow_unused=True)
        return [*plain, *first, *second]

    exact, eager = taken(reference, torch.float64), taken(reference, torch.float32)
    found = []
    for at, (a, b, t) in enumerate(zip(taken(ours, torch.float32), eager, exact, strict=True)):
        if t is None or t.norm() == 0:
            continue
        errors = [float((g.double() - t).norm() / t.norm()) for g in (a, b)]
        if not errors[0] <= 3 * errors[1] + 1e-5:
            found.append(
                f"{label}: gradient {at} is off by {errors[0]:.1e}, eager's {errors[1]:.1e}"
            )
    return found


def peak_of_step(module, inputs) -> int:
    """Bytes beyond what lies there before, in a forward and backward pass."""
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = module(*inputs)
        output.backward(torch.ones_like(output))
        del output
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


# A fresh process, in which nothing but the timed calls were made. argv: the original's file, the
# standalone file, the mode, whether gradients are on, whether a step is timed. Interleaved rounds
# with cold L2, in which the GPU never waits for the host; prints medians in ms.
TIME = """
import json, statistics, sys
from pathlib import Path
import ingot, torch
from ingot.bench.rounds import RoundOptions, compare
from ingot.model_file import load_model_file
path, written, mode, what = sys.argv[1:]
def made(path, name):
    torch.manual_seed(7)
    file = load_model_file(Path(path), class_name=name)
    return file, file.make_module().cuda().train(mode == "training")
(file, eager), (_, own) = made(path, "Model"), made(written, "ModelNew")
inputs = [t.cuda() for t in file.make_inputs()]
library = ingot.optimize(made(path, "Model")[1], inputs)
torch.set_grad_enabled(what != "off")
along = torch.ones_like(eager(*inputs))
def subject(module):
    def call(i):
        if what != "step":
            return module(*inputs)
        for parameter in module.parameters():
            parameter.grad = None
        module(*inputs).backward(along)
    return call
modules = {"eager": eager, "library": library, "file": own}
options = RoundOptions(rounds=11, extra_rounds=0)
found = compare({name: subject(m) for name, m in modules.items()}, torch.device("cuda"), options)
print(json.dumps({name: 1e3 * statistics.median(found.cold[name]) for name in modules}))
"""


def timed(path: Path, file: Path, mode: str, what: str) -> tuple[float, float, float]:
    """Milliseconds of eager's call, the library's and the file's."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TIME, str(path), str(file), mode, what],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-1500:])
    found = json.loads(done.stdout.splitlines()[-1])
    return found["eager"], found["library"], found["file"]


def check_times(path: Path, file: Path) -> list[str]:
    problems = []
    for mode, kinds in (("training", ("off", "on", "step")), ("eval", ("off", "on"))):
        for what in kinds:
            eager, library, own = timed(path, file, mode, what)
            print(
                f"{path.stem:28} {mode:8} gradients {what:4} eager {eager:.4f} ms, library "
                f"{library:.4f}, file {own:.4f}: {eager / own:.2f} x eager, "
                f"{own / library:.4f} of the library",
                flush=True,
            )
            most = 1.02 if what == "step" else 1.01
            if own > most * library and own > library + 0.003:
                problems.append(f"{mode}, gradients {what}: {own / library:.3f} of the library")
            if own > 1.02 * eager:
                problems.append(f"{mode}, gradients {what}: {own / eager:.3f} of eager")
    return problems


def check_model(path: Path, arguments: argparse.Namespace, folder: Path) -> list[str]:
    import ingot

    overrides = SMALL if arguments.small else {}
    original, new, seconds = prepared(path, overrides, folder, arguments.portable)
    print(f"{path.stem:28} compiled in {seconds:.1f} s", flush=True)
    if arguments.times_only:
        return check_times(path, folder / f"{path.stem}_new.py")
    torch.manual_seed(7)
    reference = original.make_module().cuda()
    torch.manual_seed(7)
    ours = new.make_module().cuda()
    inputs = [t.cuda() for t in original.make_inputs()]
    options = PORTABLE if arguments.portable else None
    theirs = ingot.optimize(copy.deepcopy(reference), inputs, precision="fp32", options=options)
    problems: list[str] = []
    full = inputs[0].shape[0]
    # The library leaves small products to cuBLAS where that is faster; a file has its own alone.
    tolerance = 1e-5 if arguments.portable and arguments.small else 0.0
    for training, gradients in itertools.product((True, False), (False, True)):
        mode = f"{'training' if training else 'eval'}, gradients {'on' if gradients else 'off'}"
        for module in (theirs, reference):  # calls that were made of one alone moved its statistics
            module.load_state_dict(ours.state_dict())
        ours.train(training)
        theirs.train(training)
        # With gradients on, a file's regions without a product are PyTorch's operators.
        allowed = max(tolerance, 1e-6) if gradients else tolerance
        with torch.set_grad_enabled(gradients):
            for batch in sorted({2, 3, 64, 67, min(full, 1000), full}):
                given = [torch.rand(batch, *t.shape[1:], device="cuda") for t in inputs]
                problems += differences(f"{mode}, batch {batch}", ours, theirs, given, allowed)
            wide = [torch.rand(67, t.shape[1] + 3, device="cuda")[:, 1:-2] for t in inputs]
            problems += differences(f"{mode}, strided", ours, theirs, wide, allowed)
            if not training and not gradients:
                problems += check_captured(ours, theirs, inputs, tolerance)
        if not gradients:
            continue
        few = [t[:256] for t in inputs]
        reference.load_state_dict(ours.state_dict())
        problems += check_gradients(mode, reference.train(training), ours, few, again=True)
        # Products over the batch are kernels where it is a multiple of eight.
        for batch in (3, 67, 104, full):
            some = [t[:batch] for t in inputs]
            what = f"{mode}, batch {batch}"
            problems += check_gradients(what, reference, ours, some, again=False)
        peaks = [peak_of_step(module, inputs) for module in (ours, reference, theirs)]
        own, eager, library = (peak >> 20 for peak in peaks)
        print(f"{path.stem:28} {mode}: peak {own} MB, eager {eager}, library {library}", flush=True)
        if peaks[0] > 1.01 * max(peaks[1:]) + _WORKSPACE:
            problems.append(f"{mode}: peak memory of {peaks[0]} bytes, eager's {peaks[1]}")
    if not arguments.no_timing and not arguments.small and not arguments.portable:
        del reference, ours, theirs
        torch.cuda.empty_cache()
        problems += check_times(path, folder / f"{path.stem}_new.py")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--small", action="store_true", help="odd, small sizes")
    parser.add_argument("--times-only", action="store_true", help="no comparison")
    parser.add_argument("--no-timing", action="store_true", help="compare bits alone")
    arguments = parser.parse_args()
    paths = sorted((ROOT / "examples").glob("*.py"))
    if arguments.models:
        paths = [
            Path(name) if name.endswith(".py") else ROOT / "examples" / f"{name}.py"
            for name in arguments.models
        ]
    failures = 0
    for path in paths:
        said: list[str] = []
        try:
            with (
                warnings.catch_warnings(record=True) as caught,
                tempfile.TemporaryDirectory() as folder,
            ):
                warnings.simplefilter("always")
                problems = check_model(path, arguments, Path(folder))
            said = [str(w.message) for w in caught if "original" in str(w.message)]
        except Exception as failure:  # noqa: BLE001 - one model must not hide the others
            problems = [f"{type(failure).__name__}: {str(failure)[:400]}"]
        problems += said  # the kernels must run, not the original's operators
        failures += bool(problems)
        print(f"{path.stem:28} {'; '.join(problems) or 'ok'}", flush=True)
        torch.cuda.empty_cache()
    print(f"{failures} of {len(paths)} models failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
