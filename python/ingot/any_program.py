"""The large fp32 products of this process on Ingot: `ingot run` for a process that already runs."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ingot.runtime.library import IngotError, IngotWarning, find_library

_NAME = "libingot_blas.so"
# Libraries that ask for cuBLAS's functions by name and keep what they got.
_KEEPERS = {"cupy_backends.cuda.libs.cublas": "CuPy", "jaxlib": "JAX"}

_lock = threading.RLock()
_library: ctypes.CDLL | None = None
_said: set[str] = set()
_wanted = False  # by enable()
_blocks = 0  # of fast_products(), on all threads


def enable() -> None:
    """From now on the large fp32 products that this process gives to cuBLAS run on Ingot, in every
    library and on every thread: those of libraries that are loaded, and of those that are loaded
    later. Calls nothing of CUDA, and costs nothing before the first product.

    A library that asked for cuBLAS's functions by name before, as CuPy and JAX do, keeps what it
    got: call this before you import it. A warning says so, once, and names libraries whose products
    go to a second copy of cuBLAS, which is left alone. `ingot run` has neither limit. What becomes
    of a product is as there: docs/howto/any-program.md. Does nothing under INGOT_BLAS=off.
    """
    global _wanted
    with _lock:
        _switch_on()
        _wanted = True


def disable() -> None:
    """Undoes enable(): all products are cuBLAS's again, also inside of fast_products()."""
    global _wanted
    with _lock:
        _wanted = False
        if _library is not None:
            _library.ingot_blas_disable()


@contextmanager
def fast_products() -> Iterator[None]:
    """enable(), and at the end of the block what was before. Blocks may overlap on several threads:
    it is the whole process that they switch."""
    global _blocks
    with _lock:
        _switch_on()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and not _wanted:
                _loaded().ingot_blas_disable()


def _loaded() -> ctypes.CDLL:
    global _library
    if _library is None:
        path = find_library().resolve().with_name(_NAME)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise IngotError(f"{path}, which takes products, cannot be loaded: {error}") from error
        library.ingot_blas_unreached.restype = ctypes.c_char_p
        _library = library
    return _library


def _switch_on() -> None:
    came_before = [] if _library is not None else [m for m in _KEEPERS if m in sys.modules]
    library = _loaded()
    reached = library.ingot_blas_enable()
    if reached < 0 or library.ingot_blas_preloaded():
        return
    for module in came_before:
        _warn(
            f"{_KEEPERS[module]} was imported before ingot.enable(): products whose functions it "
            "has already asked cuBLAS for stay there. Call ingot.enable() first, or use `ingot run`"
        )
    version = getattr(sys.modules.get("torch"), "version", None)
    if reached == 0 and getattr(version, "cuda", None) is not None:
        _warn("PyTorch's products are not reached: it does not load cuBLAS as a library")
    for path in library.ingot_blas_unreached().decode(errors="replace").splitlines():
        _warn(f"products of {path} are not reached: they go to a second copy of cuBLAS")


def _warn(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(f"ingot: {text}.", IngotWarning, stacklevel=5)
