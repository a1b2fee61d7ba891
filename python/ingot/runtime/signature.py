"""What a call of a program binds and what it does to it, as the library says
(docs/signature-format.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPE_CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int64: 4,
    torch.bool: 5,
}
DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.bool: "bool",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# The symbolic batch size among sizes and extents (k times it: k * BATCH); "B" in a graph's JSON.
BATCH = -1


@dataclass(frozen=True)
class TensorSignature:
    """A leaf or a result. shape: extents of [batch, rows, groups, features], `BATCH` for the batch
    size; layout: "any" strides, or a "matrix"; role: a leaf's, "input", "parameter" or "buffer"."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    layout: str
    role: str | None = None

    @property
    def is_batched(self) -> bool:
        return self.shape[0] == BATCH


@dataclass(frozen=True)
class Signature:
    """leaves, results: in the order in which a call binds them. updates: positions among the leaves
    of what a call writes, in order. precision: what products of float32 are computed in, which may
    be more accurate than what was asked for. frozen: (position of a leaf, bytes) of each weight
    that can be kept packed. workspace: as the library gives it. hash: equal for programs that do
    the same."""

    name: str
    device: str
    precision: str
    leaves: tuple[TensorSignature, ...]
    results: tuple[TensorSignature, ...]
    updates: tuple[int, ...]
    frozen: tuple[tuple[int, int], ...]
    frozen_bytes: int
    workspace: dict
    hash: str

    @classmethod
    def from_json(cls, json: dict) -> Signature:
        return cls(
            name=json["name"],
            device=json["device"],
            precision=json["precision"],
            leaves=tuple(_tensor(leaf) for leaf in json["leaves"]),
            results=tuple(_tensor(result) for result in json["results"]),
            updates=tuple(json["updates"]),
            frozen=tuple((kept["leaf"], kept["bytes"]) for kept in json["frozen"]["weights"]),
            frozen_bytes=json["frozen"]["bytes"],
            workspace=json["workspace"],
            hash=json["hash"],
        )


def _tensor(json: dict) -> TensorSignature:
    return TensorSignature(
        name=json["name"],
        dtype=TORCH_DTYPES[json["dtype"]],
        shape=tuple(BATCH if extent == "B" else extent for extent in json["shape"]),
        layout=json["layout"],
        role=json.get("role"),
    )
