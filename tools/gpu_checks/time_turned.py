"""Sweeps of which an operand lies turned, its rows side by side: residuals of an MLP-Mixer, layer
norms over the channels of images, each against eager, a copy of as many bytes and fp64.

python time_turned.py path/to/libingot.so [path/to/another.so ...] [--rounds 15]

Medians of interleaved rounds with cold L2, in microseconds; errors are relative to fp64, of the
worst result. Several libraries are timed beside one another. Exit status 1: something was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from graphs import layer_norm, residual  # noqa: E402
from measures import Timer, relative_error  # noqa: E402
from runner import LEAVES, Library, empty_results  # noqa: E402
from torch.nn import functional as F  # noqa: E402

TOLERANCE = {"f32": 2e-6, "bf16": 8e-3}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def added(x, t):
    return (x + t,)


def normed(gamma, beta, t):
    return (F.layer_norm(t, t.shape[3:], gamma.flatten(), beta.flatten()),)


def added_normed(x, t, gamma, beta):
    y = x + t
    return y, F.layer_norm(y, y.shape[3:], gamma.flatten(), beta.flatten())


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    shape: tuple[int, int, int]  # rows, groups, features
    graph: Callable[[str], dict]
    eager: Callable
    turned: tuple[str, ...] = ("t",)  # leaves and results


def tokens(batch: int, rows: int, n: int, behind: str) -> Case:
    eager = added_normed if behind else added
    graph = partial(_residual, n, rows, behind)
    return Case(f"add {behind} {batch}x{rows}x{n}", batch, (rows, 1, n), graph, eager)


def _residual(n: int, rows: int, behind: str, dtype: str) -> dict:
    return residual(n, rows, behind=behind, dtype=dtype)


def stream(batch: int, rows: int, n: int) -> Case:
    """Whose residuals lie turned all along, as they do behind a convolution's patches."""
    case = tokens(batch, rows, n, "layer_norm")
    return replace(case, name=f"turned {case.name}", turned=("x", "t", "sum"))


def images(batch: int, channels: int, side: int) -> Case:
    graph = partial(layer_norm, channels, side, side)
    name = f"layer_norm {batch}x{channels}x{side}x{side}"
    return Case(name, batch, (side, side, channels), graph, normed)


CASES = (
    tokens(64, 196, 768, "layer_norm"),
    tokens(32, 196, 512, "layer_norm"),
    tokens(64, 196, 1024, "layer_norm"),
    images(64, 192, 28),
    images(64, 768, 7),
    tokens(64, 196, 768, ""),
    tokens(32, 196, 512, ""),
    stream(32, 196, 768),
    stream(64, 196, 1024),
    stream(32, 49, 512),
)


def operands(case: Case, graph: dict, dtype: str) -> list[torch.Tensor]:
    """Dense, but for those that lie turned: [batch, features, rows] in memory."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    found = []
    for value in graph["values"]:
        if value["op"] not in LEAVES:
            continue
        sizes = [case.batch if extent == "B" else extent for extent in value["shape"]]
        t = torch.randn(sizes, device="cuda", generator=generator).to(DTYPES[dtype])
        found.append(turned(t) if value["name"] in case.turned else t)
    return found


def turned(t: torch.Tensor) -> torch.Tensor:
    return t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def results_of(case: Case, graph: dict) -> list[torch.Tensor]:
    names = [result["name"] for result in graph["results"]]
    results = empty_results(graph, case.batch)
    return [turned(t) if name in case.turned else t for name, t in zip(names, results)]


def measure(case: Case, dtype: str, libraries: list[Library], folder: str, rounds: int) -> bool:
    graph = case.graph(dtype)
    leaves = operands(case, graph, dtype)
    truth = case.eager(*[t.double() for t in leaves])
    eager_error = relative_error(case.eager(*leaves), truth)
    calls, errors, kept = [lambda: case.eager(*leaves)], [], []
    for number, library in enumerate(libraries):
        program = library.program(graph, cache_dir=f"{folder}/{number}")
        program.prepare(case.batch)
        workspace, turns = program.workspace(case.batch), []
        for _ in range(2):
            results = results_of(case, graph)
            program.run(case.batch, leaves, results, workspace)
            turns.append(results)
        torch.cuda.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(*turns))
        errors.append(relative_error(turns[0], truth) if same else float("nan"))
        kept.append((program, results, workspace))
        calls.append(program.bound(case.batch, leaves, results, workspace))
    size = sum(t.nbytes for t in [*leaves, *results])
    source = torch.zeros(size // 8, device="cuda")
    target = torch.zeros_like(source)
    calls.append(lambda: target.copy_(source))
    eager, *ours, copy = (1e3 * t for t in Timer(source.device).medians(calls, rounds))
    wrong = not all(e <= max(TOLERANCE[dtype], 2 * eager_error) for e in errors)
    times = ", ".join(f"{t:6.1f}" for t in ours)
    print(
        f"{case.name:28} {dtype:5} {size / 1e6:6.1f} MB  copy {copy:6.1f} eager {eager:6.1f} "
        f"Ingot {times} us  errors {', '.join(f'{e:.1e}' for e in errors)} "
        f"({eager_error:.1e}){'  WRONG' if wrong else ''}",
        flush=True,
    )
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    libraries = [Library(path) for path in arguments.libraries]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        right = [
            measure(case, dtype, libraries, folder, arguments.rounds)
            for dtype in DTYPES
            for case in CASES
        ]
    print(f"{right.count(False)} wrong")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
