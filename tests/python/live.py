"""What the tests of live modules share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def agree(optimised, twin, *inputs, tolerance=1e-5):
    """Calls both; compares results and the whole state."""
    found, expected = optimised(*inputs), twin(*inputs)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(
            optimised.state_dict()[name], tensor, rtol=tolerance, atol=tolerance, msg=name
        )
    return found


def x(batch=4):
    return torch.randn(batch, 8)
