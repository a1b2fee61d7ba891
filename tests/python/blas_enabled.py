"""What ingot.enable() does to libraries that multiply by cuBLAS. `python blas_enabled.py NAME` in a
process that test_blas_enable.py starts: prints what NAME found, as JSON."""

from __future__ import annotations

import _ctypes
import ctypes
import json
import mmap
import sys
import threading
import time
import types
import warnings

import ingot

TAKEN, LIBRARY = 0, 2  # 1 and 3: wrong
LINKED = ("libnow.so", "liblazy.so", "libdirect.so")


def user(name: str):
    return ctypes.CDLL(name).user_multiplies


def thrice(call) -> list:
    """As it comes, on, off, on again; and leaves it off."""
    found = [call()]
    for switch in (ingot.enable, ingot.disable, ingot.enable):
        switch()
        found.append(call())
    ingot.disable()
    return found


def loaded_before() -> dict:
    return {name: thrice(user(name)) for name in LINKED}


def called_before() -> dict:
    """Their entries have been used, and filled, when they are redirected."""
    calls = {name: user(name) for name in LINKED}
    first = [call() for call in calls.values()]
    return {"first": first, **{name: thrice(call) for name, call in calls.items()}}


def loaded_after() -> dict:
    ingot.enable()
    found = {name: user(name)() for name in (*LINKED, "libopens.so")}
    ingot.disable()
    return {"on": found, "off": {name: user(name)() for name in found}}


def asked_before() -> list:
    """A library that keeps what dlsym gave it."""
    call = user("libopens.so")
    return thrice(call)


def tables_as_they_were() -> dict:
    """What the tables of a library hold, and how its pages may be used, before and afterwards."""
    call = user("libnow.so")
    call()

    def state() -> list:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            parts = [line.split()[:2] for line in maps if "libnow.so" in line]
        closed = [p for p in parts if p[1].startswith("r--")]
        held = []
        for part, _ in closed:
            begin, end = (int(text, 16) for text in part.split("-"))
            held.append(hash(ctypes.string_at(begin, end - begin)))
        return [parts, held]

    before = state()
    ingot.enable()
    during = state()
    ingot.disable()
    return {"changed": before[1] != during[1], "parts": before[0] == during[0],
            "restored": before == state()}  # fmt: skip


def unloaded() -> list:
    """A library goes while its products are redirected, and another comes."""
    library = ctypes.CDLL("libnow.so")
    ingot.enable()
    found = [library.user_multiplies()]
    _ctypes.dlclose(library._handle)
    hold = [mmap.mmap(-1, 1 << 20) for _ in range(8)]  # where it was, something else may be
    ingot.disable()
    ingot.enable()
    found.append(user("libdirect.so")())
    del hold
    return found


def two_copies() -> dict:
    first, second = user("libnow.so"), user("libold.so")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ingot.enable()
        ingot.enable()
    return {"found": [first(), second()], "said": [str(w.message) for w in said]}


def came_too_late() -> list:
    sys.modules["jaxlib"] = types.ModuleType("jaxlib")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ingot.enable()
        ingot.disable()
        ingot.enable()
    return [str(w.message) for w in said]


def blocks() -> list:
    call = user("libnow.so")
    found = [call()]
    with ingot.fast_products():
        found.append(call())
        with ingot.fast_products():
            found.append(call())
        found.append(call())
    found.append(call())
    ingot.enable()
    with ingot.fast_products():
        pass
    found.append(call())
    try:
        with ingot.fast_products():
            ingot.disable()
            found.append(call())
            raise KeyError
    except KeyError:
        found.append(call())
    return found


def threads() -> dict:
    """Products on some threads while others switch and load."""
    call, until, wrong = user("libnow.so"), time.monotonic() + 2.0, []
    call()

    def multiply() -> None:
        while time.monotonic() < until:
            if call() & 1:
                wrong.append("product")

    def switch() -> None:
        while time.monotonic() < until:
            with ingot.fast_products():
                time.sleep(0.001)

    def load() -> None:
        while time.monotonic() < until:
            library = ctypes.CDLL("libopens.so")
            _ctypes.dlclose(library._handle)

    jobs = [threading.Thread(target=job) for job in (multiply, multiply, switch, switch, load)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return {"wrong": wrong, "after": call()}


def idle() -> list:
    """No CUDA library, and not libingot.so: nothing was multiplied."""
    ingot.enable()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line for line in maps if "libcu" in line or "libingot.so" in line]


def pytorch() -> list:
    """How many of PyTorch's entries lead to Ingot: enabled before it comes, and again after it."""
    ingot.enable()
    import torch
    from ingot import any_program

    library = any_program._loaded()
    found = [torch.version.cuda is not None, library.ingot_blas_enable()]
    ingot.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ingot.enable()
    return found


def ingots_own() -> int:
    """Where libingot.so's own calls go."""
    library = ctypes.CDLL("libcublasLt.so.13")
    own = ctypes.CDLL("libingot.so")
    found = ctypes.cast(library.cublasLtMatmul, ctypes.c_void_p)
    ingot.enable()
    return own.fake_finds(ctypes.c_void_p(library._handle), found)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
