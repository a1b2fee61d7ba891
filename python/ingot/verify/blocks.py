"""Large tensors on a CPU in blocks that stay in a processor's cache.

A temporary of hundreds of megabytes is fresh memory each time, which costs more than what is
computed in it; and operators this small need no team of threads, so that the blocks share the
processors among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

ELEMENTS = 1 << 15
_FEWEST_A_THREAD = 8


def parts_of(value: torch.Tensor) -> list:
    """Views that make up `value`; of one that is not on a CPU, or cannot be cut, itself."""
    if value.device.type != "cpu" or value.numel() <= ELEMENTS:
        return [value]
    if value.is_contiguous():
        return list(value.view(-1).split(ELEMENTS))
    return list(value.split(max(1, ELEMENTS * value.shape[0] // value.numel())))


def rows_of_parts(value: torch.Tensor) -> list:
    """Slices of the rows that make up a matrix on a CPU, in blocks; else of all of them."""
    if value.device.type != "cpu" or value.dim() != 2 or value.numel() <= ELEMENTS:
        return [slice(None)]
    step = max(1, ELEMENTS // value.shape[1])
    return [slice(start, start + step) for start in range(0, value.shape[0], step)]


def each(function: Callable[[int, Any], Any], jobs: list) -> list:
    """[function(number, job), ...], by as many threads as PyTorch has, without gradients."""

    @torch.no_grad()
    def share(first: int, step: int) -> list:
        return [function(i, jobs[i]) for i in range(first, len(jobs), step)]

    threads = min(torch.get_num_threads(), len(jobs) // _FEWEST_A_THREAD)
    if threads < 2:
        return share(0, 1)
    found: list = [None] * len(jobs)
    shares = _pool(threads).map(lambda first: share(first, threads), range(threads))
    for first, results in enumerate(shares):
        found[first::threads] = results
    return found


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "ingot-verify-blocks")
