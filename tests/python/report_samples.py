"""Reports with figures as a run on a GPU would give them, made without one.

Plans come from `ingot explain`, which needs no device; errors and times are made up, and the pages
are never shown to anybody but the tests.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner
from ingot.bench.rounds import Comparison
from ingot.cli import main
from ingot.report import bench_view, run_view, write_report

ROOT = Path(__file__).resolve().parents[2]
LONG = "a_module_whose_name_is_far_too_long_for_any_box_that_one_would_like_to_draw_on_a_telephone"

FAMILIES = {
    "own inputs": (4.7e-7, 3.2e-6, 1.1e-5),
    "fresh inputs in the same memory": (4.7e-7, 3.2e-6, 1.1e-5),
    "large mean": (2.8e-2, 2.5e-2, 1.2e-1),
    "2^±60 within rows": (1.5e-7, 1.4e-7, 1.6e-6),
    "denormals": (5.9e-15, 2.7e-5, 9.3e-5),
    "one NaN": (0.0, 0.0, 2.4e-7),
}


@functools.cache
def explained(example: str, *settings: str, mode: str = "both") -> str:
    arguments = ["explain", str(ROOT / "examples" / f"{example}.py"), "--mode", mode, "--json"]
    for setting in settings:
        arguments += ["--set", setting]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def report_of(example: str = "gemm_bn_scale_softmax", *settings: str) -> dict:
    return json.loads(explained(example, *settings))


def measures(error: float) -> dict:
    return {
        "relative_error": error,
        "worst_row_error": 1.1 * error,
        "scaled_error": error,
        "mismatches": 0,
        "nonfinite_mismatches": 0,
    }


def row(family: str, mode: str, tensor: str, ours: float, eager: float, allowed: float) -> dict:
    return {
        "family": family,
        "mode": mode,
        "tensor": tensor,
        "candidate": measures(ours),
        "eager": measures(eager),
        "allowed_relative_error": allowed,
        "allowed_worst_row_error": 1.2 * allowed,
    }


def samples(median: float) -> list[float]:
    return [median * (1 + 0.004 * ((7 * i) % 20 - 9.5)) for i in range(20)]


def subject(median: float, ours: float | None) -> dict:
    entry = {
        "median_ms": median,
        "lower_quartile_ms": 0.98 * median,
        "upper_quartile_ms": 1.02 * median,
        "samples_ms": samples(median),
        "warm_ms": 0.97 * median,
        "sustained_ms": 1.15 * median,
    }
    if ours is not None:
        ratio = ours / median
        entry["ratio"] = [0.99 * ratio, ratio, 1.01 * ratio]
        entry["never_slower"] = 1.01 * ratio <= 1.02
    return entry


def verification(slower: float = 1.0) -> dict:
    ours = 0.588 * slower * (2.775 / 0.588 if slower > 1 else 1)
    modes = ("training", "eval")
    return {
        "original": "gemm_scale_bn.py",
        "candidate": "gemm_scale_bn_new.py",
        "device": "cuda",
        "precision": "fp32",
        "verified": True,
        "strict": True,
        "tricks": [],
        "checks": [
            {"name": family, "mode": mode, "outcome": "passed", "message": "", "trick": ""}
            for family in FAMILIES
            for mode in modes
        ],
        "accuracy": [
            row(family, mode, tensor, *errors)
            for family, errors in FAMILIES.items()
            for mode in modes
            for tensor in ("output", "bn.running_mean")
        ],
        "timing": {
            "subjects": {
                "eager": subject(2.775, ours),
                "torch.compile": subject(2.766, ours),
                "candidate": subject(ours, None),
            },
            "rounds": 20,
            "note": "20 rounds, each of 20 calls after 5 warm-ups",
            "parent_clock_ms": 0.601 * slower,
        },
        "notes": [],
    }


VERIFICATION = verification()
REPORT = report_of()


def optimize_page(
    folder: Path,
    report: dict | None = None,
    slower: float = 1.0,
    rename: str | None = None,
    name: str = "optimize.html",
) -> Path:
    """A verified and timed model; rename: the name of a module, everywhere."""
    report = report or {
        **REPORT,
        "unsupported": [{"what": "dropout", "where": "m.py:7", "why": "it draws random numbers"}],
    }
    if rename:
        text = json.dumps(report).replace('"gemm', json.dumps(rename)[:-1])
        report = json.loads(text.replace("gemm.", json.dumps(rename)[1:-1] + "."))
    view = run_view(
        title=f"{rename or 'gemm_scale_bn'}.py",
        what="Report of ingot optimize, on a GPU",
        command="ingot optimize gemm_scale_bn.py --report optimize.html",
        device="cuda",
        report=report,
        verification=verification(slower),
        sources=[("gemm_scale_bn.py", "class Model:  # a comment\n    x = 'text'\n" * 30)],
        notes=["The original draws no random numbers."],
    )
    write_report(folder / name, "run.html.j2", view)
    return folder / name


def many_passes(count: int = 14) -> dict:
    """A report whose plan has many passes and long names."""
    report = report_of()
    for program in report["programs"]:
        explanation = program["explain"]
        first, last = explanation["sweeps"][0], explanation["sweeps"][-1]
        middle = [
            {**last, "name": f"{LONG}_{i}", "predicted_ms": 1e-3 * (i + 1)} for i in range(count)
        ]
        explanation["sweeps"] = [{**first, "name": LONG}, *middle]
        for value in explanation["graph"]["after"]["json"]["values"]:
            if value.get("name", "").startswith("gemm"):
                value["name"] = LONG
        for item in report["operators_replaced"]:
            item["by"] = LONG
    return report


def bench_page(folder: Path, name: str = "bench.html") -> Path:
    results = []
    for mode in ("training", "eval"):
        comparison = Comparison(
            "cuda",
            cold={n: [s * 1e-3 for s in samples(m)] for n, m in BENCH_MS.items()},
            sustained={n: [1.15e-3 * m] * 20 for n, m in BENCH_MS.items()},
            rounds=20,
            note="20 rounds, each of 20 calls after 5 warm-ups",
        )
        record = {
            "model": "gemm_scale_bn",
            "shape": "1024×8192→8192",
            "dtype": "fp32",
            "precision": "fp32",
            "mode": mode,
            "eager_ms": 2.775,
            "compile_ms": 2.766,
            "ingot_ms": 0.588,
            "sustained_ms": 0.688,
            "limit_ms": 0.513,
            "error": 4.7e-7,
            "eager_error": 3.2e-6,
        }
        results.append(
            SimpleNamespace(
                record=record,
                comparison=comparison,
                limit_s=0.513e-3,
                clocks="SM 1980 MHz",
                report=report_of("gemm_scale_bn"),
            )
        )
    view = bench_view(results, "ingot bench --report bench.html", "cuda")
    write_report(folder / name, "bench.html.j2", view)
    return folder / name


BENCH_MS = {"eager": 2.775, "eager TF32": 0.401, "torch.compile": 2.766, "Ingot": 0.588}
