"""What is computed part by part is written where it belongs: rotary embeddings, above all."""

import copy

import ingot
import pytest
import selection
import torch
from ingot.capture import gains
from ingot.capture.captured import TorchStep
from ingot.capture.joining import join_gradients, join_parts
from ingot.capture.nodes import JOINED, PART, schema_name
from ingot.runtime.layouts import JoinedLayout, LeafLayout, ResultLayout
from ingot.runtime.library import AXES
from ingot.runtime.signature import BATCH
from test_gradients import backwards_of, calls_of, error
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

_aten = torch.ops.aten
HEADS, HEAD, LENGTH = 4, 8, 6
WIDTH = HEADS * HEAD


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def by_chunks(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), -1) * sin


def scaled(x, cos, sin):
    return (rotary(x, cos, sin) * 0.5 + 1).neg()


def used_twice(x, cos, sin):
    turned = rotate_half(x)
    return turned * cos + turned.sum() * sin


def of_other_tensors(x, cos, sin):
    return torch.cat((x.exp(), x.tanh()), -1) * torch.cat((cos, cos * sin), -1)


def of_another_dimension(x, cos, sin):
    """Halves of the rows, put beside each other: of the same tensor, from the same place on."""
    rows = x[:, :, :3] * cos[:3]
    return torch.cat((rows[..., :4], -x[:, :, :3, 4:], x[:, :, 3:, :4], x[:, :, 3:, 4:]), -1) * 2


def of_two_dtypes(x, cos, sin):
    return torch.cat((-x[..., 4:].double(), x[..., :4]), -1) * sin


def uneven(x, cos, sin):
    return torch.cat((-x[..., 3:], x[..., :3]), -1) * sin


def last(x, cos, sin):
    return x[..., :4] * cos[..., :4] + x[..., 4:] * sin[..., 4:], rotate_half(x)


def rewritten(function, refused=()) -> torch.fx.Graph:
    """Traced, and checked to compute the same as before."""
    given = torch.randn(2, 3, LENGTH, HEAD), torch.randn(LENGTH, HEAD), torch.randn(1, HEAD)
    module = make_fx(function, tracing_mode="fake")(*given)
    names = {node.name for node in module.graph.nodes if node.target in refused}
    join_parts(module.graph, names)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*given), function(*given), rtol=0, atol=0)
    return module.graph


def marked(graph: torch.fx.Graph, mark: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if mark in node.meta]


@pytest.mark.parametrize("function", [rotary, by_chunks, scaled])
def test_what_follows_a_concatenation_is_computed_part_by_part(function):
    graph = rewritten(function)
    (joined,) = marked(graph, JOINED)
    assert {user.op for user in joined.users} == {"output"}
    # Of x and of the cosines both halves; the sines are the same for all rows, not for all columns.
    assert len(marked(graph, PART)) == 6
    assert not any(node.target in (_aten.split.Tensor, _aten.chunk.default) for node in graph.nodes)


def test_parts_of_other_dimensions_keep_them():
    (joined,) = marked(rewritten(of_another_dimension), JOINED)
    assert joined.meta["val"].shape == (2, 3, 3, 16)


OTHERS = [used_twice, of_other_tensors, of_two_dtypes, uneven, last]


@pytest.mark.parametrize("function", OTHERS)
def test_other_concatenations_stay(function):
    graph = rewritten(function)
    assert not marked(graph, JOINED) and not marked(graph, PART)


def test_nothing_moves_what_pytorch_must_run():
    assert not marked(rewritten(rotary, refused=(_aten.add.Tensor,)), JOINED)


def gradients_graph(*spans: tuple[int, int]) -> torch.fx.Graph:
    """The sum of the gradients of slices of ten columns."""
    graph = torch.fx.Graph()
    total = None
    for at, (start, end) in enumerate(spans):
        part = graph.placeholder(f"part_{at}")
        part.meta["val"] = torch.empty(3, min(end, 10) - start)
        args = (part, [3, 10], 1, start, end, 1)
        term = graph.call_function(_aten.slice_backward.default, args)
        term.meta["val"] = torch.empty(3, 10)
        if total is not None:
            term = graph.call_function(_aten.add.Tensor, (total, term))
            term.meta["val"] = torch.empty(3, 10)
        total = term
    graph.output([total])
    return graph


@pytest.mark.parametrize(
    "spans", [[(0, 5), (5, 10)], [(6, 10), (0, 2), (2, 6)], [(5, 1 << 62), (0, 5)]]
)
def test_gradients_of_all_parts_are_a_concatenation(spans):
    graph = gradients_graph(*spans)
    before = torch.fx.GraphModule(nn.Module(), copy.deepcopy(graph))
    join_gradients(graph)
    (joined,) = marked(graph, JOINED)
    given = [torch.randn(3, min(end, 10) - start) for start, end in spans]
    after = torch.fx.GraphModule(nn.Module(), graph)
    torch.testing.assert_close(after(*given), before(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 5), (4, 10)],
        [(0, 5), (6, 10)],
        [(0, 10)],
        [(1, 5), (5, 10)],
        [(0, 5), (5, 10), (0, 5)],
    ],
)
def test_other_sums_of_gradients_stay(spans):
    graph = gradients_graph(*spans)
    join_gradients(graph)
    assert not marked(graph, JOINED)


def test_parts_lie_one_behind_another():
    part = ResultLayout((BATCH, 2, 3), ((0,), (2,), (3,)), (BATCH, 1, 2, 3), torch.bfloat16)
    whole = JoinedLayout((BATCH, 2, 6), (1, 0, 2), 2, (part, part))
    assert whole.allocation(4) == ((4, 2, 6), (6, 24, 1))
    strides = [6, 0, 24, 1]
    assert whole.in_graph(4) == [([4, 1, 2, 3], strides, 0), ([4, 1, 2, 3], strides, 6)]
    assert whole.dtype is torch.bfloat16
    leaf = LeafLayout((0, None, 1, 2), part=(2, 3, 3))
    x = torch.empty(4, 2, 6)
    assert leaf.sizes_and_strides(x) == ([4, 1, 2, 3], [12, 0, 6, 1])
    assert leaf.offset(x) == 12 and len(strides) == AXES


class Attention(nn.Module):
    """As language models have it, with fewer heads for keys and values where told."""

    def __init__(self, groups: int = HEADS, function=rotary):
        super().__init__()
        self.groups, self.function = groups, function
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, groups * HEAD) for _ in range(2))
        angles = torch.arange(LENGTH)[:, None] / 100 ** (torch.arange(0, HEAD, 2) / HEAD)
        both = torch.cat((angles, angles), -1)[None]
        self.register_buffer("cos", both.cos())
        self.register_buffer("sin", both.sin())

    def heads(self, x):
        return x.view(*x.shape[:2], -1, HEAD).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.heads(linear(x)) for linear in (self.q, self.k, self.v))
        cos, sin = (angle.unsqueeze(1).to(x.dtype) for angle in (self.cos, self.sin))
        q, k = self.function(q, cos, sin), self.function(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


@pytest.fixture
def taken(monkeypatch):
    """Chains are, on a CPU too."""
    monkeypatch.setattr(gains, "takes_everything", True)
    monkeypatch.setattr(gains, "least_saved", lambda *_: 0.0)


def regions_with_parts(module: nn.Module) -> list:
    return [
        call.region
        for call in calls_of(module)
        if any(isinstance(layout, JoinedLayout) for layout in call.region.result_layouts)
    ]


@pytest.mark.parametrize(
    ("groups", "setting"), selection.checkered([HEADS, 2, 1], ["fp32", "bf16", "autocast"])
)
def test_rotary_attention_has_regions_forward_and_backward(taken, groups, setting):
    torch.manual_seed(4)
    dtype = torch.bfloat16 if setting == "bf16" else torch.float32
    module = Attention(groups).to(dtype)
    twin, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    made = ingot.optimize(module)
    x = torch.randn(5, LENGTH, WIDTH)

    def run(called, owner, given):
        owner.zero_grad()
        given = given.clone().requires_grad_()
        autocast = setting == "autocast" and called is not exact
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = called(given)
        y.double().square().sum().backward()
        return [y.detach(), given.grad, *(p.grad for p in owner.parameters())]

    for rows in (5, 2):
        own, other = run(made, module, x[:rows].to(dtype)), run(twin, twin, x[:rows].to(dtype))
        truth = run(exact, exact, x[:rows].to(dtype).double())
        for found, eager, right in zip(own, other, truth, strict=True):
            assert found.dtype == eager.dtype and found.shape == eager.shape
            assert error(found, right) <= 2 * error(eager, right) + 1e-6
    regions = regions_with_parts(made)
    assert regions and all("cat" in {o["what"] for o in r.operators} for r in regions)
    layouts = [la for w in backwards_of(made) for p in w.programs for la in p.result_layouts]
    assert any(isinstance(layout, JoinedLayout) for layout in layouts)
    with torch.no_grad():
        torch.testing.assert_close(made(x.to(dtype)), twin(x.to(dtype)), rtol=2e-2, atol=2e-2)


def test_halves_are_read_where_they_lie(taken):
    """Without gradients, too, where dimensions that no operator tells apart are merged first."""
    made = ingot.optimize(Attention())
    with torch.no_grad():
        made(torch.randn(5, LENGTH, WIDTH))
    (graph,) = made._ingot.graphs
    steps = [step for step in graph.compiled.captured.steps if isinstance(step, TorchStep)]
    left = [schema_name(step.target) for step in steps]
    assert regions_with_parts(made)
    assert left.count("aten::flatten") == 1 and "aten::slice" not in left  # the heads' results


def test_a_joined_result_lies_as_pytorch_lays_it_out(taken):
    class Turned(nn.Module):
        def forward(self, x, cos, sin):
            return rotary(x.transpose(1, 2), cos, sin)

    module = Turned()
    given = torch.randn(3, LENGTH, HEADS, HEAD), torch.randn(LENGTH, HEAD), torch.randn(1, HEAD)
    made = ingot.optimize(module)
    with torch.no_grad():
        found, expected = made(*given), module(*given)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert regions_with_parts(made)


def test_second_derivatives_of_parts(taken):
    torch.manual_seed(5)
    module = Attention().double()
    made = ingot.optimize(module)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.double, requires_grad=True)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        found, expected = (
            torch.autograd.grad(
                torch.autograd.grad(f(x).square().sum(), x, create_graph=True)[0].square().sum(), x
            )[0]
            for f in (made, module)
        )
    torch.testing.assert_close(found, expected)


class Calls(nn.Module):
    def __init__(self, function, **own):
        super().__init__()
        self.function = function
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, *given):
        return self.function(self, *given)


def both(function, *given, **own):
    """What an optimised module and its original give, and the former."""
    module = Calls(function, **own)
    made = ingot.optimize(copy.deepcopy(module))
    return made(*given), module(*given), made


def of_heads():
    return torch.randn(2, 3, LENGTH, HEAD), torch.randn(LENGTH, HEAD), torch.randn(1, HEAD)


READ_BEHIND = {
    "turned": lambda s, x, c, d: rotary(x, c, d).transpose(1, 2) * 2,
    "cast and turned": lambda s, x, c, d: rotary(x, c, d).double().float().transpose(1, 2) * 3,
    "with a dimension more": lambda s, x, c, d: rotary(x, c, d)[:, :, None].expand(2, 3, 2, -1, -1),
    "handed out": lambda s, x, c, d: rotary(x, c, d).transpose(1, 2),
    "multiplied": lambda s, x, c, d: torch.softmax(rotary(x, c, d) @ rotary(x * 2, c, d).mT, -1),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("function", READ_BEHIND.values(), ids=READ_BEHIND)
def test_views_of_what_is_joined_are_read_behind_it(taken, function, gradients):
    x, cos, sin = of_heads()
    with torch.set_grad_enabled(gradients):
        found, expected, made = both(function, x.requires_grad_(gradients), cos, sin)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride() and regions_with_parts(made)
    if gradients:
        along = torch.randn(expected.shape)
        own, eagers = (torch.autograd.grad(y, x, along)[0] for y in (found, expected))
        torch.testing.assert_close(own, eagers)


def test_a_derivative_that_turns_halves_of_a_batch_inside(taken):
    def function(s, x):
        turned = x.transpose(0, 1)
        return torch.cat((-turned[3:], turned[:3]), 0) * 2

    x = torch.randn(4, 6, 8, requires_grad=True)
    found, expected, made = both(function, x)
    own, eagers = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(own, eagers)
    assert regions_with_parts(made)


def test_batches_are_put_together_by_pytorch(taken):
    def function(s, a, b):
        return s.linear(torch.cat((a, b), 0)).relu()

    given = torch.randn(4, 8), torch.randn(4, 8)
    found, expected, made = both(function, *given, linear=nn.Linear(8, 8))
    torch.testing.assert_close(found, expected)
    assert calls_of(made)


def five_dimensions(s, x, cos, sin):
    y = rotary(x.permute(0, 3, 1, 2, 4), cos, sin)
    return s.linear(y.permute(0, 2, 3, 1, 4).view(x.shape[0], -1, HEAD)) * 2


def whole_numbers(s, x, cos, sin):
    y = rotary(x.transpose(1, 2), cos, sin)
    return s.linear(torch.ones(3, HEAD)) * 2 + y.transpose(1, 2).view(x.shape[0], -1).sum()


REFUSED = {
    five_dimensions: (torch.randn(3, 2, 3, 4, HEAD), torch.randn(4, 1, 3, HEAD), torch.randn(HEAD)),
    whole_numbers: tuple(
        torch.randint(-5, 5, size) for size in ((3, LENGTH, 3, HEAD), (LENGTH, HEAD), (1, HEAD))
    ),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_no_region_joins_lies_as_pytorch_lays_it_out(taken, function):
    with torch.no_grad():
        found, expected, made = both(function, *REFUSED[function], linear=nn.Linear(HEAD, HEAD))
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert calls_of(made) and not regions_with_parts(made)


def test_what_is_joined_meets_no_zeros_of_a_result_without_a_gradient(taken):
    def function(s, x, z, w):
        return torch.cat((x[:, :4], z), -1) * 2.0, torch.cat((x[:, 4:], z), -1) / w

    x, w = torch.ones(2, 8, requires_grad=True), torch.ones(2, 8)
    w[:, 0] = 0
    found, expected, made = both(function, x, torch.ones(2, 4), w)
    own, eagers = (torch.autograd.grad(y[0].sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(own, eagers, rtol=0, atol=0)
    assert regions_with_parts(made)


def test_an_activation_may_be_written_whose_concatenation_eager_keeps(taken):
    def function(s, h):
        return rotate_half(h) * s.scale

    found = []
    module = Calls(function, scale=nn.Parameter(torch.rand(8)))
    first = nn.Linear(8, 8)
    for called in (ingot.optimize(copy.deepcopy(module)), module):
        first.zero_grad()
        h = first(torch.ones(3, 8))
        h += called(h)
        h.square().sum().backward()
        found.append((first.weight.grad, called.scale.grad))
    torch.testing.assert_close(*found)


def test_on_a_cpu_nothing_is_taken_apart():
    made = ingot.optimize(Attention())
    made(torch.randn(2, LENGTH, WIDTH)).sum().backward()
    assert not regions_with_parts(made)
