"""Messages between the parent and the worker: JSON headers on a socket, tensors in plain files.

What comes from the worker is data from untrusted code: it is never unpickled, sizes are checked
against the file, and tensors are read into memory of the parent's own before anyone looks at them.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import torch

_LARGEST_HEADER = 1 << 26
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
    """The other side sent something that is no message, or closed the line."""


class Line:
    """One end of the connection. Tensors travel as raw bytes in one file per message."""

    def __init__(self, connection: socket.socket, folder: Path, side: str) -> None:
        self._connection = connection
        self._folder = folder
        self._side = side
        self._sent = 0

    def settimeout(self, seconds: float) -> None:
        self._connection.settimeout(seconds)

    def send(self, header: dict, tensors: dict) -> None:
        header = dict(header)
        if tensors:
            self._sent += 1
            name = f"{self._side}-{self._sent}.bin"
            header["blob"] = name
            header["tensors"] = _write_blob(self._folder / name, tensors)
        text = json.dumps(header).encode()
        self._connection.sendall(struct.pack("<I", len(text)) + text)

    def receive(self) -> tuple:
        """(header, tensors by name). Raises TransportError, or socket.timeout."""
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > _LARGEST_HEADER:
            raise TransportError(f"a message of {size} bytes")
        try:
            header = json.loads(self._exactly(size))
        except ValueError as error:
            raise TransportError(f"no JSON: {error}") from error
        if not isinstance(header, dict):
            raise TransportError("no JSON object")
        tensors = {}
        if "blob" in header:
            path = self._folder / os.path.basename(str(header.pop("blob")))
            try:
                tensors = _read_blob(path, header.pop("tensors", []))
            finally:
                path.unlink(missing_ok=True)
        return header, tensors

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise TransportError("the line was closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _write_blob(path: Path, tensors: dict) -> list:
    described = []
    with open(path, "wb") as file:
        for name, tensor in tensors.items():
            plain = tensor.detach().to("cpu").contiguous().reshape(-1)
            dtype = str(plain.dtype).replace("torch.", "")
            if dtype not in _DTYPES:
                raise TransportError(f"tensors of {tensor.dtype} are not supported")
            described.append([name, dtype, list(tensor.shape)])
            if plain.numel():
                file.write(plain.view(torch.uint8).numpy().data)
    return described


def _read_blob(path: Path, described: Any) -> dict:
    tensors = {}
    try:
        with open(path, "rb") as file:
            available = os.fstat(file.fileno()).st_size
            for name, dtype_name, shape in described:
                dtype = _DTYPES[dtype_name]
                if not all(isinstance(n, int) and n >= 0 for n in shape):
                    raise TransportError(f"shape {shape}")
                count = 1
                for extent in shape:
                    count *= extent
                size = count * torch.empty((), dtype=dtype).element_size()
                if size > available:
                    raise TransportError(f"tensor {name} is longer than its file")
                available -= size
                buffer = torch.empty(size, dtype=torch.uint8)
                if size and file.readinto(buffer.numpy().data) != size:
                    raise TransportError(f"tensor {name} ends early")
                tensors[str(name)] = buffer.view(dtype).reshape(shape)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TransportError(f"tensors that cannot be read: {error}") from error
    return tensors
