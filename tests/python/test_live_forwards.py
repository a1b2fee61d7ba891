"""Forwards that do more than compute: structures, Python state, control flow, writes in place."""

from __future__ import annotations

import copy

import ingot
import pytest
import torch
from live import agree, compare, no_gradients, x  # noqa: F401
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x, residual=None, *, factor=2.0):
        y = torch.relu(self.linear(x)) * factor
        if residual is not None:
            y = y + residual
        return {"y": y, "pair": (y.sum(dim=1), factor), "none": None}


def test_structured_arguments_and_results():
    model = Pair()
    optimised = ingot.optimize(model)
    for args, kwargs in (
        ((x(),), {}),
        ((x(), torch.randn(4, 6)), {}),
        ((x(),), {"residual": torch.randn(4, 6), "factor": 3.0}),
        ((x(3),), {"factor": -1.0}),
    ):
        found, expected = optimised(*args, **kwargs), model(*args, **kwargs)
        assert found.keys() == expected.keys() and found["pair"][1] == expected["pair"][1]
        assert found["none"] is None
        torch.testing.assert_close(found["y"], expected["y"])
        torch.testing.assert_close(found["pair"][0], expected["pair"][0])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.linear(x)) * self.calls


def test_state_in_python_moves_on():
    model = Counting()
    twin = copy.deepcopy(model)
    optimised = ingot.optimize(model, (x(),))
    assert optimised.calls == 0
    for _ in range(3):
        fed = x()
        torch.testing.assert_close(optimised(fed), twin(fed))
    assert optimised.calls == twin.calls == 3


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y - 1


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_control_flow_on_values_is_left_to_pytorch():
    optimised = ingot.optimize(Branching())
    for sign in (1, -1):
        fed = x() * sign
        torch.testing.assert_close(
            optimised(fed), optimised._ingot.original_forward(optimised, fed)
        )


class BySize(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        y = self.linear(x).relu()
        return y * 2 if x.shape[0] > 4 else y - 1


def test_control_flow_on_the_batch_size():
    model = BySize()
    optimised = ingot.optimize(model)
    for batch in (3, 5, 4, 8, 3):
        fed = x(batch)
        torch.testing.assert_close(
            optimised(fed), optimised._ingot.original_forward(optimised, fed)
        )


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        y = self.linear(x)
        alias = y
        y += 1
        y.relu_()
        self.seen += alias.sum(0)
        return alias * 2


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_writes_into_buffers_are_kept():
    model = InPlace()
    twin = copy.deepcopy(model)
    agree(ingot.optimize(model), twin, x())


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        x += 1
        return self.linear(x).relu()


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_writes_into_the_input_are_kept():
    optimised, model = ingot.optimize(WritesInput()), WritesInput()
    model.load_state_dict(optimised.state_dict())
    a, b = torch.ones(4, 8), torch.ones(4, 8)
    torch.testing.assert_close(optimised(a), model(b))
    torch.testing.assert_close(a, b)


class WritesInputFlat(WritesInput):
    def forward(self, x):
        x.view(-1).add_(1)
        return torch.tanh(self.linear(x)) * 2


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_a_write_through_a_view_whose_size_holds_the_batch():
    def script(m):
        for batch in (4, 5, 7):
            given = torch.ones(batch, 8)
            yield m(given), given

    compare(WritesInputFlat, script, graphs=1)


class RandomSlopes(nn.Module):
    """Leaky ReLUs whose noise the derivative reads."""

    def __init__(self, steps):
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 8), steps

    def forward(self, x):
        h = self.linear(x)
        for step in self.steps:
            h = getattr(self, step)(h)
        return torch.tanh(self.linear(h)), h

    def in_place(self, h):
        return nn.functional.rrelu(h + 0.0, training=self.training, inplace=True)

    def beside(self, h):
        return nn.functional.rrelu(h, training=self.training)

    def doubled(self, h):
        return h * 2

    def dropped(self, h):
        return nn.functional.dropout(h, 0.3, self.training)

    def added(self, h):
        h += 1
        return h

    def written(self, h):
        h[:, 0] = h[:, 0] * 0.5
        return h


@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "steps",
    [
        ["in_place"],
        ["written", "in_place"],
        ["in_place", "doubled", "written", "in_place"],
        ["dropped", "added", "beside"],
        ["dropped", "added", "in_place", "doubled", "added"],
    ],
    ids="-".join,
)
def test_gradients_through_random_slopes_that_are_written(steps, training):
    def script(m):
        m.train(training)
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(4, 8)
            junk = [torch.full((4, 8), 1e9) for _ in range(20)]  # what unwritten memory holds
            del junk
            yield m(x)

    compare(lambda: RandomSlopes(steps), script, taken=False)


class Recurrent(nn.Module):
    def __init__(self, kind, both, dropout):
        super().__init__()
        self.cells = kind(8, 6, 2, batch_first=True, bidirectional=both, dropout=dropout)
        width = 12 if both else 6
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x):
        y, state = self.cells(x)
        return torch.tanh(self.head(self.norm(y))), state


@pytest.mark.parametrize(
    ("kind", "both", "dropout"),
    [(nn.LSTM, False, 0.0), (nn.LSTM, True, 0.5), (nn.GRU, True, 0.0), (nn.RNN, False, 0.0)],
)
def test_what_is_beside_recurrent_layers_is_taken(kind, both, dropout):
    def script(m):
        for batch in (4, 4, 7):
            torch.manual_seed(batch)
            yield m(torch.randn(batch, 3, 8))

    compare(lambda: Recurrent(kind, both, dropout), script, graphs=2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_under_autocast(kind):
    def script(m):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            y, state = m(torch.randn(4, 3, 8))
        yield y.dtype
        yield y.float()

    def make():
        return Recurrent(kind, False, 0.0)

    try:
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                list(script(make()))
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("PyTorch has no 16-bit layer of this kind for this processor")
    compare(make, script, taken=False, tolerance=5e-2)


class Packed(Recurrent):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 2, 1]), batch_first=True)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return torch.tanh(self.head(self.norm(y)))


def test_packed_sequences_are_eagers():
    def script(m):
        torch.manual_seed(0)
        yield m(torch.randn(4, 3, 8))

    compare(lambda: Packed(nn.LSTM, False, 0.0), script, taken=False)


class WritesBeside(nn.Module):
    """Writes into its own tensors, beside operators that are made of others."""

    def __init__(self, dropped=False):
        super().__init__()
        self.first = nn.Conv1d(3, 6, 3, padding=1)
        self.last, self.dropped = nn.Linear(8, 8), dropped

    def forward(self, x):
        h = torch.relu_(self.first(x)).unsqueeze(1).to(x.dtype)
        y = nn.functional.scaled_dot_product_attention(h, h, h)
        y = nn.functional.dropout(torch.tanh(self.last(y)), 0.5, self.training)
        if self.dropped:
            y += 1
        return torch.sigmoid(y), h


def steps_of(module):
    (graph,) = module._ingot.graphs
    return [getattr(step, "what", "") for step in graph.compiled.captured.steps]


def test_operators_beside_writes_in_place_stay_whole():
    optimised = ingot.optimize(WritesBeside().eval())
    optimised(torch.randn(4, 3, 8))
    assert "scaled_dot_product_attention" in steps_of(optimised)
    assert not [what for what in steps_of(optimised) if "softmax" in what or "assert" in what]


@pytest.mark.parametrize("dropped", [False, True])
def test_writes_in_place_beside_attention_and_dropout(dropped):
    def script(m):
        for batch in (4, 6):
            torch.manual_seed(batch)
            yield m(torch.randn(batch, 3, 8))

    compare(lambda: WritesBeside(dropped), script, taken=False)


def test_a_convolution_under_autocast_keeps_its_dtype_where_another_is_written():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.last(torch.relu_(self.first(x)) * 2 - 1)

    model, image = Two(), torch.randn(2, 3, 9, 9)
    optimised = ingot.optimize(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = optimised(image), model(image)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_pooling_to_one_number_is_the_mean_that_it_is():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, image):
            y = nn.functional.adaptive_avg_pool2d(torch.relu_(self.first(image)), 1)
            return self.last(y.flatten(1)).tanh()

    model = Pooled()
    optimised = ingot.optimize(model)
    for batch in (4, 6):
        agree(optimised, model, torch.randn(batch, 3, 9, 9))
    assert [what for what in steps_of(optimised) if what] == ["conv2d"]


AS_ANOTHER = {
    "type_as": lambda y, q: y.type_as(q),
    "view_as": lambda y, q: y.flatten(1).softmax(-1).view_as(q),
    "reshape_as": lambda y, q: y.flatten(1).softmax(-1).reshape_as(q),
    "expand_as": lambda y, q: y.sum(-1, keepdim=True).expand_as(q),
    "to_other": lambda y, q: y.to(q),
    "to_device": lambda y, q: y.to(q.device),
    "to_device_and_dtype": lambda y, q: y.to(device=q.device, dtype=torch.float64),
}


class AsAnother(nn.Module):
    """What has the shape, dtype or device of what another region computed."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        q = self.linear(x).transpose(1, 2) * 0.5
        return torch.tanh(self.function(torch.softmax((q @ x.mT) * 0.1, -1), q))


@pytest.mark.parametrize("name", sorted(AS_ANOTHER))
@pytest.mark.filterwarnings("ignore::ingot.IngotWarning")
def test_what_is_made_like_a_tensor_of_another_region(name):
    modules = []

    def make():
        modules.append(AsAnother(AS_ANOTHER[name]))
        return modules[-1]

    compare(make, lambda module: (module(torch.randn(b, 8, 8)) for b in (3, 5, 1)))
    for module in modules:
        optimised = ingot.optimize(module)
        with torch.no_grad():
            optimised(torch.randn(3, 8, 8))
        assert len(optimised._ingot.graphs[0].compiled.programs) == 2
        assert "to" not in [item["what"] for item in optimised.ingot_report()["unsupported"]]


class CopiesNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("gain", torch.zeros(8))

    def forward(self, x):
        y, z = (nn.functional.gelu(self.linear(x)) for _ in range(2))
        y[:, :2].copy_(0.25)
        self.gain.copy_(2)
        return y * self.gain + z.copy_(1)


def test_numbers_are_copied_as_tensors_are(caplog):
    compare(CopiesNumbers, lambda module: iter([module(x())]))
    assert not caplog.records


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(8, 6, batch_first=True, proj_size=4), nn.GRU(8, 4, batch_first=True)],
    ids=["projected", "gru"],
)
def test_what_follows_from_a_sequence_lies_as_eagers(layer):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer, nn.Linear(4, 6)

        def forward(self, x):
            y, _ = self.layer(x)
            logits = nn.functional.gelu(self.head(y))
            scaled = torch.tanh(y) * 3
            return logits, scaled, y.mul_(2)

    model, fed = Sequence(), torch.randn(5, 3, 8)
    expected, found = model(fed), ingot.optimize(model)(fed)
    torch.testing.assert_close(found, expected, check_stride=True)
    flat = [each.transpose(0, 1).view(15, -1) for each in found[1:]]
    assert all(each.is_contiguous() for each in flat)
