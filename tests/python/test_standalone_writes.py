"""What a caller of a standalone file writes between forward and backward: allowed where it is with
the original, which keeps something else for backward."""

from __future__ import annotations

import pytest
import torch
from standalone_support import Pair, pair_of, two_layers

BUFFER = 'self.register_buffer("shift", torch.ones(64))'


def of_file(folder, forward: str) -> Pair:
    return pair_of(folder, two_layers(folder, forward, BUFFER))


def the_input(module, x, results):
    x += 1


def what_is_handed_out(module, x, results):
    results[0].add_(1)


def the_biases(module, x, results):
    module.a.bias += 1
    module.b.bias += 1


def the_buffer(module, x, results):
    module.shift += 1


def gradients(module, write, *, again: bool = False, wanted: bool = True) -> list[torch.Tensor]:
    """Of the last result, something being written before backward. wanted: of the input, too."""
    torch.manual_seed(2)
    source = torch.randn(32, 64, requires_grad=wanted)
    x = source * 1
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    with torch.no_grad():
        write(module, x, results)
    of = [*([source] if wanted else []), module.a.weight, module.b.weight]
    options = {"allow_unused": True, "create_graph": again}
    found = torch.autograd.grad(results[-1].sum(), of, **options)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, of)]


WRITES = {
    "a residual": ("return x + self.a(torch.relu(self.b(x.sigmoid())))", the_input),
    "a copied input": ("return self.a(F.gelu(x.clone()))", the_input),
    "a copied buffer": ("return self.a(x) * self.shift.clone()", the_buffer),
    "a sum": ("h = x + self.a(x)\nreturn h, self.b(torch.relu(h) * 2)", what_is_handed_out),
    "a product": ("h = self.a(x)\nreturn h, self.b(torch.relu(h))", what_is_handed_out),
    "a copied product": (
        "h = self.a(x)\nreturn h, F.gelu(h.clone())",
        what_is_handed_out,
    ),
    "biases": ("return self.b(torch.relu(self.a(x)))", the_biases),
    "a term": ("return torch.relu(self.a(x)) + self.shift.sum()", the_buffer),
}


WITHOUT_A_GRADIENT = {
    "an activation": ("return self.b(torch.relu(self.a(torch.tanh(x))))", the_input),
    "a unit that keeps it": ("return self.a(F.gelu(x))", the_input),
    "a residual": ("return x + self.a(x.sigmoid())", the_input),
    "the state": ("return self.a((x - self.shift) / 2).sigmoid()", the_buffer),
    "two": ("return self.a(x * self.shift).sigmoid()", the_input),
}


@pytest.mark.parametrize(
    "case, wanted",
    [*((c, True) for c in WRITES.values()), *((c, False) for c in WITHOUT_A_GRADIENT.values())],
    ids=[*WRITES, *(f"{case}, no gradient" for case in WITHOUT_A_GRADIENT)],
)
def test_what_the_original_does_not_keep_may_be_written(case, wanted, tmp_path):
    forward, write = case
    pair = of_file(tmp_path, forward)
    expected = gradients(pair.reference, write, wanted=wanted)
    for found, like in zip(gradients(pair.ours, write, wanted=wanted), expected):
        torch.testing.assert_close(found, like, rtol=1e-4, atol=1e-4)
    assert pair.calls


KEPT = {
    "an operand": ("return self.a(x)", the_input),
    "a result": ("h = torch.relu(self.a(x))\nreturn h, self.b(h)", what_is_handed_out),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_the_original_keeps_is_not_copied(case, tmp_path):
    forward, write = KEPT[case]
    pair = of_file(tmp_path, forward)
    for module in (pair.reference, pair.ours):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(module, write)
    assert not hasattr(pair.namespace._IngotRegion, "copied")


def test_a_second_derivative_says_that_a_bias_was_written(tmp_path):
    """It computes the region once more, from the bias as well."""
    ours = of_file(tmp_path, WRITES["biases"][0]).ours
    gradients(ours, lambda *_: None, again=True)
    with pytest.raises(RuntimeError, match="written after forward"):
        gradients(ours, the_biases, again=True)


def test_nothing_is_held_once_backward_has_run(tmp_path):
    ours = of_file(tmp_path, WRITES["biases"][0]).ours
    result = ours(torch.randn(32, 64))
    region = result.grad_fn
    result.sum().backward(retain_graph=True)
    assert region.again
    result.sum().backward()
    assert not region.again
