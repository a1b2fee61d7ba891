"""Times models of tests/models at real sizes: eager, eager with TF32, Ingot, and the limit.

python time_chains.py [--device cuda|cpu] [--seconds 110] [--shrink N] [--models A,B] [--kernels]
                      [--out FILE]

Interleaved bursts with cold L2, the weights changed before every call; errors are relative
Frobenius errors against fp64. The limit is what `ingot bench` computes: the products at the
library's best fp16 rate, or the fewest bytes at the copy's rate. Ends after --seconds, with what
was measured till then; the file is written after every chain. --kernels also prints what
each kernel of a call adds to its time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import ingot  # noqa: E402
import torch  # noqa: E402
from ingot.bench import limits, subjects  # noqa: E402
from ingot.bench.clocks import describe, read_clocks  # noqa: E402
from ingot.bench.records import source_hash, write_whole  # noqa: E402
from ingot.bench.rounds import compare  # noqa: E402
from ingot.model_file import load_model_file  # noqa: E402
from measures import kernels_of, relative_error, short_rounds  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

WIDE, TALL, THIN = (1024, 8192, 8192), (16384, 4096, 4096), (128, 16384, 16384)
# Model, (rows, in, out), mode, other constants of its file.
CASES = (
    ("swish_divide_clamp_tanh_clamp", WIDE, "eval", {}),
    ("groupnorm_swish_multiply_swish", WIDE, "eval", {"num_groups": 256}),
    ("batchnorm_bias_divide_swish", WIDE, "training", {}),
    ("scale_double_clamp_logsumexp_mish", WIDE, "eval", {}),
    ("batchnorm_gelu_relu", TALL, "training", {}),
    ("gelu_softmax", WIDE, "eval", {}),
    ("bmm_instance_norm_residual", WIDE, "eval", {}),
    ("maxpool_sum_scale", THIN, "eval", {}),
    ("scale_detached_residual", TALL, "eval", {}),
    ("subtract_mean_logsumexp_gelu_residual", (2048, 8192, 8192), "eval", {}),
    ("residual_mlp_block", (1024, 1024, 4096), "eval", {}),
    ("raw_weight_divide_sum_scale", WIDE, "eval", {}),
    ("avgpool_gelu_scale_max", WIDE, "eval", {"window": 16}),
    ("swiglu", (1024, 2048, 5632), "eval", {}),
    ("groupnorm_min_bias", WIDE, "eval", {"num_groups": 512}),
    ("add_layernorm_twice", (8192, 2048, 2048), "eval", {}),
    ("mish_twice", TALL, "eval", {}),
    ("maxpool_overlapping", WIDE, "eval", {}),
    ("four_axes_layernorm", (1024, 768, 3072), "eval", {}),
    ("low_rank_adapter", TALL, "eval", {}),
)
OPTIONS = {"fewest": 3, "warmups": 3, "calls": 10, "rest_s": 0.05}


def error(found, truth) -> float:
    return relative_error(pytree.tree_leaves(found), pytree.tree_leaves(truth))


def limit_of(module, inputs: list, results, inner: int, outer: int, device) -> tuple[float, int]:
    """Seconds, and the rows of the products over the whole batch."""
    first = inputs[0]
    rows = first.numel() // inner if first.shape[-1] == inner else first.shape[0]
    rates = limits.Rates(
        limits.measure_product_rate(max(1, rows), inner, outer, device),
        limits.measure_copy_rate(device),
    )
    flops = limits.product_flops(module, inputs)
    fewest = limits.fewest_bytes(inputs, module, pytree.tree_leaves(results))
    return limits.limit_seconds(flops, fewest, rates, "fp32"), rows


def print_kernels(call) -> None:
    """What each kernel of a call adds to its time: a kernel starts while the one before drains, and
    waits."""
    for name, _, added in kernels_of(call):
        print(f"    {added:9.1f} us  {name[:110]}")


def measure(case: tuple, device: torch.device, shrink: int, kernels: bool) -> dict:
    model, shape, mode, constants = case
    rows, inner, outer = (max(64, size // shrink) for size in shape)
    sizes = {"batch_size": rows, "in_features": inner, "out_features": outer, **constants}
    loaded = load_model_file(ROOT / "tests" / "models" / f"{model}.py", sizes)
    torch.manual_seed(1)
    with torch.device(device):
        module = loaded.make_module().train(mode == "training")
        sets = [loaded.make_inputs() for _ in range(2)]
    exact, eager = copy.deepcopy(module).double(), copy.deepcopy(module)
    with torch.no_grad():
        optimised = ingot.optimize(module, sets[0])
        found, expected = optimised(*sets[0]), eager(*sets[0])
        truth = exact(*[tensor.double() for tensor in sets[0]])
        errors = error(found, truth), error(expected, truth)
        del exact, eager, truth, expected
        limit, rows = limit_of(module, sets[0], found, inner, outer, device)
        del found
    # `module` is the optimised one as well: eager calls go to the class's own forward.
    twin = copy.copy(module)
    twin.__class__ = loaded.Model
    named = subjects.baselines(twin, sets, device, False, True)
    named["Ingot"] = subjects.calls(optimised, sets)
    options = short_rounds(5, 3.0, prepare=subjects.WeightChanger(twin), **OPTIONS)
    comparison = compare(named, device, options)
    ms = {name: 1e3 * comparison.summary(name).median for name in named}
    if kernels:
        print(model)
        with torch.no_grad():
            print_kernels(lambda: optimised(*sets[0]))
    return {
        "model": model,
        "shape": f"{rows}×{inner}→{outer}",
        "mode": mode,
        "eager_ms": ms[subjects.EAGER],
        "eager_tf32_ms": ms.get(subjects.EAGER_TF32),
        "ingot_ms": ms["Ingot"],
        "limit_ms": 1e3 * limit,
        "error": errors[0],
        "eager_error": errors[1],
        "left_to_pytorch": [item["what"] for item in optimised.ingot_report()["unsupported"]],
        "source_hash": source_hash(ROOT),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide all sizes, to try the script (up to 16)"
    )
    parser.add_argument("--models", default="", help="these alone, separated by commas")
    parser.add_argument("--kernels", action="store_true", help="print what each kernel takes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device, started = torch.device(arguments.device), time.monotonic()
    print(describe(read_clocks(0)) if device.type == "cuda" else "cpu")
    rows, missed, longest = [], [], 8.0
    for case in CASES:
        if arguments.models and case[0] not in arguments.models.split(","):
            continue
        begin = time.monotonic()
        if begin - started + longest > arguments.seconds:
            missed.append(case[0])
            continue
        rows.append(measure(case, device, arguments.shrink, arguments.kernels))
        rows.sort(key=lambda row: row["ingot_ms"] / row["limit_ms"])
        if arguments.out:
            write_whole(arguments.out, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        longest = max(4.0, time.monotonic() - begin)
    for r in rows:
        print(
            f"{r['model']:40} {r['shape']:18} {r['mode']:8} eager {r['eager_ms']:8.3f} Ingot "
            f"{r['ingot_ms']:8.3f} limit {r['limit_ms']:8.3f} /limit "
            f"{r['ingot_ms'] / r['limit_ms']:6.3f} error {r['error']:.1e} eager's "
            f"{r['eager_error']:.1e} {' '.join(r['left_to_pytorch'])}"
        )
    print(
        f"{len(rows)} chains in {time.monotonic() - started:.0f} s, not reached: {missed or 'none'}"
    )
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
