"""`ingot.tune`: choosing, remembering and reading again. Times come from tables here: this needs no
GPU."""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path

import ingot
import pytest
import torch
from click.testing import CliRunner
from ingot import tuning
from ingot.cli import main
from ingot.runtime.layouts import ResultLayout
from ingot.runtime.program import Program
from torch import nn

K, N, BATCH = 4096, 1024, 1000
GRAPH = {
    "ingot_graph": 1,
    "name": "linear",
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, K]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, N, 1, K]},
        {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": True}},
        {"op": "relu", "args": [2]},
    ],
    "results": [{"value": 3, "name": "y"}],
}
LAYOUT = ResultLayout((-1, N), ((0,), (3,)), (-1, 1, 1, N), torch.float32)
CPU = torch.device("cpu")


def program(folder: Path) -> Program:
    options = {"cache_dir": str(folder), "sm": 90}
    return Program(GRAPH, device="cuda", result_layouts=[LAYOUT], options=options)


def explained(folder: Path) -> dict:
    return program(folder).explain(BATCH)["executable"]["sweeps"][0]["tuning"]


class Times:
    """Seconds of a call by configuration: 1 for all but those given; counts what it measured."""

    def __init__(self, **seconds: float):
        self.seconds, self.measured = seconds, 0

    def __call__(self, programs: dict, leaves: list) -> dict:
        assert [t.shape[0] for t in leaves] == [BATCH, 1]
        assert all(
            made.explain(BATCH)["executable"]["sweeps"][0]["tuning"]["choice"] == name
            for name, made in programs.items()
        )
        self.measured += 1
        return {name: self.seconds.get(name, 1.0) for name in programs}


def tune(folder: Path, times: Times, **options) -> tuning.TunedProduct:
    (product,) = tuning.tune_program(program(folder), BATCH, CPU, measure=times, **options)
    return product


def another(folder: Path) -> str:
    known = explained(folder)
    return next(n for n in known["candidates"] if n not in (known["choice"], "library"))


def test_the_fastest_is_remembered_and_used(tmp_path):
    other, times = another(tmp_path), Times(**{another(tmp_path): 0.5})
    product = tune(tmp_path, times)
    assert (product.choice, product.known, product.gain) == (other, False, 2.0)
    assert set(product.milliseconds) == set(explained(tmp_path)["candidates"])
    assert (explained(tmp_path)["choice"], explained(tmp_path)["by"]) == (other, "tuned")


def test_the_library_can_be_the_fastest(tmp_path):
    assert tune(tmp_path, Times(library=0.5)).choice == "library"
    sweep = program(tmp_path).explain(BATCH)["executable"]["sweeps"][0]
    assert sweep["provider"].startswith("cuBLASLt")


def test_what_is_no_faster_than_noise_changes_nothing(tmp_path):
    estimated = explained(tmp_path)["choice"]
    product = tune(tmp_path, Times(**{another(tmp_path): 0.995}))
    assert (product.choice, product.gain) == (estimated, 1.0)


def test_a_choice_stays_until_it_is_asked_for_again(tmp_path):
    other = another(tmp_path)
    first = tune(tmp_path, Times(library=0.5))
    later = Times(**{other: 0.1})
    kept = tune(tmp_path, later)
    assert kept.known and kept.choice == "library" and later.measured == 0
    assert kept.milliseconds == first.milliseconds
    assert tune(tmp_path, later, again=True).choice == other
    assert explained(tmp_path)["by"] == "tuned"


@pytest.mark.parametrize(
    ("operators", "precision", "is_own"),
    [(("relu",), "tf32", True), (("erf", "exp"), "tf32", False), (("erf", "exp"), "fp32", True)],
)
def test_beside_tf32_much_arithmetic_is_a_pass_of_its_own(operators, precision, is_own):
    """In an epilogue it keeps the tensor cores waiting, and cuBLAS's TF32 is not far behind."""
    values = [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, 768]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, 768, 1, 3072]},
        {"op": "matmul", "args": [0, 1]},
    ]
    for at, operator in enumerate(operators):
        values.append({"op": operator, "args": [2 + at]})
    graph = {**GRAPH, "values": values, "results": [{"value": len(values) - 1, "name": "y"}]}
    layout = ResultLayout((-1, 3072), ((0,), (3,)), (-1, 1, 1, 3072), torch.float32)
    options = {"sm": 90, "cache_dir": ""}
    made = Program(
        graph, device="cuda", precision=precision, result_layouts=[layout], options=options
    )
    (sweep,) = made.explain(6272)["executable"]["sweeps"]
    assert sweep["provider"].startswith("Ingot's") == is_own, sweep["provider"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"ingot_tuned_products": 1, "products": 3}'])
def test_a_damaged_file_is_rebuilt(tmp_path, text):
    file = tmp_path / "tuned-products.json"
    file.write_text(text)
    with pytest.warns(UserWarning, match="damaged"):
        assert tune(tmp_path, Times(library=0.5)).choice == "library"
    assert list(json.loads(file.read_text())["products"]) == [explained(tmp_path)["key"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tune(tmp_path, Times()).known


@pytest.mark.parametrize("kind", ["fifo", "link", "writable"])
def test_a_file_that_others_may_have_written_is_replaced(tmp_path, kind):
    file, other = tmp_path / "tuned-products.json", tmp_path / "other"
    assert tune(tmp_path, Times(library=0.5)).choice == "library"
    file.rename(other)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(other)
    else:
        other.rename(file).chmod(0o622)
    with pytest.warns(UserWarning, match="not used"):
        assert not tune(tmp_path, Times(library=0.5)).known
    assert file.is_file() and not file.is_symlink()
    assert explained(tmp_path)["by"] == "tuned"


def test_writers_do_not_lose_each_others_entries(tmp_path):
    file = tmp_path / "deep" / "tuned.json"

    def write(index: int) -> None:
        for number in range(10):
            product = tuning.TunedProduct(f"{index} {number}", "library", "", {})
            tuning.remember(file, [product])

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tuning.read(file)) == 40


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "folder").write_text("no folder")
    product = tuning.TunedProduct("key", "library", "", {})
    with pytest.raises(ingot.IngotError, match="folder/tuned.json"):
        tuning.remember(tmp_path / "folder" / "tuned.json", [product])


def test_a_module_on_the_host_is_refused():
    with pytest.raises(ValueError, match="measures on a GPU"):
        ingot.tune(nn.Linear(8, 8), [torch.rand(4, 8)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_what_it_lacks():
    example = Path(__file__).resolve().parents[2] / "examples" / "gemm_scale_bn.py"
    answer = CliRunner().invoke(main, ["tune", str(example)])
    assert answer.exit_code == 2 and "PyTorch sees none here" in answer.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tuned_modules_agree_with_the_original(tmp_path):
    module = nn.Sequential(nn.Linear(2048, 512), nn.ReLU()).cuda().eval()
    x = torch.rand(200, 2048, device="cuda")
    options = {"cache_dir": str(tmp_path)}
    (product,) = ingot.tune(module, [x], precision="fp32", options=options)
    assert product.milliseconds and min(product.milliseconds.values()) > 0
    with torch.no_grad():
        optimised = ingot.optimize(module, [x], precision="fp32", options=options)
        exact = module.double()(x.double())
        module.float()
        assert ((optimised(x) - exact).norm() / exact.norm()).item() < 1e-6
