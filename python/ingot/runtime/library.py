"""Finds libingot, checks that it speaks our ABI, and declares its functions for ctypes."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import warnings
from pathlib import Path

import ingot
from ingot.log import logger
from ingot.runtime import host_product

# include/ingot/ingot.h, which this module restates.
ABI_VERSION = 2
AXES = 4

STATUS_INVALID_ARGUMENT = 1
STATUS_UNSUPPORTED = 2
STATUS_UNAVAILABLE = 3
STATUS_FAILED = 4

_STATUS_NAMES = {
    STATUS_INVALID_ARGUMENT: "invalid argument",
    STATUS_UNSUPPORTED: "unsupported",
    STATUS_UNAVAILABLE: "unavailable on this machine",
    STATUS_FAILED: "failed",
}


class IngotError(RuntimeError):
    """libingot reported an error; `status` is its ingot_status."""

    def __init__(self, message: str, status: int = STATUS_FAILED):
        super().__init__(message)
        self.status = status


class IngotWarning(UserWarning):
    """Something that runs without Ingot though it was asked for, said once."""


class LibraryNotFoundError(IngotError):
    """No usable libingot on this machine."""


class Tensor(ctypes.Structure):
    """ingot_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * AXES),
        ("strides", ctypes.c_int64 * AXES),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
    )


class Call(ctypes.Structure):
    """ingot_call: fields are 64-bit words, all of them."""

    _fields_ = (
        ("program", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("tensors", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("frozen", ctypes.c_void_p),
        ("frozen_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    )


# program, batch, tensors, count; then one piece of memory or more, each with its size; the stream.
_ON_TENSORS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
_MEMORY = (ctypes.c_void_p, ctypes.c_size_t)
_STREAM = (ctypes.c_void_p,)

_FUNCTIONS = {
    # name: (result, arguments); an ingot_status result is checked by `Library.check`.
    "ingot_abi_version": (ctypes.c_int, ()),
    "ingot_version": (ctypes.c_char_p, ()),
    "ingot_last_error": (ctypes.c_char_p, ()),
    "ingot_free": (None, (ctypes.c_void_p,)),
    "ingot_program_create": (
        ctypes.c_int,
        (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)),
    ),
    "ingot_program_destroy": (None, (ctypes.c_void_p,)),
    "ingot_program_compile": (ctypes.c_int, _ON_TENSORS),
    "ingot_program_compile_another": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int)),
    ),
    "ingot_program_prepare": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)),
    "ingot_program_workspace_size": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_size_t)),
    ),
    "ingot_program_prepare_call": (
        ctypes.c_int,
        (*_ON_TENSORS, ctypes.POINTER(ctypes.c_size_t)),
    ),
    "ingot_program_run": (ctypes.c_int, (*_ON_TENSORS, *_MEMORY, *_STREAM)),
    "ingot_program_frozen_size": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)),
    ),
    "ingot_program_freeze": (ctypes.c_int, (*_ON_TENSORS, *_MEMORY, *_STREAM)),
    "ingot_program_run_frozen": (ctypes.c_int, (*_ON_TENSORS, *_MEMORY, *_MEMORY, *_STREAM)),
    "ingot_program_call": (ctypes.c_int, (ctypes.c_void_p,)),
    "ingot_program_explain": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)),
    ),
    "ingot_program_signature": (
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)),
    ),
    "ingot_standalone_source": (
        ctypes.c_int,
        (
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_void_p),
        ),
    ),
    "ingot_evaluate_fp64": (
        ctypes.c_int,
        (ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int),
    ),
    "ingot_doctor": (ctypes.c_int, (ctypes.POINTER(ctypes.c_void_p),)),
    "ingot_set_host_product": (
        ctypes.c_int,
        (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "ingot_blas_product": (ctypes.c_int, host_product.ARGUMENTS),
    "ingot_set_host_threads": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_int)),
}


class Library:
    """libingot with its functions declared; errors become IngotError with the library's message."""

    def __init__(self, path: os.PathLike | str):
        self.path = Path(path)
        try:
            self._handle = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise LibraryNotFoundError(
                f"cannot load {self.path}: {error}", STATUS_UNAVAILABLE
            ) from error
        version = getattr(self._handle, "ingot_abi_version", None)
        if version is None:
            raise LibraryNotFoundError(f"{self.path} is not libingot", STATUS_UNAVAILABLE)
        found = version()
        if found != ABI_VERSION:
            raise LibraryNotFoundError(
                f"{self.path} speaks ABI version {found}, this Python package speaks "
                f"{ABI_VERSION}: install both from the same release"
                + (", or unset INGOT_LIBRARY" if os.environ.get("INGOT_LIBRARY") else ""),
                STATUS_UNAVAILABLE,
            )
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._handle, name, None)
            if function is None:
                raise LibraryNotFoundError(
                    f"{self.path} lacks {name}: it was built from another source than this "
                    "Python package",
                    STATUS_UNAVAILABLE,
                )
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        if self.version != ingot.__version__:
            warnings.warn(
                f"{self.path} is of release {self.version}, this Python package of "
                f"{ingot.__version__}: they fit together, but are not tested together",
                stacklevel=2,
            )

    @property
    def version(self) -> str:
        return self.ingot_version().decode()

    def check(self, status: int) -> None:
        if status:
            raise self.error(status)

    def error(self, status: int) -> IngotError:
        message = (self.ingot_last_error() or b"").decode(errors="replace")
        return IngotError(message or f"libingot: {_STATUS_NAMES.get(status, status)}", status)

    def take_json(self, pointer: ctypes.c_void_p) -> dict:
        """Decodes JSON text that the library allocated, and releases it."""
        try:
            return json.loads(ctypes.string_at(pointer.value))
        finally:
            self.ingot_free(pointer)

    def doctor(self) -> dict:
        text = ctypes.c_void_p()
        self.check(self.ingot_doctor(ctypes.byref(text)))
        return self.take_json(text)


def _candidates() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    return [
        package / "lib" / "libingot.so",
        package / "lib64" / "libingot.so",
        # A source checkout: <root>/python/ingot next to <root>/build.
        package.parent.parent / "build" / "libingot.so",
    ]


def find_library() -> Path:
    """The library that this process uses: INGOT_LIBRARY, the installed one, or the checkout's."""
    chosen = os.environ.get("INGOT_LIBRARY")
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise LibraryNotFoundError(
                f"INGOT_LIBRARY names {chosen}, which is not a file", STATUS_UNAVAILABLE
            )
        return path
    for path in _candidates():
        if path.is_file():
            return path
    looked = ", ".join(str(path) for path in _candidates())
    raise LibraryNotFoundError(
        f"libingot.so was not found (looked at {looked}): install the package, or set "
        "INGOT_LIBRARY to the library's path",
        STATUS_UNAVAILABLE,
    )


_lock = threading.Lock()
_library: Library | None = None


def library() -> Library:
    """The process's libingot, loaded once and told about PyTorch's runtime libraries."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                loaded = Library(find_library())
                logger.debug("using %s, release %s", loaded.path, loaded.version)
                if "torch" in sys.modules:
                    _share_host_threads(loaded)
                    host_product.register(loaded)
                _library = loaded
    return _library


def _loaded_libraries(prefixes: tuple[str, ...]) -> list[str]:
    """Paths of shared libraries mapped into this process whose file name starts with a prefix."""
    found = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line.rstrip("\n").partition("/")
                name = path[1] + path[2]
                if os.path.basename(name).startswith(prefixes):
                    found[name] = None
    except OSError:
        return []
    return list(found)


def _share_host_threads(loaded: Library) -> None:
    """Two OpenMP pools would spin against each other, so the library joins PyTorch's."""
    import torch

    paths = _loaded_libraries(("libgomp", "libiomp5", "libomp"))
    bundled = os.path.dirname(os.path.dirname(torch.__file__))
    # PyTorch's own copy first: numpy's or scikit-learn's may be mapped beside it.
    paths.sort(key=lambda path: not path.startswith(os.path.join(bundled, "torch")))
    for path in paths:
        try:
            runtime = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 4) | os.RTLD_NOW)
        except OSError:
            continue
        # No limit of its own: the runtime's count follows torch.set_num_threads().
        loaded.check(loaded.ingot_set_host_threads(runtime._handle, 0))
        return


_cuda_ready = False


def make_cuda_libraries_visible() -> None:
    """Maps the NVRTC and cuBLASLt that PyTorch's wheels bring, so that the library's dlopen() by
    name finds these rather than none, or those of another release."""
    global _cuda_ready
    if _cuda_ready:
        return
    import torch

    root = Path(torch.__file__).resolve().parent.parent / "nvidia"
    major = (torch.version.cuda or "").partition(".")[0]
    for pattern in (f"libnvrtc.so.{major}*", f"libcublasLt.so.{major}*"):
        if _loaded_libraries((pattern.rstrip("*"),)):
            continue
        for path in sorted(root.glob(f"*/lib/{pattern}")):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue
    _cuda_ready = True
