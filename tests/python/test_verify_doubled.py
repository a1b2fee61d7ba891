"""Forwards that name fp32, or make tensors of it, beside the fp64 run that verify compares with."""

from __future__ import annotations

import pytest
import torch
from ingot.verify.bounds import Roundings
from ingot.verify.criteria import ErrorModel
from ingot.verify.reference import Cotangents, Reference
from test_verify_models import model, verify, why
from torch import nn
from torch.nn import functional as F

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def as_float(y, single):
    return y.float() if single is torch.float32 else y.double()


def scattered(y, single):
    return torch.zeros(y.shape[0], 12).scatter(1, torch.arange(10).expand(y.shape), y)


def one_hot(y, single):
    places = torch.zeros(y.shape[0], 10, dtype=single).scatter_(1, y.argmax(1, keepdim=True), 1.0)
    return y * places + as_float(F.one_hot(y.argmax(1), 10), single) @ y.new_ones(10, 10)


def added(y, single):
    rows = torch.arange(y.shape[0]) % 3
    sums = torch.zeros(3, 10, dtype=single).index_add(0, rows, y)
    return sums[rows] + y.new_zeros(3, 10).index_add_(0, rows, y)[rows]


def cast(y, single):
    return as_float(y, single) / 3 + y.to(single) * y.type(single)


def asked(y, single):
    return F.softmax(y, -1, dtype=single) + y.cumsum(0, dtype=single)


def ramp(y, single):
    return y @ torch.arange(0, 1, 0.1, dtype=single).diag() + torch.tensor(0.1) * y


def masked(y, single):
    mask = as_float(y > 0, single)
    return y.masked_fill(mask == 0, 0.0) @ mask.t()


def mean_of_integers(y, single):
    return y * (torch.arange(10) / 3)


def attribute(y, single):
    return y @ TABLE.to(y.dtype) if single is not torch.float32 else y @ OWN.table


def complex_numbers(y, single):
    turns = torch.polar(torch.ones(10), torch.arange(10) / 3)
    made = y.to(torch.complex64 if single is torch.float32 else torch.complex128) * turns
    return torch.view_as_real(made)


def in_parts(y, single):
    return as_float(y.half(), single) * y.double().to(single)


FORMS = [scattered, one_hot, added, cast, asked, ramp, masked, mean_of_integers, attribute]
FORMS += [complex_numbers, in_parts]
NAMES = ("gemm.weight", "gemm.bias", "scale")
TABLE = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.gemm, self.form, self.table = nn.Linear(12, 10), form, TABLE.clone()

    def forward(self, x):
        global OWN
        OWN = self
        return self.form(self.gemm(x), torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_the_truth_is_all_in_fp64(form):
    original = Reference(Model, [form], 5, CPU)
    values = [torch.rand(16, 12, generator=torch.Generator().manual_seed(6))]
    call = (original.initial_state, values, True, 7)
    truth = original.truth(*call, Cotangents(8))
    assert truth.error is None
    assert torch.get_default_dtype() is torch.float32
    twin = Model(form)
    twin.load_state_dict({name[2:]: t for name, t in original.initial_state.items()})
    twin.double()
    with torch.no_grad():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            wanted = form(twin.gemm(values[0].double()), torch.float64)
        finally:
            torch.set_default_dtype(default)
    (found,) = truth.outputs
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    assert truth.gradients["dp:gemm.weight"].dtype is torch.float64
    eager = original.eager(original.initial_state, values, True, "contiguous", 7)
    assert eager.outputs[0].dtype is torch.float32
    roundings = Roundings.of("fp32", torch.float32, ErrorModel.INDEPENDENT)
    _, (spread,), _ = original.truth_and_spread(*call, roundings, Cotangents(8))
    assert 1e-9 < spread.relative_error < (2e-3 if form is in_parts else 2e-6)


class Closing(nn.Module):
    """minGPT's way: its MLP is a function of parts that it closes over."""

    def __init__(self, widths, form):
        super().__init__()
        parts = self.parts = nn.ModuleDict({"up": nn.Linear(*widths), "out": form})
        self.forms = {"mlp": lambda x: parts.out(torch.tanh(parts.up(x)))}

    def forward(self, x):
        return self.forms["mlp"](x)


def test_what_functions_of_a_module_close_over_is_the_exact_modules():
    original = Reference(Closing, [(12, 10), nn.Linear(10, 10)], 5, CPU)
    values = [torch.rand(16, 12)]
    first = original.initial_state
    for state in (first, original.changed(first, 9), first):
        truth = original.truth(state, values, True, 7).outputs[0]
        eager = original.eager(state, values, True, "contiguous", 7).outputs[0]
        assert truth.dtype is torch.float64
        torch.testing.assert_close(eager.double(), truth, rtol=1e-5, atol=1e-6)


def test_a_cast_of_a_model_of_several_types_is_part_of_it():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gemm, self.scale = nn.Linear(12, 10).bfloat16(), nn.Parameter(torch.rand(10))

        def forward(self, x):
            return self.gemm(x).float() * self.scale

    original = Reference(Mixed, [], 5, CPU)
    x = torch.rand(16, 12).bfloat16()
    truth = original.truth(original.initial_state, [x], True, 7)
    weight, bias, scale = (original.initial_state[f"p:{n}"].double() for n in NAMES)
    wanted = F.linear(x.double(), weight, bias).float() * scale
    torch.testing.assert_close(truth.outputs[0], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
def test_a_scatter_into_fp32_zeros_is_verified(tmp_path):
    original = model(
        "y = self.gemm(x)\n"
        "out = torch.zeros(x.shape[0], 10)\n"
        "out.scatter_(1, torch.arange(10).expand(y.shape).flip(1), torch.relu(y))\n"
        "return out.index_add(0, torch.arange(x.shape[0]), y.float())"
    )
    result = verify(tmp_path, original)
    assert result.verified, why(result)
    wrong = original.replace("torch.relu(y)", "torch.relu(y.bfloat16().float())")
    assert not verify(tmp_path, original, wrong).verified
