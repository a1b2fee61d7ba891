"""The host's programs as Python sees them: what `explain` prints, and calls whose tensors lie
otherwise, in memory that the library names beforehand."""

from __future__ import annotations

import json
import re

import ingot
import pytest
import torch
from click.testing import CliRunner
from ingot.cli import main
from ingot.report.launches import launch_rows
from ingot.report.plan import plan_view
from ingot.runtime.layouts import ResultLayout
from ingot.runtime.program import Program
from ingot.runtime.signature import BATCH

FEATURES, OUTPUTS = 24, 40

LINEAR = {
    "ingot_graph": 1,
    "name": "linear_tanh",
    "values": [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, FEATURES]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, OUTPUTS, 1, FEATURES]},
        {"op": "linear", "args": [0, 1, -1]},
        {"op": "tanh", "args": [2]},
    ],
    "results": [{"value": 3, "name": "y"}],
    "updates": [],
}


def program() -> Program:
    shape = (BATCH, 1, 1, OUTPUTS)
    layout = ResultLayout((BATCH, OUTPUTS), ((0,), (3,)), shape, torch.float32)
    return Program(LINEAR, result_layouts=[layout])


def tensors(rows: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.rand(rows, 1, 1, FEATURES, generator=generator)
    return [x, torch.rand(1, OUTPUTS, 1, FEATURES, generator=generator)]


def test_explain_tells_the_program_and_its_hash():
    explained = program().explain(6)
    told = explained["executable"]["program"]
    assert re.fullmatch("[0-9a-f]{16}", told["hash"])
    assert told["hash"] == program().explain(6)["executable"]["program"]["hash"]
    assert told["hash"] != program().explain(7)["executable"]["program"]["hash"]
    product = told["steps"][0]
    assert product["kind"] == "product"
    assert (product["m"], product["n"], product["k"]) == (6, OUTPUTS, FEATURES)
    assert product["memory"][:2] == ["x", "w"]
    assert [step["kind"] for step in told["steps"] if "y" in step["memory"]] in (
        ["sweep"],
        ["product"],  # on its blocks
    )
    for buffer in told["buffers"]:
        assert buffer["offset"] + buffer["bytes"] <= explained["workspace_bytes"]


def test_the_report_shows_what_explain_tells():
    explained = program().explain(6)
    view = plan_view({"name": "linear_tanh", "mode": "eval", "explain": explained})
    told = explained["executable"]["program"]
    assert view["hash"] == told["hash"]
    assert view["launches"] == launch_rows(told)
    assert f"6 × {OUTPUTS} × {FEATURES}" in view["launches"][0]["what"]


def test_the_command_line_prints_it(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.gemm = nn.Linear(8, 16)\n        self.bn = nn.BatchNorm1d(16)\n"
        "    def forward(self, x):\n        return self.bn(self.gemm(x))\n"
        "def get_init_inputs():\n    return []\n"
        "def get_inputs():\n    return [torch.rand(4, 8)]\n"
    )
    asked = ["explain", str(model), "--device", "cpu", "--mode", "training", "--no-kernels"]
    answer = CliRunner().invoke(main, asked, env={"COLUMNS": "200"})
    assert answer.exit_code == 0, answer.output
    for word in ("product", "merge", "4 × 16 × 8", "update of 'bn.running_mean'"):
        assert word in answer.output
    printed = re.search("Launch program ([0-9a-f]{16})", answer.output)
    answer = CliRunner().invoke(main, [*asked, "--json"])
    (region,) = json.loads(answer.output)["programs"]
    assert printed.group(1) == region["explain"]["executable"]["program"]["hash"]


def spread(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
    return out.copy_(x)


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(reversed(x.shape))).permute(3, 2, 1, 0).copy_(x)


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    memory = bytearray(4 * x.numel() + 1)
    return torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape).copy_(x)


@pytest.mark.parametrize("relaid", [spread, turned, at_odd_address])
def test_other_layouts_take_the_workspace_that_they_need(relaid):
    made, (x, w) = program(), tensors()
    (expected,) = made.run([x, w])
    dense = made.last_binding.workspace_bytes
    assert dense == made.workspace_size(6)
    for given in ([relaid(x), w], [x, relaid(w)], [relaid(x), relaid(w)]):
        (found,) = made.run(given)
        assert torch.equal(found, expected)
        (found,) = made.run(given)
        assert torch.equal(found, expected)
    # Of these a product reads a weight that lies turned in place; everything else is copied.
    assert made.last_binding.workspace_bytes >= dense + x.numel() * x.element_size()
    (found,) = made.run([x, w])
    assert torch.equal(found, expected)


def test_a_live_module_takes_inputs_with_strides():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(FEATURES, OUTPUTS), torch.nn.Tanh())
    x = torch.rand(6, 2 * FEATURES)[:, ::2]
    optimised = ingot.optimize(module, [x])
    found, expected = optimised(x), torch.nn.functional.tanh(module[0](x))
    torch.testing.assert_close(found, expected)
