"""Chains behind convolutions: results, gradients and strides as PyTorch's, in fp64's sight."""

import copy
import sys
from pathlib import Path

import ingot
import pytest
import selection
import torch
from ingot.model_capture import capture

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))

from conv_chains import CHAINS, named

# Behind the convolution comes what no region takes.
READ_BY_PYTORCH = {
    "conv2d_avgpool_sigmoid_sum",
    "convtranspose2d_maxpool_hardtanh_mean_tanh",
    "convtranspose3d_maxpool_softmax_subtract_swish_max",
    "convtranspose3d_sum_residual_multiply_residual",
}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / (truth.norm() + 1e-30)).item()


def strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def results(module, x, gradients: bool) -> list[torch.Tensor]:
    if not gradients:
        with torch.no_grad():
            return [module(x)]
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    weight = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
    (y * weight).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def compared(chain, training: bool, gradients: bool, batches=(3, 5), channels_last: bool = False):
    torch.manual_seed(3)
    module, (x,) = chain.build(True).train(training), chain.inputs(True)
    if channels_last:
        module.convolution.to(memory_format=FORMATS[x.dim()])
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    optimised = ingot.optimize(module)
    for batch in batches:
        x = torch.randn(batch, *x.shape[1:])
        if channels_last:
            x = x.contiguous(memory_format=FORMATS[x.dim()])
        truth = results(exact, x.double(), gradients)
        expected, found = results(eager, x, gradients), results(optimised, x, gradients)
        for one, other, true in zip(found, expected, truth, strict=True):
            assert one.shape == other.shape and strides(one) == strides(other)
            assert relative(one, true) <= max(4 * relative(other, true), 2e-6)
        for one, other in zip(optimised.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(one, other)
    return optimised


# What tells training from eval. Of the others one mode will do, and three dimensions of space:
# with their biases apart all are tried below.
NORMS = [chain for chain in CHAINS if "batchnorm" in chain.name]
ROOMS = [chain for chain in CHAINS if len(chain.small) > 3]


@pytest.mark.parametrize("chain", NORMS, ids=lambda chain: chain.name)
def test_chains_in_training_are_pytorchs(chain):
    compared(chain, True, gradients=False)


@pytest.mark.parametrize("chain", ROOMS, ids=lambda chain: chain.name)
def test_chains_are_pytorchs(chain):
    compared(chain, False, gradients=False)


@pytest.fixture
def biases_apart(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("ingot.capture.importer.adds_biases_apart", lambda device_type: True)


def steps_of(optimised) -> list:
    graphs = [graph.compiled for graph in optimised._ingot.graphs if graph.compiled]
    return [step for graph in graphs for step in graph.captured.steps]


@pytest.mark.parametrize("chain", selection.every(4, CHAINS), ids=lambda chain: chain.name)
def test_chains_add_their_convolutions_bias(chain, biases_apart):
    steps = steps_of(compared(chain, False, gradients=False))
    (convolution,) = [s for s in steps if getattr(s, "what", "").startswith("conv")]
    kept = convolution.args[2] is not None
    assert kept == (chain.name in READ_BY_PYTORCH)
    assert not any(getattr(step, "target", None) is torch.ops.aten.add_.Tensor for step in steps)


@pytest.mark.parametrize(
    "chain",
    selection.every(2, [c for c in CHAINS if len(c.small) > 2]),
    ids=lambda chain: chain.name,
)
def test_chains_keep_the_format_of_their_channels(chain):
    compared(chain, chain in NORMS, gradients=False, batches=(3,), channels_last=True)


def test_a_bias_whose_chain_stays_pytorchs_is_added_in_place(monkeypatch, biases_apart):
    monkeypatch.setattr("ingot.capture.importer.weak_nodes", refusing_all)
    module, (x,) = named("conv2d_relu_biasadd").build(True).eval(), torch.randn(1, 3, 4, 9, 11)
    with torch.no_grad():
        captured = capture(module, [x])
        adding = [step.target for step in captured.steps if step.what.startswith("add")]
    assert adding[0] is torch.ops.aten.add_.Tensor and torch.ops.aten.add_.Tensor not in adding[1:]


def refusing_all(cut) -> set[str]:
    return {node.name for node in cut.taken if node.name not in cut.refused}


WITH_GRADIENTS = (
    "conv3d_mish_tanh",
    "conv2d_gelu_groupnorm",
    "convtranspose3d_batchnorm_avgpool_avgpool",
)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_chains_are_pytorchs(name, training):
    compared(named(name), training, gradients=True)
