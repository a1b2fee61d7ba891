"""Operators with a backward of their own: activation checkpoints and autograd.Functions, and
transforms of torch.func, inside a forward."""

import copy

import ingot
import pytest
import torch
from ingot.capture import CaptureError
from ingot.model_capture import capture, capture_in_pieces
from live import compare, regions_run
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(dropout)

    def forward(self, x, scale=None, *, more=1.0):
        y = self.dropout(torch.relu(self.norm(self.a(x)) * more))
        y = self.b(y)
        return x + y if scale is None else (x + y * scale, y)


class Chain(nn.Module):
    def __init__(self, dropout=0.0, **settings):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head, self.settings = nn.Linear(32, 8), settings

    def forward(self, x):
        x = torch.tanh(x) * 2
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        return torch.log_softmax(self.head(x), 1)


class Mixed(Chain):
    """Several arguments and results, a keyword of the block, one that is not kept."""

    def forward(self, x):
        scale = torch.sigmoid(x) + 1
        x, y = checkpoint(self.blocks[0], x, scale, use_reentrant=False, more=0.5)
        z = x * y
        x = checkpoint(lambda a: torch.relu(self.blocks[1](a)) * 2, z, use_reentrant=False)
        return torch.tanh(self.head(x + z)), x


class InARow(Chain):
    def forward(self, x):
        return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False))


class Selective(Chain):
    def forward(self, x):
        def keep(context, operator, *unused, **unused_too):
            product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE

        def contexts():
            return create_selective_checkpoint_contexts(keep)

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return torch.tanh(self.head(x))


def _steps(m):
    for batch in (16, 16, 5):
        x = torch.randn(batch, 32, requires_grad=True)
        result = m(x)
        yield result
        if torch.is_grad_enabled():
            first = result[0] if isinstance(result, tuple) else result
            wanted = [x, *m.parameters()]
            yield torch.autograd.grad(
                first.square().sum(), wanted, allow_unused=True, retain_graph=True
            )


@pytest.mark.parametrize("kind", [Chain, Mixed, InARow])
def test_results_and_gradients(kind):
    compare(lambda: kind(use_reentrant=False), _steps, tolerance=1e-4)


@pytest.mark.parametrize("kind", [Chain, Selective])
def test_kinds_that_run_backward_once(kind):
    """A choice of operators to keep is PyTorch's whole."""

    def script(m):
        for _ in range(2):
            x = torch.randn(16, 32, requires_grad=True)
            result = m(x)
            result.square().sum().backward()
            yield result.detach(), x.grad

    def make():
        return kind(use_reentrant=True)

    compare(make, script, gradients=(True,), tolerance=1e-4, taken=kind is Chain)


def test_dropout_draws_the_same_again():
    compare(lambda: Chain(0.5, use_reentrant=False), _steps, gradients=(True,), tolerance=1e-4)


def _kept_bytes(module, x) -> int:
    """Of tensors that a forward keeps for its backward, parameters and the input apart."""
    own = {p.untyped_storage().data_ptr() for p in [x, *module.parameters(), *module.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)
    assert result.requires_grad
    return sum(kept.values())


def test_what_is_inside_is_not_kept():
    model = Chain(use_reentrant=False)
    made = ingot.optimize(copy.deepcopy(model))
    compiled = torch.compile(copy.deepcopy(model), backend="ingot")
    x = torch.randn(64, 32)
    eager = _kept_bytes(model, x)
    for each in (made, compiled):
        each(x)
        with regions_run() as ran:
            found = _kept_bytes(each, x)
        assert found <= 1.05 * eager, (found, eager)
        assert len(ran) >= 4
    assert _kept_bytes(ingot.optimize(nn.Sequential(*model.blocks)), x) > 1.5 * eager


def test_recomputed_parts_run_by_ingot_too():
    made = ingot.optimize(Chain(use_reentrant=False))
    result = made(torch.randn(16, 32))
    with regions_run() as ran:
        result.sum().backward()
    forward = [name for name in ran if name.startswith("blocks") or "a_norm" in name]
    assert len(forward) >= 3, ran


def test_commands_show_the_pieces():
    model, x = Chain(use_reentrant=False).eval(), torch.randn(16, 32)
    with pytest.raises(CaptureError, match="torch.utils.checkpoint"):
        capture(model, [x])
    assert len(capture_in_pieces(model, [x])) == 5


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Paired(torch.autograd.Function):
    """Its backward is not the derivative of its forward, and of one result there is none."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        places = x.argmax(-1)
        ctx.mark_non_differentiable(places)
        return x * y, x + y, places

    @staticmethod
    def backward(ctx, product, total, _):
        x, y = ctx.saved_tensors
        return 2 * (product * y + total), product * x + 3 * total


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)


class Turned(Own):
    def forward(self, x):
        return torch.tanh(self.b(Reversed.apply(torch.relu(self.a(x)) * 2, 0.3))) * 2


class Twice(Own):
    def forward(self, x):
        x = Reversed.apply(torch.tanh(self.a(x)) * 2, 0.5)
        return torch.tanh(Reversed.apply(self.b(x), 2.0) * 2)


class Pairs(Own):
    def forward(self, x):
        product, total, places = Paired.apply(self.a(x), self.b(x))
        return torch.relu(product + total) * 2 + places.unsqueeze(-1)


class TurnedInACheckpoint(Own):
    def forward(self, x):
        def block(x):
            return Reversed.apply(torch.tanh(self.a(x)) * 2, 0.5) * 3

        return torch.tanh(self.b(checkpoint(block, x, use_reentrant=False)) * 2)


class TurnedInABranch(Own):
    def forward(self, x):
        x = torch.tanh(self.a(x)) * 2
        return torch.cond(x.sum() > 0, lambda x: Reversed.apply(x, 0.5) * 2, lambda x: x * 3, (x,))


@pytest.mark.parametrize("kind", [Turned, Twice, Pairs, TurnedInACheckpoint, TurnedInABranch])
def test_a_backward_of_the_users_own(kind):
    compare(kind, _steps, tolerance=1e-4, taken=kind is not TurnedInABranch)


@torch.compiler.allow_in_graph
def allowed(x):
    return Reversed.apply(x, 0.5) * 2


@torch.compiler.allow_in_graph
def with_a_hook(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 5)
    return y


@torch._dynamo.nonstrict_trace
def not_strict(x):
    return Reversed.apply(x, 0.3) * 2


class Allowed(Reversed):
    pass


torch.compiler.allow_in_graph(Allowed)


class Whole(Own):
    """A Python function that stands in the graph as it is."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return torch.tanh(self.b(self.function(torch.relu(self.a(x)))) * 2)


class WholeBesideVmap(Whole):
    def forward(self, x):
        return super().forward(x) * torch.vmap(lambda row: row > 0)(x)


FUNCTIONS = (allowed, with_a_hook, not_strict, lambda x: Allowed.apply(x, 0.5))


@pytest.mark.parametrize("function", FUNCTIONS, ids=("allowed", "hook", "nonstrict", "class"))
def test_functions_that_dynamo_does_not_look_into(function):
    compare(lambda: Whole(function), _steps, tolerance=1e-4)


def test_functions_that_dynamo_does_not_look_into_beside_vmap():
    compare(lambda: WholeBesideVmap(allowed), _steps, tolerance=1e-4, taken=False)


def test_functions_that_dynamo_does_not_look_into_are_told():
    module = ingot.optimize(Whole(allowed))
    with torch.enable_grad():
        module(torch.randn(4, 32))
    (item,) = [i for i in module.ingot_report()["unsupported"] if "function" in i["what"]]
    assert item["what"] == "the function allowed"
    assert item["where"].startswith("test_pieces.py:")


class Cube(torch.autograd.Function):
    """Reads what it was given, what it gave, and what it put on its ctx."""

    @staticmethod
    def forward(ctx, x, factor):
        y = x * x * x
        ctx.save_for_backward(x, y)
        ctx.x, ctx.factor = x, factor
        return y * factor, y

    @staticmethod
    def backward(ctx, scaled, gradient):
        x, y = ctx.saved_tensors
        return (scaled * ctx.factor + gradient) * 3 * x * ctx.x + 0 * y, None


class Cubes(Own):
    def forward(self, x):
        scaled, plain = Cube.apply(torch.tanh(self.a(x)), 0.3)
        return torch.tanh(self.b(scaled + plain) * 2)


def test_second_derivatives_by_a_backward_of_the_users_own():
    def script(m):
        x = torch.randn(6, 32, requires_grad=True)
        result = m(x)
        (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        first.square().sum().backward()
        yield result.detach(), first.detach(), x.grad, *(p.grad for p in m.parameters())

    compare(Cubes, script, gradients=(True,), tolerance=1e-4)


class Forces(Own):
    """A transform inside the forward."""

    def energy(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x)))).sum()

    def forward(self, x):
        return torch.func.vmap(torch.func.grad(self.energy))(x) * 2


class Jacobians(Forces):
    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(lambda v: torch.tanh(self.a(v))))(x).sum(1)


@pytest.mark.parametrize("kind", [Forces, Jacobians])
def test_transforms_inside_a_forward_leave_nothing_behind(kind):
    def same(tensor):
        return tensor

    def script(m):
        yield m(torch.randn(6, 32))

    compare(kind, script, tolerance=1e-4, taken=False)
    x = torch.randn(6, 32)
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):  # as eager
            ingot.optimize(kind())(x)
    with torch.autograd.graph.saved_tensors_hooks(same, same), regions_run() as ran:
        ingot.optimize(Turned())(x).sum().backward()
    assert ran
