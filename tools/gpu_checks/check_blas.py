"""fp32 products of PyTorch with libingot_blas.so in front of cuBLAS: right, and how fast.

python check_blas.py LIBRARY [--device cuda|cpu] [--rounds 20] [--seconds 300] [--out FILE]
                     [--beside NAME=VARIABLE=VALUE,... ]...

LIBRARY is libingot.so; libingot_blas.so lies beside it. Two processes, one with it in LD_PRELOAD
and one without, take turns at 89 shapes: in each round both time the same product, cold (the L2
cache overwritten before it), by events on the stream. Before that each compares torch.mm, addmm,
bmm and einsum over transpositions, strides and scalars, CUDA graphs of products, and then every
shape, with fp64. Exit status 1 where an error is above both 1e-6 and the library's, where nothing
was taken, or where a shape is slower than the library: where the 95 % interval of the median ratio
lies below 0.98 whole, or, of a shape that was handed on (its error is cuBLAS's to the last bit),
below 0.94. There the same kernel runs on either side, on other addresses, which was seen to make
4 % of a difference. --beside: another process that takes turns, with these variables (of a peer's
library, LD_PRELOAD and its settings; TF32=1 lets cuBLAS have TF32), timed and compared with fp64 at
the large products that begin behind no offset, and never judged. A CPU has no cuBLAS to stand
before: there both sides are the same, the shapes small and the times without a bound; it shows that
this program runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from blas_products import NotSupportedError, product, product_with_device_scalars, stored

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
ERROR = 1e-6
SLOWEST = {"taken": 0.98, "handed on": 0.94}
INNER = 3  # calls of which a round takes the median
LONG_MS, LONG_ROUNDS = 5.0, 7
BESIDE_ROUNDS = 7
LEAST_WORK_BESIDE = 1 << 24  # multiplications

# m, n, k, batches, how the operands are stored (blas_products.py).
SQUARE = [(s, s, s, 1, "nn") for s in (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)]
SQUARE += [(s, s, s, 1, "nn") for s in (8192, 12288, 16384)]
LINEAR = [
    (1, 4096, 4096, 1, "nt"),
    (16, 4096, 4096, 1, "nt"),
    (128, 4096, 4096, 1, "nt"),
    (512, 4096, 4096, 1, "nt"),
    (1024, 8192, 8192, 1, "nt"),
    (2048, 3072, 768, 1, "nt"),
    (4096, 4096, 1024, 1, "nt"),
    (7168, 4096, 1024, 1, "nt"),
    (7168, 1024, 4096, 1, "nt"),
    (8192, 2304, 768, 1, "nt"),
    (8192, 50257, 768, 1, "nt"),
    (16384, 4096, 4096, 1, "nt"),
]
GRADIENTS = [
    (4096, 1024, 7168, 1, "tn"),
    (8192, 8192, 1024, 1, "tn"),
    (4096, 4096, 16384, 1, "tn"),
    (768, 3072, 8192, 1, "tn"),
    (1024, 8192, 8192, 1, "nn"),
    (8192, 768, 3072, 1, "nn"),
]
THIN = [
    (100000, 32, 32, 1, "nt"),
    (100000, 10, 784, 1, "nt"),
    (65536, 64, 64, 1, "nt"),
    (65536, 128, 128, 1, "nn"),
    (65536, 256, 256, 1, "nn"),
    (128, 65536, 512, 1, "nn"),
    (16384, 16, 16384, 1, "nn"),
    (1000003, 129, 131, 1, "nn"),
]
DEEP = [
    (256, 256, 131072, 1, "nn"),
    (64, 64, 262144, 1, "nn"),
    (128, 128, 1000000, 1, "tn"),
    (512, 512, 65536, 1, "tn"),
    (1024, 1024, 32768, 1, "nt"),
]
OWN = [(s, s, k, 1, "own") for s, k in ((512, 8192), (2048, 2048), (4096, 1024), (8192, 4096))]
BATCHES = [
    (64, 64, 64, 4096, "nn"),
    (128, 128, 64, 1024, "nt"),
    (197, 197, 64, 192, "nt"),
    (512, 512, 64, 96, "nt"),
    (512, 64, 512, 96, "nn"),
    (1024, 1024, 128, 32, "nt"),
    (1024, 1024, 1024, 8, "nn"),
    (2048, 2048, 2048, 8, "tn"),
]
ARRAYS = [
    (s, s, s, count, "array nn") for s, count in ((512, 64), (768, 32), (1024, 16), (2048, 4))
]
ARRAYS += [(1024, 1024, 1024, 16, how) for how in ("array tn", "array nt added")]
ARRAYS += [(1000, 1030, 1022, 16, "array tt added"), (4096, 512, 1024, 8, "array nt")]
ODD = [(1023, 1025, 1027, 1, "nn"), (4095, 4097, 4099, 1, "nt"), (3001, 1999, 2501, 1, "tn")]
ODD += [(2050, 2050, 2050, 1, "nn")]
# GPT-2's head: logits, the gradients of its input and its weight; and a weight stored [k, n].
WORDS = [(4096, 50257, 768, 1, "nt"), (4096, 768, 50257, 1, "nn"), (50257, 768, 4096, 1, "tn")]
WORDS += [(4096, 50257, 768, 1, "nn"), (4096, 768, 50257, 1, "nt"), (768, 50257, 4096, 1, "tn")]
LAYOUTS = [(4096, 4096, 4096, 1, how) for how in ("nt off 4", "nn off 8", "nt wide", "tn wide")]
LAYOUTS += [(4096, 50256, 768, 1, "nt off 4"), (2048, 768, 3072, 1, "nn wide")]
LAYOUTS += [(1024, 1024, 1024, 1, "nt off 4"), (16, 4096, 4096, 1, "nt off 4")]
LT = [(8192, 3072, 768, 1, f"lt {form}") for form in ("gelu", "gelu bias", "rows", "apart")]
LT += [(512, 512, 256, 32, "lt gelu bias"), (1024, 1024, 1024, 8, "lt apart")]
LT += [(4096, 50257, 768, 1, "lt apart")]  # no rows of whole 16 bytes, read and written
SHAPES = (
    SQUARE + LINEAR + GRADIENTS + THIN + DEEP + OWN + BATCHES + ARRAYS + ODD + WORDS + LAYOUTS + LT
)
SMALL = [(64, 48, 80, 1, "nn"), (64, 48, 80, 1, "tn"), (33, 33, 65, 1, "own"), (9, 8, 7, 3, "nt")]
SMALL += [(64, 48, 80, 1, "tn off 4"), (64, 48, 80, 3, "nt wide"), (9, 8, 7, 3, "lt gelu bias")]
SMALL += [(9, 8, 7, 3, "array tn added")]


# a worker ----------------------------------------------------------------------------------------


def distance(found, truth) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def check_shape(shape: tuple, device: str) -> float | None:
    """None where the library has no such product."""
    try:
        multiply, truth = product(shape, device)
        found = multiply()
    except NotSupportedError:
        return None
    # In fp64 by rows: a whole product of 16384³ would take the memory of both processes.
    rows = slice(0, 512)
    return distance(found[..., rows, :], truth(rows))


def operators(device: str) -> dict:
    """Largest relative errors of PyTorch's products over what they can be asked."""
    import torch

    scale = 16 if device == "cuda" else 1
    m, n, k = 48 * scale, 40 * scale, 56 * scale
    torch.manual_seed(2)
    errors: dict = {}

    def take(name: str, found, truth) -> None:
        errors[name] = max(errors.get(name, 0.0), distance(found, truth))

    for a_transposed in (False, True):
        for b_transposed in (False, True):
            a = stored(m, k, 1, a_transposed, device)
            b = stored(k, n, 1, b_transposed, device)
            wide = torch.randn(k, 2 * n + 3, device=device)[:, 1 : n + 1]
            c, bias = torch.randn(m, n, device=device), torch.randn(n, device=device)
            truth = a.double() @ b.double()
            take("mm", torch.mm(a, b), truth)
            take("mm of a view", torch.mm(a, wide), a.double() @ wide.double())
            take("addmm", torch.addmm(c, a, b), truth + c.double())
            scaled = torch.addmm(c, a, b, beta=0.25, alpha=-1.5)
            take("addmm scaled", scaled, 0.25 * c.double() - 1.5 * truth)
            nan = torch.full_like(c, float("nan"))
            take("addmm, beta 0", torch.addmm(nan, a, b, beta=0), truth)
            take("linear", torch.nn.functional.linear(a, b.t(), bias), truth + bias.double())
            into = torch.randn(n, m, device=device).t()
            take("mm into a transposed result", torch.mm(a, b, out=into), truth)
            x = stored(m, k, 3, a_transposed, device)
            y = stored(k, n, 3, b_transposed, device)
            take("bmm", torch.bmm(x, y), x.double() @ y.double())
            take("matmul, one weight", x @ b, x.double() @ b.double())
            e = torch.einsum("bik,bkj->bji", x, y)
            take("einsum", e, (x.double() @ y.double()).transpose(1, 2))
            activated = torch._addmm_activation(bias, a, b, use_gelu=True)
            truth_of_gelu = torch.nn.functional.gelu(truth + bias.double(), approximate="tanh")
            take("addmm with GELU", activated, truth_of_gelu)
            for where in ("off 4", "off 8", "wide"):
                u = stored(m, k, 1, a_transposed, device, where)
                v = stored(k, n, 1, b_transposed, device, where)
                take(f"mm, {where}", torch.mm(u, v), u.double() @ v.double())
                into = stored(m, n, 1, False, device, where)
                take(f"mm into a result, {where}", torch.mm(a, b, out=into), truth)
    special = torch.randn(m, k, device=device)
    special[3, 5], special[7, 2] = float("inf"), float("nan")
    found, truth = special @ b, special.double() @ b.double()
    same = found.isnan() == truth.isnan()
    errors["Inf and NaN"] = 0.0 if bool(same.all()) else 1.0
    return errors


def graphs() -> dict:
    """Scalars on the device; two CUDA graphs that live at once, replayed in turn, at the same time
    and beside products, and a third one after the first is gone: largest relative errors."""
    import torch

    torch.manual_seed(4)
    x, w, y = (torch.randn(1024, 1024, device="cuda") for _ in range(3))
    scaled = {
        f"scalars on the device{', in a graph' * captured}": distance(
            product_with_device_scalars(x, w, y, -1.5, 0.25, captured),
            -1.5 * (x.double() @ w.double()) + 0.25 * y.double(),
        )
        for captured in (False, True)
    }
    names = ("two graphs, in turn", "two graphs at once", "graphs beside products", "a later graph")
    size, errors, aside = 1024, dict.fromkeys(names, 0.0), torch.cuda.Stream()
    multiply, truth = product(ARRAYS[2], "cuda")
    with torch.cuda.stream(aside):
        out = multiply()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        multiply()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    errors["a batch by pointers in a graph"] = distance(out, truth(slice(None)))
    torch.manual_seed(3)
    inputs = [torch.randn(size, size, device="cuda") for _ in range(6)]

    def chain(x, w, v):
        return (x @ w / 32) @ v / 32

    def captured(x, w, v):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                chain(x, w, v)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = chain(x, w, v)
        return graph, out

    def check(name: str, out, x, w, v) -> None:
        torch.cuda.synchronize()
        found = distance(out, chain(x.double(), w.double(), v.double()))
        errors[name] = max(errors[name], found)

    a, b, c, d, e, f = inputs
    first, one = captured(a, b, c)
    second, two = captured(d, e, f)
    for number in range(6):
        for each in (a, d):
            each.normal_()
        first.replay()
        second.replay()
        first.replay()
        check("two graphs, in turn", one, a, b, c)
        check("two graphs, in turn", two, d, e, f)
        first.replay()
        with torch.cuda.stream(aside):
            second.replay()
        check("two graphs at once", one, a, b, c)
        check("two graphs at once", two, d, e, f)
        found = []
        for graph in (first, second):
            graph.replay()
            with torch.cuda.stream(aside):
                found.append(chain(b, c, d))
        for out in found:
            check("graphs beside products", out, b, c, d)
        check("graphs beside products", one, a, b, c)
        check("graphs beside products", two, d, e, f)
        if number == 3:
            del first
            first, one = captured(b, c, a)
            a, b, c = b, c, a
            second.replay()
            first.replay()
            check("a later graph", one, a, b, c)
            check("a later graph", two, d, e, f)
    return {**errors, **scaled}


class Timer:
    def __init__(self, device: str) -> None:
        import torch

        self.device, self.shape, self.multiply = device, None, None
        cuda = device == "cuda"
        self.cache = torch.empty(256 << 20, dtype=torch.int8, device=device) if cuda else None

    def __call__(self, shape: tuple) -> float:
        """Milliseconds of a call, the host's launch not counted."""
        import torch

        if shape != self.shape:
            self.multiply = None
            self.shape, (self.multiply, _) = shape, product(shape, self.device)
            for _ in range(2):
                self.multiply()
        times = []
        for _ in range(INNER):
            if self.device == "cpu":
                start = time.perf_counter()
                self.multiply()
                times.append((time.perf_counter() - start) * 1e3)
                continue
            self.cache.zero_()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            self.multiply()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        return median(times)


def work(device: str) -> None:
    """Answers requests on stdin, one JSON value a line."""
    import torch

    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = os.environ.get("TF32") == "1"
    timer = Timer(device)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, subject = json.loads(line)
        if what == "operators":
            answer = operators(device)
            if device == "cuda":
                answer.update(graphs())
        elif what == "check":
            answer = check_shape(tuple(subject), device)
        else:
            answer = timer(tuple(subject))
        if device == "cuda" and what != "time":
            torch.cuda.empty_cache()
        print(json.dumps(answer), flush=True)


# the parent --------------------------------------------------------------------------------------


class Worker:
    def __init__(self, device: str, environment: dict) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "", "--worker", "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, what: str, subject=None):
        self.process.stdin.write(json.dumps([what, subject]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def text_of(shape: tuple) -> str:
    m, n, k, batches, how = shape
    return f"{m}×{k}→{n} {how}" + (f" ×{batches}" if batches > 1 else "")


class Peers:
    """Processes with other libraries in front of cuBLAS. One that ends is asked no more."""

    def __init__(self, device: str, described: list[str]) -> None:
        self.workers = {}
        for text in described:
            name, _, variables = text.partition("=")
            environment = dict(pair.split("=", 1) for pair in variables.split(",") if pair)
            self.workers[name] = Worker(device, environment)

    def measure(self, shape: tuple, ingot: Worker, rounds: int) -> dict:
        """Of each its time, ours beside it, and the error."""
        m, n, k, batches, how = shape
        if m * n * k * batches < LEAST_WORK_BESIDE or how not in ("nn", "nt", "tn", "own"):
            return {}
        found = {}
        for name, worker in list(self.workers.items()):
            try:
                error = worker.ask("check", shape)
                pair = worker, ingot
                both = [[each.ask("time", shape) for each in pair] for _ in range(rounds)]
            except (SystemExit, OSError) as end:
                print(f"{name} is asked no more: {end}", flush=True)
                del self.workers[name]
                continue
            theirs, ours = (median(times) for times in zip(*both))
            # JSON has no NaN, which a peer was seen to give.
            known = error if math.isfinite(error) else None
            found[name] = {"ms": theirs, "ingot_ms": ours, "error": known}
        return found

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()


def measure(workers: dict, shape: tuple, rounds: int) -> dict:
    from ingot.bench.statistics import median_ratio

    errors = {name: worker.ask("check", shape) for name, worker in workers.items()}
    if None in errors.values():
        return {"shape": list(shape), "by": "no library", "error": errors["ingot"]}
    times: dict = {name: [] for name in workers}
    for number in range(rounds):
        names = list(workers) if number % 2 == 0 else list(workers)[::-1]
        for name in names:
            times[name].append(workers[name].ask("time", shape))
        if number + 1 == LONG_ROUNDS and median(times["cublas"]) > LONG_MS:
            break
    ratio = median_ratio(times["cublas"], times["ingot"])
    m, n, k, batches, _ = shape
    return {
        "shape": list(shape),
        "by": "handed on" if errors["ingot"] == errors["cublas"] else "taken",
        "ingot_ms": median(times["ingot"]),
        "cublas_ms": median(times["cublas"]),
        "ratio": ratio.median,
        "interval": [ratio.lower, ratio.upper],
        "tflops": 2e-9 * m * n * k * batches / median(times["ingot"]),
        "error": errors["ingot"],
        "cublas_error": errors["cublas"],
    }


def run(options: argparse.Namespace) -> int:
    cuda = options.device == "cuda"
    blas = Path(options.library).resolve().with_name("libingot_blas.so")
    if not blas.is_file():
        raise SystemExit(f"{blas} is not there: build the target ingot_blas")
    ends = time.monotonic() + options.seconds
    failures, records = [], []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        in_front = {"LD_PRELOAD": str(blas), "INGOT_BLAS_REPORT": str(report)}
        workers = {"ingot": Worker(options.device, in_front), "cublas": Worker(options.device, {})}
        peers = Peers(options.device, options.beside)
        found = {name: worker.ask("operators") for name, worker in workers.items()}
        for name, error in found["ingot"].items():
            other = found["cublas"][name]
            ok = error <= max(ERROR, other)
            print(f"{'PASS' if ok else 'FAIL'} {name}: {error:.1e}, cuBLAS {other:.1e}")
            if not ok:
                failures.append(name)
        for shape in SHAPES if cuda else SMALL:
            if time.monotonic() > ends:
                failures.append(f"no time for {text_of(shape)} and what follows")
                break
            record = measure(workers, shape, options.rounds)
            record["beside"] = peers.measure(shape, workers["ingot"], BESIDE_ROUNDS)
            records.append(record)
            if record["by"] == "no library":  # nothing to compare with: right, or not taken either
                right = record["error"] is None or record["error"] <= ERROR
                print(f"{'PASS' if right else 'FAIL'} {text_of(shape)}: not cuBLAS's; {record}")
                failures += [] if right else [text_of(shape)]
                continue
            accurate = record["error"] <= max(ERROR, record["cublas_error"])
            lower, upper = record["interval"]
            ok = accurate and (not cuda or upper >= SLOWEST[record["by"]])
            print(
                f"{'PASS' if ok else 'FAIL'} {text_of(shape)}: {record['by']}, "
                f"{record['ratio']:.2f} × ({lower:.2f} to {upper:.2f}), "
                f"{record['ingot_ms']:.4f} ms, cuBLAS {record['cublas_ms']:.4f}; error "
                f"{record['error']:.1e}, cuBLAS {record['cublas_error']:.1e}",
                flush=True,
            )
            for name, peer in record["beside"].items():
                times = f"{peer['ms']:.4f} ms, Ingot {peer['ingot_ms']:.4f}"
                error = "NaN" if peer["error"] is None else f"{peer['error']:.1e}"
                print(f"       {name}: {times}; error {error}", flush=True)
            if not ok:
                failures.append(text_of(shape))
        peers.end()
        for worker in workers.values():
            worker.end()
        lines = report.read_text().splitlines() if report.exists() else []
    rows = [row for line in lines for row in json.loads(line)["products"]]
    taken = sum(row["count"] for row in rows if row["taken"])
    every = sum(row["count"] for row in rows)
    if cuda and taken == 0:
        failures.append("nothing was taken")
    outcomes: dict = {}
    for row in rows:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + row["count"]
    for outcome, count in outcomes.items():
        print(f"{count:7} {outcome}")
    if options.out:
        from ingot.bench.records import write_whole

        result = {"operators": found, "shapes": records, "products": rows}
        write_whole(Path(options.out), json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{taken} of {every} products taken; {len(failures)} failures: {'; '.join(failures)}")
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", default="")
    parser.add_argument("--beside", action="append", default=[])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.device)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
