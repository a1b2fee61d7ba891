"""Times XLA's emulations of the fp32 matrix product at the bundled models' shapes: product alone.

python xla_products.py [--out bench/results/products/GPU.json] [--algorithms NAME...]

Each algorithm runs in a process of its own, with JAX allocating memory as it goes. A figure is the
median over rounds of a burst of 20 calls after 5 warm-ups and a rest, queued back to back, divided
by 20; operands and result exceed L2, so every call finds it cold. Errors are relative Frobenius
errors of 64 rows against fp64.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

ALGORITHMS = ("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "TF32_TF32_F32_X3")
SHAPES = ((1024, 8192, 8192), (16384, 4096, 4096))
WARMUPS, CALLS, REST_S = 5, 20, 0.1
ERROR_ROWS = 64


def shape_text(rows: int, inner: int, columns: int) -> str:
    return f"{rows}×{inner}→{columns}"


def relative_error(x, w, y) -> float:
    """Of the first rows of y = x·wᵀ, arrays on the host."""
    import numpy

    exact = x[:ERROR_ROWS].astype(numpy.float64) @ w.astype(numpy.float64).T
    difference = y[:ERROR_ROWS].astype(numpy.float64) - exact
    return float(numpy.linalg.norm(difference) / numpy.linalg.norm(exact))


def burst(product, x, w, calls: int) -> float:
    """Milliseconds a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        y = product(x, w)
    y.block_until_ready()
    return (time.perf_counter() - begin) / calls * 1e3


def measure(algorithm: str, shapes, rounds: int, seconds: float) -> None:
    """Prints one record a shape; runs in a process of its own."""
    import statistics

    import jax
    import numpy

    preset = jax.lax.DotAlgorithmPreset[algorithm]
    contract_last = (((1,), (1,)), ((), ()))

    @jax.jit
    def product(x, w):
        return jax.lax.dot_general(
            x, w, contract_last, precision=preset, preferred_element_type=jax.numpy.float32
        )

    for rows, inner, columns in shapes:
        generator = numpy.random.default_rng(1)
        x = generator.random((rows, inner), dtype=numpy.float32)
        w = (2 * generator.random((columns, inner), dtype=numpy.float32) - 1) / inner**0.5
        w = w.astype(numpy.float32)
        on_device = jax.device_put(x), jax.device_put(w)
        y = product(*on_device).block_until_ready()
        times: list[float] = []
        begin = time.monotonic()
        while len(times) < rounds and (len(times) < 3 or time.monotonic() - begin < seconds):
            time.sleep(REST_S)
            burst(product, *on_device, WARMUPS)
            times.append(burst(product, *on_device, CALLS))
        record = {
            "shape": shape_text(rows, inner, columns),
            "method": f"XLA {algorithm}",
            "ms": round(statistics.median(times), 5),
            "rounds": len(times),
            "error": relative_error(x, w, numpy.asarray(y)),
            "version": f"jax {jax.__version__}",
            "device": jax.devices()[0].device_kind,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)


def last_error(text: str) -> str:
    """The line of a traceback that says what was wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])[:300]


def run_algorithm(algorithm: str, arguments: argparse.Namespace) -> tuple[list, str]:
    """(records, what went wrong) of one algorithm, measured in a process of its own."""
    command = [sys.executable, __file__, "--measure", algorithm]
    command += ["--rounds", str(arguments.rounds), "--seconds", str(arguments.seconds)]
    if arguments.shapes:
        command += ["--shapes", *arguments.shapes]
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=arguments.limit,
            env=environment,
            check=False,
        )
        out, problem = answer.stdout, ""
        if answer.returncode:
            problem = last_error(answer.stderr)
    except subprocess.TimeoutExpired as stopped:
        out = stopped.stdout or b""
        out = out.decode() if isinstance(out, bytes) else out
        problem = f"not done after {arguments.limit:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    return [json.loads(line) for line in lines], problem


def merge(path: Path, new: list) -> None:
    """Replaces records of the same shape and method; the file appears whole or not at all."""
    from ingot.bench.records import write_whole

    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    records = {(r["shape"], r["method"]): r for r in [*known, *new]}
    ordered = [records[key] for key in sorted(records)]
    write_whole(path, json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of records to merge into")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--shapes", nargs="+", metavar="M,K,N", help="others than the bundled ones")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one shape's rounds")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one algorithm")
    parser.add_argument("--measure", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        shapes = [tuple(map(int, s.split(","))) for s in arguments.shapes or []] or SHAPES
        measure(arguments.measure, shapes, arguments.rounds, arguments.seconds)
        return 0
    failed = 0
    for algorithm in arguments.algorithms:
        begin = time.monotonic()
        records, problem = run_algorithm(algorithm, arguments)
        for record in records:
            print(
                f"{record['method']:22} {record['shape']:20} {record['ms']:8.4f} ms  error "
                f"{record['error']:.1e}  {record['rounds']} rounds"
            )
        failed += bool(problem)
        print(f"{algorithm}: {problem or 'ok'} ({time.monotonic() - begin:.0f} s)", flush=True)
        if arguments.out and records:
            merge(arguments.out, records)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
