"""Messages between the parent and the worker: JSON headers on a socket, tensors in sealed memory.

What comes from the worker is data from untrusted code. It is never unpickled. Tensors arrive as a
file descriptor of anonymous memory that the kernel has sealed (memfd_create(2), F_SEAL_WRITE):
nobody can change, shorten or lengthen it any more, no path leads to it, so nothing can stand in
its place, and it is gone with the two processes, however they end.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import json
import math
import mmap
import os
import socket
import stat
import struct
import time
from typing import Any

import torch

_LARGEST_HEADER = 1 << 24
_ALIGNMENT = 64
_STAGE_BYTES = 16 << 20
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SEALS = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
)  # fmt: skip
_DTYPES = {
    str(d).replace("torch.", ""): d
    for d in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


class TransportError(Exception):
    """The other side sent something that is no message."""


class ClosedError(TransportError):
    """The other side closed the line."""


class TooLargeError(TransportError):
    """The other side sent more bytes than were allowed for."""


class Line:
    """One end of the connection. largest: bytes of tensors that a received message may hold."""

    def __init__(self, connection: socket.socket, largest: int | None = None) -> None:
        self._connection = connection
        self.largest = largest

    def settimeout(self, seconds: float) -> None:
        self._connection.settimeout(seconds)

    def send(self, header: dict, tensors: dict) -> None:
        header = dict(header)
        attached = []
        memory = None
        if tensors:
            memory, header["tensors"] = _sealed_memory(tensors)
            rights = array.array("i", [memory])
            attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            text = json.dumps(header).encode()
            size = struct.pack("<I", len(text))
            sent = self._connection.sendmsg([size], attached)
            self._connection.sendall(size[sent:] + text)
        finally:
            if memory is not None:
                os.close(memory)

    def receive(self, wanted_id: str | None = None, limit_s: float | None = None) -> tuple:
        """(header, tensors by name). wanted_id: what the header must carry as "id", looked at
        before anything else. limit_s: for the whole message. Raises TransportError, or
        TimeoutError."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        start, memory = self._first_bytes(deadline)
        try:
            (size,) = struct.unpack("<I", start + self._exactly(4 - len(start), deadline))
            if size > _LARGEST_HEADER:
                raise TransportError(f"a message of {size} bytes")
            header = _parsed(self._exactly(size, deadline))
            if wanted_id is not None and header.get("id") != wanted_id:
                raise TransportError("it does not answer the request")
            described = header.pop("tensors", None)
            if described is None:
                return header, {}
            if memory is None:
                raise TransportError("tensors without their memory")
            return header, _read(memory, described, self.largest)
        finally:
            if memory is not None:
                os.close(memory)

    def close(self) -> None:
        self._connection.close()

    def _first_bytes(self, deadline: float | None) -> tuple:
        """The message begins with its size, to which the descriptor is attached."""
        self._set_deadline(deadline)
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        data, ancillary, _, _ = self._connection.recvmsg(4, room, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % 4])
        for extra in descriptors[1:]:
            os.close(extra)
        memory = descriptors[0] if descriptors else None
        if not data:
            if memory is not None:
                os.close(memory)
            raise ClosedError("the line was closed")
        return data, memory

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        parts = []
        while size:
            self._set_deadline(deadline)
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise ClosedError("the line was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _set_deadline(self, deadline: float | None) -> None:
        if deadline is not None:
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))


def _parsed(text: bytes) -> dict:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"no JSON: {error}") from error
    if not isinstance(header, dict):
        raise TransportError("no JSON object")
    return header


def _sealed_memory(tensors: dict) -> tuple:
    """(file descriptor, description for the header)."""
    described, places, size = [], [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).replace("torch.", "")
        if dtype not in _DTYPES:
            raise TransportError(f"tensors of {tensor.dtype} are not supported")
        described.append([name, dtype, list(tensor.shape)])
        places.append(size)
        size += _padded(tensor.numel() * tensor.element_size())
    memory = os.memfd_create("ingot-verify", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if size:
            os.ftruncate(memory, size)
            for place, tensor in zip(places, tensors.values(), strict=True):
                _write(memory, place, tensor.detach())
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory, described


def _write(memory: int, place: int, tensor: torch.Tensor) -> None:
    """By write(2): through a mapping each page would be cleared first, and cost a fault."""
    if not tensor.numel():
        return
    if not _lies_plainly(tensor):
        if tensor.is_cuda and type(tensor) in _PLAIN:
            _write_from_gpu(memory, place, tensor)
            return
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    _write_bytes(memory, place, tensor)


def can_be_sent(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES.values()


def _lies_plainly(tensor: torch.Tensor) -> bool:
    """Whether its bytes are what they seem: a subclass may have none."""
    if type(tensor) not in _PLAIN or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    size = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    held = tensor.data_ptr() and tensor.untyped_storage().nbytes() >= size
    return bool(held) and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of its elements. (One of one element is contiguous whatever its strides.)"""
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _write_from_gpu(memory: int, place: int, tensor: torch.Tensor) -> None:
    """By way of a little pinned memory, which is at hand already."""
    flat = bytes_of(tensor.resolve_conj().resolve_neg())
    stage = _stage()
    for part in flat.split(stage.numel()):
        staged = stage[: part.numel()].copy_(part)
        _write_bytes(memory, place, staged)
        place += part.numel()


@functools.cache
def _stage() -> torch.Tensor:
    return torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True)


def _write_bytes(memory: int, place: int, tensor: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    data = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()))
    written = 0
    while written < size:
        written += os.pwrite(memory, data[written:], place + written)


def _read(memory: int, described: Any, largest: int | None) -> dict:
    """The tensors, as views of the sealed memory; what is written to them stays with us."""
    places = _places(described)
    size = places[-1][3] if places else 0
    if largest is not None and size > largest:
        raise TooLargeError(
            f"an answer of {size >> 20} MiB; no more than {largest >> 20} MiB can be right"
        )
    try:
        facts = os.fstat(memory)
        if not stat.S_ISREG(facts.st_mode) or fcntl.fcntl(memory, fcntl.F_GET_SEALS) != _SEALS:
            raise TransportError("tensors in something that is no sealed memory")
        if facts.st_size != size:
            raise TransportError(f"{facts.st_size} bytes of tensors, of which {size} are described")
        mapped = mmap.mmap(memory, size, flags=mmap.MAP_PRIVATE) if size else None
    except (OSError, ValueError) as error:
        raise TransportError(f"tensors that cannot be read: {error}") from error
    tensors = {}
    for (name, dtype, shape, end), (_, _, _, start) in zip(
        places, [("", None, (), 0), *places], strict=False
    ):
        if mapped is None or start == end:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        count = torch.Size(shape).numel()
        tensors[name] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).view(shape)
    return tensors


def _places(described: Any) -> list:
    """(name, dtype, shape, where its bytes end) of each tensor, in order."""
    places: list = []
    end = 0
    with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError, RuntimeError):
        for name, dtype_name, shape in described:
            dtype = _DTYPES[dtype_name]
            if not isinstance(name, str) or not all(
                type(n) is int and 0 <= n < 1 << 48 for n in shape
            ):
                break
            end += _padded(math.prod(shape) * dtype.itemsize)
            places.append((name, dtype, tuple(shape), end))
        if len(places) == len(described):
            return places
    raise TransportError("a description of tensors that is none")


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
