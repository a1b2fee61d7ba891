"""The policies "high" and "tf32" on a GPU: errors against fp64, where infinities and NaN stand, and
times beside eager TF32 and the policy "fp32", interleaved, with cold L2.

python time_policies.py [--rounds 11] [--seconds 160] [--models A,B] [--shrink N]
                        [--device cuda|cpu] [--root FOLDER]

One line a case: of every contender the median in ms and its relative Frobenius error. Exit status 1
where a product under "high" is more than 1.2e-5 off (a model's result: 3e-5; a step's result and
gradients: a tenth of what eager TF32's are), is not bit for bit the same when repeated, or has
infinities and NaN elsewhere than fp64; and where "tf32" is slower than eager TF32 by more than 2%,
or its error is above 1.5 times eager's.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import ingot
import torch
from ingot.model_file import load_model_file
from measures import Timer, relative_error
from torch import nn
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parents[2]
WIDE, TALL = (1024, 8192, 8192), (16384, 4096, 4096)
MODELS = (
    ("gemm_scale_bn", WIDE),
    ("gemm_scale_bn_large", TALL),
    ("gemm_bn_scale_softmax", WIDE),
    ("linear_gelu", (4096, 1024, 4096)),
)
KINDS = ("training", "eval", "frozen", "training step", "eval step")
CHAINS = (
    ("swish_divide_clamp_tanh_clamp", WIDE, "eval"),
    ("batchnorm_gelu_relu", TALL, "training"),
    ("mish_twice", (65536, 256, 256), "eval"),
    ("swiglu", (1024, 2048, 5632), "eval"),
    ("residual_mlp_block", (1024, 1024, 4096), "eval"),
    ("gelu_softmax", WIDE, "eval"),
    ("scale_detached_residual", (16384, 1024, 128), "eval"),
    ("add_layernorm_twice", (8192, 2048, 2048), "eval"),
    ("batchnorm_bias_divide_swish", (256, 512, 512), "training"),
    ("maxpool_sum_scale", (128, 16384, 16384), "eval"),
    ("raw_weight_divide_sum_scale", (64, 4096, 4096), "eval"),
    ("divide_gelu", (32768, 64, 1024), "eval"),
    ("low_rank_adapter", TALL, "eval"),
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
SLOWER, WORSE = 1.02, 1.5
bad: list[str] = []


def fails(what: str, why: str) -> None:
    bad.append(what)
    print(f"FAIL {what}: {why}", flush=True)


def matrix(shape: tuple[int, int], kind: str, device: torch.device) -> torch.Tensor:
    if kind in ("uniform", "one sign"):
        return torch.rand(shape, device=device)
    x = torch.randn(shape, device=device)
    if kind == "rows":
        x *= torch.exp2(torch.randint(-20, 21, (shape[0], 1), device=device))
    elif kind == "outliers":
        x[:, 17] *= 2.0**10
    elif kind == "special":
        x[3, 5], x[40, 7], x[100, 0] = float("inf"), float("-inf"), float("nan")
    return x


def product(shape, kind: str, device: torch.device) -> None:
    m, k, n = shape
    what = f"product {m}x{k}->{n} {kind}"
    linear = nn.Linear(k, n, device=device).eval()
    if kind == "one sign":
        nn.init.uniform_(linear.weight)
    x = matrix((m, k), kind, device)
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
        error = relative_error([y[finite]], [truth[finite]])
        if not error <= PRODUCT_ERROR:
            fails(what + name, f"error {error:.2e}")
    error = relative_error([found[finite]], [truth[finite]])
    fine_error = relative_error([fine[finite]], [truth[finite]])
    print(f"{what:44} high {error:.2e}  fp32 {fine_error:.2e}", flush=True)


def forward(module, inputs):
    def call():
        with torch.no_grad():
            return pytree.tree_leaves(module(*inputs))

    return call


def step(module, inputs, weights):
    def call():
        module.zero_grad(set_to_none=True)
        results = pytree.tree_leaves(module(*inputs))
        torch.autograd.backward(results, weights)
        return [*(r.detach() for r in results), *(p.grad for p in module.parameters())]

    return call


def model(path: Path, shape, kind: str, timer: Timer, rounds: int) -> None:
    rows, inner, outer = shape
    sizes = {"batch_size": rows, "in_features": inner, "out_features": outer}
    loaded = load_model_file(path, sizes)
    torch.manual_seed(1)
    with torch.device(timer.device):
        eager = loaded.make_module().train("training" in kind)
        inputs = loaded.make_inputs()
    own = [ingot.optimize(copy.deepcopy(eager), precision=p) for p in ("tf32", "high", "fp32")]
    exact = copy.deepcopy(eager).double()
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    if "step" in kind:
        weights = [torch.randn_like(r) for r in forward(eager, inputs)()]
        truth = step(exact, wide, [w.double() for w in weights])()
        calls = [step(m, inputs, weights) for m in (eager, *own)]
    else:
        truth = forward(exact, wide)()
        calls = [forward(m, inputs) for m in (eager, *own)]
    if kind == "frozen":
        for m in own:
            m.ingot_freeze()
    del exact, wide
    errors = [relative_error(call(), truth) for call in calls]
    del truth
    times = timer.medians(calls, rounds)
    what = f"{path.stem} {kind}"
    if not errors[2] <= (errors[0] / 10 if "step" in kind else MODEL_ERROR):
        fails(what, f"error {errors[2]:.2e}")
    if not errors[1] <= WORSE * errors[0]:
        fails(what, f"error under tf32 {errors[1]:.2e}, eager's {errors[0]:.2e}")
    if times[1] > SLOWER * times[0]:
        fails(what, f"{times[1] / times[0]:.3f} of eager's time under tf32")
    columns = zip(("eager TF32", "tf32", "high", "fp32"), times, errors, strict=True)
    text = "  ".join(f"{who} {ms:.4f} ({error:.1e})" for who, ms, error in columns)
    left = " ".join(item["what"] for item in own[0].ingot_report()["unsupported"])
    print(
        f"{what:42} {rows}x{inner}->{outer} {text}  TF32/tf32 {times[0] / times[1]:.3f}, /high "
        f"{times[0] / times[2]:.3f} {left}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=160)
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes, to try it")
    parser.add_argument("--models", default="", help="these alone, separated by commas")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    started, timer = time.monotonic(), Timer(torch.device(arguments.device))
    torch.backends.cuda.matmul.allow_tf32 = True
    listed = [("examples", *each, kind) for each in MODELS for kind in KINDS]
    listed += [("tests/models", *each) for each in CHAINS]

    def shrunk(shape):
        return [min(size, max(128, size // arguments.shrink)) for size in shape]

    models = [
        partial(
            model,
            arguments.root / folder / f"{name}.py",
            shrunk(shape),
            kind,
            timer,
            arguments.rounds,
        )
        for folder, name, shape, kind in listed
        if not arguments.models or name in arguments.models.split(",")
    ]
    products = [partial(product, shrunk(shape), kind, timer.device) for shape, kind in PRODUCTS]
    products = [] if arguments.models else products
    cases = models[:3] + products + models[3:]  # what is asked for first, before time runs out
    for number, case in enumerate(cases):
        if time.monotonic() - started > arguments.seconds:
            print(f"not reached: {len(cases) - number} of {len(cases)}")
            break
        case()
        if timer.cuda:
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - started:.0f} s; bad: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
