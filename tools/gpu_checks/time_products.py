"""Times products of every kind through torch.compile(backend="ingot"), beside eager.

python time_products.py [--seconds 240] [--names A,B] [--gradients] [--small]

One line each: eager's and Ingot's time of a call (medians of interleaved rounds of calls under CUDA
events, fp32 without TF32), how many times as fast, both relative Frobenius errors against fp64 of
the same (on the GPU), and what runs the products. --gradients: a forward and a backward pass.
--small: sizes of a few hundred, at which nothing may be slower. Ends with the geometric mean, and
with status 1 where an error is beyond eager's or a time beyond 1 / 0.95 of it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from ingot.capture import Region  # noqa: E402
from ingot.live import products  # noqa: E402
from ingot.live.backend import Session, compile_graph  # noqa: E402
from measures import relative_error  # noqa: E402
from torch.nn import functional as F  # noqa: E402


def attention(q, k, v):
    return F.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v


def cases(small: bool) -> dict:
    s = 256 if small else 4096
    h = s // 2
    b, t, d, heads = (4, 96, 64, 4) if small else (16, 1024, 64, 16)
    n, r = (8, 128) if small else (128, 512)
    return {
        "a b": (lambda a, b: a @ b, (s, s), (s, s)),
        "a b 2048": (lambda a, b: a @ b, (h, h), (h, h)),
        "a b, unequal": (lambda a, b: a @ b, (s, h), (h, s + 8)),
        "a b, odd": (lambda a, b: a @ b, (s - 1, h - 1), (h - 1, s + 1)),
        "aT b": (lambda a, b: a.T @ b, (s, h), (s, h)),
        "a bT": (lambda a, b: a @ b.T, (s, h), (s, h)),
        "aT bT": (lambda a, b: a.T @ b.T, (h, s), (s, h)),
        "a aT": (lambda a: a @ a.T, (s, h)),
        "a a": (lambda a: a @ a, (s, s)),
        "tril": (lambda a, b: torch.tril(a @ b), (s, s), (s, s)),
        "deep": (lambda a, b: a @ b, (h // 8, s * 8), (s * 8, h // 8)),
        "tall": (lambda a, b: a @ b, (s * 8, 64), (64, s // 4)),
        "addmm": (lambda c, a, b: torch.addmm(c, a, b), (s,), (s, h), (h, s)),
        "a bT relu": (lambda a, b: torch.relu(a @ b.T * 2), (s, h), (s, h)),
        "aT b gelu": (lambda a, b, c: F.gelu(a.T @ b + c), (h, s), (h, s), (s,)),
        "a bT softmax": (lambda a, b: F.softmax(a @ b.T * 0.01, -1), (s, h), (s, h)),
        "bmm": (torch.bmm, (n, r, r), (n, r, r)),
        "bmm odd": (torch.bmm, (n, r - 11, r), (n, r, r + 3)),
        "bmm few": (torch.bmm, (4, s // 2, s // 2), (4, s // 2, s // 2)),
        "bmm tiny": (torch.bmm, (n * 8, 64, 64), (n * 8, 64, 64)),
        "bmm thin": (torch.bmm, (n * 8, 1, r), (n * 8, r, r)),
        "bmm aT": (lambda a, b: torch.bmm(a.mT, b), (n, r, r), (n, r, r)),
        "bmm bT": (lambda a, b: torch.bmm(a, b.mT), (n, r, r), (n, r, r)),
        "bmm expanded": (lambda a, b: torch.bmm(a, b.expand(n, r, r)), (n, r, r), (1, r, r)),
        "baddbmm": (torch.baddbmm, (n, r, r), (n, r, r), (n, r, r)),
        "bmm bias relu": (lambda a, b, c: F.relu(torch.bmm(a, b) + c), (n, r, r), (n, r, r), (r,)),
        "bmm softmax": (lambda a, b: F.softmax(torch.bmm(a, b), -1), (n, r, r), (n, r, r)),
        "3-d by 2-d": (lambda a, b: a @ b, (n, r, r), (r, r)),
        "2-d by 3-d": (lambda a, b: a @ b, (r, r), (n, r, r)),
        "4-d by 4-d": (lambda a, b: a @ b, (b, heads, t, t), (b, heads, t, d)),
        "4-d by 3-d": (lambda a, b: a @ b, (b, heads, t, d), (heads, d, t)),
        "scores": (lambda q, k: q @ k.mT, (b, heads, t, d), (b, heads, t, d)),
        "scores of bqhd": (
            lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).mT,
            (b, t, heads, d),
            (b, t, heads, d),
        ),
        "attention": (attention, *[(b, heads, t, d)] * 3),
        "einsum bqhd,bkhd->bhqk": (
            lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
            (b, t, heads, d),
            (b, t, heads, d),
        ),
        "einsum bhqk,bkhd->bqhd": (
            lambda p, v: torch.einsum("bhqk,bkhd->bqhd", p, v),
            (b, heads, t, t),
            (b, t, heads, d),
        ),
        "einsum bijl,lk->bijk": (
            lambda a, b: torch.einsum("bijl,lk->bijk", a, b),
            (b, t // 4, t // 4, 256),
            (256, 768),
        ),
        "einsum bcd,bce->de": (
            lambda x, y: torch.einsum("bcd,bce->de", x, y),
            (b, t, 16 * d),
            (b, t, 16 * d),
        ),
        "tensordot": (
            lambda x, y: torch.tensordot(x, y, dims=([1, 2], [0, 1])),
            (s, 16, d),
            (16, d, s),
        ),
    }


def runners(session: Session) -> str:
    (graph,) = session.graphs
    if graph.compiled is None:
        return "PyTorch"
    found = []
    for step in graph.compiled.captured.steps:
        if isinstance(step, Region):
            found += ["region" for v in step.graph["values"] if v["op"] == "matmul"]
        elif step.target is products.product:
            found.append("by itself")
    return ", ".join(found) or "PyTorch"


def caller(function, inputs: list, gradients: bool):
    if not gradients:
        return lambda: [function(*inputs)]
    weights = torch.rand_like(function(*inputs).detach())

    def call():
        for tensor in inputs:
            tensor.grad = None
        result = function(*inputs)
        result.backward(weights)
        return [result.detach(), *(tensor.grad for tensor in inputs)]

    return call


def burst(call, calls: int) -> float:
    """Milliseconds of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def measure(name: str, case: tuple, gradients: bool) -> tuple[float, bool]:
    function, *shapes = case
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device="cuda") for shape in shapes]
    torch._dynamo.reset()
    session = Session()
    run = torch.compile(function, backend=lambda gm, given: compile_graph(session, gm, given))
    if gradients:
        inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.manual_seed(1)
    eager = caller(function, inputs, gradients)
    torch.manual_seed(1)
    ours = caller(run, inputs, gradients)
    with torch.set_grad_enabled(gradients):
        wide = [tensor.detach().double().requires_grad_(gradients) for tensor in inputs]
        if gradients:
            torch.manual_seed(1)
            weights = torch.rand_like(function(*inputs).detach())
            result = function(*wide)
            result.backward(weights.double())
            truth = [result.detach(), *(tensor.grad for tensor in wide)]
        else:
            truth = [function(*wide)]
        del wide
        error, eagers_error = relative_error(ours(), truth), relative_error(eager(), truth)
        del truth
        for call in (eager, ours):
            burst(call, 3)
        calls = max(3, min(50, int(20 / max(burst(eager, 3), 1e-3))))
        rounds = [(burst(eager, calls), burst(ours, calls)) for _ in range(7)]
    theirs, own = (statistics.median(times) for times in zip(*rounds))
    gain = theirs / own
    sound = error <= 2 * eagers_error + 1e-6 and gain >= 0.95
    print(
        f"{name:24} {theirs:9.3f} ms {own:9.3f} ms {gain:6.2f}x  errors {eagers_error:.1e} "
        f"{error:.1e}  {runners(session)}{'' if sound else '  <---'}",
        flush=True,
    )
    return gain, sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--names", default="")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    end = time.monotonic() + options.seconds
    gains, all_sound = [], True
    wanted = set(filter(None, options.names.split(",")))
    print(f"{'':24} {'eager':>12} {'Ingot':>12}")
    for name, case in cases(options.small).items():
        if wanted and name not in wanted:
            continue
        if time.monotonic() > end:
            print("out of time before", name)
            break
        with torch.set_grad_enabled(options.gradients):
            gain, sound = measure(name, case, options.gradients)
        gains.append(gain)
        all_sound = all_sound and sound
        torch.cuda.empty_cache()
    if gains:
        mean = math.exp(statistics.fmean(map(math.log, gains)))
        print(f"{len(gains)} products, geometric mean {mean:.2f}x")
    return 0 if all_sound else 1


if __name__ == "__main__":
    sys.exit(main())
