"""Forwards that TorchDynamo does not take whole: cut in pieces, given up, compiled too often."""

from __future__ import annotations

import copy
import warnings

import ingot
import pytest
import torch
from ingot.live import dynamo, vain
from ingot.live.backend import IngotWarning
from live import regions_run
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Variants(nn.Module):
    """One compilation for each text."""

    def __init__(self):
        super().__init__()
        self.linear, self.text = nn.Linear(16, 16), ""

    def forward(self, x):
        return self.linear(x).relu() * len(self.text)


def said_over(module: nn.Module, calls: int) -> list[str]:
    """Warnings of ours over calls that must give eager's results."""
    twin = copy.deepcopy(module)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        optimised = ingot.optimize(module)
        for number in range(calls):
            module.text = twin.text = "x" * number
            fed = torch.randn(4, 16)
            torch.testing.assert_close(optimised(fed), twin(fed))
    return [str(w.message) for w in said if issubclass(w.category, IngotWarning)]


@pytest.mark.parametrize("own", [3, 5])
def test_a_limit_of_compilations_is_told_once(own, monkeypatch):
    name = dynamo._limit_name()
    monkeypatch.setitem(dynamo._WHILE_COMPILING, name, 3)
    with torch._dynamo.config.patch(name, own):
        (told,) = said_over(Variants(), own + 3)
    assert "has compiled forward (test_graph_breaks.py:" in told
    assert f"{own} times, its limit" in told and "TORCH_LOGS=recompiles" in told


def test_a_forward_that_dynamo_gives_up_is_told_once():
    class Model(Variants):
        def forward(self, x):
            for _ in range(2):
                with torch.autograd.profiler.record_function("step"):
                    if x.sum() > 0:
                        x = self.linear(x).relu()
            return x

    (told,) = said_over(Model(), 8)
    assert "captures nothing of forward" in told and "TORCH_LOGS=graph_breaks" in told
    optimised = ingot.optimize(Model())
    with pytest.warns(IngotWarning, match="captures nothing of forward"):
        optimised(torch.randn(4, 16))
    (left,) = (i for i in optimised.ingot_report()["unsupported"] if i["what"] == "the module")
    assert left["where"].startswith("test_graph_breaks.py:") and "captures nothing" in left["why"]


def test_the_line_of_a_forward_of_pytorchs_own():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    model[1].register_full_backward_hook(lambda *unused: None)
    optimised = ingot.optimize(model)
    with pytest.warns(IngotWarning, match=r"captures nothing of forward \(container.py:"):
        optimised(torch.randn(4, 16)).sum().backward()


class Talking(Variants):
    def forward(self, x):
        y = self.linear(x)
        print("large:", y.sum() > 1e9)
        warnings.warn("a warning", stacklevel=2)
        return self.linear(y.relu() * 2)


@pytest.mark.parametrize("gradients", [False, True])
def test_messages_break_no_graph_and_are_said_at_each_call(gradients, capsys):
    module, said = Talking(), []
    optimised = ingot.optimize(copy.deepcopy(module))
    for called in (module, optimised):
        with warnings.catch_warnings(record=True) as warned, torch.set_grad_enabled(gradients):
            warnings.simplefilter("always")
            results = [called(torch.ones(rows, 16)) for rows in (4, 2, 4)]
        told = [str(w.message) for w in warned if w.category is UserWarning]
        said.append((capsys.readouterr().out, told, results))
    assert said[0][:2] == said[1][:2] and len(said[0][1]) == 3
    torch.testing.assert_close(said[0][2], said[1][2])
    assert len(optimised._ingot.graphs) == 1


class Broken(Variants):
    """A branch on a number behind a product, and, before anything else, one in PyTorch's code."""

    def __init__(self, within):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.within = nn.TransformerEncoder(layer, 1) if within else None

    def forward(self, x):
        if self.within is not None:
            mask = 0 * x[:1, :1]  # whether that is a causal one hangs on its values
            return self.linear(self.within(x[:, None], mask)[:, 0]).relu()
        y = self.linear(x).relu()
        if y.sum() < 0:
            return y
        return self.linear(y).relu()


@pytest.mark.parametrize("within", [False, True])
def test_what_a_broken_graph_leaves_to_pytorch_is_told_once(within):
    (told,) = (t for t in said_over(Broken(within), 3) if "what TorchDynamo cannot capture" in t)
    assert within or "(test_graph_breaks.py:" in told
    assert "TORCH_LOGS=graph_breaks" in told
    optimised = ingot.optimize(Broken(within))
    with torch.no_grad():
        optimised(torch.randn(4, 16))
    left = [i for i in optimised.ingot_report()["unsupported"] if i["what"] != "the module"]
    assert [i["what"] for i in left] == ["a part of the forward"] and left[0]["why"] in told


@pytest.fixture
def failures(monkeypatch):
    """Those of a Dynamo that fails at all calls."""
    found = []

    def fails(*unused, **unused_too):
        found.append(RuntimeError("a fault of its own"))
        raise found[-1]

    made = dynamo._Careful.__init__

    def failing(self, callback, *rest):
        made(self, fails, *rest)

    monkeypatch.setattr(dynamo._Careful, "__init__", failing)
    return found


def test_failures_of_dynamo_are_told_once(failures):
    (told,) = said_over(Variants(), 8)
    assert "has failed at 4 calls of forward (test_graph" in told and "a fault of its own" in told


def test_where_dynamo_fails_it_is_hardly_asked_again(failures):
    optimised, x = ingot.optimize(Variants()), torch.randn(4, 16)
    optimised(x)
    (left,) = optimised.ingot_report()["unsupported"]
    assert left["why"] == "TorchDynamo fails: a fault of its own"
    for _ in range(3 + vain._SPARED):
        optimised(x)
    assert len(failures) == 2 * 4  # for any batch size, and for this one
    for _ in range(1 + 2 * vain._SPARED):
        optimised(x)
    assert len(failures) == 2 * 5
    optimised(x)
    assert len(failures) == 2 * 6


def test_what_the_user_gets_wrong_is_no_failure_of_dynamos():
    optimised = ingot.optimize(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    for width in range(1, 8):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            optimised(torch.randn(4, width))
    assert optimised.ingot_report()["unsupported"] == []
    optimised(torch.randn(4, 16))
    assert optimised.ingot_report()["operators_replaced"]


class AskingForSizes(nn.Module):
    """quantile wants its operand's sizes as numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x):
        y = torch.relu(self.linear(x)) * 2
        return y / y.abs().quantile(0.9, 1, keepdim=True)


def test_what_fails_for_any_size_is_captured_for_each():
    model = AskingForSizes()
    twin, optimised = copy.deepcopy(model), ingot.optimize(model)
    for rows in (8, 16, 8, 1, 5, 16):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(optimised(x), twin(x))
    taken = {item["what"] for item in optimised.ingot_report()["operators_replaced"]}
    assert taken == {"linear", "relu", "mul"}
    tried = torch._dynamo.utils.counters["frames"]["total"]
    for rows in (16, 5):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(optimised(x), twin(x))
    assert torch._dynamo.utils.counters["frames"]["total"] == tried


def test_a_frame_that_fails_is_no_other_frame():
    """Variable lengths: TorchDynamo fails behind the line at which it broke the graph."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, x, lengths):
            y = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            y = nn.utils.rnn.pad_packed_sequence(self.rnn(y)[0], batch_first=True)[0]
            return torch.relu(self.head(y.mean(1))) * 2

    model = Packed()
    twin, optimised = copy.deepcopy(model), ingot.optimize(model)
    for _ in range(8):
        x, lengths = torch.randn(4, 7, 8), torch.randint(1, 8, (4,))
        torch.testing.assert_close(optimised(x, lengths), twin(x, lengths))
    tried = torch._dynamo.utils.counters["frames"]["total"]
    optimised(x, lengths)
    assert torch._dynamo.utils.counters["frames"]["total"] == tried


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def first(self, x):
        return torch.relu(self.a(x) * 2 + 1)

    def second(self, x):
        return torch.tanh(self.b(x) * 2 + 1)


class InTheMiddle(Layers):
    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class AtTheStart(Layers):
    def forward(self, x):
        torch._dynamo.graph_break()
        return self.second(self.first(x))


class InAChild(nn.Module):
    """As modules under FSDP2, whose hooks TorchDynamo does not trace."""

    def __init__(self):
        super().__init__()
        self.child, self.head = AtTheStart(), nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.head(self.child(x)) * 2 + 1)


class BeforeAChildAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = AtTheStart()

    def forward(self, x):
        return self.child(x)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", [InTheMiddle, AtTheStart, InAChild, BeforeAChildAlone])
def test_every_call_runs_what_the_first_one_ran(kind, gradients):
    twin, numbers = kind(), []
    made = ingot.optimize(copy.deepcopy(twin))
    for batch in (16, 32, 16, 7):
        fed = torch.randn(batch, 64)
        with torch.set_grad_enabled(gradients), regions_run() as ran:
            torch.testing.assert_close(made(fed), twin(fed), rtol=1e-4, atol=1e-5)
        numbers.append(len(ran))
    assert numbers[0] > 0 and len(set(numbers)) == 1, numbers


def test_a_whole_forward_has_a_shortcut_and_one_in_pieces_has_none():
    for kind, features, known in ((Variants, 16, 1), (InTheMiddle, 64, 0)):
        made = ingot.optimize(kind())
        for _ in range(2):
            made(torch.randn(4, features))
        assert len(made._ingot._shortcuts) == known


class Slope(nn.Module):
    """As networks of physics: derivatives by the input are part of what the forward gives."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x = x.requires_grad_()
        u = torch.tanh(self.last(self.field(x)) * 2)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return u, second


def test_gradients_that_a_forward_asks_for_are_no_frames_of_dynamos():
    twin = Slope()
    made = ingot.optimize(copy.deepcopy(twin))
    for batch in (6, 6, 3):
        fed = torch.randn(batch, 2)
        for module in (made, twin):
            module.zero_grad()
            sum(y.square().sum() for y in module(fed.clone())).backward()
        for (name, found), expected in zip(made.named_parameters(), twin.parameters()):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert any(graph.compiled for graph in made._ingot.graphs)
    whys = [item["why"] for item in made.ingot_report()["unsupported"]]
    assert any("autograd.grad" in why for why in whys)
    assert not any("is_inference" in why for why in whys), whys
    assert len(made._ingot.graphs) <= 4


class Shows(nn.Module):
    """Dynamo prints no shape that holds the batch, and makes a graph of the size alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        print("before the layer:", x.shape)
        return torch.relu(self.linear(x)) * 2


class Shown(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(16, 16), Shows()

    def forward(self, x):
        return self.head(torch.relu(self.linear(x)) * 2)


def test_a_shape_that_is_printed_is_told_once_and_both_sides_are_taken(capsys):
    twin = Shown()
    made = ingot.optimize(copy.deepcopy(twin))
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for batch in (4, 5):
            fed = torch.randn(batch, 16)
            with regions_run() as ran:
                torch.testing.assert_close(made(fed), twin(fed))
            assert len(ran) == 2
    assert capsys.readouterr().out.count("torch.Size([5, 16])") == 2
    told = [str(w.message) for w in said if issubclass(w.category, IngotWarning)]
    assert len(told) == 1 and "cannot capture (test_graph_breaks.py" in told[0], told
    assert len(made.ingot_report()["unsupported"]) == 1


def test_no_switch_of_dynamos_is_advised(caplog):
    """A number that is asked for breaks the graph, which Ingot says: not Dynamo too, whose switch
    would be for a compiler of the user's own."""

    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.first(x)
            return self.second(h * (2.0 if h.sum().item() > 0 else 3.0))

    # Told once a process, whoever asked before.
    torch._dynamo.variables.tensor.TensorVariable._warn_capture_scalar_outputs.cache_clear()
    model = Asking()
    x = torch.randn(4, 8)
    torch.testing.assert_close(ingot.optimize(copy.deepcopy(model))(x), model(x))
    assert not [r for r in caplog.records if "capture_scalar_outputs" in r.getMessage()]


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x, /, scale=None, shift=1.0):
        y = torch.tanh(self.linear(x)) + shift
        return y if scale is None else y * scale


def test_a_call_that_leaves_arguments_out_has_a_shortcut():
    eager = Optional()
    made = ingot.optimize(copy.deepcopy(eager))
    x, scale = torch.randn(4, 8), torch.randn(16)
    ways = [
        ((x,), {}),
        ((x, scale), {}),
        ((x,), {"scale": scale}),
        ((x,), {"shift": 2.0, "scale": None}),
        ((x, None, 1.0), {}),
    ]
    through = made._ingot._through_dynamo
    with torch.no_grad():
        for args, kwargs in ways:
            torch.testing.assert_close(made(*args, **kwargs), eager(*args, **kwargs))
        made._ingot._through_dynamo = None  # nothing goes there any more
        for args, kwargs in ways:
            torch.testing.assert_close(made(*args, **kwargs), eager(*args, **kwargs))
        made._ingot._through_dynamo = through
        for args, kwargs in [((), {}), ((x, None, 1.0, 2), {}), ((), {"x": x}), ((x,), {"y": 1})]:
            for module in (eager, made):
                with pytest.raises(TypeError):
                    module(*args, **kwargs)
        with pytest.raises(TypeError):
            made(x, scale, scale=scale)
