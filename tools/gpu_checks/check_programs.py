"""Checks the CUDA backend on a GPU against the fp64 evaluator, each kind of sweep, and how it runs.

Streams, captured graphs, strided inputs, threads and a forked process are part of it.

python check_programs.py path/to/libingot.so [--small] [--only NAME]

Prints one line a case and exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import traceback

import torch
from graphs import zoo
from runner import Library, empty_results, evaluate, make_leaves

# Of the output's scale; the reduced precisions round operands to 11 or 8 bits.
TOLERANCE = {"fp32": 3e-6, "ieee": 3e-6, "tf32": 3e-3, "fp16": 3e-3, "bf16": 3e-2}


def error(truth: torch.Tensor, candidate: torch.Tensor) -> float:
    scale = truth.double().abs().max().item() or 1.0
    difference = (truth.double() - candidate.cpu().double()).abs()
    return float("nan") if difference.isnan().any() else difference.max().item() / scale


def run_once(program, graph, batch, leaves, stream=None):
    own = [t.clone() for t in leaves]
    results = empty_results(graph, batch)
    workspace = program.workspace(batch)
    torch.cuda.synchronize()
    program.run(batch, own, results, workspace, stream)
    torch.cuda.synchronize()
    return results + [
        t for t, v in zip(own, leaf_values(graph), strict=True) if v["op"] == "buffer"
    ]


def leaf_values(graph):
    return [v for v in graph["values"] if v["op"] in ("input", "parameter", "buffer")]


def check(library, graph, batch, options, cache):
    precision = options.get("precision", "fp32")
    leaves = make_leaves(graph, batch, seed=batch)
    truth, host = evaluate(library, graph, batch, leaves)
    truth += [t for t, v in zip(host, leaf_values(graph), strict=True) if v["op"] == "buffer"]
    program = library.program(graph, cache_dir=cache, **options)
    program.prepare(batch)
    first = run_once(program, graph, batch, leaves)
    worst = max(error(t, c) for t, c in zip(truth, first, strict=True))
    problems = []
    if not worst <= TOLERANCE[precision]:
        problems.append(f"error {worst:.1e}")
    stream = torch.cuda.Stream()
    for other in (
        run_once(program, graph, batch, leaves),
        run_once(program, graph, batch, leaves, stream),
    ):
        if not all(torch.equal(a, b) for a, b in zip(first, other, strict=True)):
            problems.append("bits differ between runs")
    for name, layout in LAYOUTS.items():
        turns = [strided_results(program, graph, batch, leaves, layout) for _ in range(2)]
        moved = max(error(t, c) for t, c in zip(truth, turns[0], strict=False))
        if not moved <= TOLERANCE[precision]:
            problems.append(f"{name} operands: error {moved:.1e}")
        if not all(torch.equal(a, b) for a, b in zip(*turns, strict=True)):
            problems.append(f"{name} operands: bits differ between runs")
    if not replays(program, graph, batch, leaves, first):
        problems.append("a captured graph gives other bits")
    return worst, problems


def with_gaps(t: torch.Tensor) -> torch.Tensor:
    """At an odd address, too."""
    wide = torch.empty([*t.shape[:3], t.shape[3] + 3], dtype=t.dtype, device=t.device)
    wide[..., 1:-2] = t
    return wide[..., 1:-2]


def turned(t: torch.Tensor) -> torch.Tensor:
    """Rows side by side: [batch, features, rows] in memory, or [features, batch] without rows."""
    order = (0, 3, 1, 2) if t.shape[1] * t.shape[2] > 1 else (3, 0, 1, 2)
    back = [order.index(axis) for axis in range(4)]
    return t.permute(order).contiguous().permute(back)


LAYOUTS = {"strided": with_gaps, "turned": turned}


def strided_results(program, graph, batch, leaves, layout) -> list[torch.Tensor]:
    """With inputs and parameters that lie so."""
    own = [
        layout(t) if v["op"] != "buffer" else t.clone()
        for t, v in zip(leaves, leaf_values(graph), strict=True)
    ]
    results = empty_results(graph, batch)
    program.run(batch, own, results, program.workspace(batch))
    torch.cuda.synchronize()
    return results


def replays(program, graph, batch, leaves, expected) -> bool:
    own = [t.clone() for t in leaves]
    results = empty_results(graph, batch)
    workspace = program.workspace(batch)
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        program.run(batch, own, results, workspace, torch.cuda.current_stream())
    for t in results:
        t.fill_(-1)
    captured.replay()
    torch.cuda.synchronize()
    count = len(results)
    return all(torch.equal(a, b) for a, b in zip(results, expected[:count], strict=True))


def check_threads(library, graph, cache, threads=8, calls=30) -> list[str]:
    """One program, many threads, streams and batch sizes."""
    program = library.program(graph, cache_dir=cache)
    batches = [2, 33, 64, 100]
    leaves = {b: make_leaves(graph, b, seed=b) for b in batches}
    expected = {b: run_once(program, graph, b, leaves[b])[0] for b in batches}
    problems: list[str] = []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(calls):
                    b = batches[(index + i) % len(batches)]
                    own = [t.clone() for t in leaves[b]]
                    results = empty_results(graph, b)
                    workspace = program.workspace(b)
                    program.run(b, own, results, workspace, stream)
                    stream.synchronize()
                    if not torch.equal(results[0], expected[b]):
                        problems.append(f"thread {index}, batch {b}: other bits")
        except Exception as failure:  # noqa: BLE001 - reported by the main thread
            problems.append(f"thread {index}: {failure}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return problems


def check_fork(library, graph, cache) -> list[str]:
    program = library.program(graph, cache_dir=cache)
    leaves = make_leaves(graph, 8, seed=1)
    run_once(program, graph, 8, leaves)
    results, workspace = empty_results(graph, 8), program.workspace(8)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            program.prepare(8)
        except RuntimeError as failure:
            code = 0 if "fork" in str(failure) else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    del results, workspace
    return [] if status == 0 else [f"a forked process ended with status {status}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--small", action="store_true", help="few cases, for compute-sanitizer")
    parser.add_argument("--only", default="")
    parser.add_argument("--cache", default="/tmp/ingot-check-cache")
    arguments = parser.parse_args()
    library = Library(arguments.library)
    options = [{"precision": "fp32"}, {"precision": "ieee"}]
    if not arguments.small:
        options += [{"precision": p} for p in ("tf32", "fp16", "bf16")]
        options.append({"precision": "fp32", "capabilities": {"dependent_launch": False}})
        options.append({"precision": "fp32", "capabilities": {"hopper_product": False}})
    labels = {"dependent_launch": "-no-pdl", "hopper_product": "-portable"}
    failures = 0
    for (name, (graph, batches)), option in itertools.product(zoo().items(), options):
        if arguments.only not in name:
            continue
        if option["precision"] not in ("fp32", "ieee") and name not in (
            "gemm_scale_bn",
            "two_linears",
        ):
            continue
        for batch in batches[-1:] if arguments.small else batches:
            try:
                worst, problems = check(library, graph, batch, option, arguments.cache)
            except Exception as failure:  # noqa: BLE001 - one case must not hide the others
                worst, problems = float("nan"), [str(failure).splitlines()[0][:300]]
                if os.environ.get("INGOT_TRACE"):
                    traceback.print_exc()
            failures += bool(problems)
            verdict = "; ".join(problems) or "ok"
            masked = next(iter(option.get("capabilities", {})), None)
            label = option["precision"] + labels.get(masked, "")
            if problems or not arguments.small:
                print(
                    f"{name:28} {label:13} batch {batch:5} error {worst:.1e}  {verdict}", flush=True
                )
    if not arguments.small and not arguments.only:
        for name in ("gemm_scale_bn", "gemm_bn_scale_softmax"):
            problems = check_threads(library, zoo()[name][0], arguments.cache)
            failures += bool(problems)
            print(f"{name:28} threads: {problems[:3] or 'ok'}")
        problems = check_fork(library, zoo()["gemm_scale_bn"][0], arguments.cache)
        failures += bool(problems)
        print(f"{'fork':28} {problems or 'ok'}")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
