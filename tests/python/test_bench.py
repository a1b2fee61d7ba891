"""Statistics, rounds, records and limits of the benchmarks."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import replace

import pytest
import torch
from ingot.bench import (
    RoundOptions,
    compare,
    limits,
    median_ratio,
    never_slower,
    records,
    subjects,
    summarize,
)
from ingot.bench.cases import bundled_cases, examples_folder, product_cases, products_folder
from ingot.bench.ladder import measure_ladder, merge, rungs_of
from ingot.bench.suite import INGOT, check_case, ingot_optimize, measure_case
from ingot.report.ladder import draw_ladder

CPU = torch.device("cpu")

pytestmark = pytest.mark.alone


def noisy(center: float, count: int, seed: int) -> list:
    generator = random.Random(seed)
    return [center * (1 + 0.01 * generator.gauss(0, 1)) for _ in range(count)]


def test_summary_of_known_values():
    found = summarize([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (found.median, found.lower_quartile, found.upper_quartile) == (3.0, 2.0, 4.0)
    assert found.spread == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_ratio_ignores_drift_that_rounds_share():
    drift = [1 + 0.5 * i / 20 for i in range(20)]
    fast = [d * s for d, s in zip(drift, noisy(0.5, 20, 1), strict=True)]
    slow = [d * s for d, s in zip(drift, noisy(1.0, 20, 2), strict=True)]
    ratio = median_ratio(fast, slow)
    assert ratio.lower < 0.5 < ratio.upper
    assert ratio.upper - ratio.lower < 0.05


def test_never_slower_needs_rounds_and_the_upper_end():
    assert never_slower(noisy(1.0, 40, 3), noisy(1.0, 40, 4)) is True
    assert never_slower(noisy(1.05, 40, 5), noisy(1.0, 40, 6)) is False
    assert never_slower([1.0] * 19, [1.0] * 19) is None


def test_rounds_interleave_and_measure():
    order = []

    def subject(name: str, seconds: float):
        def call(i: int) -> None:
            order.append(name)
            time.sleep(seconds)

        return call

    found = compare(
        {"fast": subject("fast", 0.001), "slow": subject("slow", 0.003)},
        CPU,
        RoundOptions(rounds=8, budget_s=2),
    )
    assert found.rounds == len(found.cold["fast"]) == len(found.cold["slow"]) == 8
    assert found.ratio("fast", "slow").median < 0.8
    assert found.never_slower("fast", "slow") is None
    # Not all of one and then all of the other.
    switches = sum(a != b for a, b in itertools.pairwise(order))
    assert switches > 8


def test_rounds_are_bounded_by_the_budget():
    found = compare(
        {"slow": lambda i: time.sleep(0.02)}, CPU, RoundOptions(rounds=1000, budget_s=0.1)
    )
    assert 7 <= found.rounds < 40
    assert "as many as the time allowed" in found.note


def test_prepare_runs_before_each_call_and_is_not_timed():
    prepared = []

    def prepare(i: int) -> None:
        prepared.append(i)
        time.sleep(0.005)

    found = compare(
        {"it": lambda i: None}, CPU, RoundOptions(rounds=7, budget_s=1, prepare=prepare)
    )
    assert prepared
    assert max(found.cold["it"]) < 0.004


def test_weight_changer_changes_matrices_by_turns():
    module = torch.nn.Linear(3, 2)
    own = module.weight.detach().clone()
    change = subjects.WeightChanger(module)
    change(1)
    assert not torch.equal(module.weight, own)
    change(2)
    assert torch.equal(module.weight, own)


def record(**changes) -> dict:
    made = dict.fromkeys(records.FIELDS, 1.0)
    made.update(model="m", shape="1×2→3", dtype="fp32", precision="fp32", mode="training")
    made.update(changes)
    return made


def test_records_merge_by_key_and_keep_the_others(tmp_path):
    path = tmp_path / "results" / "machine.json"
    records.merge(path, [record(ingot_ms=2.0), record(mode="eval")])
    records.merge(path, [record(ingot_ms=1.5)])
    kept = json.loads(path.read_text())
    assert len(kept) == 2
    assert {r["mode"]: r["ingot_ms"] for r in kept} == {"training": 1.5, "eval": 1.0}
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"]
    with pytest.raises(ValueError, match="lacks error"):
        incomplete = record()
        del incomplete["error"]
        records.merge(path, [incomplete])


def test_products_go_from_one_element_to_the_bundled_models():
    cases = product_cases()
    assert len(cases) >= 40 and len({case.key for case in cases}) == len(cases)
    shapes = [case.shape for case in cases]
    assert "1×1→1" in shapes and "128×4096→4096" in shapes
    assert {case.shape for case in bundled_cases()} <= set(shapes)
    other = product_cases(True, [(2, 3, 4)])
    assert [(c.shape, c.dtype) for c in other] == [("2×3→4", d) for d in ("fp32", "bf16", "fp16")]


def test_a_product_is_measured_from_the_package_itself():
    (case,) = product_cases(shapes=[(5, 9, 3)])
    result = measure_case(
        case,
        products_folder(),
        CPU,
        lambda module, inputs, precision: module,
        RoundOptions(rounds=20, budget_s=1),
        compiled=False,
    )
    made = result.record
    assert (made["model"], made["shape"], made["rounds"]) == ("linear", "5×9→3", 20)
    assert 0 < made["ratio_lower"] <= made["ratio"] <= made["ratio_upper"]


def test_source_hash_follows_the_sources(tmp_path):
    for folder in ("kernels", "src", "python/ingot"):
        (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / "src" / "a.cpp"
    source.write_text("int a;\n")
    before = records.source_hash(tmp_path)
    (tmp_path / "src" / "notes.txt").write_text("not a source")
    assert records.source_hash(tmp_path) == before
    source.write_text("int b;\n")
    assert records.source_hash(tmp_path) != before


def test_limit_is_the_larger_of_work_and_traffic():
    rates = limits.Rates(product=1e12, copy=1e9)
    assert limits.limit_seconds(1e12, 0.0, rates, "fp32") == pytest.approx(3.0)
    assert limits.limit_seconds(1e12, 0.0, rates, "bf16") == pytest.approx(1.0)
    assert limits.limit_seconds(1e9, 1e9, rates, "fp32") == pytest.approx(1.0)


def test_flops_of_a_linear_layer_are_counted():
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU())
    assert limits.product_flops(module, [torch.rand(4, 16)]) == 2 * 4 * 16 * 8


@pytest.fixture
def small_case():
    case = replace(bundled_cases()[0], rows=67, inner=133, columns=71)
    try:
        return case, examples_folder()
    except FileNotFoundError:
        pytest.skip("the bundled models are not here")


def test_case_is_measured_whole(small_case):
    case, folder = small_case
    result = measure_case(
        case,
        folder,
        CPU,
        lambda module, inputs, precision: module,
        RoundOptions(rounds=7, budget_s=1),
        compiled=False,
    )
    assert set(result.record) == set(records.FIELDS)
    assert result.record["shape"] == "67×133→71"
    assert result.record["error"] == result.record["eager_error"] < 1e-5
    assert result.record["compile_ms"] is None
    assert result.record["eager_tf32_ms"] is None
    assert result.record["limit_ms"] > 0


def test_a_ladder_has_every_policy_with_its_own_error(small_case, tmp_path):
    case, folder = small_case
    options = RoundOptions(rounds=7, budget_s=1)
    found = measure_ladder(case, folder, CPU, ingot_optimize(CPU), options, compiled=False)
    rungs = {(r["by"], r["policy"]): r for r in found.record["rungs"]}
    assert set(rungs) == {("eager", "fp32"), ("eager", "bf16")} | {
        (INGOT, policy) for policy in ("ieee", "fp32", "bf16")
    }
    # Running statistics of one rung must not be the next one's: all fp32 rungs are right.
    assert all(r["error"] < 1e-5 for (_, policy), r in rungs.items() if policy != "bf16")
    assert all(1e-4 < r["error"] < 1e-1 for (_, policy), r in rungs.items() if policy == "bf16")
    assert rungs[INGOT, "fp32"]["limit_ms"] > 0 and rungs["eager", "fp32"]["ratio"] == 1.0

    file, picture = tmp_path / "ladder" / "machine.json", tmp_path / "ladder.svg"
    for record in (found.record, {**found.record, "mode": "eval"}, found.record):
        merge(file, record)
    assert len(json.loads(file.read_text())) == 2
    draw_ladder(found.record, "machine", picture, [{"name": "Peer", "ms": 1.0, "error": 1e-5}])
    text = picture.read_text()
    assert all(name in text for name in ("Ingot bf16", "eager fp32", "Peer"))


def test_a_gpu_has_more_rungs():
    rungs = rungs_of(torch.device("cuda"), compiled=True)
    assert [r.policy for r in rungs if r.by == INGOT] == [
        *("ieee", "fp32", "high", "tf32", "bf16", "fp16")
    ]
    assert len({r.name for r in rungs}) == len(rungs) == 11


def test_errors_of_a_wrong_module_are_seen(small_case):
    case, folder = small_case

    class Half(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x).bfloat16().float()

    found, eager = check_case(case, folder, CPU, lambda module, inputs, precision: Half(module))
    assert found.relative_error > 1e-4 > eager.relative_error
