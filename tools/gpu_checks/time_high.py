"""The policy "high" on a GPU: errors against fp64, where infinities and NaN stand, and times beside
eager TF32 and the policy "fp32", interleaved, with cold L2.

python time_high.py [--rounds 11] [--seconds 60] [--root FOLDER]

One line a case: of every contender the median in ms and its relative Frobenius error. Exit status 1
where a product under "high" is more than 1.2e-5 off (a model's result: 3e-5; a step's result and
gradients: a tenth of what eager TF32's are), is not bit for bit the same when repeated, or has
infinities and NaN elsewhere than fp64.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from pathlib import Path

import ingot
import torch
from ingot.model_file import load_model_file
from measures import Timer, relative_error
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
MODELS = (
    ("gemm_scale_bn", (1024, 8192, 8192)),
    ("gemm_scale_bn_large", (16384, 4096, 4096)),
    ("gemm_bn_scale_softmax", (1024, 8192, 8192)),
    ("linear_gelu", (4096, 1024, 4096)),
)
# Rows, inputs, outputs; what the elements of x are like.
PRODUCTS = (
    *(
        (shape, "uniform")
        for shape in ((1024, 8192, 8192), (16384, 4096, 4096), (2048, 2048, 2048))
    ),
    *((shape, "normal") for shape in ((1027, 4099, 2053), (513, 32768, 1000), (300, 8192, 64))),
    ((2048, 4096, 4096), "one sign"),
    ((2048, 4096, 4096), "rows"),
    ((2048, 4096, 4096), "outliers"),
    ((2048, 4096, 4096), "special"),
)
PRODUCT_ERROR, MODEL_ERROR = 1.2e-5, 3e-5
bad: list[str] = []


def relative(found, truth) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


def fails(what: str, why: str) -> None:
    bad.append(what)
    print(f"FAIL {what}: {why}", flush=True)


def matrix(shape: tuple[int, int], kind: str) -> torch.Tensor:
    if kind in ("uniform", "one sign"):
        return torch.rand(shape, device="cuda")
    x = torch.randn(shape, device="cuda")
    if kind == "rows":
        x *= torch.exp2(torch.randint(-20, 21, (shape[0], 1), device="cuda"))
    elif kind == "outliers":
        x[:, 17] *= 2.0**10
    elif kind == "special":
        x[3, 5], x[40, 7], x[100, 0] = float("inf"), float("-inf"), float("nan")
    return x


def product(shape, kind: str) -> None:
    m, k, n = shape
    what = f"product {m}x{k}->{n} {kind}"
    linear = nn.Linear(k, n, device="cuda").eval()
    if kind == "one sign":
        nn.init.uniform_(linear.weight)
    x = matrix((m, k), kind)
    high, fp32 = (ingot.optimize(copy.deepcopy(linear), precision=p) for p in ("high", "fp32"))
    with torch.no_grad():
        truth = copy.deepcopy(linear).double()(x.double())
        found, again, fine = high(x), high(x), fp32(x)
        linear.weight.data = linear.weight.data.t().contiguous().t()
        by_columns = ingot.optimize(linear, precision="high")(x)
    if not torch.equal(found.nan_to_num(), again.nan_to_num()):
        fails(what, "other bits when repeated")
    finite = truth.isfinite()
    for name, y in (("", found), (" by columns", by_columns)):
        if not torch.equal(y.isnan(), truth.isnan()) or not torch.equal(y.isinf(), truth.isinf()):
            fails(what + name, "infinities or NaN elsewhere")
        error = relative(y[finite], truth[finite])
        if not error <= PRODUCT_ERROR:
            fails(what + name, f"error {error:.2e}")
    error = relative(found[finite], truth[finite])
    print(
        f"{what:44} high {error:.2e}  fp32 {relative(fine[finite], truth[finite]):.2e}", flush=True
    )


def forward(module, inputs):
    def call():
        with torch.no_grad():
            return [module(*inputs)]

    return call


def step(module, inputs, weight):
    def call():
        module.zero_grad(set_to_none=True)
        result = module(*inputs)
        result.backward(weight)
        return [result.detach(), *(p.grad for p in module.parameters())]

    return call


def model(name: str, shape, kind: str, timer: Timer, arguments) -> None:
    rows, inner, outer = shape
    loaded = load_model_file(
        arguments.root / "examples" / f"{name}.py",
        {"batch_size": rows, "in_features": inner, "out_features": outer},
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        eager = loaded.make_module().train(kind in ("training", "step"))
        inputs = loaded.make_inputs()
    own = [ingot.optimize(copy.deepcopy(eager), precision=p) for p in ("high", "fp32")]
    exact, wide = copy.deepcopy(eager).double(), [t.double() for t in inputs]
    if kind == "step":
        weight = torch.randn_like(forward(eager, inputs)()[0])
        truth = step(exact, wide, weight.double())()
        calls = [step(m, inputs, weight) for m in (eager, *own)]
    else:
        truth = forward(exact, wide)()
        calls = [forward(m, inputs) for m in (eager, *own)]
    if kind == "frozen":
        for m in own:
            m.ingot_freeze()
    del exact, wide
    errors = [relative_error(call(), truth) for call in calls]
    del truth
    times = timer.medians(calls, arguments.rounds)
    if not errors[1] <= (errors[0] / 10 if kind == "step" else MODEL_ERROR):
        fails(f"{name} {kind}", f"error {errors[1]:.2e}")
    columns = zip(("eager TF32", "high", "fp32"), times, errors, strict=True)
    text = "  ".join(f"{what} {ms:.4f} ({error:.1e})" for what, ms, error in columns)
    print(f"{name:22} {kind:9} {rows}x{inner}->{outer} {text}  TF32/high {times[0] / times[1]:.3f}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    started, timer = time.monotonic(), Timer(torch.device("cuda"))
    torch.backends.cuda.matmul.allow_tf32 = True
    models = [
        lambda name=name, s=s, kind=kind: model(name, s, kind, timer, arguments)
        for name, s in MODELS
        for kind in ("training", "eval", "frozen", "step")
    ]
    products = [lambda s=s, kind=kind: product(s, kind) for s, kind in PRODUCTS]
    cases = models[:3] + products + models[3:]  # what is asked for first, before time runs out
    for number, case in enumerate(cases):
        if time.monotonic() - started > arguments.seconds:
            print(f"not reached: {len(cases) - number} of {len(cases)}")
            break
        case()
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - started:.0f} s; bad: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
