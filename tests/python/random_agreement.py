"""What tests by random programs share: ways into Ingot, the loop over seeds, smaller programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

import ingot
import torch
from live import regions_run
from torch import nn

Program = TypeVar("Program")


def by_optimize(module: nn.Module) -> Callable:
    return module if isinstance(module, ingot.OptimizedModule) else ingot.optimize(module)


def by_compile(module: nn.Module) -> Callable:
    return torch.compile(module, backend="ingot")


def agree(
    seeds: Iterable[int],
    draw: Callable[[random.Random], Program],
    difference: Callable[[Program, Callable], str | None],
) -> None:
    """No program of these seeds differs from PyTorch's run, and of most a part was taken."""
    taken = []
    for seed in seeds:
        program = draw(random.Random(seed))
        wrap = by_compile if seed % 4 == 0 else by_optimize
        with regions_run() as ran:
            found = difference(program, wrap)
        assert found is None, f"seed {seed}, {wrap.__name__}: {found}\n{program}"
        taken.append(bool(ran))
    assert sum(taken) > len(taken) / 2


def reduced(
    program: Program,
    wrap: Callable,
    smaller: Callable[[Program], Iterable[Program]],
    difference: Callable[[Program, Callable], str | None],
    most: int = 150,
) -> Program:
    """A smaller program that differs too, by at most so many tries: for whoever looks into one."""
    tries, changed = 0, True
    while changed and tries < most:
        changed = False
        for each in smaller(program):
            tries += 1
            try:
                if tries <= most and difference(each, wrap):
                    program, changed = each, True
                    break
            except Exception:
                continue
    return program
