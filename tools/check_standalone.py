"""Compiles the standalone file of every bundled model with load_inline. No GPU is needed.

The files are written as `ingot optimize --standalone` writes them and compiled by their own code:
the two seed models for compute capability 8.0 and 9.0, the others for 9.0. A warning of nvcc, a
register spill, local memory, or more than 90 seconds of a core for an architecture and extension
are failures (a file has up to three: what runs without gradients, what stores what backward reads,
and backward). Of backward's kernels, rows that are read in three phases may have so many bytes of
stack that three blocks of them fit on a multiprocessor.
What was compiled before, with the same text, stays in build/standalone. Without nvcc, or with a
PyTorch without CUDA, nothing can be compiled, which is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "standalone"
SEEDS = ("gemm_bn_scale_softmax", "gemm_scale_bn")
STACK_OF_BACKWARD = 160  # bytes
LIMIT_S = 90.0  # of processor time, which a busy machine does not stretch

WRITE = """
import sys
from pathlib import Path
from ingot.model_file import load_model_file
from ingot.standalone_writer import Standalone
for model in sys.argv[2:]:
    path = Path(model)
    text = Standalone(load_model_file(path)).render()
    Path(sys.argv[1], path.name).write_text(text, encoding="utf-8")
"""

COMPILE = """
import resource, sys
from pathlib import Path
import torch
from ingot.model_file import load_model_file
file = load_model_file(Path(sys.argv[1]), class_name="ModelNew")
namespace = sys.modules[file.Model.__module__]
texts = [namespace._INGOT_PLAIN]
for others in ("_INGOT_STORING", "_INGOT_BACKWARD"):
    texts += [getattr(namespace, others)] if hasattr(namespace, others) else []
for text in texts:
    extension = namespace._ingot_extension(text)
    print("library", extension.__file__)
    if not torch.cuda.is_available():
        # Calls must end in a message, not in a crash.
        for region in namespace._IngotRegion.__subclasses__():
            try:
                getattr(extension, region.name)([torch.ones(4, 4, 4, 4)] * 99, text is not texts[0])
            except RuntimeError as error:
                assert "ModelNew: its kernels are for" in str(error), error
            else:
                raise AssertionError(region.name)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("seconds", used.ru_utime + used.ru_stime)
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def spills(cuobjdump: str, library: str) -> list[str]:
    """Functions with a stack or local memory."""
    listing = subprocess.run(
        [cuobjdump, "--dump-resource-usage", library], capture_output=True, text=True, check=True
    )
    found, kernels, name = [], 0, ""
    for line in listing.stdout.splitlines():
        function = re.match(r"\s*Function (\S+):", line)
        if function:
            name = function[1]
        usage = re.search(r"STACK:(\d+).*LOCAL:(\d+)", line)
        if usage and name:
            kernels += 1
            most = STACK_OF_BACKWARD if "_backward" in Path(library).stem else 0
            if int(usage[1]) > most or int(usage[2]):
                found.append(f"{name}: {usage[1]} bytes of stack, {usage[2]} of local memory")
            name = ""
    return found if kernels else ["the library holds no kernel"]


def check(path: Path, cuobjdump: str) -> tuple[str, list[str]]:
    """(what was done, what is wrong)."""
    architectures = "8.0;9.0" if path.stem in SEEDS else "9.0"
    begun = time.monotonic()
    result = run(
        COMPILE,
        str(path),
        TORCH_CUDA_ARCH_LIST=architectures,
        TORCH_EXTENSIONS_DIR=str(CACHE),
        NVCC_APPEND_FLAGS="-Werror all-warnings",
        MAX_JOBS="1",
    )
    seconds = time.monotonic() - begun
    if result.returncode != 0:
        return architectures, (result.stdout + result.stderr).strip().splitlines()[-25:]
    answers = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    libraries = [line.split(" ", 1)[1] for line in result.stdout.splitlines() if "library " in line]
    problems = [problem for library in libraries for problem in spills(cuobjdump, library)]
    compiled = float(answers["seconds"])
    limit = LIMIT_S * (architectures.count(";") + 1) * len(libraries)
    if compiled > limit:
        problems.append(f"compiling took {compiled:.0f} s of a core; the limit is {limit:.0f} s")
    return f"{architectures}, {compiled:.0f} s of a core, {seconds:.0f} s in all", problems


def find_cuobjdump() -> str | None:
    """The toolkit's, or the one that comes with PyTorch's Triton."""
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton else None
    return shutil.which("cuobjdump") or (folder and shutil.which("cuobjdump", path=str(folder)))


def missing() -> str | None:
    if not shutil.which("nvcc"):
        return "no nvcc"
    if not find_cuobjdump():
        return "no cuobjdump"
    import torch

    return None if torch.version.cuda else "a PyTorch without CUDA"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of bundled models (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    why = missing()
    if why:
        print(f"{why} on this machine: standalone files were not compiled")
        return 0
    models = sorted((ROOT / "examples").glob("*.py"))
    if arguments.models:
        models = [ROOT / "examples" / f"{name}.py" for name in arguments.models]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        written = run(WRITE, folder, *map(str, models))
        if written.returncode != 0:
            print(written.stdout + written.stderr, file=sys.stderr)
            return 1
        # The longest first.
        files = sorted(Path(folder).glob("*.py"), key=lambda path: path.stem not in SEEDS)
        failures, cuobjdump = 0, find_cuobjdump()
        results = pool.map(lambda path: check(path, cuobjdump), files)
        for path, (done, problems) in zip(files, results, strict=True):
            print(f"{path.stem}: {done}: {'FAILED' if problems else 'ok'}", flush=True)
            for line in problems:
                print(f"    {line}")
            failures += bool(problems)
    print(f"{len(files) - failures} of {len(files)} standalone files compile clean")
    return 1 if failures or not files else 0


if __name__ == "__main__":
    sys.exit(main())
