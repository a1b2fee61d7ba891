"""Times whole models where PyTorch allows TF32: eager TF32 and Ingot, interleaved, with cold L2.

python time_tf32.py [--seconds 100] [--shrink N] [--device cuda|cpu] [--models A,B] [--root FOLDER]

The models that start the project first, without gradients and as training steps, in training and
in eval mode; then models of tests/models. One line a case: the medians, eager's over Ingot's, and
the relative Frobenius errors of both against fp64 (of the result, and of a step's gradients). Exit
status 1 where Ingot is slower than eager by more than 2%, or its error is above 1.5 times eager's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SEED = (
    ("examples/gemm_scale_bn.py", (1024, 8192, 8192)),
    ("examples/gemm_scale_bn_large.py", (16384, 4096, 4096)),
    ("examples/gemm_bn_scale_softmax.py", (1024, 8192, 8192)),
)
WIDE, TALL = (1024, 8192, 8192), (16384, 4096, 4096)
CHAINS = (
    ("linear_gelu", (4096, 1024, 4096), "eval", "examples"),
    ("swish_divide_clamp_tanh_clamp", WIDE, "eval", "tests/models"),
    ("batchnorm_gelu_relu", TALL, "training", "tests/models"),
    ("mish_twice", (65536, 256, 256), "eval", "tests/models"),
    ("swiglu", (1024, 2048, 5632), "eval", "tests/models"),
    ("residual_mlp_block", (1024, 1024, 4096), "eval", "tests/models"),
    ("gelu_softmax", WIDE, "eval", "tests/models"),
    ("scale_detached_residual", (16384, 1024, 128), "eval", "tests/models"),
    ("add_layernorm_twice", (8192, 2048, 2048), "eval", "tests/models"),
    ("batchnorm_bias_divide_swish", (256, 512, 512), "training", "tests/models"),
    ("maxpool_sum_scale", (128, 16384, 16384), "eval", "tests/models"),
    ("raw_weight_divide_sum_scale", (64, 4096, 4096), "eval", "tests/models"),
    ("divide_gelu", (32768, 64, 1024), "eval", "tests/models"),
    ("low_rank_adapter", TALL, "eval", "tests/models"),
)
SLOWER, WORSE = 1.02, 1.5


def without_gradients(module, inputs):
    def call():
        with torch.no_grad():
            result = module(*inputs)
        return list(pytree.tree_leaves(result))

    return call


def step(module, inputs, weights):
    def call():
        module.zero_grad(set_to_none=True)
        results = pytree.tree_leaves(module(*inputs))
        torch.autograd.backward(results, weights)
        return [*(r.detach() for r in results), *(p.grad for p in module.parameters())]

    return call


def case(loaded, mode: str, gradients: bool, device, timer, rounds: int):
    torch.manual_seed(1)
    with torch.device(device):
        eager = loaded.make_module().train(mode == "training")
        inputs = loaded.make_inputs()
    exact, optimised = copy.deepcopy(eager).double(), ingot.optimize(copy.deepcopy(eager))
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    if gradients:
        weights = [torch.randn_like(r) for r in without_gradients(eager, inputs)()]
        truth = step(exact, wide, [w.double() for w in weights])()
        calls = [step(eager, inputs, weights), step(optimised, inputs, weights)]
    else:
        truth = without_gradients(exact, wide)()
        calls = [without_gradients(eager, inputs), without_gradients(optimised, inputs)]
    del exact, wide
    results = [call() for call in calls]
    errors = [relative_error(result, truth) for result in results]
    del truth, results
    return timer.medians(calls, rounds), errors, optimised.ingot_report()["unsupported"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes, to try it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default="", help="these alone, separated by commas")
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    device, started = torch.device(arguments.device), time.monotonic()
    timer, bad, missed = Timer(device), [], []
    listed = [
        (arguments.root / path, shape, mode, gradients)
        for path, shape in SEED
        for mode in ("training", "eval")
        for gradients in (False, True)
    ] + [
        (arguments.root / folder / f"{name}.py", shape, mode, False)
        for name, shape, mode, folder in CHAINS
    ]
    for path, shape, mode, gradients in listed:
        if arguments.models and path.stem not in arguments.models.split(","):
            continue
        what = f"{path.stem} {mode}{' step' if gradients else ''}"
        if time.monotonic() - started > arguments.seconds:
            missed.append(what)
            continue
        rows, inner, outer = (max(16, size // arguments.shrink) for size in shape)
        sizes = {"batch_size": rows, "in_features": inner, "out_features": outer}
        label = f"{what:46} {rows}×{inner}→{outer:<6}"
        try:
            loaded = load_model_file(path, sizes)
            (eager, own), (eager_error, error), left = case(
                loaded, mode, gradients, device, timer, arguments.rounds
            )
        except Exception as problem:
            print(f"{label} FAILED {type(problem).__name__}: {problem}"[:300], flush=True)
            traceback.print_exc()
            bad.append(what)
            continue
        wrong = own > SLOWER * eager or error > WORSE * eager_error
        bad += [what] if wrong else []
        print(
            f"{label} eager TF32 {eager:8.4f} Ingot {own:8.4f} ({eager / own:5.2f}×) error "
            f"{error:.2e} eager's {eager_error:.2e} {' '.join(u['what'] for u in left)}"
            f"{' BAD' if wrong else ''}",
            flush=True,
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(
        f"{time.monotonic() - started:.0f} s; bad: {bad or 'none'}; not reached: {missed or 'none'}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    import ingot
    import torch
    from ingot.model_file import load_model_file
    from measures import Timer, relative_error
    from torch.utils import _pytree as pytree

    sys.exit(main())
