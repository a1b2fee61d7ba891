"""Backward passes of standalone files by kernels, which the library's evaluator stands in for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import selection
import torch
from ingot.model_file import load_model_file
from ingot.standalone import backward
from ingot.standalone_writer import Standalone
from standalone_support import (
    close,
    filled,
    gradients,
    on_the_host,
    pair_of,
    tensors,
    two_layers,
)

MODELS = Path(__file__).resolve().parents[1] / "models"
# Not fp32 inside, or not differentiable; products that are no matrices of one weight.
OTHERS = {"half_inside", "in_place"}
NAMES = sorted(path.stem for path in MODELS.glob("*.py") if path.stem not in OTHERS)
# Of the quick tests: these have kernels for backward.
QUICK = ["batchnorm_gelu_relu", "gelu_softmax", "three_layer_sequential", "tokens_mean_linear"]


@pytest.fixture(autouse=True)
def whatever_its_size(monkeypatch):
    monkeypatch.setattr(backward, "LEAST_WORK", 0)


def written(name: str) -> Standalone:
    return Standalone(load_model_file(MODELS / f"{name}.py"))


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("name", selection.quick(QUICK, NAMES))
def test_gradients_are_the_originals(name, mode, tmp_path):
    standalone = written(name)
    pair = pair_of(tmp_path, standalone, double=True)
    reference, ours, inputs = pair.reference, pair.ours, pair.inputs
    for module in (reference, ours):
        module.train(mode == "training")
    like = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
    like += list(reference.parameters())
    expected = gradients(copy.deepcopy(reference), inputs, again=False)
    close(filled(gradients(copy.deepcopy(ours), inputs, again=False), like), expected, 1e-8)
    ran = {name for name, _ in pair.calls}
    assert not standalone.backward or ran & {program.name for program in standalone.backward}
    assert standalone.backward or name not in QUICK
    for found, wanted in zip(
        gradients(copy.deepcopy(ours), inputs, again=True),
        gradients(copy.deepcopy(reference), inputs, again=True),
    ):
        close(filled(found, like), filled(wanted, like), 1e-7)


def test_a_mode_of_few_gradients_computes_few(tmp_path):
    """Products of what needs no gradient, of the inputs too, do not run."""
    standalone = written("three_layer_sequential")
    file, _, calls = on_the_host(tmp_path, standalone)
    ours, original = file.make_module(), standalone.original.make_module()
    ours.load_state_dict(original.state_dict())
    products = {p.name for p in standalone.backward if len(p.graph["values"]) == 3}
    counts = []
    for frozen, wanted in (((), True), ((), False), (("weight",), False)):
        inputs = [x.clone().requires_grad_(wanted) for x in standalone.original.make_inputs()]
        both = []
        for module in (ours, original):
            module.zero_grad()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.endswith(frozen) or not frozen)
            calls.clear()
            module(*inputs).square().sum().backward()
            both.append([p.grad for p in module.parameters()])
            counts.append(sum(name in products for name, _ in calls))
        close(*both, 1e-4)
    assert counts[0] > counts[2] >= 3 and counts[4] < counts[2]


def test_other_numbers_of_samples(monkeypatch, tmp_path):
    """Products over the batch are for any, up to where their sums would be too long."""
    monkeypatch.setattr(backward, "_MOST_SAMPLES", {"fp32": 64})
    standalone = written("gelu_softmax")
    pair = pair_of(tmp_path, standalone)
    names = {p.name for p in standalone.backward if p.name.endswith("batch_product")}
    (example,) = pair.inputs
    for rows, ours in ((len(example), True), (2, True), (64, True), (65, False)):
        x = torch.randn(rows, example.shape[1])
        expected = gradients(copy.deepcopy(pair.reference), [x], again=False)
        pair.calls.clear()
        found = gradients(copy.deepcopy(pair.ours), [x], again=False)
        close(found, expected, 1e-4)
        assert any(name in names for name, _ in pair.calls) == ours


FORWARDS = {
    "two results": "y = self.a(x).relu()\nreturn y, self.b(y).tanh()",
    "a constant": "return self.b(self.a(x).clamp(min=0.25)).relu()",
    "a mask": "return self.b(torch.where(self.a(x) > 0.1, self.a(x), 0.5))",
    "one weight twice": "return self.a(self.a(x).tanh()).sigmoid()",
    "a residual": "return x + self.b(torch.nn.functional.gelu(self.a(x)))",
    "statistics of the batch": "return self.b((self.a(x) - self.a(x).mean(0)).tanh())",
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_small_programs(forward, tmp_path):
    standalone = two_layers(tmp_path, forward)
    pair = pair_of(tmp_path, standalone, double=True)
    for again in (False, True):
        expected = gradients(copy.deepcopy(pair.reference), pair.inputs, again=again)
        found = gradients(copy.deepcopy(pair.ours), pair.inputs, again=again)
        like = [*pair.inputs, *pair.reference.parameters()]
        for a, b in zip(found, expected) if again else [(found, expected)]:
            close(filled(a, like), filled(b, like), 1e-7)
    assert standalone.backward


def test_a_graph_is_kept_and_gradients_are_added_up(tmp_path):
    pair = pair_of(tmp_path, written("three_layer_sequential"), double=True)
    sums = []
    for module in (pair.reference, pair.ours):
        (result,) = tensors(module(*pair.inputs))
        result.sum().backward(retain_graph=True)
        result.square().sum().backward()
        sums.append([p.grad for p in module.parameters()])
    close(sums[1], sums[0], 1e-8)


def test_small_products_are_pytorchs(monkeypatch, tmp_path):
    monkeypatch.setattr(backward, "LEAST_WORK", 1 << 24)
    standalone = written("gelu_softmax")
    assert not standalone.backward and "_INGOT_BACKWARD" not in standalone.render()
