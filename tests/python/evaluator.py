"""Graphs of a few operators, evaluated in double precision by libingot, for tests."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence

import torch
from ingot.runtime.layouts import LeafLayout, TensorLayout, fill
from ingot.runtime.library import Tensor, library

DTYPES = {
    torch.float32: ("f32", 0),
    torch.float64: ("f64", 1),
    torch.float16: ("f16", 2),
    torch.bfloat16: ("bf16", 3),
    torch.int64: ("i64", 4),
    torch.bool: ("bool", 5),
}


def axes_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor over [batch, rows, groups, features]: [F], [N, F] and [N, C, L] as they stand."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        return tensor[:, :, None, :]
    if tensor.dim() == 2:
        return tensor[:, None, None, :]
    return tensor.reshape(1, 1, 1, -1) if tensor.is_contiguous() else tensor[None, None, None, :]


def describe(view: torch.Tensor) -> Tensor:
    assert view.dim() == 4
    tensor = Tensor()
    tensor.data = view.data_ptr()
    tensor.sizes[:] = view.shape
    tensor.strides[:] = view.stride()
    tensor.dtype = DTYPES[view.dtype][1]
    tensor.device = -1
    return tensor


class GraphUnderTest:
    """Collects values; every leaf is bound to the tensor that it was made from."""

    def __init__(self) -> None:
        self.values: list[dict] = []
        self.bindings: list[torch.Tensor] = []
        self.batch: int | None = None

    def append(self, value: dict) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def leaf(self, tensor: torch.Tensor, role: str = "input", batched: bool | None = None) -> int:
        """A leaf over `tensor`; batched by default where it has two axes or more."""
        view = axes_view(tensor)
        batched = tensor.dim() >= 2 if batched is None else batched
        shape: list = list(view.shape)
        if batched:
            assert self.batch in (None, shape[0])
            self.batch = shape[0]
            shape[0] = "B"
        self.bindings.append(view)
        name = f"leaf{len(self.bindings)}"
        return self.append(
            {"op": role, "name": name, "dtype": DTYPES[tensor.dtype][0], "shape": shape}
        )

    def constant(self, value: float | str) -> int:
        return self.append({"op": "constant", "value": value})

    def op(self, name: str, *args: int, dtype: torch.dtype | None = None, **attributes) -> int:
        """An operator; `dtype` declares what its result must be."""
        value: dict = {"op": name, "args": list(args), "attributes": attributes}
        if dtype is not None:
            value["dtype"] = DTYPES[dtype][0]
        return self.append(value)

    def evaluate(self, value: int, like: torch.Tensor) -> torch.Tensor:
        """The value in f64, in the shape of `like` (its truth); buffers of updates are written."""
        graph = {
            "ingot_graph": 1,
            "values": self.values,
            "results": [{"value": value, "name": "y"}],
        }
        result = torch.full(like.shape, -777.0, dtype=torch.float64)
        tensors = [describe(view) for view in [*self.bindings, axes_view(result)]]
        array = (Tensor * len(tensors))(*tensors)
        loaded = library()
        batch = 1 if self.batch is None else self.batch
        loaded.check(
            loaded.ingot_evaluate_fp64(json.dumps(graph).encode(), batch, array, len(tensors))
        )
        return result


def evaluate_fp64(
    graph: dict,
    tensors: Sequence[torch.Tensor],
    leaf_layouts: Sequence[LeafLayout],
    result_layouts: Sequence[TensorLayout],
) -> list[torch.Tensor]:
    """The library's reference evaluation of a graph in double precision, on host tensors."""
    leaves = [v for v in graph["values"] if v["op"] in ("input", "parameter", "buffer")]
    array = (Tensor * (len(tensors) + len(graph["results"])))()
    batch = 1
    for index, (tensor, layout) in enumerate(zip(tensors, leaf_layouts)):
        sizes, strides = layout.sizes_and_strides(tensor)
        if leaves[index]["shape"][0] == "B":
            batch = sizes[0]
        fill(array[index], sizes, strides, tensor.dtype, -1)
        array[index].data = tensor.data_ptr() + layout.offset(tensor)
    results = []
    entries = iter(range(len(tensors), len(array)))
    for layout in result_layouts:
        sizes, strides = layout.allocation(batch)
        result = torch.empty_strided(sizes, strides, dtype=torch.float64, device="cpu")
        for extents, along, offset in layout.in_graph(batch):
            entry = array[next(entries)]
            fill(entry, extents, along, torch.float64, -1)
            # The layout counts in the dtype that the result has elsewhere.
            entry.data = result.data_ptr() + offset // layout.dtype.itemsize * 8
        results.append(result)
    loaded = library()
    loaded.check(
        loaded.ingot_evaluate_fp64(
            json.dumps(graph).encode(), batch, ctypes.addressof(array), len(array)
        )
    )
    return results


def assert_same(actual: torch.Tensor, expected: torch.Tensor, scale=1.0, tolerance=1e-11) -> None:
    """Equal up to rounding: NaN and infinities in the same places, and errors within
    tolerance · (|expected| + scale); scale: what rounding errors of the formula are relative to."""
    expected = expected.to(torch.float64)
    assert actual.shape == expected.shape
    finite = expected.isfinite()
    matching = torch.where(
        finite,
        (actual - expected).abs() <= tolerance * (expected.abs() + scale),
        (actual == expected) | (actual.isnan() & expected.isnan()),
    )
    if not bool(matching.all()):
        where = tuple((~matching).nonzero()[0].tolist())
        raise AssertionError(
            f"at {where}: {actual[where].item()!r}, PyTorch gives {expected[where].item()!r}"
        )
