"""Backward passes of blocks in 16 bits are regions, as those in fp32 are."""

import copy

import ingot
import pytest
import torch
from ingot.capture import derivative
from ingot.capture.captured import TorchStep
from ingot.capture.stages import compute_again, stages_of
from ingot.live import backward
from test_gradients import backwards_of, error
from torch import nn
from torch.nn import functional as F

_aten = torch.ops.aten
WIDTH = 32


class ByHand(nn.Module):
    """RMS norm as networks write it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """Three linears and a norm, gated or not; products in several stages of its backward."""

    def __init__(self, norm=nn.LayerNorm, gated: bool = False):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH) if gated else None

    def forward(self, x):
        x = x + self.first(x)
        y = self.norm(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class OfTokens(nn.Module):
    """GPT-2's layer behind its attention: products see tokens as rows, [batch · length, width], as
    the attention's result may come already; what is around them, [batch, length, width]."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(n, k) / n**0.5 for n, k in ((WIDTH, WIDTH), (WIDTH, 64), (64, WIDTH))
        )
        self.biases = nn.ParameterList(torch.randn(k) for k in (WIDTH, 64, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def layer(self, at: int, rows: torch.Tensor, shape) -> torch.Tensor:
        made = torch.addmm(self.biases[at], rows.view(-1, rows.size(-1)), self.weights[at])
        return made.view(*shape[:-1], made.size(-1))

    def forward(self, x):
        rows = torch.sort(x.view(-1, WIDTH), -1)[0]  # PyTorch's: a region begins with rows
        x = x + self.layer(0, rows, x.shape)
        inner = self.layer(1, self.norm(x), x.shape)
        return x + self.layer(2, F.gelu(inner), x.shape)


BLOCKS = {
    "of tokens": lambda: OfTokens(),
    "layer norm": lambda: Block(),
    "by hand, gated": lambda: Block(ByHand, True),
    "several": lambda: nn.Sequential(Block(), Block(ByHand), Block()),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_in_16_bits_has_a_backward_of_regions(name, autocast):
    torch.manual_seed(3)
    dtype = torch.float32 if autocast else torch.bfloat16
    module = BLOCKS[name]().to(dtype)
    twin, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    made = ingot.optimize(module)
    x = torch.randn(6, 7, WIDTH)

    def gradients(called, owner, given):
        given = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and called is not exact):
            called(given).double().square().sum().backward()
        return [given.grad, *(p.grad for p in owner.parameters())]

    for rows in (6, 3):  # another batch: the same programs
        for owner in (module, twin, exact):
            owner.zero_grad()
        own = gradients(made, module, x[:rows].to(dtype))
        other = gradients(twin, twin, x[:rows].to(dtype))
        truth = gradients(exact, exact, x[:rows].to(dtype).double())
        for found, eager, right in zip(own, other, truth, strict=True):
            assert found.dtype == eager.dtype and found.shape == eager.shape
            assert error(found, right) <= 2 * error(eager, right) + 5e-3
    ways = backwards_of(made)
    assert ways and all(way.programs for way in ways)


def steps_of(module: nn.Module, x: torch.Tensor, monkeypatch, autocast: bool) -> list[str]:
    """What PyTorch runs of its backward pass."""
    found: list[str] = []
    imported = backward.import_graph

    def watched(feed, **options):
        captured = imported(feed, **options)
        found.extend(s.what for s in captured.steps if isinstance(s, TorchStep))
        return captured

    monkeypatch.setattr(backward, "import_graph", watched)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ingot.optimize(module)(x).sum().backward()
    return found


def test_a_mean_by_hand_and_casts_that_say_their_device_stay_in_a_region(monkeypatch):
    left = steps_of(Block(ByHand), torch.randn(6, 7, WIDTH), monkeypatch, True)
    assert "expand" not in left and left.count("_to_copy") <= 1
    assert left.count("transposed_product") == 3


def test_views_of_a_result_are_no_results_of_their_own():
    module = ingot.optimize(BLOCKS["several"]())
    module(torch.randn(6, 7, WIDTH)).sum().backward()
    for way in backwards_of(module):
        for program in way.programs:
            values = program.graph["values"]

            def computed(at: int, values=values) -> int:
                return computed(values[at]["args"][0]) if values[at]["op"] == "view" else at

            results = [computed(result["value"]) for result in program.graph["results"]]
            assert len(set(results)) == len(results)


def staged(rows: int) -> torch.fx.Graph:
    """x̂ in 32 bits of an input in 16, read on both sides of three products, which it is none of."""
    graph = torch.fx.Graph()

    def add(target, *args, like, **kwargs):
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = like
        return node

    half, wide = (torch.empty(rows, 64, dtype=t, device="meta") for t in (torch.half, torch.float))
    row = torch.empty(rows, 1, device="meta")
    x, weight, gradient = (graph.placeholder(name) for name in ("x", "weight", "gradient"))
    x.meta["val"], gradient.meta["val"] = half, half
    weight.meta["val"] = torch.empty(64, 64, dtype=torch.half, device="meta")
    cast = add(_aten._to_copy.default, x, like=wide, dtype=torch.float)
    mean = add(_aten.mean.dim, cast, [-1], True, like=row)
    normal = add(_aten.sub.Tensor, cast, mean, like=wide)
    y = gradient
    for _ in range(3):
        y = add(_aten.mm.default, y, weight, like=half)
    last = add(_aten.mul.Tensor, y, normal, like=wide)
    early = add(_aten.neg.default, normal, like=wide)
    graph.output([last, early])
    return graph


def test_each_stage_computes_again_what_it_would_load_more_of():
    graph = staged(1 << 20)  # 128 MB a product: a stage each
    assert len(set(stages_of(graph).values())) > 1
    compute_again(graph)
    graph.lint()
    stages = stages_of(graph)
    across = {
        source
        for node in graph.nodes
        for source in node.all_input_nodes
        if {source.op, node.op} == {"call_function"} and stages[source] != stages[node]
    }
    wide = [n for n in across if n.meta["val"].dtype == torch.float and n.meta["val"].shape[1] > 1]
    assert not wide  # the mean may be stored, x̂ is not
    assert sum(node.target is _aten.mean.dim for node in graph.nodes) == 1


def test_what_loads_as_much_is_stored():
    graph = staged(1 << 20)
    for node in graph.nodes:  # of an input in 32 bits
        if node.name == "x":
            node.meta["val"] = torch.empty(1 << 20, 64, device="meta")
    before = len(graph.nodes)
    compute_again(graph)
    assert len(graph.nodes) == before


def gated(rows: int, dtype: torch.dtype, transposed) -> torch.fx.Graph:
    """Of silu(g)·u: gradients behind two products, and the operand of a weight's gradient, whose
    other one is there behind the first."""
    graph = torch.fx.Graph()

    def add(target, *args, columns=64):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(rows, columns, dtype=dtype, device="meta")
        return node

    g, u, dy, w = (graph.placeholder(name) for name in ("g", "u", "dy", "w"))
    for leaf in (g, u, dy):
        leaf.meta["val"] = torch.empty(rows, 64, dtype=dtype, device="meta")
    w.meta["val"] = torch.empty(64, 64, dtype=dtype, device="meta")
    early = add(_aten.mm.default, dy, w)
    dh = add(_aten.mm.default, early, w)
    operand = add(_aten.mul.Tensor, add(_aten.silu.default, g), u)
    dh.name, operand.name = "dh", "operand"
    weight = add(transposed, "bf16", early, operand)
    weight.meta["val"] = torch.empty(64, 64, dtype=dtype, device="meta")
    last = add(_aten.mm.default, add(_aten.mul.Tensor, dh, u), w)
    graph.output([weight, last, add(_aten.mul.Tensor, dh, g)])
    return graph


def stage_of_operand(*arguments) -> tuple[int, int]:
    """That of what is computed again, and that of the gradients beside it."""
    graph = gated(*arguments)
    stages = stages_of(graph)
    named = {node.name: node for node in graph.nodes}
    return stages[named["operand"]], stages[named["dh"]]


def test_an_operand_is_computed_again_where_it_is_read_anyway():
    large, product = 1 << 19, backward.transposed_product  # 64 MB
    there, beside = stage_of_operand(large, torch.bfloat16, product)
    assert there == beside > 0
    # Beside packed operands it would be held for longer.
    there, beside = stage_of_operand(large, torch.float32, product)
    assert there < beside


class Pooled(nn.Module):
    """In the middle of its backward a maximum's gradient is put into zeros: by PyTorch's operator,
    where place_by_number() does not write it otherwise."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(F.relu(self.norm(x)).max(dim=2).values)


def test_what_is_read_behind_pytorchs_operator_is_computed_behind_it(monkeypatch):
    found = []
    imported = backward.import_graph

    def watched(feed, **options):
        captured = imported(feed, **options)
        found.extend(captured.regions)
        return captured

    monkeypatch.setattr(backward, "import_graph", watched)
    monkeypatch.setattr(derivative, "place_by_number", lambda graph: None)
    module = Pooled().bfloat16()
    x = torch.randn(6, 8, 40, dtype=torch.bfloat16, requires_grad=True)
    twin = copy.deepcopy(module)
    given = x.detach().clone().requires_grad_()
    ingot.optimize(module)(x).square().sum().backward()
    twin(given).square().sum().backward()
    torch.testing.assert_close(x.grad, given.grad, rtol=5e-2, atol=5e-2)
    # x̂, in 32 bits, does not go from one region to the other.
    whole = [la for region in found for la in region.result_layouts if la.shape == (-1, 8, 40)]
    assert len(found) > 1 and whole
    assert all(layout.dtype == torch.bfloat16 for layout in whole)


class PooledFirst(nn.Module):
    """At the end of its backward, between PyTorch's operator and a product, are sums alone."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 16)

    def forward(self, x):
        pooled = F.avg_pool1d(self.linear(x).unsqueeze(1), 4).squeeze(1)
        return (F.gelu(pooled) * 2).max(dim=1).values


def test_the_sum_of_a_bias_is_of_the_region_of_its_product(monkeypatch):
    x = torch.randn(6, WIDTH, requires_grad=True)
    left = steps_of(PooledFirst(), x, monkeypatch, False)
    assert "avg_pool2d_backward" in left and "sum" not in left


VIEWS = {
    "first token": lambda x: x[:, 0],
    "other tokens": lambda x: x[:, 1:],
    "tokens as rows": lambda x: x.reshape(-1, WIDTH),
    "tokens outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_one_backward_pass_is_for_all_batch_sizes_however_the_samples_lie(name):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 3)

        def forward(self, x):
            return self.second(torch.relu(self.first(VIEWS[name](torch.sort(x, -1)[0]))))

    torch.manual_seed(5)
    module = Head()
    made, twin = ingot.optimize(module), copy.deepcopy(module)
    for rows in (6, 3, 5):
        x = torch.randn(rows, 7, WIDTH)
        for called, owner in ((made, module), (twin, twin)):
            owner.zero_grad()
            called(x).square().sum().backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert error(ours.grad, theirs.grad.double()) < 1e-5
    assert len(backwards_of(made)) == 1


@pytest.mark.parametrize("factor", [1, 2, 1.5])
def test_zeros_that_autograd_makes_without_memory_have_some_where_users_get_them(factor):
    layer = nn.Linear(4, 6)

    def forward(z, x):
        return torch.sgn(layer(z) * factor + x)

    z, x = torch.randn(3, 4), torch.randn(3, 6, requires_grad=True)
    made = torch.compile(forward, backend="ingot")
    for _ in range(2):  # a second gradient is added to the first, in its memory
        made(z, x).sum().backward()
    assert x.grad.tolist() == [[0.0] * 6] * 3
