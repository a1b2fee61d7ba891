"""What standalone files compute: outputs, buffers, random numbers and gradients of every model of
tests/models, their kernels replaced by the library's evaluator."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import selection
import torch
from ingot.model_file import load_model_file
from ingot.standalone_writer import Standalone
from standalone_support import (
    Pair,
    Products,
    close,
    filled,
    gradients,
    in_mode,
    pair_of,
    tensors,
    two_layers,
)
from torch.utils import _pytree as pytree

FOLDER = Path(__file__).resolve().parents[1] / "models"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
# Computes in half precision inside, whatever the module's own.
HALF = {"half_inside"}
# Its own forward writes into what backward needs: PyTorch refuses to differentiate it.
NOT_DIFFERENTIABLE = {"in_place"}
DIFFERENTIABLE = [name for name in NAMES if name not in HALF | NOT_DIFFERENTIABLE]


@pytest.fixture(scope="module")
def written():
    """Each model's Standalone, made once."""
    made: dict[str, Standalone] = {}

    def get(name: str) -> Standalone:
        if name not in made:
            made[name] = Standalone(load_model_file(FOLDER / f"{name}.py"))
        return made[name]

    return get


@pytest.mark.parametrize("mode", selection.quick(["training"], ["training", "eval"]))
@pytest.mark.parametrize("name", selection.quick(selection.MODELS, NAMES))
def test_results_and_state(name, mode, written, tmp_path):
    standalone = written(name)
    pair = pair_of(tmp_path, standalone)
    reference, ours, inputs = pair.reference, pair.ours, pair.inputs
    assert list(ours.state_dict()) == list(reference.state_dict())
    for module in (reference, ours):
        module.train(mode == "training")
    tolerance = 2e-2 if name in HALF else 1e-4
    with torch.no_grad():
        for _ in range(2):
            outputs = []
            for module in (reference, ours):
                torch.manual_seed(5)
                outputs.append(module(*inputs))
            close(outputs[1], outputs[0], tolerance)
            after = torch.rand(1)  # as many random numbers were drawn
            torch.manual_seed(5)
            reference_again = copy.deepcopy(reference)(*inputs)
            assert torch.equal(after, torch.rand(1))
            del reference_again
    assert pair.calls and not any(storing for _, storing in pair.calls)
    close(ours.state_dict(), reference.state_dict(), tolerance)


@pytest.mark.parametrize("mode", selection.quick(["training"], ["training", "eval"]))
@pytest.mark.parametrize(
    "name", selection.quick(set(selection.MODELS) & set(DIFFERENTIABLE), DIFFERENTIABLE)
)
def test_gradients(name, mode, written, tmp_path):
    standalone = written(name)
    pair = pair_of(tmp_path, standalone, double=True)
    reference, ours, inputs = pair.reference, pair.ours, pair.inputs
    like = in_mode(pair, mode)
    expected = gradients(copy.deepcopy(reference), inputs, again=False)
    # No product is computed again: the first derivative never reads the reference.
    references = {c: c.reference for c in pair.namespace._IngotRegion.__subclasses__()}
    for region in references:
        if getattr(region, "derivative", None) and region.storing:
            region.reference = None
    found = gradients(copy.deepcopy(ours), inputs, again=False)
    for region, own in references.items():
        region.reference = staticmethod(own)
    close(filled(found, like), filled(expected, like), 1e-8)
    expected = gradients(copy.deepcopy(reference), inputs, again=True)
    found = gradients(copy.deepcopy(ours), inputs, again=True)
    for a, b in zip(found, expected):
        close(filled(a, like), filled(b, like), 1e-7)


def deviation(folder) -> Pair:
    """The deviation's derivative is infinite where it is zero, as the biases are equal."""
    forward = "y = self.a(x)\nreturn y, y.var(dim=1, correction=0).sqrt()"
    return pair_of(folder, two_layers(folder, forward, "nn.init.zeros_(self.a.weight)"))


def test_a_result_without_a_gradient_makes_no_gradient_nan(tmp_path):
    pair = deviation(tmp_path)
    found = []
    for module in (pair.reference, pair.ours):
        with torch.no_grad():
            module.a.bias.fill_(0.5)
        module(*pair.inputs)[0].sum().backward()
        found.append([p.grad for p in module.a.parameters()])
    assert pair.calls and all(g.isfinite().all() for g in found[0])
    close(found[1], found[0], 1e-6)


def test_parts_that_no_gradient_reaches(tmp_path):
    """A region is asked for gradients where all of its results have none: a later one gave none."""
    namespace = deviation(tmp_path).namespace

    class Both(namespace._IngotRegion):
        name, count, storing, read = "both", 2, "kernels", (0, 1)

        @staticmethod
        def reference(u, v):
            return u.sin(), v.cos()

    both = SimpleNamespace(both=lambda leaves, storing: list(Both.reference(*leaves)))
    namespace._ingot_extension = lambda kernels: both
    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    first, second = Both.run(*Both.run(x, y)), Both.run(z, z)
    (first[0].sum() + second[1].sum()).backward()
    torch.testing.assert_close(x.grad, x.sin().cos() * x.cos())
    torch.testing.assert_close(z.grad, -z.sin())
    assert y.grad is None or not y.grad.any()

    u, v, w = (torch.randn(3, requires_grad=needed) for needed in (False, True, True))
    (Both.run(u, v)[0].sum() + w.sum()).backward()
    assert v.grad is None or not v.grad.any()


@pytest.mark.parametrize("mode", ["training", "eval"])
def test_backward_computes_no_product_of_forward_again(mode, written, tmp_path):
    pair = pair_of(tmp_path, written("batchnorm_gelu_relu"))
    ours, inputs = pair.ours, [t.requires_grad_() for t in pair.inputs]
    output = ours.train(mode == "training")(*inputs)
    assert [storing for _, storing in pair.calls] == [True]
    with Products() as products:
        output.sum().backward()
    assert products.count == 2  # of the weight's gradient and of the input's
    assert all(t.grad is not None for t in (*inputs, *ours.parameters()))


def test_products_are_stored_where_gradients_need_them(written, tmp_path):
    pair = pair_of(tmp_path, written("gelu_softmax"))
    ours, inputs = pair.ours, pair.inputs
    ours(*inputs)
    with torch.no_grad():
        ours(*inputs)
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    ours(*inputs)
    assert [storing for _, storing in pair.calls] == [True, False, False]


FORWARDS = {
    "the input's device": "return self.a(x.max(1, keepdim=True)[0] - x)",
    "the input's device, where it is read": "return self.a(x.max(1, keepdim=True)[0] * x.exp())",
    "a norm of which nothing is read": "return (self.a(x), self.norm(self.a(x)))[0].tanh()",
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_derivatives_of_what_is_made_on_a_device_and_of_what_nothing_reads(forward, tmp_path):
    standalone = two_layers(tmp_path, forward, "self.norm = nn.BatchNorm1d(64)")
    pair = pair_of(tmp_path, standalone, double=True)
    for again in (False, True):
        found = gradients(copy.deepcopy(pair.ours), pair.inputs, again=again)
        expected = gradients(copy.deepcopy(pair.reference), pair.inputs, again=again)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
    assert pair.calls


EQUAL_ROWS = "nn.init.zeros_(self.a.weight)\nnn.init.constant_(self.a.bias, 0.5)"
PARTLY_FROZEN = {
    "side by side": "return self.a(x).relu(), self.b(x).tanh()",
    "one behind the other": "y = self.a(x).relu(); return y, self.b(y).tanh()",
    "an infinite derivative": "y = self.a(x); return y.var(1, correction=0).sqrt(), self.b(x)",
    "one read detached": "return self.a(x).tanh() * self.b(x).detach()",
    "whole numbers": "y = self.a(x); return self.b(x).exp(), y.tanh(), y.argmax(1)",
}


def test_a_file_for_one_batch_size_leaves_others_to_the_original(tmp_path):
    forward = "y = self.a(x) * (2 if x.shape[0] > 40 else 1)\nreturn torch.tanh(self.b(y)) * 0.5"
    standalone = two_layers(tmp_path, forward)
    pair = pair_of(tmp_path, standalone)
    assert [mode.captured.static_batch for mode in standalone.modes] == [32]
    with torch.no_grad():
        for rows, kernels in ((32, True), (7, False), (50, False)):
            pair.calls.clear()
            x = torch.randn(rows, 64)
            torch.testing.assert_close(pair.ours(x), pair.reference(x), rtol=1e-5, atol=1e-5)
            assert bool(pair.calls) == kernels


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("frozen", "ab")
@pytest.mark.parametrize("forward", PARTLY_FROZEN)
def test_results_of_frozen_parts_require_no_gradient(forward, frozen, again, tmp_path):
    standalone = two_layers(tmp_path, PARTLY_FROZEN[forward], EQUAL_ROWS)
    pair = pair_of(tmp_path, standalone, double=True)
    for region in pair.namespace._IngotRegion.__subclasses__() if not again else ():
        region.reference = None  # no product is computed again
    requiring, found = [], []
    for module in (pair.reference, pair.ours):
        getattr(module, frozen).requires_grad_(False)
        results = tensors(module(*pair.inputs))
        requiring.append([t.requires_grad for t in results])
        wanted = [p for p in module.parameters() if p.requires_grad]
        total = sum(t.square().sum() for t in results if t.requires_grad)
        if any(requiring[0]):
            found.append(torch.autograd.grad(total, wanted, create_graph=again))
        if again and any(requiring[0]):
            total = sum(g.square().sum() for g in found[-1])
            found[-1] += torch.autograd.grad(total, wanted)
    assert pair.calls and requiring[0] == requiring[1]
    if found:
        close(found[1], found[0], 1e-8)


def test_a_batch_that_kernels_have_no_statistics_of_is_the_originals(tmp_path):
    """However the arguments are given: forward has one that nobody gives here."""
    path = tmp_path / "model.py"
    path.write_text(
        """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm, self.bn = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x, y, scale=0.5):
        return self.bn(self.gemm(x)) * scale + y

def get_inputs():
    return [torch.randn(32, 64), torch.randn(32, 64)]

def get_init_inputs():
    return []
"""
    )
    pair = pair_of(tmp_path, Standalone(load_model_file(path)))
    with torch.no_grad():
        close(pair.ours(*pair.inputs), pair.reference(*pair.inputs), 1e-4)
        assert len(pair.calls) == 1
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            pair.ours(*(value[:1] for value in pair.inputs))
    assert len(pair.calls) == 1
