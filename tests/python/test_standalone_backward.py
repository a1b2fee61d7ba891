"""Backward passes of standalone files by kernels, which the library's evaluator stands in for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import selection
import torch
from ingot.live import products
from ingot.model_file import constants_of, load_model_file
from ingot.standalone import backward
from ingot.standalone_writer import Standalone
from standalone_support import (
    close,
    filled,
    gradients,
    in_mode,
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
    monkeypatch.setattr(products, "LEAST_WORK", 0)


def written(name: str, batch: int = 40) -> Standalone:
    """batch: in place of most models' 37, of which products over the batch are PyTorch's."""
    path = MODELS / f"{name}.py"
    usual = constants_of(path.read_text(), str(path)).get("batch_size") == 37
    return Standalone(load_model_file(path, {"batch_size": batch} if usual else {}))


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("name", selection.quick(QUICK, NAMES))
def test_gradients_are_the_originals(name, mode, tmp_path):
    standalone = written(name)
    pair = pair_of(tmp_path, standalone, double=True)
    reference, ours, inputs = pair.reference, pair.ours, pair.inputs
    like = in_mode(pair, mode)
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
    """Products over the batch are for multiples of eight, as the copy engine takes rows of an
    operand that lies turned, up to where their sums would be too long."""
    monkeypatch.setattr(backward, "_MOST_SAMPLES", {"fp32": 64})
    standalone = written("gelu_softmax")
    pair = pair_of(tmp_path, standalone)
    names = {p.name for p in standalone.backward if p.name.endswith("batch_product")}
    (example,) = pair.inputs
    for rows, ours in ((len(example), True), (8, True), (64, True), (60, False), (72, False)):
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
    monkeypatch.setattr(products, "LEAST_WORK", 1 << 24)
    standalone = written("gelu_softmax")
    assert not standalone.backward and "_INGOT_BACKWARD" not in standalone.render()


SHAPES = {
    "tokens": ("6, 5, 64", "return self.b(self.a(x).relu()).tanh()", "pass"),
    "tokens as rows": (
        "6, 8, 64",
        "rows = torch.sort(x.view(-1, 64), -1)[0]\n"
        "return (self.b(self.a(rows).relu()).view(x.shape) * x).tanh()",
        "pass",
    ),
    "four dimensions": ("3, 2, 5, 64", "return self.b(F.gelu(self.a(x))).softmax(-1)", "pass"),
    "a parameter called device": (
        "6, 64",
        "return self.b(torch.where(self.a(x) > self.device, self.a(x), 0.5))",
        "self.device = nn.Parameter(torch.randn(64))",
    ),
    "weights of a parametrisation": (
        "6, 64",
        "return self.b(self.a(x).relu())",
        "nn.utils.parametrizations.weight_norm(self.a)",
    ),
    "a result of the inputs alone": (
        "6, 64",
        "return x.exp() + x, self.b(self.a(x).tanh())",
        "pass",
    ),
    "a largest element": ("6, 64", "return self.b(self.a(x)).max(-1)[0].tanh()", "pass"),
}


def pair_with(folder: Path, name: str):
    shape, forward, init = SHAPES[name]
    standalone = two_layers(folder, forward, init, f"torch.randn({shape})")
    return pair_of(folder, standalone, double=True)


@pytest.mark.parametrize("name", SHAPES)
def test_of_any_shape_and_for_any_of_the_gradients(name, tmp_path, caplog):
    pair = pair_with(tmp_path, name)
    parameters = [list(module.parameters()) for module in (pair.reference, pair.ours)]
    x = pair.inputs[0].requires_grad_()
    for of_input, of_parameters in ((True, True), (False, True), (True, False)):
        found = []
        for module, own in zip((pair.reference, pair.ours), parameters):
            wanted = [*([x] if of_input else []), *(own if of_parameters else [])]
            results = [t for t in tensors(module(x)) if t.requires_grad]
            total = sum(t.square().sum() for t in results)
            found.append(torch.autograd.grad(total, wanted, allow_unused=True))
        close(filled(found[1], wanted), filled(found[0], wanted), 1e-7)
    assert pair.calls and "failed" not in caplog.text


def test_many_gradients_at_once(tmp_path):
    pair = pair_with(tmp_path, "tokens")
    found = []
    for module in (pair.reference, pair.ours):
        x = pair.inputs[0].detach().requires_grad_()
        result = module(x)
        torch.manual_seed(0)
        along = torch.randn(3, *result.shape, dtype=result.dtype)
        wanted = [x, *module.parameters()]
        found.append(torch.autograd.grad(result, wanted, along, is_grads_batched=True))
    close(found[1], found[0], 1e-7)


def test_constants_of_many_numbers_are_pytorchs(monkeypatch, tmp_path):
    """Those of a row's elements, of which a largest one's gradient takes the place, of a model of
    one batch size."""
    monkeypatch.setattr(products, "LEAST_WORK", 1 << 24)
    monkeypatch.setattr(backward, "_MOST_CONSTANTS", 100)
    forward = "h = self.c(self.e[x])\nreturn self.d(h * h.max(-1, keepdim=True)[0]).relu()"
    init = "self.c, self.d = nn.Linear(256, 256), nn.Linear(256, 256)"
    init += "\nself.e = nn.Parameter(torch.randn(5, 256))"
    standalone = two_layers(tmp_path, forward, init, "torch.randint(0, 5, (512,))")
    assert "class ModelNew" in standalone.render()


def test_one_dimensional_arguments_of_another_length_are_the_originals(tmp_path):
    forward = "return self.b(self.a(self.e[x]).relu())"
    init = "self.e = nn.Parameter(torch.randn(5, 64))"
    pair = pair_of(tmp_path, two_layers(tmp_path, forward, init, "torch.randint(0, 5, (8,))"))
    for x in (torch.randint(0, 5, (8,)), torch.randint(0, 5, (5,)), torch.tensor(3)):
        pair.calls.clear()
        close(pair.ours(x), pair.reference(x), 1e-5)
        assert bool(pair.calls) == (x.shape == (8,))
