"""The models of tests/models in 16 bits at real sizes: eager, torch.compile max-autotune, Ingot.

python time_halves.py [--device cuda|cpu] [--types bf16,fp16] [--models A,B] [--seconds 500]
                      [--rounds 20] [--jobs 1] [--no-compile] [--out FILE] [--again]

Forward in a fresh module's mode, without gradients, on one GPU: interleaved rounds, cold L2, the
weights changed before every call. A row holds the medians, and Ingot's time over the better of
eager and torch.compile with its 95 % interval. Outputs may be no worse against fp64 than 1.1 times
eager's own error (relative Frobenius) and 1e-3 more. With --jobs several models are compiled at
once; whatever is timed, the trials of max-autotune among it, runs alone. Rows go to --out as they
come; those of the present sources that were right are not repeated. Exit status: 1 something was
wrong, 3 time ran out, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "python", Path(__file__).parent):
    sys.path.insert(0, str(folder))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")

import ingot  # noqa: E402
import torch  # noqa: E402
from ingot.bench import subjects  # noqa: E402
from ingot.bench.rounds import compare  # noqa: E402
from ingot.model_file import load_model_file  # noqa: E402
from measures import relative_error, short_rounds  # noqa: E402
from row_table import COMPILE, EAGER, INGOT, RowTable, rows_told, times_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from turns import Turns  # noqa: E402

MODELS = ROOT / "tests" / "models"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROW = "row: "
LEAST_S = 25.0
# By the rows that a model file has for a start: as many as fill the GPU, and features that its
# groups divide and tensor cores like.
SIZES = {
    37: {"batch_size": 1024, "in_features": 8192, "out_features": 7680},
    5: {"batch_size": 512, "in_features": 4096, "out_features": 3840},
    8192: {"batch_size": 65536, "features": 64},
}
OWN_SIZES = {
    "batched_product": {"batch_size": 64, "in_features": 1024, "out_features": 3840},
    "baddbmm_relu": {"batch_size": 64, "in_features": 1024, "out_features": 3840},
    "flatten_image": {"batch_size": 16384, "in_features": 45, "out_features": 60},
    "sliced_features": {"width": 1024},
    "sigmoid_linear_logsumexp": {"classes": 1000},
}
GROUPS = 240
ROUNDS_IN_FP64 = ("half_inside",)  # by a cast of its own: nothing is true of it
LEAST_ERROR = 1e-3  # where eager's results happen to be exact
OPTIONS = {"fewest": 7, "warmups": 3, "calls": 10, "rest_s": 0.02}


def sizes_of(model: str, small: bool) -> dict:
    if small:
        return {}
    constants = load_model_file(MODELS / f"{model}.py").constants
    sizes = SIZES[constants["batch_size"]] | OWN_SIZES.get(model, {})
    return sizes | ({"num_groups": GROUPS} if "num_groups" in constants else {})


def in_type(value, dtype: torch.dtype):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


class Halves:
    """One model, with its inputs, in a type."""

    def __init__(self, model: str, dtype: torch.dtype, arguments: argparse.Namespace):
        self.device = torch.device(arguments.device)
        sizes = sizes_of(model, self.device.type == "cpu")
        loaded = load_model_file(MODELS / f"{model}.py", sizes)
        torch.manual_seed(1)
        with torch.device(self.device):
            self.module = loaded.make_module().to(dtype)
            sets = [loaded.make_inputs() for _ in range(2)]
        self.sets = [pytree.tree_map(lambda v: in_type(v, dtype), inputs) for inputs in sets]
        leaves = [v for v in pytree.tree_leaves(self.sets[0]) if isinstance(v, torch.Tensor)]
        self.shape = " ".join("×".join(map(str, leaf.shape)) for leaf in leaves)
        if "out_features" in sizes:
            self.shape += f"→{sizes['out_features']}"
        # `module` will be the optimised one as well: eager calls go to the class's own forward.
        self.eager = copy.copy(self.module)
        self.kind = loaded.Model

    def optimised(self) -> nn.Module:
        found = ingot.optimize(self.module, self.sets[0])
        self.eager.__class__ = self.kind
        return found

    def truth(self) -> object:
        def doubled(value):
            return in_type(value, torch.float64)

        exact = copy.deepcopy(self.eager).double()
        torch.manual_seed(2)
        return exact(*pytree.tree_map(doubled, self.sets[0]))


def error(found, truth) -> float:
    """Of results that are numbers, and not zero throughout: of those nothing relative can be
    told."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(truth), strict=True)
    pairs = [(a, b) for a, b in pairs if b.is_floating_point() and b.norm() > 0]
    return relative_error(*zip(*pairs)) if pairs else 0.0


def row_of(model: str, halves: Halves, arguments: argparse.Namespace, turns: Turns) -> dict:
    with turns.beside_others():
        truth, eager = halves.truth(), copy.deepcopy(halves.eager)
        torch.manual_seed(2)
        expected = eager(*halves.sets[0])
        optimised = halves.optimised()
        torch.manual_seed(2)
        found = optimised(*halves.sets[0])
        errors = error(found, truth), error(expected, truth)
        del truth, expected, eager, found
    loses = errors[0] > 1.1 * errors[1] + LEAST_ERROR
    named = {EAGER: subjects.calls(halves.eager, halves.sets)}
    if not arguments.no_compile:
        named[COMPILE] = subjects.compiled_by_torch(halves.eager, halves.sets, halves.device)
        with trials_alone(turns):
            named[COMPILE](0)
    named[INGOT] = subjects.calls(optimised, halves.sets)
    report = optimised.ingot_report()
    row = {
        "shape": halves.shape,
        "mode": "training" if halves.module.training else "eval",
        "error": errors[0],
        "eager_error": errors[1],
        "wrong": "less accurate than eager" if loses and model not in ROUNDS_IN_FP64 else "",
        "operators": len(report["operators_replaced"]),
        "left_to_pytorch": [item["what"] for item in report["unsupported"]],
    }
    if arguments.rounds:
        change = subjects.WeightChanger(halves.eager)
        options = short_rounds(arguments.rounds, 8.0, prepare=change, **OPTIONS)
        with turns.alone():
            row |= against_the_better(compare(named, halves.device, options), named)
    return row


def against_the_better(comparison, named: dict) -> dict:
    row = times_of(comparison, named)
    others = [name for name in (EAGER, COMPILE) if name in named]
    best = min(others, key=lambda name: comparison.summary(name).median)
    ratio = comparison.ratio(INGOT, best)
    return row | {
        "best": best,
        "best_ratio": round(ratio.median, 4),
        "best_lower": round(ratio.lower, 4),
        "best_upper": round(ratio.upper, 4),
        "never_slower": comparison.never_slower(INGOT, best),
    }


@contextlib.contextmanager
def trials_alone(turns: Turns) -> Iterator[None]:
    """Inductor's trials of kernels, while no other process uses the GPU."""
    from torch._inductor.runtime.benchmarking import benchmarker

    measure = benchmarker.benchmark_gpu

    def alone(*args, **kwargs):
        with turns.alone():
            return measure(*args, **kwargs)

    benchmarker.benchmark_gpu = alone
    try:
        yield
    finally:
        del benchmarker.benchmark_gpu


def child(arguments: argparse.Namespace) -> int:
    """Measures the models that are asked for in each type, and prints each row."""
    warnings.simplefilter("ignore")
    turns, deadline, longest = Turns(arguments.turns), time.monotonic() + arguments.seconds, LEAST_S
    for key in arguments.child.split(","):
        begun = time.monotonic()
        if begun + longest > deadline:
            return 3
        model, kind = key.split(":")
        row = {"model": model, "type": kind}
        torch._dynamo.reset()
        try:
            with torch.no_grad():
                with turns.beside_others():
                    halves = Halves(model, DTYPES[kind], arguments)
                row |= row_of(model, halves, arguments, turns)
        except Exception as failure:  # the next one may do better
            row["wrong"] = f"{type(failure).__name__}: {failure}"[:600]
            row["trace"] = traceback.format_exc(limit=-6)
        print(ROW + json.dumps(row), flush=True)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        longest = max(longest, time.monotonic() - begun)
    return 0


def key_of(row: dict) -> tuple:
    return row["model"], row["type"]


def line(row: dict) -> str:
    what = f"{row['model']:40} {row['type']:5}"
    if "shape" not in row:
        return f"{what} WRONG {row['wrong']}"
    errors = f"error {row['error']:.1e} eager's {row['eager_error']:.1e}"
    times = ""
    if "ratio" in row:
        compiled = f"compile {row['compile_ms']:8.4f} " if row["compile_ms"] else ""
        times = (
            f"eager {row['eager_ms']:8.4f} {compiled}Ingot {row['ingot_ms']:8.4f} ms ratio "
            f"{row['best_ratio']:.3f} [{row['best_lower']:.3f}, {row['best_upper']:.3f}] "
        )
    wrong = f" WRONG {row['wrong']}" if row["wrong"] else ""
    return f"{what} {row['shape']:32} {times}{errors}{wrong}"


def measure(keys: list, table: RowTable, arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--child", ",".join(keys), "--device", arguments.device]
    command += ["--seconds", str(arguments.seconds - 10), "--rounds", str(arguments.rounds)]
    command += ["--turns", str(arguments.turns)] + ["--no-compile"] * arguments.no_compile
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    said: list[str] = []
    for row in rows_told(process.stdout, ROW, said):
        table.add(row)
        print(line(row), flush=True)
        if "trace" in row:
            print(row["trace"], flush=True)
    if process.wait() not in (0, 3):
        print(*said[-8:], sep="\n    ", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--types", default="bf16,fp16")
    parser.add_argument("--models", default="", help="these alone, separated by commas")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=20, help="0: correctness alone")
    parser.add_argument("--jobs", type=int, default=1, help="models that are compiled at once (1)")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true", help="repeat what was done")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.child:
        return child(arguments)
    started, table = time.monotonic(), RowTable(arguments.out, key_of)
    models = arguments.models.split(",") if arguments.models else []
    models = models or sorted(path.stem for path in MODELS.glob("*.py"))
    wanted = [(model, kind) for kind in arguments.types.split(",") for model in models]
    timed = arguments.rounds > 0
    todo = [key for key in wanted if arguments.again or not table.done(key, timed)]
    shares = [[":".join(key) for key in todo[i :: arguments.jobs]] for i in range(arguments.jobs)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        arguments.turns = Path(folder) / "turns"
        list(pool.map(lambda keys: measure(keys, table, arguments), filter(None, shares)))
    return verdict(table, wanted, time.monotonic() - started)


def verdict(table: RowTable, wanted: list, seconds: float) -> int:
    rows = [table.rows[key] for key in wanted if key in table.rows]
    timed = [row for row in rows if "best_ratio" in row]
    slower = [r for r in timed if not r["never_slower"]]
    for row in sorted(slower, key=lambda row: -row["best_ratio"]):
        print("not shown to be never slower:", line(row))
    if timed:
        mean = statistics.geometric_mean(1 / row["best_ratio"] for row in timed)
        print(f"{len(timed)} timed: {mean:.3f} × the better of eager and torch.compile")
    wrong = [" ".join(key_of(row)) for row in rows if row["wrong"]]
    current = sum(row["source_hash"] == table.hash for row in rows)
    left = len(wanted) - current
    print(f"{len(rows)} rows in {seconds:.0f} s, wrong: {', '.join(wrong) or 'none'}; {left} left")
    return 1 if wrong else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
