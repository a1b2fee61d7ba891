"""What torch.compile offers beside models, through our backend: optimisers' steps, blocks compiled
once, compiled backward passes, warnings as errors."""

import warnings

import ingot
import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
)
def test_a_compiled_step_of_an_optimiser_moves_its_state_once(make):
    found = []
    for backend in ("eager", "ingot"):
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2, 2))]
        optimiser = make(parameters)
        step = torch.compile(lambda it=optimiser: it.step(), backend=backend)
        for at in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + at)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ingot.IngotWarning)
                step()
        states = [t for state in optimiser.state.values() for t in state.values()]
        found.append([*parameters, *(t for t in states if isinstance(t, torch.Tensor))])
    torch.testing.assert_close(*found)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3))
        self.layers = nn.ModuleList(blocks)

    @torch.compiler.nested_compile_region
    def block(self, layer, x):
        return x + layer(x)

    def forward(self, x):
        for layer in self.layers:
            x = self.block(layer, x)
        return x


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="PyTorch too old")
@pytest.mark.parametrize("wrap", [ingot.optimize, lambda m: torch.compile(m, backend="ingot")])
def test_blocks_that_are_compiled_once_are_written_out(wrap):
    torch.manual_seed(0)
    module = Nested()
    fast, x, found = wrap(module), torch.randn(5, 16), []
    for m in (fast, module):
        y = m(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    if isinstance(fast, ingot.OptimizedModule):
        (graph,) = fast._ingot.graphs
        assert len(graph.compiled.captured.regions) >= 1
        assert not fast.ingot_report()["unsupported"]


def test_regions_have_their_derivatives_where_backward_is_compiled(capfd):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    fast, x = torch.compile(module, backend="ingot"), torch.randn(8, 16)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            fast(x).square().sum().backward()
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    for _ in range(2):
        module(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in module.parameters()], rtol=1e-4, atol=1e-5)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("wrap", [ingot.optimize, lambda m: torch.compile(m, backend="ingot")])
def test_what_is_not_taken_is_told_where_warnings_are_errors(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x):
            return torch.linalg.svdvals(self.linear(x).relu())

    module, x = Model(), torch.randn(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ingot.IngotWarning)
        torch.testing.assert_close(wrap(module)(x), module(x))


@pytest.mark.parametrize("wrap", [ingot.optimize, lambda m: torch.compile(m, backend="ingot")])
def test_state_of_modules_that_are_called_whole_moves_once(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.norm(self.linear(x)).relu()

    torch.manual_seed(0)
    module, x = Model(), torch.randn(4, 16)
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", ingot.IngotWarning)
        fast = wrap(module)
        for _ in range(3):
            fast(x).sum().backward()
    assert (module.calls.item(), module.norm.num_batches_tracked.item()) == (3, 3)
