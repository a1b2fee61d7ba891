"""What runs after a verification on a GPU (writers, tables, report, JSON), without a GPU: the
commands are typed, and the verification gives a recorded result.

recorded/gemm_scale_bn-cuda.json has the form of a whole run with timing and the H200's times and
errors from bench/results. `tools/gpu-suite user` records whole results on a GPU, as
bench/results/user/<gpu>.json; they are used as well.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import selection
from click.testing import CliRunner
from ingot.cli import main
from ingot.cli.explain import _explained
from ingot.live import dynamo
from ingot.verify.measures import Measures
from ingot.verify.result import AccuracyRow, Check, VerifyResult
from ingot.verify.timing import _table

sys.path.insert(0, str(Path(__file__).parent))

from test_report import Page, assert_complete

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "gemm_scale_bn.py"
RECORDED = [
    Path(__file__).parent / "recorded" / "gemm_scale_bn-cuda.json",
    *sorted((ROOT / "bench/results/user").glob("*.json")),
]
SCHEMA = json.loads(resources.files("ingot").joinpath("schemas/output.schema.json").read_text())


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def recorded(request) -> dict:
    return json.loads(request.param.read_text(encoding="utf-8"))


def failed(result: dict) -> dict:
    """The same run, had it not been verified: nothing is timed then."""
    wrong = Check("own inputs", "training", "failed", "relative error 1.0e-03", "lower precision")
    return {
        **copy.deepcopy(result),
        "verified": False,
        "tricks": ["lower precision"],
        "checks": [dataclasses.asdict(wrong), *result["checks"][1:]],
        "timing": None,
    }


def without_timing(result: dict) -> dict:
    return {**copy.deepcopy(result), "timing": None}


run_whole = dynamo.run_whole


def without_gpu(*arguments):
    """TorchDynamo asks a GPU that is there for its streams and random numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        return run_whole(*arguments)


@pytest.fixture
def gpu(monkeypatch, recorded):
    """A GPU as far as the commands see; what would run on it gives the recorded result."""
    there = SimpleNamespace(result=recorded, options=None)

    def verified(original: str, candidate: str, options, *started) -> SimpleNamespace:
        there.options = options
        Path(candidate).read_text(encoding="utf-8")
        found = {**copy.deepcopy(there.result), "original": original, "candidate": candidate}
        return SimpleNamespace(to_dict=lambda: found)

    def planned(loaded, precision: str, device: str) -> dict:
        return _explained(loaded, ["training", "eval"], precision, device, 90)

    name = "NVIDIA H200"
    properties = SimpleNamespace(name=name, major=9, minor=0, total_memory=143771 << 20)
    monkeypatch.setattr("ingot.verify.verify_pair", verified)
    monkeypatch.setattr("ingot.cli.optimize._optimized_report", planned)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *number: name)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *number: properties)
    monkeypatch.setattr("ingot.live.dynamo.run_whole", without_gpu)
    return there


@pytest.fixture
def nothing_started(monkeypatch):
    """Processes begun for a candidate take longer to start than the rest takes, and nobody asks
    them for anything here: test_optimize begins them once."""
    for begun in ("begin", "Extensions"):
        monkeypatch.setattr(f"ingot.verify.{begun}", lambda *_: contextlib.nullcontext())


def run(*arguments: object):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


CHANGES = {"whole": copy.deepcopy, "without timing": without_timing, "failed": failed}
WAYS = [(form, change) for form in ("library", "standalone") for change in CHANGES]
# Standalone files take longest to write.
QUICK = [("standalone", "whole"), ("library", "without timing"), ("library", "failed")]


@pytest.mark.parametrize("way", selection.quick(QUICK, WAYS), ids="-".join)
def test_optimize(request, tmp_path, gpu, way):
    standalone = ["--standalone"] if way[0] == "standalone" else []
    if way[1] != "whole":
        request.getfixturevalue("nothing_started")
    gpu.result = CHANGES[way[1]](gpu.result)
    target, page = tmp_path / "new.py", tmp_path / "report.html"
    result = run("optimize", MODEL, "-o", target, *standalone, "--report", page)
    verified, timing = gpu.result["verified"], gpu.result["timing"]
    assert (gpu.options.device, gpu.options.timing) == ("cuda", True)
    assert result.exit_code == (0 if verified else 1), result.output
    assert target.exists() == verified
    assert f"{target} was not written." in result.output or f"Wrote {target}." in result.output
    assert ("never slower" in result.output) == bool(timing)
    shown = Page(page)
    assert_complete(shown)
    assert "NVIDIA H200" in shown.text and "class ModelNew" in shown.text
    if not verified:
        assert "NOT verified" in result.output and "Not verified" in shown.text
        return
    text = target.read_text(encoding="utf-8")
    compile(text, "new.py", "exec")
    if timing:
        ours = timing["subjects"]["candidate"]["median_ms"]
        assert f"measured {ours:.4f} ms" in result.output
        assert (f"candidate: {ours:.3f} ms a call (median)" in text) == bool(standalone)
    if standalone and timing:
        assert_errors_and_times_are_stated(text, gpu.result)


def assert_errors_and_times_are_stated(text: str, result: dict) -> None:
    document = " ".join(text.partition('"""\n')[0].split())
    for row in result["accuracy"]:
        if row["family"] == "own inputs":
            ours, eager = row["candidate"]["relative_error"], row["eager"]["relative_error"]
            figures = f"error against fp64 {ours:.1e}, the original's {eager:.1e}"
            assert f"{row['tensor']}, {row['mode']} mode: {figures}" in document
    for name, subject in result["timing"]["subjects"].items():
        assert f"{name}: {subject['median_ms']:.3f} ms a call (median)" in document


@pytest.mark.parametrize("way", selection.quick(QUICK, WAYS), ids="-".join)
def test_optimize_as_json(tmp_path, gpu, nothing_started, way):
    standalone = ["--standalone"] if way[0] == "standalone" else []
    gpu.result = CHANGES[way[1]](gpu.result)
    result = run("optimize", MODEL, "-o", tmp_path / "new.py", *standalone, "--json", "-q")
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["written"] == gpu.result["verified"] == (result.exit_code == 0)
    for key in ("verified", "checks", "accuracy", "timing"):
        assert found["verification"][key] == gpu.result[key]


@pytest.mark.parametrize("change", CHANGES)
def test_verify(tmp_path, gpu, change):
    gpu.result = CHANGES[change](gpu.result)
    page = tmp_path / "report.html"
    result = run("verify", MODEL, MODEL, "--report", page)
    assert result.exit_code == (0 if gpu.result["verified"] else 1), result.output
    assert "Accuracy against fp64" in result.output
    shown = Page(page)
    assert_complete(shown)
    assert "on NVIDIA H200" in shown.text
    found = json.loads(run("verify", MODEL, MODEL, "--json").stdout)
    jsonschema.validate(found, SCHEMA)


def test_tune_shows_each_product(monkeypatch, gpu):
    from ingot.tuning import TunedProduct

    key = "NVIDIA H200 | n 8192 | k 8192 | m 1024"
    measured = {"library": 0.4, "128x256": 0.5}
    found = [
        TunedProduct(key, "library", "128x256", measured),
        TunedProduct(f"{key}0", "128x256", "128x256", {"128x256": 0.5}),
    ]
    monkeypatch.setattr("ingot.tune", lambda *arguments, **options: found, raising=False)
    monkeypatch.setattr("torch.nn.Module.cuda", lambda module: module)
    monkeypatch.setattr("torch.Tensor.to", lambda tensor, device: tensor)
    result = run("tune", ROOT / "examples/linear_gelu.py", "--set", "batch_size=4")
    assert result.exit_code == 0
    assert "m 1024 " in result.output and "0.4000" in result.output and "1.250" in result.output


def form(value: object) -> object:
    """Keys and types, without the values; of a list its first item's."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, list):
        return [form(item) for item in value[:1]]
    return type(value).__name__


def test_recorded_results_have_the_form_of_real_ones(recorded):
    """What verify makes today, built from its own parts."""
    measures = Measures(1e-7, 1e-7, 1e-7, 0, 0)
    real = VerifyResult("model.py", "model_new.py", "cuda", "fp32")
    real.checks.append(Check("own inputs", "training", "passed"))
    real.accuracy.append(
        AccuracyRow("own inputs", "training", "output", measures, measures, 1e-5, 1e-5)
    )
    samples = {name: [1e-3] * 20 for name in ("eager", "torch.compile", "candidate")}
    reply = {"note": "20 rounds", "warm_s": samples, "sustained_s": samples}
    real.timing = _table(reply, samples, 1e-3)
    assert form(recorded) == form(real.to_dict())
    assert len(recorded["checks"]) > 30 and recorded["device"] == "cuda"
