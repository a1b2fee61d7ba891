"""Small real programs of several frameworks, as they are and under `ingot run`.

python blas_programs.py LIBRARY [--only NAME] [--device cuda|cpu] [--seconds 120] [--out FILE]

LIBRARY is libingot.so; libingot_blas.so lies beside it. Programs whose packages are not here are
left out, and say so; those in C++ are built from cublas_programs.cu with nvcc (or a binary of it is
named by INGOT_CUBLAS_PROGRAMS). Prints for each: seconds of a run (the median, the first not
counted) and the error against the same in fp64, without and with Ingot, and how many products it
took. Exit status 1 where a program fails with Ingot alone, or its error is above both 2e-6 and
twice the library's, where a program in double got another answer or had a product taken, or where
none was taken at all. Some run by ingot.enable() in the place of `ingot run`. A CPU shows that the
script runs: its programs are small, and none of their products is cuBLAS's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
ACCURATE, WORSE = 2e-6, 2.0
REPEATS = 5


# the programs: each gives a call to time, what waits for it, and its result's error ---------------


def distance(found, truth) -> float:
    return float(((found.double() - truth) ** 2).sum().sqrt() / (truth**2).sum().sqrt())


def torch_hessian(cuda: bool) -> tuple:
    """Products of a Hessian and a vector of a network's loss: derivatives of derivatives."""
    import torch

    width, rows = (2048, 8192) if cuda else (32, 64)
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(1)
    weights = [torch.randn(width, width, device=device) / width**0.5 for _ in range(3)]
    x, y = (torch.randn(rows, width, device=device) for _ in range(2))
    along = [torch.randn_like(w) for w in weights]

    def run(dtype=torch.float32):
        w = [each.to(dtype).requires_grad_() for each in weights]
        hidden = x.to(dtype)
        for each in w:
            hidden = torch.tanh(hidden @ each)
        loss = ((hidden - y.to(dtype)) ** 2).mean()
        slopes = torch.autograd.grad(loss, w, create_graph=True)
        along_it = sum((s * v.to(dtype)).sum() for s, v in zip(slopes, along))
        return torch.cat([g.flatten() for g in torch.autograd.grad(along_it, w)])

    return run, lambda found: distance(found, run(torch.float64)), wait_of(cuda)


def torch_einsum(cuda: bool) -> tuple:
    """Scores of attention, a bilinear form and their gradients by einsum: batches of products."""
    import torch

    b, h, n, d = (8, 16, 1024, 128) if cuda else (2, 2, 16, 8)
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(2)
    q, k, v = (torch.randn(b, h, n, d, device=device) for _ in range(3))
    form = torch.randn(h, d, d, device=device) / d

    def run(dtype=torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v, form)]
        scores = torch.einsum("bhid,hde,bhje->bhij", leaves[0], leaves[3], leaves[1])
        mixed = torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, -1), leaves[2])
        slopes = torch.autograd.grad((mixed**2).sum(), leaves)
        return torch.cat([g.flatten() for g in (mixed.detach(), *slopes)])

    return run, lambda found: distance(found, run(torch.float64)), wait_of(cuda)


def torch_kernel(cuda: bool) -> tuple:
    """Twenty steps of conjugate gradients on a kernel matrix with many right-hand sides."""
    import torch

    n, sides = (8192, 512) if cuda else (64, 8)
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(3)
    points = torch.randn(n, 16, device=device, dtype=torch.float64)
    matrix = torch.exp(-(torch.cdist(points, points) ** 2) / 32)
    matrix.diagonal().add_(1)
    right = torch.randn(n, sides, device=device)

    def run(dtype=torch.float32):
        a, r = matrix.to(dtype), right.to(dtype)
        x, p, rr = torch.zeros_like(r), r, (r * r).sum(0)
        for _ in range(20):
            ap = a @ p
            step = rr / (p * ap).sum(0)
            x, r = x + step * p, r - step * ap
            rr, before = (r * r).sum(0), rr
            p = r + (rr / before) * p
        return x

    return run, lambda found: distance(found, run(torch.float64)), wait_of(cuda)


def torch_words(cuda: bool) -> tuple:
    """The head of GPT-2 in training: 50257 logits a token, and what follows from their loss."""
    import torch

    tokens, width, words = (4096, 768, 50257) if cuda else (16, 8, 37)
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(8)
    weight = torch.randn(words, width, device=device) / width**0.5
    x, right = torch.randn(tokens, width, device=device), torch.arange(tokens, device=device)

    def run(dtype=torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        logits = torch.nn.functional.linear(*leaves)
        loss = torch.nn.functional.cross_entropy(logits, right % words)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])

    return run, lambda found: distance(found, run(torch.float64)), wait_of(cuda)


def torch_flat(cuda: bool) -> tuple:
    """The gradient of a network whose parameters are one vector, as solvers want them: its weights
    begin anywhere."""
    import torch

    width, rows = (2048, 8192) if cuda else (32, 64)
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(9)
    sizes = [1, width * width, width * width, width * width]  # a scale in front
    vector = torch.randn(sum(sizes), device=device) / width**0.5
    x = torch.randn(rows, width, device=device)

    def run(dtype=torch.float32):
        flat = vector.to(dtype).requires_grad_()
        scale, *weights = flat.split(sizes)
        hidden = x.to(dtype) * scale
        for each in weights:
            hidden = torch.tanh(torch.nn.functional.linear(hidden, each.view(width, width)))
        return torch.autograd.grad((hidden**2).mean(), flat)[0]

    return run, lambda found: distance(found, run(torch.float64)), wait_of(cuda)


def gpytorch_solve(cuda: bool) -> tuple:
    """What an exact Gaussian process predicts with: its covariance's inverse times many vectors, by
    GPyTorch's conjugate gradients."""
    import gpytorch
    import torch

    n, sides, device = (8192, 256, "cuda") if cuda else (48, 4, "cpu")
    points, values = samples(n, device)
    right = torch.randn(n, sides, device=device)

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            super().__init__(points.float(), values.float(), likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            mean, covariance = self.mean_module(x), self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    model = Model().to(device).train()

    def covariance():
        return model.likelihood(model(*model.train_inputs)).lazy_covariance_matrix

    def run():
        by_products = gpytorch.settings.max_cholesky_size(1)
        with torch.no_grad(), by_products, gpytorch.settings.cg_tolerance(1e-4):
            return covariance().solve(right)

    def error(found):
        with torch.no_grad():
            dense = covariance().to_dense().double()
        return distance(found, torch.linalg.solve(dense, right.double()))

    return run, error, wait_of(cuda)


def botorch_double(cuda: bool) -> tuple:
    """BoTorch's Gaussian process, in double as it asks for: nothing to take, and the same bits."""
    import gpytorch
    import torch
    from botorch.models import SingleTaskGP

    points, values = samples(1024 if cuda else 48, "cuda" if cuda else "cpu")

    def run():
        model = SingleTaskGP(points, values[:, None]).train()
        loss_of = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        with gpytorch.settings.max_cholesky_size(10**6):
            loss = -loss_of(model(*model.train_inputs), model.train_targets)
            leaves = [p for p in model.parameters() if p.requires_grad]
            slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
        kept = [s.flatten() for s in slopes if s is not None]
        return torch.cat([loss.detach().flatten(), *kept])

    return run, lambda found: float(found.sum()), wait_of(cuda)  # the answer: it must be the same


def samples(n: int, device: str) -> tuple:
    import torch

    torch.manual_seed(4)
    points = torch.rand(n, 8, device=device, dtype=torch.float64)
    return points, torch.sin(points.sum(1)) + 0.1 * torch.randn_like(points[:, 0])


def jax_network(cuda: bool) -> tuple:
    """A network's gradient by jnp.dot at "highest"."""
    import jax
    import jax.numpy as jnp
    import numpy

    jax.config.update("jax_enable_x64", True)
    width, rows = (4096, 8192) if cuda else (32, 64)
    random = numpy.random.default_rng(6)
    shapes = [(width, width)] * 3
    weights = [random.standard_normal(s, dtype=numpy.float32) / width**0.5 for s in shapes]
    x = random.standard_normal((rows, width), dtype=numpy.float32)

    @jax.jit
    def slopes(weights, x):
        def loss(weights):
            hidden = x
            for w in weights:
                hidden = jnp.tanh(jnp.dot(hidden, w, precision="highest"))
            return (hidden**2).mean()

        return jax.grad(loss)(weights)

    given = [jnp.asarray(w) for w in weights], jnp.asarray(x)

    def run():
        return slopes(*given)

    def error(found):
        wide = [jnp.asarray(w, jnp.float64) for w in weights], jnp.asarray(x, jnp.float64)
        truth = slopes(*wide)
        off = sum(float(((f.astype(jnp.float64) - t) ** 2).sum()) for f, t in zip(found, truth))
        return (off / sum(float((t**2).sum()) for t in truth)) ** 0.5

    return run, error, lambda found: jax.block_until_ready(found)


def cupy_solver(cuda: bool) -> tuple:
    """Newton's iteration for a matrix's inverse: X ← X (2 − A X)."""
    import cupy

    n = 8192 if cuda else 64
    cupy.random.seed(7)
    # As single numbers in double too, so that both invert the same.
    single = cupy.random.standard_normal((n, n), dtype=cupy.float32)
    single = cupy.eye(n, dtype=cupy.float32) + 0.25 * single / n**0.5

    def run(dtype=cupy.float32):
        a = single.astype(dtype)
        found, two = a.T * dtype(0.6), 2 * cupy.eye(n, dtype=dtype)
        for _ in range(6):
            found = found @ (two - a @ found)
        return found

    def error(found):
        truth = run(cupy.float64)
        return float(cupy.linalg.norm(found.astype(cupy.float64) - truth) / cupy.linalg.norm(truth))

    return run, error, lambda _: cupy.cuda.Device().synchronize()


def wait_of(cuda: bool) -> Callable:
    import torch

    return lambda _: torch.cuda.synchronize() if cuda else None


@dataclass(frozen=True)
class Program:
    name: str
    make: Callable | None = None
    needs: tuple = ("torch",)
    words: tuple = ()  # of a program in C++
    double: bool = False
    enabled: bool = False  # by ingot.enable(), in the place of `ingot run`


PROGRAMS = (
    Program("C++: blocked Cholesky, 16384", words=("cholesky", "16384", "3")),
    Program("C++: block power iteration, 16384", words=("power", "16384", "3")),
    Program("PyTorch: Hessian times vector", torch_hessian),
    Program("PyTorch: the same, ingot.enable()", torch_hessian, enabled=True),
    Program("PyTorch: einsum and its gradient", torch_einsum),
    Program("PyTorch: conjugate gradients", torch_kernel),
    Program("PyTorch: GPT-2's head in training", torch_words),
    Program("PyTorch: parameters in one vector", torch_flat),
    Program("JAX: gradient at highest", jax_network, ("jax",)),
    Program("JAX: the same, ingot.enable()", jax_network, ("jax",), enabled=True),
    Program("CuPy: Newton's inverse", cupy_solver, ("cupy",)),
    Program("CuPy: the same, ingot.enable()", cupy_solver, ("cupy",), enabled=True),
    Program("GPyTorch: conjugate gradients", gpytorch_solve, ("torch", "gpytorch")),
    Program("BoTorch: in double", botorch_double, ("torch", "gpytorch", "botorch"), double=True),
)


def work(number: int, device: str, enabled: bool) -> None:
    """The child: one program, its seconds and error as a line of JSON."""
    if enabled:
        import ingot

        ingot.enable()
    run, error_of, wait = PROGRAMS[number].make(device == "cuda")
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        found = run()
        wait(found)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": median(seconds[1:]), "error": error_of(found)}), flush=True)


# the parent ---------------------------------------------------------------------------------------


def cublas_folders() -> list[str]:
    """Where a program in C++ finds cuBLAS, and Ingot its compiler: the toolkit, else Python's."""
    folders = [Path("/usr/local/cuda/lib64")]
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec else []:
        folders += sorted(Path(base).glob("*/lib"))
    return [str(folder) for folder in folders if any(folder.glob("lib*.so*"))]


def build(folder: str) -> tuple[str, str]:
    """The program in C++; else why there is none."""
    if given := os.environ.get("INGOT_CUBLAS_PROGRAMS"):
        return given, ""
    if shutil.which("nvcc") is None:
        return "", "nvcc is not here"
    made = str(Path(folder) / "cublas_programs")
    source = Path(__file__).with_name("cublas_programs.cu")
    command = ["nvcc", "-O2", "-std=c++17", "-arch=sm_80", source, "-lcublas", "-o", made]
    answer = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return (made, "") if answer.returncode == 0 else ("", answer.stderr.strip()[-300:])


def missing(program: Program, why: str, device: str) -> str:
    if program.words:
        return why if device == "cuda" else "it needs a GPU"
    absent = [name for name in program.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} is not here" if absent else ""


@dataclass
class Found:
    seconds: float = 0.0
    error: float = 0.0
    taken: int = 0
    every: int = 0
    problem: str = ""


def measure(number: int, options, binary: str, ingot: bool, limit: float) -> Found:
    program = PROGRAMS[number]
    own = [binary, *program.words]
    if not program.words:
        own = [sys.executable, __file__, options.library, "--worker", str(number)]
        own += ["--device", options.device] + ["--enabled"] * (ingot and program.enabled)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        paths = [*cublas_folders(), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            "INGOT_LIBRARY": options.library,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "python"), os.environ.get("PYTHONPATH", ""))),
            "COLUMNS": "400",
        }
        if program.words:
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
        if ingot and program.enabled:
            environment["INGOT_BLAS_REPORT"] = str(report)
        elif ingot:
            own = [sys.executable, "-m", "ingot.cli", "run", *own]
        try:
            answer = subprocess.run(
                own, env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Found(problem=f"took more than {limit:.0f} s")
        lines = answer.stdout.strip().splitlines()
        if answer.returncode != 0 or not lines:
            last = (answer.stderr.strip() or "no output").splitlines()[-1]
            return Found(problem=f"exit status {answer.returncode}: {last}")
        found = Found(**json.loads(lines[-1]))
        for text in report.read_text().splitlines() if report.exists() else []:
            rows = json.loads(text)["products"]
            found.taken += sum(row["count"] for row in rows if row["taken"])
            found.every += sum(row["count"] for row in rows)
        for taken, every in re.findall(r"(\d+) of (\d+) fp32 products taken", answer.stderr):
            found.taken += int(taken)
            found.every += int(every)
        return found


def verdict(program: Program, before: Found, after: Found) -> str:
    if before.problem:
        return ""  # no fault of Ingot's
    if after.problem:
        return after.problem
    if program.double:
        same = before.error == after.error and after.taken == 0
        return "" if same else "another answer in double, or a product taken"
    return "" if after.error <= max(ACCURATE, WORSE * before.error) else "less accurate"


def run(options) -> int:
    options.library = str(Path(options.library).resolve())
    ends, failures, rows, taken = time.monotonic() + options.seconds, [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        binary, why = build(folder) if options.device == "cuda" else ("", "")
        print("| program | s | with Ingot, s | × | error | with Ingot | taken |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for number, program in enumerate(PROGRAMS):
            if options.only not in program.name:
                continue
            if absent := missing(program, why, options.device):
                print(f"| {program.name} | left out: {absent} | | | | | |", flush=True)
                continue
            left = ends - time.monotonic()
            if left < 5:
                print(f"| {program.name} | left out: no time | | | | | |", flush=True)
                failures.append(f"no time for {program.name}")
                continue
            before, after = (
                measure(number, options, binary, ingot, max(5.0, ends - time.monotonic()))
                for ingot in (False, True)
            )
            problem = verdict(program, before, after)
            if problem:
                failures.append(f"{program.name}: {problem}")
            taken += after.taken
            print(line_of(program, before, after), flush=True)
            rows.append({"program": program.name, "before": vars(before), "after": vars(after)})
    if options.device == "cuda" and rows and taken == 0:
        failures.append("nothing was taken")
    if options.out:
        from ingot.bench.records import write_whole

        write_whole(Path(options.out), json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(f"{taken} products taken; {len(failures)} failures: {'; '.join(failures)}")
    return 1 if failures else 0


def line_of(program: Program, before: Found, after: Found) -> str:
    if before.problem or after.problem:
        return f"| {program.name} | {before.problem or 'ran'} | {after.problem or 'ran'} | | | | |"
    errors = f"{before.error:.1e} | {after.error:.1e}"
    if program.double:
        errors = "the same | bits" if before.error == after.error else "an answer | another"
    return (
        f"| {program.name} | {before.seconds:.4f} | {after.seconds:.4f} | "
        f"{before.seconds / after.seconds:.2f} | {errors} | {after.taken} of {after.every} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--enabled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.device, options.enabled)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
