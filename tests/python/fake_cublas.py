"""Builds what stands for cuBLAS, the driver and a GPU behind libingot_blas.so."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from ingot.runtime.library import find_library

HERE = Path(__file__).resolve().parent
# Libraries that multiply: how their calls of cuBLAS are bound.
USERS = {
    "libnow.so": ("-Wl,-z,now,-z,relro", "-l:libcublas.so.13"),
    "liblazy.so": ("-Wl,-z,lazy,-z,norelro", "-l:libcublas.so.13"),
    "libdirect.so": ("-fno-plt", "-l:libcublas.so.13"),
    "libold.so": ("-Wl,-z,lazy", "-l:libcublas.so.12"),
    "libopens.so": ("-DOPENS",),
}
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Fakes:
    folder: Path
    blas: Path  # libingot_blas.so

    def environment(self, preload: bool = True, **more: str) -> dict:
        added = {
            "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{HERE}",
            "LD_LIBRARY_PATH": str(self.folder),
            "INGOT_LIBCUDA": str(self.folder / "libcuda.so.1"),
            "INGOT_LIBRARY": str(self.folder / "libingot.so"),
            "FAKE_REAL_INGOT": str(find_library()),
            **({"LD_PRELOAD": str(self.blas)} if preload else {}),
            **more,
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("INGOT", "NVIDIA"))}
        return {**kept, **added}

    def run(self, command: list, **environment) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            env=self.environment(**environment),
            check=False,
        )


def blas_library() -> Path:
    return find_library().with_name("libingot_blas.so")


def compile_c(*options) -> None:
    subprocess.run(["gcc", "-O3", "-Wall", "-Werror", *map(str, options)], check=True)


def built_or_skipped(folder: Path) -> Fakes:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    if not blas_library().is_file():
        pytest.skip("libingot_blas.so is not built beside libingot.so")
    return build(folder)


def build(folder: Path) -> Fakes:
    """Needs gcc. cuBLAS's symbols have versions, as the real library's have."""
    versions = folder / "versions.map"
    versions.write_text("libcublas.so.13 { global: cublas*; fake*; };\n")
    shared = ("-shared", "-fPIC", "-I", ROOT / "include")
    script = f"-Wl,--version-script={versions}"
    # The last is another copy of cuBLAS, of another release.
    for name in ("libcublas.so.13", "libcublasLt.so.13", "libcublas.so.12"):
        # One source for all: what a process finds in one of them is never asked of the other.
        soname = f"-Wl,-soname,{name}"
        compile_c(*shared, script, soname, HERE / "fake_cublas.c", "-o", folder / name)
    compile_c(*shared, HERE / "fake_driver.c", "-o", folder / "libcuda.so.1")
    compile_c(*shared, HERE / "cpu_ingot.c", "-o", folder / "libingot.so", "-ldl")
    linked = (HERE / "blas_program.c", "-L", folder, "-l:libcublas.so.13", "-ldl")
    compile_c(*linked, "-o", folder / "linked")
    first = ("-L", blas_library().parent, f"-l:{blas_library().name}")
    compile_c(linked[0], "-Wl,--no-as-needed", *first, *linked[1:], "-o", folder / "linked_first")
    compile_c("-DOPENS", HERE / "blas_program.c", "-ldl", "-o", folder / "opens")
    for name, options in USERS.items():
        user = ("-shared", "-fPIC", "-DLIBRARY", HERE / "blas_program.c", "-o", folder / name)
        compile_c(*user, "-L", folder, *options, "-ldl")
    (folder / blas_library().name).symlink_to(blas_library())
    return Fakes(folder, blas_library())
