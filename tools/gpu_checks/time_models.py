"""Times the seed models through libingot beside PyTorch eager (events, interleaved, cold L2).

python time_models.py path/to/libingot.so [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from graphs import gemm_bn_scale_softmax, gemm_scale_bn
from runner import Library, empty_results, make_leaves

CASES = [
    ("gemm_scale_bn", gemm_scale_bn, 1024, 8192, 8192),
    ("gemm_scale_bn", gemm_scale_bn, 16384, 4096, 4096),
    ("gemm_bn_scale_softmax", gemm_bn_scale_softmax, 1024, 8192, 8192),
    ("gemm_scale_bn", gemm_scale_bn, 128, 1024, 1024),
]


def eager(name, leaves):
    f = torch.nn.functional
    if name == "gemm_scale_bn":
        x, w, b, scale, gamma, beta, mean, var, count = leaves
    else:
        x, w, b, gamma, beta, mean, var, count, scale = leaves
    y = f.linear(x.flatten(1), w.reshape(w.shape[1], -1), b.flatten())
    y = y * scale.flatten() if name == "gemm_scale_bn" else y
    count += 1
    y = f.batch_norm(y, mean.flatten(), var.flatten(), gamma.flatten(), beta.flatten(), True, 0.1)
    return y if name == "gemm_scale_bn" else torch.softmax(scale.flatten() * y, dim=1)


def timed(call, flush) -> float:
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def profile(label: str, call) -> None:
    """Microseconds of each kernel of a call, by name."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    for event in recorded.key_averages():
        name = event.key.split("(")[0]
        print(f"    {label}: {event.device_time_total / 10:9.1f} us  {name[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cache", default="/tmp/ingot-check-cache")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    library = Library(arguments.library)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for name, make, batch, k, n in CASES:
        graph = make(k, n)
        leaves = make_leaves(graph, batch, seed=1)
        results = empty_results(graph, batch)
        programs, workspaces = {}, {}
        calls = {"eager": lambda leaves=leaves, name=name: eager(name, leaves)}
        for label, options in {
            "ingot fp32": {},
            "ingot ieee": {"precision": "ieee"},
            "ingot tf32": {"precision": "tf32"},
        }.items():
            begin = time.perf_counter()
            program = library.program(graph, cache_dir=arguments.cache, **options)
            program.prepare(batch)
            workspace = program.workspace(batch)
            programs[label], workspaces[label] = program, workspace
            print(f"{label}: created and prepared in {time.perf_counter() - begin:.2f} s")

            def call(program=program, workspace=workspace, leaves=leaves, results=results, b=batch):
                program.run(b, leaves, results, workspace)

            calls[label] = call
        times = {label: [] for label in calls}
        for _ in range(3 + arguments.rounds):
            for label, call in calls.items():
                times[label].append(timed(call, flush))
        bound = programs["ingot fp32"].bound(batch, leaves, results, workspaces["ingot fp32"])
        best = []
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(20):
                bound()
            best.append((time.perf_counter() - begin) / 20 * 1e6)
        host = statistics.median(best)
        if arguments.profile:
            profile("ingot fp32", calls["ingot fp32"])
        row = {label: round(statistics.median(t[3:]), 4) for label, t in times.items()}
        exact = eager(name, [t.double() if t.is_floating_point() else t for t in leaves]).flatten()
        errors = {}
        for label, call in calls.items():
            got = call()
            got = (results[0] if got is None else got).flatten().double()
            errors[label] = f"{((got - exact).norm() / exact.norm()).item():.1e}"
        print(
            f"{name} {batch}x{k}x{n}: {json.dumps(row)} ms; errors {json.dumps(errors)}; "
            f"host {host:.1f} us a call of the library",
            flush=True,
        )


if __name__ == "__main__":
    main()
