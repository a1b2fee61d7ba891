"""torch.vmap inside a forward: masks that are made so, as transformers makes them, leave the rest
of the model to Ingot."""

import ingot
import pytest
import torch
from live import compare
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.filterwarnings("ignore::ingot.IngotWarning")


class Attention(nn.Module):
    """A mask from four nested vmaps over a rule of (sample, head, query, key)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def rule(self, kept):
        return lambda sample, head, query, key: (key <= query) & kept[sample, key]

    def mask(self, x, kept):
        rule = self.rule(kept)
        for dims in ((None,) * 3 + (0,), (None, None, 0, None), (None, 0, None, None)):
            rule = torch.vmap(rule, in_dims=dims, out_dims=0)
        samples, places = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        return torch.vmap(rule, in_dims=(0, None, None, None))(
            samples, torch.arange(2), places, places
        )

    def forward(self, x, kept):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*heads, attn_mask=self.mask(x, kept))
        return x + functional.gelu(self.out(y.transpose(1, 2).flatten(2))) * 2


def _calls(m):
    for batch, length in ((4, 6), (4, 6), (3, 6), (1, 6), (4, 5)):
        kept = torch.ones(batch, length, dtype=torch.bool)
        kept[-1, length - 1] = False
        x = torch.randn(batch, length, 32)
        yield m(x.requires_grad_(torch.is_grad_enabled()), kept)


def test_a_mask_leaves_the_rest_to_ingot():
    compare(Attention, _calls, tolerance=1e-4)
    optimised = ingot.optimize(Attention())
    with torch.no_grad():
        for _ in _calls(optimised):
            pass
    assert {graph.problem for graph in optimised._ingot.graphs} == {None}
    taken = {line["what"] for line in optimised.ingot_report()["operators_replaced"]}
    assert {"linear", "layer_norm", "gelu"} <= taken


class Mapped(nn.Module):
    """A layer of the model's own under vmap: a gradient goes through it."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        return torch.vmap(lambda row: torch.relu(self.layer(row)) * 2)(torch.tanh(self.first(x)))


class Noisy(Mapped):
    """With randomness of its own, as eager draws it."""

    def forward(self, x):
        drop = torch.vmap(lambda row: functional.dropout(row, 0.5), randomness="different")
        return torch.relu(self.first(x)) * 2 + drop(x.detach())


class Writes(Mapped):
    """Into a tensor of the forward's, under vmap."""

    def forward(self, x):
        y, kept = torch.relu(self.first(x)) * 2, torch.zeros(x.shape[0], 32)
        torch.vmap(lambda row, of: row.add_(of))(kept, x.detach())
        return y + kept


class Switched(Mapped):
    """With gradients switched off around it."""

    def forward(self, x):
        y = torch.relu(self.first(x)) * 2
        with torch.no_grad():
            scale = torch.vmap(lambda row: row.sum() * 0.5)(y)
        return y * scale[:, None]


@pytest.mark.parametrize("kind", [Mapped, Noisy, Writes, Switched])
def test_what_stays_pytorchs(kind):
    def script(m):
        for batch in (6, 6, 3):
            yield m(torch.randn(batch, 32, requires_grad=torch.is_grad_enabled()))

    compare(kind, script, tolerance=1e-4, taken=False)


def test_what_cannot_be_batched_raises_as_eager_and_leaves_no_level_behind():
    class Branches(Mapped):
        def forward(self, x):
            return torch.relu(self.first(x)) + torch.vmap(lambda row: row * row.sum().item())(x)

    x = torch.randn(4, 32)
    for called in (Branches(), ingot.optimize(Branches())):
        with pytest.raises(RuntimeError, match="vmap"):
            called(x)
    assert torch._C._functorch.maybe_current_level() is None
    assert torch.equal(torch.vmap(torch.sin)(x), torch.sin(x))
