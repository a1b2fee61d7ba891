"""Compiles every kernel for every supported architecture, with nvcc and with NVRTC.

Two kinds of source: each header of kernels/ on its own (it must stand alone), and the kernels that
`ingot explain --kernels-out` generates for the bundled models. A warning, a register spill, local
memory or a serialised wgmma (C7508, C7517, C7518) is a failure. No GPU is needed. What compiled
cleanly before, with the same text, flags and compiler, is not compiled again.

--quick: by NVRTC alone, which is what the library uses, and of the generated kernels as many as
between them instantiate each template, products with each tile.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "kernels"
CACHE = ROOT / "build" / "kernels"
ARCHITECTURES = ("sm_80", "sm_90a")
STANDARD = "-std=c++17"

# What the compilers may print that must not be there.
BAD_LINE = re.compile(r"warning|C7508|C7517|C7518|error", re.IGNORECASE)
RESOURCES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Job:
    compiler: str  # "nvcc" or "NVRTC"
    name: str
    source: str
    architecture: str


def complaints(log: str) -> list[str]:
    """Lines of a compiler's log that fail the check."""
    bad = [line.strip() for line in log.splitlines() if BAD_LINE.search(line)]
    for match in RESOURCES.finditer(log):
        if any(int(number) for number in match.groups()):
            bad.append(match.group(0))
    return bad


class Nvcc:
    def __init__(self, path: str):
        self.path = path
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        self.version = version.stdout.strip().splitlines()[-1]

    def compile(self, source: str, architecture: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cu"
            file.write_text(source)
            command = [self.path, STANDARD, f"-arch={architecture}", "-cubin", "-O3"]
            command += ["-Werror", "all-warnings", "-Xptxas", "-v", "-I", str(KERNELS)]
            command += ["-o", str(Path(folder) / "kernel.cubin"), str(file)]
            result = subprocess.run(command, capture_output=True, text=True)
        log = result.stdout + result.stderr
        return log if result.returncode == 0 else f"{log}\nerror: nvcc failed"


class Nvrtc:
    """NVRTC as the library uses it: headers from memory, no include path."""

    def __init__(self, path: str):
        # NVRTC opens its builtins by bare name, which finds them only if they are loaded already
        # where (as in PyTorch's wheels) they are in no directory that the loader searches.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            if ".alt." not in builtins.name:
                ctypes.CDLL(str(builtins))
        self.library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"NVRTC {major.value}.{minor.value}"
        self.headers = {
            str(file.relative_to(KERNELS)): file.read_bytes()
            for file in sorted(KERNELS.rglob("*.cuh"))
        }

    def compile(self, source: str, architecture: str) -> str:
        program = ctypes.c_void_p()
        count = len(self.headers)
        texts = (ctypes.c_char_p * count)(*self.headers.values())
        names = (ctypes.c_char_p * count)(*(name.encode() for name in self.headers))
        self.library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", count, texts, names
        )
        flags = [f"-arch={architecture}".encode(), STANDARD.encode(), b"--ptxas-options=-v"]
        status = self.library.nvrtcCompileProgram(
            program, len(flags), (ctypes.c_char_p * len(flags))(*flags)
        )
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self.library.nvrtcGetProgramLog(program, buffer)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        log = buffer.value.decode(errors="replace")
        return log if status == 0 else f"{log}\nerror: NVRTC failed ({status})"


def find_nvcc() -> Nvcc | None:
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Nvcc(path) if path else None


def find_nvrtc() -> Nvrtc | None:
    """NVRTC of the PyTorch of this Python, else of a CUDA installation."""
    candidates = []
    for entry in sys.path:
        nvidia = Path(entry) / "nvidia"
        if nvidia.is_dir():
            candidates += sorted(nvidia.glob("*/lib/libnvrtc.so.*"))
    candidates += sorted(Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*"))
    for candidate in candidates:
        if "-builtins" in candidate.name or ".alt." in candidate.name:
            continue
        try:
            return Nvrtc(str(candidate))
        except OSError:
            continue
    return None


def header_sources() -> dict[str, str]:
    sources = {}
    for file in sorted(KERNELS.rglob("*.cuh")):
        path = str(file.relative_to(KERNELS))
        sources[path] = f'#include "{path}"\n'
    return sources


# One process for all models: importing PyTorch takes longer than explaining a model.
EXPLAIN = """
import json, sys
from ingot.cli import main
for arguments in json.loads(sys.argv[1]):
    print("ingot", *arguments, flush=True)
    main(arguments, standalone_mode=False)
"""


# A bundled model in 16 bits.
HALF_MODEL = """
import importlib.util
import sys

import torch

# By a name that can be imported: TorchDynamo asks for it.
spec = importlib.util.spec_from_file_location({name!r}, {path!r})
original = sys.modules[{name!r}] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(original)
get_init_inputs = original.get_init_inputs


class Model(original.Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.to({dtype})


def get_inputs():
    return [tensor.to({dtype}) for tensor in original.get_inputs()]
"""
# Rows of a result that do not start at multiples of 16 bytes, as a vocabulary's of 50257 words.
UNEVEN_MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(768, 50257, dtype={dtype})

    def forward(self, x):
        return torch.relu(self.head(x)) + 1


def get_inputs():
    return [torch.rand(4096, 768).to({dtype})]


def get_init_inputs():
    return []
"""
# Running sums: of rows of a warp, which a vector divides or not, and of a block.
SCAN_MODEL = """
import torch


class Model(torch.nn.Module):
    def forward(self, *rows):
        return [torch.tanh(torch.cumsum(torch.relu(x) * 2, dim=1)) for x in rows]


def get_inputs():
    return [torch.rand(8, length).to({dtype}) for length in (60, 1001, 20000)]


def get_init_inputs():
    return []
"""
HALF_MODELS = ("gemm_scale_bn", "gemm_bn_scale_softmax", "linear_gelu")
# Under tf32: a bundled model and its constants, so that each tile of the tf32 product is met.
TF32_MODELS = (
    *(("gemm_scale_bn", {"batch_size": size}) for size in (16, 128, 256, 1024, 2048)),
    ("gemm_scale_bn", {"batch_size": 2048, "out_features": 4099}),
    ("gemm_scale_bn", {"batch_size": 128, "in_features": 4096, "out_features": 1024}),
    ("gemm_scale_bn_large", {}),
    ("gemm_bn_scale_softmax", {}),
    ("linear_gelu", {}),
)
# The same under high: each of its tiles, stored by TMA and not.
HIGH_MODELS = (
    ("gemm_scale_bn", {}),
    ("gemm_scale_bn", {"batch_size": 640, "out_features": 4096}),
    ("gemm_scale_bn", {"batch_size": 2048, "out_features": 4099}),
    ("gemm_scale_bn", {"batch_size": 1536, "out_features": 1024}),
    ("gemm_scale_bn", {"batch_size": 8192, "in_features": 1024, "out_features": 4099}),
    ("gemm_scale_bn", {"batch_size": 16384, "out_features": 128}),
    ("gemm_scale_bn_large", {}),
    ("gemm_bn_scale_softmax", {}),
    ("linear_gelu", {}),
)
# Models whose products hand their results on as halves, and their extents: each tile with halves
# for its samples, its result, and both.
BLOCK_CONSTANTS = ("batch_size", "in_features", "out_features")
HANDED_MODELS = (
    ("three_layer_sequential", (16384, 1024, 1024)),
    ("three_layer_sequential", (7168, 1024, 1024)),
    ("three_layer_sequential", (6272, 512, 512)),
    ("residual_mlp_block", (1024, 1024, 4096)),
)


# Rows that no multiprocessor keeps: {norm} in front of a softmax is a phase more.
LONG_ROWS_MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.images = torch.nn.GroupNorm(2, 32, dtype={dtype})
        self.all = {norm}

    def forward(self, images, rows):
        return self.images(images), torch.softmax(self.all(rows) * 2, dim=1), rows.softmax(1)


def get_inputs():
    return [torch.rand(4, 32, 512, 512).to({dtype}), torch.rand(4, {elements}).to({dtype})]


def get_init_inputs():
    return []
"""


def long_rows_models(folder: Path) -> list[Path]:
    """Read in waves, by blocks that stay, and by clusters that keep all or a part, some of which no
    vector divides; of two phases."""
    models = []
    for elements, dtype in (
        (1 << 23, "torch.float32"),
        (1 << 21, "torch.float32"),
        (1 << 21, "torch.bfloat16"),
        (1 << 18, "torch.float32"),
        (1 << 18, "torch.bfloat16"),
        (50257, "torch.float32"),
        (50257, "torch.bfloat16"),
    ):
        norm = f"torch.nn.LayerNorm(({elements},), dtype={dtype})"
        path = folder / f"long_rows_{elements}_{dtype.removeprefix('torch.')}.py"
        text = LONG_ROWS_MODEL.format(elements=elements, dtype=dtype, norm=norm)
        path.write_text(text, encoding="utf-8")
        models.append(path)
    return models


def scan_models(folder: Path) -> list[Path]:
    models = []
    for dtype in ("float32", "bfloat16", "float16"):
        models.append(folder / f"scan_{dtype}.py")
        models[-1].write_text(SCAN_MODEL.format(dtype=f"torch.{dtype}"), encoding="utf-8")
    return models


def half_models(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    models = []
    for name in HALF_MODELS:
        for dtype in ("torch.bfloat16", "torch.float16"):
            path = folder / f"{name}_{dtype.removeprefix('torch.')}.py"
            original = str(ROOT / "examples" / f"{name}.py")
            path.write_text(
                HALF_MODEL.format(name=f"whole_{name}", path=original, dtype=dtype),
                encoding="utf-8",
            )
            models.append(path)
    for dtype in ("torch.bfloat16", "torch.float16"):
        models.append(folder / f"uneven_{dtype.removeprefix('torch.')}.py")
        models[-1].write_text(UNEVEN_MODEL.format(dtype=dtype), encoding="utf-8")
    return models


def generated_sources(architecture: str, folder: Path) -> dict[str, str]:
    """Kernels of the bundled models, training and eval mode, as the command line writes them; of
    some in 16 bits, under tf32 and under high too."""
    models = [
        model
        for model in sorted((ROOT / "examples").glob("*.py"))
        if "class Model" in model.read_text(encoding="utf-8")
    ]
    models += half_models(folder / "half")
    models += [*long_rows_models(folder), *scan_models(folder)]
    options = ["--device", "cuda", "--sm", re.sub(r"\D", "", architecture), "--mode", "both"]
    options.append("--no-kernels")
    commands = {model.stem: ["explain", str(model), *options] for model in models}
    if architecture == "sm_90a":
        for precision, chosen in (("tf32", TF32_MODELS), ("high", HIGH_MODELS)):
            for number, (name, constants) in enumerate(chosen):
                command = ["explain", str(ROOT / "examples" / f"{name}.py"), *options]
                command += ["--precision", precision]
                for key, value in constants.items():
                    command += ["--set", f"{key}={value}"]
                commands[f"{name}_{precision}_{number}"] = command
        for name, sizes in HANDED_MODELS:
            command = ["explain", str(ROOT / "tests" / "models" / f"{name}.py"), *options]
            for key, value in zip(BLOCK_CONSTANTS, sizes, strict=True):
                command += ["--set", f"{key}={value}"]
            commands["_".join((name, *map(str, sizes)))] = command
    for name, command in commands.items():
        command += ["--kernels-out", str(folder / architecture / name)]
    result = subprocess.run(
        [sys.executable, "-c", EXPLAIN, json.dumps([*commands.values()])],
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise SystemExit(
            f"ingot explain failed for {architecture}:\n{result.stdout[-4000:]}"
            f"{result.stderr[-4000:]}"
        )
    sources = {}
    for name in commands:
        files = sorted((folder / architecture / name).rglob("*.cu"))
        if not files:
            raise SystemExit(f"ingot explain wrote no kernels of {name} for {architecture}")
        for file in files:
            sources[f"{name}/{file.name}"] = file.read_text(encoding="utf-8")
    return sources


def templates(source: str) -> set[str]:
    """What a kernel includes itself, and what it instantiates: tiles with all their numbers, and
    whether a product gathers statistics."""
    includes = re.findall(r'^#include "([^"]+)"', source, re.MULTILINE)
    tiles = re.findall(r"\w+Config<[^>]*>|kMoments = \d+", source)
    return {*includes, *tiles, *re.findall(r"\b([a-z_]+)<(?:ingot|\w+Config|\d)", source)}


def covering(sources: dict[str, str]) -> dict[str, str]:
    """The longest ones first, which need most registers: those that have a template which none
    before them has."""
    seen: set[str] = set()
    chosen = {}
    for name, source in sorted(sources.items(), key=lambda item: (-len(item[1]), item[0])):
        if not templates(source) <= seen:
            seen |= templates(source)
            chosen[name] = source
    return chosen


def run(job: Job, compilers: dict[str, Nvcc | Nvrtc], kernels_hash: str) -> list[str]:
    compiler = compilers[job.compiler]
    text = "\0".join([compiler.version, job.architecture, STANDARD, job.source, kernels_hash])
    stamp = CACHE / hashlib.sha256(text.encode()).hexdigest()
    if stamp.exists():
        return []
    bad = complaints(compiler.compile(job.source, job.architecture))
    if not bad:
        stamp.touch()
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()

    found = {"nvcc": find_nvcc(), "NVRTC": find_nvrtc()}
    for name, compiler in found.items():
        print(f"{name}: {compiler.version if compiler else 'not on this machine, left out'}")
    compilers = {name: compiler for name, compiler in found.items() if compiler}
    if not compilers:
        print("neither compiler is here: nothing was checked", file=sys.stderr)
        return 1
    if arguments.quick:
        compilers = {"NVRTC": compilers["NVRTC"]} if "NVRTC" in compilers else compilers
    CACHE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for file in [Path(__file__), *sorted(KERNELS.rglob("*.cuh"))]:
        digest.update(file.read_bytes())

    print("generating the kernels of the bundled models", flush=True)
    jobs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(min(arguments.jobs, len(ARCHITECTURES))) as pool,
    ):
        generated = pool.map(lambda name: generated_sources(name, Path(folder)), ARCHITECTURES)
        for architecture, kernels in zip(ARCHITECTURES, generated, strict=True):
            sources = header_sources() | (covering(kernels) if arguments.quick else kernels)
            jobs += [
                Job(compiler, name, source, architecture)
                for name, source in sources.items()
                for compiler in compilers
            ]
    failures = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda job: run(job, compilers, digest.hexdigest()), jobs)
        for number, (job, bad) in enumerate(zip(jobs, results, strict=True), 1):
            label = f"{job.compiler} {job.architecture} {job.name}"
            print(f"[{number}/{len(jobs)}] {label}: {'FAILED' if bad else 'ok'}", flush=True)
            for line in bad:
                print(f"    {line}")
            failures += bool(bad)
    print(f"{len(jobs) - failures} of {len(jobs)} compilations clean")
    return 1 if failures or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
