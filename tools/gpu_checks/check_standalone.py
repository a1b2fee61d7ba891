"""Checks standalone files on a GPU: their bits and their speed against the library's.

python check_standalone.py [MODEL ...] [--portable] [--small] [--no-timing] [--seconds S]

For each bundled model (default: all) writes the standalone file, compiles it, and compares its
ModelNew with ingot.optimize's on equal modules: outputs and buffers bit by bit, in training and
eval mode, at several batch sizes, on strided inputs and in a captured CUDA graph; then times both
in alternation. --portable compiles for compute capability 8.0 with PTX, so that the portable
product runs whatever the GPU. Needs INGOT_LIBRARY or an installed package. Prints one line a case;
exit status 1 if bits differ or the median ratio exceeds 1.02.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

SMALL = {"batch_size": 67, "in_features": 136, "hidden_features": 92, "out_features": 64}
PORTABLE = {"capabilities": {"hopper_product": False, "portable_product": True}}


def prepared(path: Path, overrides: dict, folder: Path, portable: bool):
    """(the original's file, the standalone file as a module, seconds of compilation)."""
    from ingot.model_file import constants_of, load_model_file
    from ingot.standalone_writer import Standalone, write_standalone

    known = constants_of(path.read_text(encoding="utf-8"), str(path))
    overrides = {k: v for k, v in overrides.items() if k in known}
    if overrides and "residual" in path.stem:
        overrides["out_features"] = overrides["in_features"]
    original = load_model_file(path, overrides)
    file = folder / f"{path.stem}_new.py"
    write_standalone(file, Standalone(original))
    new = load_model_file(file, class_name="ModelNew")
    namespace = sys.modules[new.Model.__module__]
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    if portable:
        os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0+PTX"
    begun = time.monotonic()
    if namespace._ingot_library() is None:
        raise RuntimeError("the file's kernels could not be compiled")
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


def time_ratio(ours, theirs, inputs, seconds: float) -> tuple[float, float, float]:
    """(median of the ratios by round, our median ms, the library's)."""

    def batch_ms(module, calls: int = 10) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            module(*inputs)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    for module in (ours, theirs):
        batch_ms(module, 5)
    rounds, begun = [], time.monotonic()
    while len(rounds) < 10 or time.monotonic() - begun < seconds:
        pair = (ours, theirs) if len(rounds) % 2 == 0 else (theirs, ours)
        took = {module: batch_ms(module) for module in pair}
        rounds.append((took[ours], took[theirs]))
    return (
        statistics.median(a / b for a, b in rounds),
        statistics.median(a for a, _ in rounds),
        statistics.median(b for _, b in rounds),
    )


def check_model(path: Path, arguments: argparse.Namespace, folder: Path) -> list[str]:
    import ingot

    overrides = SMALL if arguments.small else {}
    original, new, seconds = prepared(path, overrides, folder, arguments.portable)
    print(f"{path.stem:28} compiled in {seconds:.1f} s", flush=True)
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
    for training in (True, False):
        mode = "training" if training else "eval"
        ours.train(training)
        theirs.train(training)
        for batch in sorted({2, 3, 64, 67, min(full, 1000), full}):
            given = [torch.rand(batch, *t.shape[1:], device="cuda") for t in inputs]
            problems += differences(f"{mode}, batch {batch}", ours, theirs, given, tolerance)
        wide = [torch.rand(67, t.shape[1] + 3, device="cuda")[:, 1:-2] for t in inputs]
        problems += differences(f"{mode}, strided", ours, theirs, wide, tolerance)
        if not training:
            problems += check_captured(ours, theirs, inputs, tolerance)
        if arguments.no_timing:
            continue
        ratio, own, library = time_ratio(ours, theirs, inputs, arguments.seconds)
        print(
            f"{path.stem:28} {mode:8} {own:.4f} ms, library {library:.4f} ms, ratio {ratio:.4f}",
            flush=True,
        )
        if ratio > 1.02 and not arguments.small:
            problems.append(f"{mode}: {ratio:.3f} times the library's time")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--small", action="store_true", help="odd, small sizes")
    parser.add_argument("--no-timing", action="store_true", help="compare bits alone")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each timing")
    arguments = parser.parse_args()
    paths = sorted((ROOT / "examples").glob("*.py"))
    if arguments.models:
        paths = [ROOT / "examples" / f"{Path(name).stem}.py" for name in arguments.models]
    failures = 0
    for path in paths:
        said: list[str] = []
        try:
            with (
                warnings.catch_warnings(record=True) as caught,
                torch.no_grad(),
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
