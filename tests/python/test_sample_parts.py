"""Regions whose batch is parts of samples: frames of videos, windows and columns of images."""

import copy
import sys
import warnings
from pathlib import Path

import ingot
import pytest
import selection
import torch
from ingot.model_capture import capture
from live import programs_of
from regions import regions_run
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))
from parts_of_samples import MODULES, Attention, Beside, Columns, Frames

warnings.simplefilter("ignore", ingot.IngotWarning)

FRAMES, TOKENS, WIDTH = SIZES = 6, 5, 16


def _inputs(samples: int) -> torch.Tensor:
    return torch.randn(samples, FRAMES, TOKENS, WIDTH)


def _calls(module, batches, training: bool, half: bool) -> list:
    found = []
    for samples in batches:
        torch.manual_seed(samples)
        x = _inputs(samples).requires_grad_(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            result = module(x)
        if training:
            module.zero_grad()
            weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
            (result.float() * weights).sum().backward()
            found.append([x.grad, *(p.grad.clone() for p in module.parameters())])
        found.append([result.detach(), *(b.clone() for b in module.buffers())])
    return found


@pytest.mark.parametrize(
    ("half", "training", "model"), selection.checkered([False, True], [False, True], MODULES)
)
def test_results_are_eagers_for_any_batch(model, training, half):
    torch.manual_seed(0)
    module = model(*SIZES).train(training)
    twin = copy.deepcopy(module)
    optimised = ingot.optimize(module)
    with torch.set_grad_enabled(training), regions_run() as ran:
        found = _calls(optimised, (3, 2, 1, 5), training, half)
        expected = _calls(twin, (3, 2, 1, 5), training, half)
    assert ran
    tolerance = 3e-2 if half else 2e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batches", [(3,), (1,), (3, 2)], ids=str)
@pytest.mark.parametrize("model", MODULES)
def test_a_graph_of_one_size_is_taken_as_well(model, batches):
    torch._dynamo.reset()
    module = model(*SIZES).train()
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend="ingot")
    with regions_run() as ran:
        found = _calls(compiled, batches, training=True, half=False)
        assert ran
        expected = _calls(twin, batches, training=True, half=False)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_everything_but_batched_products_is_taken():
    left = {}
    for model in (Frames, Attention, Columns):
        with torch.no_grad():
            captured = capture(model(*SIZES).eval(), [_inputs(3)])
        left[model.__name__] = sorted(item.what for item in captured.unsupported)
        assert {region.per_sample for region in captured.regions} <= {1, FRAMES, TOKENS}
        assert any(region.per_sample > 1 for region in captured.regions)
    assert left == {"Frames": [], "Attention": ["matmul", "matmul"], "Columns": []}


def test_whole_samples_have_a_region_of_their_own():
    with torch.no_grad():
        captured = capture(Beside(*SIZES).eval(), [_inputs(3)])
    counts = {
        operator["what"]: region.per_sample
        for region in captured.regions
        for operator in region.operators
    }
    assert counts["tanh"] == FRAMES and counts["sigmoid"] == 1


def test_what_one_batch_is_enough_for_stays_as_it_is():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.relu(self.inner(x.reshape(-1, WIDTH)))

    with torch.no_grad():
        captured = capture(Rows().eval(), [torch.randn(3, 7, WIDTH)])
    assert [region.per_sample for region in captured.regions] == [1]


def test_a_report_tells_the_batch_of_the_parts():
    optimised = ingot.optimize(Frames(*SIZES).eval())
    with torch.no_grad():
        optimised(_inputs(3))
    (program,) = programs_of(optimised)
    assert program.last_batch == 3 * FRAMES
    assert optimised.ingot_report(4)["programs"][0]["batch"] == 4 * FRAMES
    optimised.ingot_prepare(_inputs(2))


def test_an_empty_batch_is_pytorchs(caplog):
    module = Frames(*SIZES).eval()
    with torch.no_grad():
        found = ingot.optimize(module)(_inputs(0))
    assert found.shape == (0, TOKENS, WIDTH) and "failed" not in caplog.text


class Turned(nn.Module):
    """A sum that lies as what is turned does."""

    def __init__(self):
        super().__init__()
        self.first, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        samples, frames, tokens, width = x.shape
        parts = x.reshape(samples * frames, tokens, 1, width).expand(-1, -1, 3, -1)
        y = torch.tanh(self.first(parts)).permute(1, 0, 2, 3)
        return y + torch.relu(self.mlp(self.norm(y)))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_lies_turned_does_so_behind_merged_axes(dynamic):
    torch._dynamo.reset()
    module = Turned()
    with torch.no_grad(), regions_run() as ran:
        expected = module(_inputs(3))
        compiled = torch.compile(copy.deepcopy(module), backend="ingot", dynamic=dynamic)
        found = compiled(_inputs(3))
        assert found.stride() == expected.stride()
        found.permute(1, 0, 2, 3).view(-1, WIDTH)
    assert ran


class Resumed(nn.Module):
    """Behind a break, sizes come in that are no tensor's."""

    def __init__(self):
        super().__init__()
        self.shift, self.inner = nn.Parameter(torch.randn(TOKENS, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        samples, frames, tokens, width = x.shape
        y = x.reshape(samples * frames, tokens, width)
        torch._dynamo.graph_break()
        y = (y + self.shift).reshape(samples * frames * tokens, width)
        return F.gelu(self.inner(y))


def test_numbers_of_another_graph_end_a_region(caplog):
    torch._dynamo.reset()
    module = Resumed()
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend="ingot", dynamic=True)
    found, expected = (_calls(each, (3, 2, 4), True, False) for each in (compiled, twin))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert "failed" not in caplog.text
