"""Every sweep that tests/models make on a GPU, forward and backward, executed by the host and held
beside the CPU's program of the same graph."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import emulation
import pytest
import selection
import torch
from ingot import model_capture
from ingot.capture import gains
from ingot.capture.backward_operators import BACKWARD_OPERATORS
from ingot.capture.captured import Region
from ingot.capture.derivative import derivative_of
from ingot.live import backward
from ingot.live.dynamo import NotWholeError
from ingot.model_file import constants_of, load_model_file
from torch import nn
from torch.nn import functional as F

MODELS = Path(__file__).resolve().parents[1] / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.py"))
# Sizes of whole vectors; the files' own are odd. Groups of several features each.
VECTORS = {"batch_size": 24, "in_features": 64, "out_features": 96, "num_groups": 12}
# Of each what no other of them has: what is chosen of a group norm goes backwards to a place among
# all groups; columns and their running statistics; one number a row; rows in registers.
KEPT = ("batchnorm_gelu_relu", "groupnorm_min_bias", "sigmoid_sum_logsumexp", "softmax_by_hand")
THOROUGH = pytest.mark.thorough

pytestmark = [
    pytest.mark.skipif(emulation.COMPILER is None, reason="there is no compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="fibers and libraries of Linux"),
    pytest.mark.usefixtures("one_thread"),
]


def regions_of(module: nn.Module, inputs: list, gradients: bool) -> Iterator[tuple]:
    """(region, values of its leaves where these are the module's and its inputs)."""
    for value in inputs:
        if value.is_floating_point():
            value.requires_grad_(gradients)
    call = (module, tuple(inputs))
    captured = model_capture.capture(*call, gradients=gradients, device_type="cuda")
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    for region in captured.regions:
        leaves = [v for v in region.graph["values"] if v["op"] in ("input", "parameter", "buffer")]
        given = iter(inputs)
        yield (
            region,
            [
                next(given, None) if leaf["op"] == "input" else state.get(leaf["name"])
                for leaf in leaves
            ],
        )


def graphs_of(module: nn.Module, inputs: list) -> Iterator[dict]:
    """Of its forward and, where the importer takes them, of gradients: all, those of inputs."""
    for region, leaves in regions_of(module, inputs, True):
        yield region.graph
        if any(leaf is None for leaf in leaves):
            continue  # made by another region
        every = [leaf.requires_grad for leaf in leaves]
        inputs_alone = [
            needed and not isinstance(leaf, nn.Parameter) for needed, leaf in zip(every, leaves)
        ]
        for needed in (every, inputs_alone):
            if any(needed):
                yield from backward_graphs(region, leaves, needed)


def backward_graphs(region: Region, leaves: list, needed: list) -> Iterator[dict]:
    try:
        derivative = derivative_of(region, leaves, needed, leaves[0].size(0), BACKWARD_OPERATORS)
        captured = backward.captured_derivative(derivative, region, "cpu", "fp32")
    except Exception:  # it is PyTorch's
        return
    for step in captured.steps:
        if isinstance(step, Region):
            yield step.graph


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("sizes", [{}, VECTORS], ids=["own", "vectors"])
@pytest.mark.parametrize("name", selection.quick(KEPT, NAMES))
def test_kernels_of_models(name, sizes, training):
    path = MODELS / f"{name}.py"
    known = constants_of(path.read_text())
    file = load_model_file(path, {key: value for key, value in sizes.items() if key in known})
    try:
        graphs = list(graphs_of(file.make_module().train(training), file.make_inputs()))
    except NotWholeError:  # the file's sizes go together in no other way
        assert sizes
        return
    assert graphs
    for graph in graphs:
        emulation.check(graph, sizes.get("batch_size", 7))


class Written(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self._forward = forward

    def forward(self, x):
        return self._forward(x)


def density_and_square(x):
    """GELU's derivative, written by hand, and a square that it has in common with what follows."""
    return (x * torch.exp(-0.5 * (x * x)) + torch.erf(x * 0.5**0.5)) * (1 - x * x)


# What a row's functions hold, and what rows in registers and pieces of rows hand on.
WRITTEN = {
    "normal density": lambda x: F.layer_norm(density_and_square(x), x.shape[1:]),
    "softmax": lambda x: F.softmax(2 * x, dim=1),
    "logsumexp": lambda x: torch.logsumexp(2 * x, dim=1),
    "normalise": lambda x: F.normalize(x),
}


@pytest.mark.parametrize("length", [768, 4097, 65535, 131072, pytest.param(393220, marks=THOROUGH)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_of_rows(name, dtype, length):
    x = torch.randn(3, length).to(dtype)
    regions = list(regions_of(Written(WRITTEN[name]), [x], False))
    assert regions
    for region, _ in regions:
        emulation.check(region.graph, 3)


TYPES = [torch.float32, torch.bfloat16]
LONG_ROWS = {
    "groups": (nn.GroupNorm(2, 8), (2, 8, 256, 256), "rows_resident"),
    "groups that pieces span": (nn.GroupNorm(2, 8), (2, 8, 200, 200), "rows_resident"),
    "many weights": (nn.LayerNorm((1 << 20) + 8), (5, (1 << 20) + 8), "rows_folded"),
    "weights": (nn.LayerNorm(1 << 17), (2, 1 << 17), "rows_resident"),
    "two phases": (
        Written(lambda x: F.layer_norm(torch.softmax(x, 1), x.shape[1:])),
        (1, 1 << 21),
        "rows_in_waves",
    ),
}


@pytest.mark.parametrize("dtype", selection.quick([torch.float32], TYPES), ids=str)
@pytest.mark.parametrize("name", selection.quick(list(LONG_ROWS)[:3], LONG_ROWS))
def test_kernels_of_pieces(name, dtype, monkeypatch):
    """Of rows that many blocks share, in the order in which one block alone would draw them."""
    monkeypatch.setattr(gains, "takes_everything", True)
    module, shape, template = LONG_ROWS[name]
    module = copy.deepcopy(module).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_()
    ((region, _),) = regions_of(module, [torch.randn(shape).to(dtype)], False)
    assert any(f"{template}<" in text for text in emulation.kernels_of(region.graph, shape[0]))
    emulation.check(region.graph, shape[0])


def test_logarithms():
    """Of numbers of every magnitude, and of those that have none or an infinite one."""
    bits = torch.arange(1 << 23, 0x7F800000, 99991, dtype=torch.int32)
    near_one = 1 + torch.arange(-2000, 2000) * 2.0**-18
    subnormal = torch.tensor([1, 3, 1 << 22, (1 << 23) - 1], dtype=torch.int32).view(torch.float32)
    special = torch.tensor([0, -0.0, torch.inf, -torch.inf, torch.nan, -1, -1e-40])
    x = torch.cat([special, subnormal, bits.view(torch.float32), near_one])[None]
    ((region, _),) = regions_of(Written(lambda x: -(torch.log(x) * 2)), [x], False)
    (found,), _ = emulation.run(region.graph, [x], 1)
    found, expected = found.double().flatten(), -2 * x.double().log().flatten()
    torch.testing.assert_close(found, expected, rtol=3.2e-7, atol=0, equal_nan=True)
    normal = slice(len(special) + len(subnormal), None)
    torch.testing.assert_close(found[normal], expected[normal], rtol=1.3e-7, atol=0)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 1024), 1), ((3, 50257), 1), ((3, 131072), 1), ((3, 4096, 24), 1), ((2, 40, 17, 33), 1)],
)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_places_of_the_largest(shape, dim, dtype, monkeypatch):
    """The first of equals, and of NaN."""
    monkeypatch.setattr(gains, "takes_everything", True)
    x = (torch.randn(shape) * 4).round().to(dtype)
    x[0].view(-1)[::997] = 100
    x[1].view(-1)[5003 % x[1].numel() :: 7001] = torch.nan
    ((region, _),) = regions_of(Written(lambda x: torch.argmax(x, dim)), [x], False)
    (found,), _ = emulation.run(region.graph, [x], shape[0])
    assert torch.equal(found.flatten().long(), torch.argmax(x, dim).flatten())


@pytest.mark.parametrize("length", [100, 4097])
def test_running_sums(length):
    """Which the CPU's programs do not have."""
    module = Written(lambda x: (x + 1).cumsum(dim=1))
    regions = list(regions_of(module, [torch.randn(3, length)], False))
    for region, _ in regions:
        (x,) = emulation.leaves_of(region.graph, 3)
        (found,), _ = emulation.run(region.graph, [x], 3)
        expected = (x.double() + 1).cumsum(-1)
        assert (found - expected).norm() < 1e-5 * expected.norm()
    assert regions


@pytest.mark.parametrize("needed", ["all", "inputs"])
@pytest.mark.parametrize(
    "name", selection.quick(("add_swish_tanh_gelu_hardtanh", "gelu_softmax"), NAMES)
)
def test_sweeps_that_pack(name, needed):
    """Backward, where a product reads what the sweep before it makes."""
    path = MODELS / f"{name}.py"
    known = constants_of(path.read_text())
    sizes = {"batch_size": 40, "in_features": 512, "out_features": 768, "num_groups": 12}
    file = load_model_file(path, {key: value for key, value in sizes.items() if key in known})
    module = file.make_module()
    module.requires_grad_(needed == "all")
    try:
        graphs = list(graphs_of(module, file.make_inputs()))
    except NotWholeError:
        return
    found = sum(emulation.check_packed(graph, sizes["batch_size"]) for graph in graphs)
    assert found or name not in ("add_swish_tanh_gelu_hardtanh", "gelu_softmax")
