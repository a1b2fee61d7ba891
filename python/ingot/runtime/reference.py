"""The library's reference: what a graph's results are in double precision."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence

import torch

from ingot.runtime import library as _library
from ingot.runtime.layouts import LeafLayout, TensorLayout, fill
from ingot.runtime.library import library


def evaluate_fp64(
    graph: dict,
    tensors: Sequence[torch.Tensor],
    leaf_layouts: Sequence[LeafLayout],
    result_layouts: Sequence[TensorLayout],
) -> list[torch.Tensor]:
    """The library's reference evaluation of a graph in double precision, on host tensors."""
    leaves = [v for v in graph["values"] if v["op"] in ("input", "parameter", "buffer")]
    array = (_library.Tensor * (len(tensors) + len(graph["results"])))()
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
