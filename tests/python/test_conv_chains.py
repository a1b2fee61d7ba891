"""Chains behind convolutions: results, gradients and strides as PyTorch's, in fp64's sight."""

import copy
import sys
from pathlib import Path

import ingot
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "gpu_checks"))

from conv_chains import CHAINS, named

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / (truth.norm() + 1e-30)).item()


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
        module = module.to(memory_format=FORMATS[x.dim()])
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    optimised = ingot.optimize(module)
    for batch in batches:
        x = torch.randn(batch, *x.shape[1:])
        if channels_last:
            x = x.contiguous(memory_format=FORMATS[x.dim()])
        truth = results(exact, x.double(), gradients)
        expected, found = results(eager, x, gradients), results(optimised, x, gradients)
        for one, other, true in zip(found, expected, truth, strict=True):
            assert one.shape == other.shape and one.stride() == other.stride()
            assert relative(one, true) <= max(4 * relative(other, true), 2e-6)
        for one, other in zip(optimised.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(one, other)
    return optimised


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_chains_are_pytorchs(chain, training):
    compared(chain, training, gradients=False)
