"""Every product: what is taken of it, with the batch in front, contracted, or nowhere; its numbers,
its gradients, its strides.

Where a region does not take a product, a GPU runs it as a product by itself; here that runs on the
CPU, as if it gained something there.
"""

from __future__ import annotations

import ingot
import pytest
import selection
import torch
from ingot.capture import Region, wide_samples
from ingot.live import importing, products
from ingot.live.backend import Session, compile_graph
from torch import nn
from torch.nn import functional as F

# What runs the products of a model.
REGION, OWN, PYTORCH = "a region", "a product by itself", "PyTorch"


def attention(q, k, v):
    return F.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v


# name: model, shapes of its inputs, what runs each product.
CASES = {
    "a b": (lambda a, b: a @ b, [(12, 8), (8, 10)], [REGION]),
    "a b, square": (lambda a, b: a @ b, [(12, 12), (12, 12)], [REGION]),
    "a b, rows of b as many as of a": (lambda a, b: a @ b, [(12, 12), (12, 10)], [REGION]),
    "aT b": (lambda a, b: a.T @ b, [(8, 12), (8, 10)], [OWN]),
    "aT b, square": (lambda a, b: a.T @ b, [(12, 12), (12, 12)], [OWN]),
    "a bT": (lambda a, b: a @ b.T, [(12, 8), (10, 8)], [OWN]),
    "a bT, square": (lambda a, b: a @ b.T, [(12, 12), (12, 12)], [OWN]),
    "a bT, relu": (lambda a, b: torch.relu(a @ b.T), [(12, 8), (10, 8)], [REGION]),
    "aT b, gelu": (lambda a, b: F.gelu(a.T @ b), [(8, 12), (8, 10)], [REGION]),
    "a bT, square, softmax": (
        lambda a, b: F.softmax(a @ b.T, -1),
        [(12, 12), (12, 12)],
        [REGION],
    ),
    "a aT": (lambda a: a @ a.T, [(12, 8)], [OWN]),
    "aT a": (lambda a: a.T @ a, [(12, 8)], [OWN]),
    "a a": (lambda a: a @ a, [(12, 12)], [OWN]),
    "a b c": (lambda a, b, c: a @ b @ c, [(12, 12), (12, 12), (12, 12)], [REGION] * 2),
    "tril": (lambda a, b: torch.tril(a) @ b, [(12, 12), (12, 12)], [REGION]),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        [(12, 10), (12, 8), (8, 10)],
        [REGION],
    ),
    "addmm of a transposed": (
        lambda c, a, b: torch.addmm(c, a.T, b, beta=0.5, alpha=2),
        [(12, 10), (8, 12), (8, 10)],
        [OWN],
    ),
    "a v": (lambda a, v: a @ v, [(12, 8), (8,)], [REGION]),
    "bmm": (torch.bmm, [(6, 12, 8), (6, 8, 10)], [REGION]),
    "bmm, cubes": (torch.bmm, [(6, 6, 6), (6, 6, 6)], [REGION]),
    "bmm of a transposed": (
        lambda a, b: torch.bmm(a.transpose(1, 2), b),
        [(6, 8, 12), (6, 8, 10)],
        [REGION],
    ),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        [(6, 12, 10), (6, 12, 8), (6, 8, 10)],
        [REGION],
    ),
    "chunk": (lambda a, b: a.chunk(2, 1)[1] @ b, [(12, 16), (8, 10)], [REGION]),
    "expanded": (lambda a, b: torch.bmm(a, b.expand(6, 8, 10)), [(6, 12, 8), (1, 8, 10)], [OWN]),
    "3-d by 2-d": (lambda a, b: a @ b, [(6, 12, 8), (8, 10)], [REGION]),
    "2-d by 3-d": (lambda a, b: a @ b, [(12, 8), (6, 8, 10)], [OWN]),
    "2-d by 3-d, relu": (lambda a, b: torch.relu(a @ b), [(12, 8), (6, 8, 10)], [REGION]),
    "one by a batch, relu": (
        lambda a, b: torch.relu(a @ b),
        [(1, 12, 8), (6, 8, 10)],
        [REGION],
    ),
    "4-d by 2-d": (lambda a, b: a @ b, [(6, 3, 12, 8), (8, 10)], [REGION]),
    "4-d by 3-d": (lambda a, b: a @ b, [(6, 3, 12, 8), (3, 8, 10)], [OWN]),
    "3-d by 4-d": (lambda a, b: a @ b, [(3, 12, 8), (6, 3, 8, 10)], [OWN]),
    "2-d by 4-d": (lambda a, b: a @ b, [(12, 8), (6, 3, 8, 10)], [OWN]),
    "4-d by 4-d": (lambda a, b: a @ b, [(6, 3, 12, 8), (6, 3, 8, 10)], [OWN]),
    "attention": (attention, [(6, 3, 12, 8), (6, 3, 14, 8), (6, 3, 14, 10)], [OWN, OWN]),
    "attention over 3-d": (attention, [(6, 12, 8), (6, 14, 8), (6, 14, 10)], [REGION, REGION]),
    "einsum ij,kj->ik": (
        lambda a, b: torch.einsum("ij,kj->ik", a, b),
        [(12, 8), (10, 8)],
        [REGION],
    ),
    "einsum bij,bjk->bik": (
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        [(6, 12, 8), (6, 8, 10)],
        [REGION],
    ),
    "einsum bhqd,bhkd->bhqk": (
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        [(6, 3, 12, 8), (6, 3, 14, 8)],
        [OWN],
    ),
    "einsum bhqk,bkhd->bqhd": (
        lambda a, b: torch.einsum("bhqk,bkhd->bqhd", a, b),
        [(6, 3, 12, 14), (6, 14, 3, 8)],
        [OWN],
    ),
    "einsum bi,bj->ij": (
        lambda a, b: torch.einsum("bi,bj->ij", a, b),
        [(12, 8), (12, 10)],
        [OWN],
    ),
    "einsum bcd,bce->de": (
        lambda a, b: torch.einsum("bcd,bce->de", a, b),
        [(6, 12, 8), (6, 12, 10)],
        [OWN],
    ),
    "einsum ijk,jkl->il": (
        lambda a, b: torch.einsum("ijk,jkl->il", a, b),
        [(12, 5, 8), (5, 8, 10)],
        [OWN],
    ),
    "einsum bi,bj->bij": (
        lambda a, b: torch.einsum("bi,bj->bij", a, b),
        [(12, 8), (12, 10)],
        [PYTORCH],
    ),
    "tensordot": (
        lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])),
        [(12, 5, 8), (5, 8, 10)],
        [REGION],
    ),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    def pays(a, b):
        return a.dim() == b.dim() and b.dim() in (2, 3) and a.shape[:-2] == b.shape[:-2]

    monkeypatch.setattr(importing, "_has_own_products", lambda device, autocast: autocast is None)
    monkeypatch.setattr(importing, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "pays", pays)


def compiled(function):
    torch._dynamo.reset()
    session = Session()
    run = torch.compile(function, backend=lambda gm, given: compile_graph(session, gm, given))
    return session, run


def runners(session: Session) -> list[str]:
    """Of a graph's products, in order."""
    (graph,) = session.graphs
    if graph.compiled is None:
        return [PYTORCH]
    found = []
    for step in graph.compiled.captured.steps:
        if isinstance(step, Region):
            found += [REGION for value in step.graph["values"] if value["op"] == "matmul"]
        elif step.target is products.product:
            found.append(OWN)
        elif step.what in ("mm", "bmm", "matmul", "einsum", "tensordot", "addmm"):
            found.append(PYTORCH)
    return found


def outcome(function, inputs, gradients):
    inputs = [t.detach().clone().requires_grad_(gradients) for t in inputs]
    result = function(*inputs)
    if not gradients:
        return [result]
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    (result * weights).sum().backward()
    return [result.detach(), *(t.grad for t in inputs)]


@pytest.mark.parametrize("gradients", selection.quick([True], [False, True]), ids=["", "gradients"])
@pytest.mark.parametrize("name", CASES)
def test_each_product_is_taken(name, gradients, as_on_a_gpu):
    function, shapes, expected = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    session, run = compiled(function)
    found = outcome(run, inputs, gradients)
    assert runners(session) == expected
    for ours, theirs in zip(found, outcome(function, inputs, gradients)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert found[0].stride() == function(*inputs).stride()


@pytest.mark.parametrize("name", ["a b, square", "aT b", "a aT", "4-d by 4-d", "attention"])
def test_any_number_of_entries(name, as_on_a_gpu):
    function, shapes, _ = CASES[name]

    class Model(nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    torch._dynamo.reset()
    run = ingot.optimize(Model())
    lead = shapes[0][0]
    for size in (lead, lead + 1, 3, lead):
        sized = [[size if extent == lead else extent for extent in shape] for shape in shapes]
        inputs = [torch.randn(shape) for shape in sized]
        torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gradients, runner", [(False, OWN), (True, REGION)])
def test_a_weights_gradient_is_no_batch_of_matrices(gradients, runner, as_on_a_gpu):
    """PyTorch runs such a product as one of a batch, of an expanded weight, if no gradient is
    needed."""
    x, weight = torch.randn(4, 64, 8), torch.randn(8, 10, requires_grad=gradients)
    session, run = compiled(lambda x, weight: x.transpose(0, 1) @ weight)
    result = run(x, weight)
    assert runners(session) == [runner]
    torch.testing.assert_close(result, x.transpose(0, 1) @ weight, rtol=1e-5, atol=1e-5)
    nodes, ahead = [], [result.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None:
            nodes.append(node.name())
            ahead += [below for below, _ in node.next_functions]
    assert bool(nodes) == gradients
    assert "ExpandBackward0" not in nodes


def test_a_second_derivative_is_that_of_the_product(as_on_a_gpu):
    def penalty(multiply):
        a = torch.arange(24.0).view(4, 6).div(24).requires_grad_()
        b = torch.arange(30.0).view(6, 5).div(30).requires_grad_()
        first = torch.autograd.grad(multiply(a, b).square().sum(), [a, b], create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return a.grad, b.grad

    found = penalty(lambda a, b: products.product("fp32", a, b))
    torch.testing.assert_close(found, penalty(torch.mm))


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_a_product_keeps_what_its_gradients_read(needed, as_on_a_gpu):
    a, b = torch.randn(12, 8), torch.randn(8, 10)
    for tensor, has_gradient in zip((a, b), needed):
        tensor.requires_grad_(has_gradient)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda at: None):
        products.product("fp32", a, b)
    read = [t.shape for t, other_needs in zip((a, b), reversed(needed)) if other_needs]
    assert [t.shape for t in kept] == read


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_a_batch_of_which_eager_keeps_a_copy_may_be_written(turned):
    """A matrix times a batch is one product, of the batch's columns."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(12, 8))

        def forward(self, x):
            return torch.relu(self.weight @ x)

    torch._dynamo.reset()
    module, found = Mixing(), []
    for called in (ingot.optimize(module), module):
        x = torch.linspace(-1, 1, 240).view(6, 5, 8).mT if turned else torch.ones(6, 8, 5)
        result = called(x)
        x.zero_()
        if turned:  # eager keeps x itself
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
        else:
            found.append(torch.autograd.grad(result.sum(), module.weight))
    if found:
        torch.testing.assert_close(*found)


class Graph(nn.Module):
    """Convolutions of a dense graph."""

    def __init__(self, layers: int, width: int = 16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, adjacency, x):
        for layer in self.layers:
            x = torch.relu(adjacency @ layer(x))
        return x


@pytest.mark.parametrize(
    ("layers", "width", "gradients", "streamed"),
    [
        (3, 16, "of weights", True),
        (1, 16, "of weights", False),
        (3, 64, "of weights", False),
        (3, 16, "of the adjacency", False),
        (3, 16, "none", False),
    ],
)
def test_what_a_step_cannot_afford_to_pack_is_read_as_it_lies(
    layers, width, gradients, streamed, monkeypatch
):
    monkeypatch.setattr(wide_samples, "_MUCH", 1)
    adjacency, x = torch.rand(96, 96), torch.randn(96, width)
    adjacency.requires_grad_(gradients == "of the adjacency")
    torch._dynamo.reset()
    model = Graph(layers, width)
    run = ingot.optimize(model)
    with torch.set_grad_enabled(gradients != "none"):
        result = run(adjacency, x)
    (graph,) = run._ingot.graphs
    regions = graph.compiled.captured.regions
    assert any(region.streamed for region in regions) == streamed
    torch.testing.assert_close(result, model(adjacency, x), rtol=1e-5, atol=1e-5)
    if gradients == "of weights":  # what is multiplied by a matrix without a gradient is not kept
        assert all(len(region.graph["results"]) <= layers for region in regions)


@pytest.mark.parametrize("transposed", [False, True], ids=["a region", "by itself"])
def test_what_beta_of_zero_multiplies_counts_for_nothing(transposed, as_on_a_gpu):
    def function(c, a, b):
        return torch.addmm(c, a.T if transposed else a, b, beta=0)

    a = torch.randn((8, 12) if transposed else (12, 8))
    inputs = [torch.full((12, 10), torch.nan), a, torch.randn(8, 10)]
    session, run = compiled(function)
    torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)
    assert runners(session) == [OWN if transposed else REGION]


@pytest.mark.parametrize(
    ("provider", "tf32", "pytorchs"),
    [
        ("cuBLASLt (ieee fp32)", False, True),
        ("cuBLASLt (ieee fp32)", True, False),
        ("cuBLASLt (tf32)", True, True),
        ("cuBLASLt (tf32)", False, False),
        ("cuBLASLt (bf16)", False, False),
        ("Ingot's fp32 product for Hopper (fp16 halves)", False, False),
    ],
)
def test_what_the_library_would_run_is_pytorchs_if_it_is_the_same(
    provider, tf32, pytorchs, monkeypatch
):
    class Planned:
        def explain(self, batch):
            return {"executable": {"sweeps": [{"provider": provider}]}}

    monkeypatch.setattr(products.policy, "tf32_allowed", lambda: tf32)
    assert products._is_pytorchs(Planned(), 8) is pytorchs


def test_a_report_names_products_by_themselves(as_on_a_gpu):
    torch._dynamo.reset()

    class Model(nn.Module):
        def forward(self, a):
            return a @ a.T

    model = ingot.optimize(Model())
    model(torch.randn(12, 8))
    report = model.ingot_report()
    assert [entry["what"] for entry in report["operators_replaced"]] == ["mm"]
    assert report["unsupported"] == []


def test_small_products_stay_whole(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(importing, "LEAST_WORK", 1 << 24)
    session, run = compiled(CASES["4-d by 4-d"][0])
    run(torch.randn(6, 3, 12, 8), torch.randn(6, 3, 8, 10))
    assert runners(session) == [PYTORCH]


def test_autocast_and_the_cpu_keep_pytorchs():
    assert not importing._has_own_products("cuda", torch.bfloat16)
    assert not importing._has_own_products("cpu", None)
    assert importing._has_own_products("cuda", None)
    assert not products.pays(torch.empty(4096, 4096), torch.empty(4096, 4096))


@pytest.mark.parametrize("batched", [False, True], ids=["matrices", "batches"])
def test_operands_as_they_lie(batched, as_on_a_gpu):
    lead = (5,) if batched else ()
    whole_a, whole_b = torch.randn(*lead, 20, 30), torch.randn(*lead, 30, 40)
    for a, b in [
        (whole_a[..., 2:14, 3:11], whole_b[..., :8, 4:14]),
        (whole_a[..., ::2, ::3], whole_b[..., ::3, ::2]),
        (whole_a.mT[..., :12, :20], whole_b[..., :20, :]),
        (whole_a, whole_b.mT.contiguous().mT),
        (whole_a[..., :1, :], whole_b[..., :1]),
        (torch.randn(20, 30).expand(*lead, 20, 30), whole_b),
        (whole_a, torch.randn(30, 40).expand(*lead, 30, 40)),
    ]:
        found = products.product("fp32", a, b)
        torch.testing.assert_close(found, a @ b, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()


@pytest.mark.parametrize("is_own", [False, True])
def test_a_product_without_a_program_is_pytorchs_with_its_gradients(
    is_own, as_on_a_gpu, monkeypatch
):
    if not is_own:
        monkeypatch.setattr(products._programs, "of", lambda *given: None)
    shapes = ((48, 32), (32, 16)), ((3, 48, 32), (3, 32, 16))
    for name, operands in zip(("MmBackward0", "BmmBackward0"), shapes):
        a, b = (torch.randn(shape, requires_grad=True) for shape in operands)
        found = products.product("fp32", a, b)
        assert (found.grad_fn.name() == name) != is_own
        gradients = torch.autograd.grad(found.sum(), (a, b))
        expected = torch.autograd.grad((a @ b).sum(), (a, b))
        torch.testing.assert_close((found, *gradients), (a @ b, *expected))
