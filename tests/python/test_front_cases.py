"""What a captured forward can get wrong: everything that may differ from one call to the next, and
everything that a forward may do beside computing. Each against a copy run by PyTorch alone."""

from __future__ import annotations

import copy
import dataclasses
import random
import types

import ingot
import numpy as np
import pytest
import torch
from ingot.live.backend import IngotWarning
from live import compare, regions_run, x
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 6)


def test_an_input_that_is_read_for_its_shape_only():
    class Model(Base):
        def forward(self, x, y):
            return torch.relu(self.l(x)) * y.shape[1]

    def script(m):
        for width in (3, 3, 7, 3, 1):
            yield m(x(), torch.randn(5, width))

    compare(Model, script)


class BySize(Base):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(6)

    def forward(self, x):
        y = self.l(x)
        if x.size(0) > 1:
            y = self.bn(y) + 1
        return torch.relu(y)


@pytest.mark.parametrize("training", [True, False])
def test_a_branch_on_the_batch_size(training):
    def script(m):
        m.train(training)
        for batch in (4, 1, 37, 1, 4):
            yield m(x(batch))

    compare(BySize, script)


def test_squeeze_with_one_row():
    class Model(Base):
        def forward(self, x):
            return torch.relu(self.l(x)).squeeze() * 2

    def script(m):
        for batch in (4, 1, 2, 1):
            yield m(x(batch))

    compare(Model, script)


def test_a_configuration_object_that_changes():
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(scale=2.0, act="relu", sizes=[1, 2])

        def forward(self, x):
            y = getattr(torch, self.config.act)(self.l(x)) * self.config.scale
            return y + len(self.config.sizes)

    def script(m):
        yield m(x())
        m.config.scale = 3.0
        yield m(x())
        m.config.act = "tanh"
        yield m(x())
        m.config.sizes.append(3)
        yield m(x())
        m.config = types.SimpleNamespace(scale=-1.0, act="sigmoid", sizes=[])
        yield m(x())

    compare(Model, script)


SCALE, SHIFT = 2.0, torch.ones(6)


def test_globals_that_change():
    class Model(Base):
        def forward(self, x):
            return torch.relu(self.l(x)) * SCALE + SHIFT

    def script(m):
        global SCALE, SHIFT
        SCALE, SHIFT = 2.0, torch.ones(6)
        yield m(x())
        SCALE = 3.0
        yield m(x())
        SHIFT = torch.arange(6.0)
        yield m(x())
        SHIFT.mul_(2)
        yield m(x())

    compare(Model, script)


class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(6)

    def forward(self, x):
        self.hidden = torch.tanh(self.l(x).mean(0) + self.hidden)
        return torch.relu(self.l(x)) + self.hidden


def test_state_in_a_tensor_attribute():
    def script(m):
        for _ in range(4):
            yield m(x())
        yield m.hidden
        m.hidden = torch.zeros(6)
        yield m(x())

    compare(Recurrent, script)


def test_a_network_that_carries_its_hidden_state_over():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.i2h, self.h2o = nn.Linear(8 + 5, 5), nn.Linear(5, 3)
            self.hidden = torch.zeros(4, 5)

        def forward(self, x):
            self.hidden = torch.tanh(self.i2h(torch.cat((x, self.hidden), dim=1)))
            return self.h2o(self.hidden)

    def script(m):
        for _ in range(3):
            yield m(x())
        yield m.hidden

    compare(Model, script)


def test_constants_that_are_returned_are_fresh():
    class Model(Base):
        def forward(self, x):
            return torch.relu(self.l(x)) * 2, torch.zeros(6), torch.full((2, 2), 3.0)

    def script(m):
        for _ in range(3):
            y, zeros, threes = m(x())
            yield y, zeros.clone(), threes.clone()
            zeros.add_(5)
            threes.mul_(2)

    compare(Model, script)


@pytest.mark.parametrize(
    "bounds", [(0, float("inf")), (float("-inf"), 1.0), (float("-inf"), float("inf")), (None, 2)]
)
def test_clamp_with_infinities(bounds):
    class Model(Base):
        def forward(self, x):
            return self.l(x).clamp(*bounds) * 2

    def script(m):
        yield m(x())
        yield m(torch.full((2, 8), float("inf")))
        yield m(torch.full((2, 8), float("nan")))

    compare(Model, script, gradients=(False,))
    compare(Model, lambda m: iter([m(x())]), gradients=(True,))


def test_gradients_of_buffers():
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.register_buffer("w", torch.rand(6).requires_grad_())

        def forward(self, x):
            return torch.relu(self.l(x)) * self.w

    compare(Model, lambda m: (m(x()) for _ in range(2)))


def test_gradients_of_generated_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.maker = nn.Linear(3, 48)
            self.l = nn.Linear(8, 6, bias=False)
            del self.l.weight

        def forward(self, x, style):
            self.l.weight = self.maker(style).view(6, 8)
            return torch.relu(self.l(x)) * 2

    def script(m):
        for _ in range(3):
            yield m(x(), torch.randn(3))

    compare(Model, script)


def test_gradients_of_a_weight_set_from_outside():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 6, bias=False)
            del self.l.weight
            self.l.weight = torch.zeros(6, 8)

        def forward(self, x):
            return torch.relu(self.l(x)) * 2

    def script(m):
        yield m(x())
        weight = torch.randn(6, 8, requires_grad=True)
        m.l.weight = weight * 2
        y = m(x())
        yield y
        if torch.is_grad_enabled():
            yield torch.autograd.grad(y.sum(), weight, retain_graph=True)

    compare(Model, script)


def test_gradients_of_globals_and_of_what_a_closure_holds():
    held = torch.rand(6).requires_grad_()

    class Model(Base):
        def forward(self, x):
            return torch.relu(self.l(x).detach()) * held

    def script(m):
        y = m(x())
        yield y
        if torch.is_grad_enabled():
            yield torch.autograd.grad(y.square().sum(), held, retain_graph=True)

    compare(Model, script)


def test_what_a_forward_leaves_in_lists_are_tensors():
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.log, self.named = [], {}

        def forward(self, x):
            y = self.l(x)
            self.log.append(y)
            self.named["mean"] = y.mean()
            z = torch.relu(y) * 2
            self.log.append(z)
            return z

    def script(m):
        for _ in range(3):
            yield m(x())
        yield list(m.log)
        yield dict(m.named)
        m.log.clear()
        yield m(x())
        yield list(m.log)

    compare(Model, script)


def test_parameters_that_are_thawed_get_gradients():
    def script(m):
        m.requires_grad_(False)
        yield m(x())
        m.requires_grad_(True)
        yield m(x())
        m.l.weight.requires_grad_(False)
        yield m(x())
        m.l.weight.requires_grad_(True)
        yield m(x())

    compare(BySize, script)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "tensor"])
def test_hooks_that_are_put_on_a_child_later(kind):
    seen = []

    def add(m):
        if kind == "forward":
            return m.l.register_forward_hook(lambda m, i, o: seen.append(1) or o * 3)
        if kind == "pre":
            return m.l.register_forward_pre_hook(lambda m, i: seen.append(1) or (i[0] + 1,))
        if kind == "backward":
            return m.l.register_full_backward_hook(lambda m, i, o: seen.append(1))
        return m.l.weight.register_hook(lambda g: seen.append(1) or g * 2)

    def script(m):
        seen.clear()
        yield m(x())
        handle = add(m)
        for _ in range(2):
            y = m(x())
            yield y
            if torch.is_grad_enabled():
                y.sum().backward(retain_graph=True)
        yield len(seen)
        handle.remove()
        yield m(x())
        yield len(seen)

    compare(BySize, script)


def test_counting_calls_costs_no_captures():
    class Model(Base):
        def __init__(self):
            super().__init__()
            self.calls, self.total = 0, 0.0

        def forward(self, x):
            self.calls += 1
            self.total += 0.5
            return torch.relu(self.l(x)) * self.calls + self.total

    def script(m):
        for _ in range(12):
            yield m(x())
        yield m.calls, m.total

    compare(Model, script, graphs=4)


@pytest.mark.parametrize("values", [(1.5, -2.0), (1, 3), (True, False), ("relu", "tanh")])
def test_an_attribute_that_alternates_costs_no_captures(values):
    class Model(Base):
        gain = values[0]

        def forward(self, x):
            y = self.l(x)
            if isinstance(self.gain, str):
                return getattr(torch, self.gain)(y) * 2
            return torch.relu(y) * (2 if self.gain is True else self.gain)

    def script(m):
        for turn in range(12):
            m.gain = values[turn % 2]
            yield m(x())

    compare(Model, script, graphs=3)


@dataclasses.dataclass
class Config:
    scale: float
    tensor: torch.Tensor
    names: list


class Anything(Base):
    def forward(self, x, extra=None, *rest, flag=False, **named):
        y = torch.relu(self.l(x))
        if isinstance(extra, dict):
            y = y + extra["shift"]
        elif isinstance(extra, list):
            y = y * len(extra)
        elif isinstance(extra, Config):
            y = y * extra.scale + extra.tensor
        elif isinstance(extra, set):
            y = y - len(extra)
        for one in rest:
            y = y + one
        for name in sorted(named):
            y = y * named[name]
        return Config(2.0, -y, ["a"]) if flag else {"y": y, "none": None, "pair": (y.sum(1), 3)}


def _plain(result):
    if isinstance(result, Config):
        return [result.scale, result.tensor, str(result.names)]
    return result


ARGUMENTS = {
    "dict": lambda: ((x(), {"shift": torch.ones(6)}), {}),
    "list": lambda: ((x(), [1, 2, 3]), {}),
    "set": lambda: ((x(), {1, 2}), {}),
    "dataclass": lambda: ((x(), Config(3.0, torch.ones(6), ["n"])), {}),
    "dataclass back": lambda: ((x(),), {"flag": True}),
    "rest": lambda: ((x(), None, torch.ones(6), 2.0), {}),
    "named": lambda: ((x(),), {"scale": 2.0, "other": torch.full((6,), 0.5)}),
    "by name": lambda: ((), {"x": x()}),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_and_results_of_every_kind(kind):
    def script(m):
        for _ in range(3):
            args, kwargs = ARGUMENTS[kind]()
            yield _plain(m(*args, **kwargs))

    compare(Anything, script)


def test_the_same_tensor_twice_and_views_of_one():
    class Model(Base):
        def forward(self, x, y):
            return torch.relu(self.l(x)) + self.l(y) * 2

    def script(m):
        a, b, wide = x(), x(), torch.randn(8, 8)
        for args in ((a, a), (a, b), (b, b), (wide[:4], wide[4:]), (wide[:4], wide[2:6]), (a, a)):
            yield m(*args)

    compare(Model, script)


def test_results_that_are_inputs_or_views_of_them():
    class Model(Base):
        def forward(self, x):
            y = torch.relu(self.l(x)) * 2
            return x, x.view(-1), y, y.view(-1), self.l.weight

    def script(m):
        fed = x()
        same, flat, y, y_flat, weight = m(fed)
        yield same is fed, flat.data_ptr() == fed.data_ptr(), weight is m.l.weight
        yield y.data_ptr() == y_flat.data_ptr()
        yield y, y_flat

    compare(Model, script)


def test_an_image_cut_into_tokens():
    """A view of a convolution's result, which may lie channels-last."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut = nn.Conv2d(3, 8, 4, stride=4)
            self.norm, self.l = nn.LayerNorm(8), nn.Linear(8, 6)
            self.position = nn.Parameter(torch.randn(1, 4, 8))

        def forward(self, x):
            tokens = self.cut(x).flatten(2).transpose(1, 2) + self.position
            return torch.nn.functional.gelu(self.l(self.norm(tokens))).mean(1)

    def script(m):
        for batch in (2, 5, 1):
            image = torch.randn(batch, 3, 8, 8)
            yield m(image)
            yield m(image.contiguous(memory_format=torch.channels_last))
        m.to(memory_format=torch.channels_last)
        yield m(torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last))

    compare(Model, script)


@pytest.mark.parametrize("training", [True, False])
def test_batch_sizes_there_and_back(training):
    def make():
        return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))

    def script(m):
        m.train(training)
        for batch in (37, 2, 1, 0, 2, 37, 1, 64, 0):
            yield m(x(batch))

    compare(make, script)


def test_a_new_batch_size_costs_no_capture():
    def script(m):
        for batch in (2, 37, 64, 5, 300):
            yield m(x(batch))

    def make():
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU())

    compare(make, script, graphs=1, tolerance=2e-3)


def test_ranks_and_lengths_that_change():
    def make():
        return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU())

    def script(m):
        for shape in ((4, 8), (4, 5, 8), (4, 9, 8), (2, 9, 8), (2, 3, 5, 8), (4, 5, 8), (8,)):
            yield m(torch.randn(shape))

    compare(make, script)


def test_an_empty_and_a_single_row_in_batch_norm():
    def script(m):
        yield m(x())
        for batch in (1, 0):
            try:
                yield m(x(batch))
            except (ValueError, RuntimeError) as error:
                yield type(error).__name__
        m.eval()
        yield m(x(1))
        yield m(x(0))

    compare(lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU()), script)


def test_dropout_draws_what_pytorch_draws():
    def make():
        return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 4))

    def script(m):
        for _ in range(3):
            yield m(x())
        m.eval()
        yield m(x())

    compare(make, script)


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(8, 6), nn.Linear(6, 4), draw

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.draw()) * self.draw()


DRAWS = {
    "a number of Python's": lambda: random.uniform(0.5, 1.5),
    "a whole number of Python's": lambda: random.randint(1, 5),
    "a number of NumPy's": lambda: np.random.rand(),
    "an array of NumPy's": lambda: torch.from_numpy(np.random.rand(1).astype(np.float32)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_forwards_draw_what_they_draw(draw):
    def script(m):
        random.seed(5)
        np.random.seed(5)
        for batch in (4, 4, 3):
            yield m(x(batch))

    compare(lambda: Draws(DRAWS[draw]), script)


class NormsTwice(nn.Module):
    """By the statistics that it moves afterwards, which backward reads as they are then."""

    def __init__(self, again):
        super().__init__()
        self.a, self.b, self.again = nn.Linear(8, 6), nn.Linear(6, 4), again
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.norm.train(False)
        y = self.norm(self.a(x))
        self.norm.train(self.again)
        return self.b(torch.relu(self.norm(y)))


@pytest.mark.parametrize("again", (True, False))
def test_a_norm_by_statistics_that_are_moved_then(again):
    def script(m):
        for batch in (4, 4, 3):
            yield m(x(batch))

    compare(lambda: NormsTwice(again), script, taken=not again)


class MakesItsLayers(nn.Module):
    def forward(self, x):
        if not hasattr(self, "norm"):
            self.a, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        return torch.relu(self.norm(self.a(x)))


def test_layers_that_the_first_call_makes():
    def script(m):
        for batch in (4, 4, 3):
            yield m(x(batch))
        m.eval()
        yield m(x(4))

    compare(MakesItsLayers, script)


def test_tensors_of_other_kinds():
    def script(m):
        yield m(x())
        yield m(nn.Parameter(x()))
        try:
            yield m(x().to_sparse()).to_dense()
        except RuntimeError:
            yield "sparse"
        yield m(torch.randn(8, 4).t())
        yield m(x(1).expand(4, 8))
        yield m(x().double().float())

    compare(lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), script)


def test_modules_of_a_model_optimised_by_themselves_and_then_the_model():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU())
    module = nn.Sequential(nn.Linear(8, 6), inner)
    twin, fed = copy.deepcopy(module), x(5)
    module[1] = ingot.optimize(module[1])
    with regions_run() as ran:
        torch.testing.assert_close(module(fed), twin(fed))
    assert len(ran) == 1
    outer = ingot.optimize(module)
    torch.testing.assert_close(outer(fed), twin(fed))
    assert {item["what"] for item in outer.ingot_report()["operators_replaced"]} > {"linear"}


def test_warnings_come_once():
    class Model(Base):
        def forward(self, x):
            return torch.cumsum(torch.relu(self.l(x)), dim=1)

    optimised = ingot.optimize(Model())
    with pytest.warns(IngotWarning, match="cumsum") as said:
        for batch in (4, 5, 4):
            optimised(x(batch))
    assert len([w for w in said if issubclass(w.category, IngotWarning)]) == 1
