"""What a standalone file's training step holds at its peak, beside the original's."""

from __future__ import annotations

from pathlib import Path

import pytest
import selection
import torch
from ingot.model_file import constants_of, load_model_file
from ingot.standalone.functions import FunctionPrinter
from ingot.standalone.printing import ATEN
from ingot.standalone_writer import Standalone
from live_memory import LiveBytes
from standalone_support import on_the_host
from torch.fx.experimental.proxy_tensor import make_fx

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
# More samples than features, and fewer: either the activations or the weights are what is large.
SIZES = [(512, 64), (32, 128)]


def written(path: Path, samples: int, features: int) -> Standalone:
    known = constants_of(path.read_text(encoding="utf-8"), str(path))
    sizes = dict.fromkeys(("in_features", "hidden_features", "out_features"), features)
    sizes["batch_size"] = samples
    return Standalone(load_model_file(path, {k: v for k, v in sizes.items() if k in known}))


def peak_of_backward(module, inputs: list[torch.Tensor]) -> int:
    """Bytes at most, what forward left to it included."""
    module.zero_grad()
    with LiveBytes() as live:
        result = module(*inputs)
        live.peak = 0
        result.backward(torch.ones_like(result))
    return live.peak


@pytest.mark.parametrize("samples, features", SIZES)
@pytest.mark.parametrize("path", selection.quick(EXAMPLES[1:3], EXAMPLES), ids=lambda p: p.stem)
def test_a_step_holds_no_more_than_the_originals(path, samples, features, tmp_path):
    standalone = written(path, samples, features)
    file, _, calls = on_the_host(tmp_path, standalone)
    ours, original = file.make_module(), standalone.original.make_module()
    for wanted in (False, True):
        inputs = standalone.original.make_inputs()
        peaks = [
            peak_of_backward(module, [x.clone().requires_grad_(wanted) for x in inputs])
            for module in (ours, original)
        ]
        assert peaks[0] <= peaks[1] + 4096
    assert calls and all(storing for _, storing in calls)


def test_what_is_seen_to_live():
    with LiveBytes() as live:
        a = torch.ones(256)
        b = (a + 1).view(16, 16)
        assert live.now == 2048
        del a
        assert live.now == 1024 and live.peak == 2048
        b.t().add_(1)
        assert live.peak == 2048
    assert b.sum() == 3 * 256


def body_of(function, *given, needs=None) -> str:
    """Its derivative-like text."""
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    names = [f"x{at}" for at in range(len(given))]
    return "\n".join(FunctionPrinter(graph, names, needs, free=True, held=["x1"]).lines())


def run(text: str, *given):
    lines = "\n".join("    " + line for line in text.splitlines())
    space = {"torch": torch, ATEN: torch.ops.aten}
    exec(f"def made(needs, {', '.join(f'x{at}' for at in range(len(given)))}):\n{lines}", space)
    return lambda needs: space["made"](needs, *given)


def test_parts_of_results_are_freed_one_by_one():
    def norm(x, weight):
        whole = torch.ops.aten.native_layer_norm(x, [8], weight, None, 1e-5)
        again = torch.ops.aten.native_layer_norm(x, [8], weight, None, 1e-5)
        return whole[0] * whole[2], again[1] + again[2]

    given = torch.randn(4, 8), torch.randn(8)
    text = body_of(norm, *given)
    assert "unused" in text and "del unused" in text and "[0]" not in text
    assert "del x0" in text.replace(", ", "\ndel ") and "x1" not in text.split("del ")[-1]
    for found, expected in zip(run(text, *given)(None), norm(*given)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_products_come_last_and_what_holds_tensors_before_them():
    def gradients(dy, weight, x, scale, y):
        scaled = dy * scale
        return scaled @ weight, scaled.t() @ x, (dy * y).sum([0]), scaled.sum([0])

    sizes = ((4, 8), (8, 8), (4, 8), (8,), (4, 8))
    given = [torch.randn(size) for size in sizes]
    needs = [f"needs[{at}]" for at in range(4)]
    text = body_of(gradients, *given, needs=needs)
    before, returned = text.split("return")
    assert before.count("sum(") == 1 and returned.count("sum(") == 1
    assert "@" not in before and returned.count("@") == 2
    expected = gradients(*given)
    for wanted in ([True] * 4, [False, True, False, True], [False, False, True, False]):
        found = run(text, *given)(wanted)
        for own, other, asked in zip(found, expected, wanted):
            if asked:
                torch.testing.assert_close(own, other, rtol=0, atol=0)
