"""Causal masks that nobody calls causal, which PyTorch finds by comparing values at each call."""

import copy
import warnings

import ingot
import pytest
import selection
import torch
from ingot.capture.captured import TorchStep
from ingot.capture.causal import is_causal, question_put_off, was_asked
from live import agree, compare, no_gradients  # noqa: F401
from torch import nn
from torch.nn.modules import transformer

LENGTH, WIDTH, HEADS = 12, 64, 4
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def causal(length=LENGTH, dtype=torch.float32):
    if dtype is torch.bool:
        return torch.ones(length, length, dtype=dtype).triu(1)
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


class LanguageModel(nn.Module):
    """As PyTorch's tutorial has it: a call brings the mask, or the forward makes it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, mask=None, padding=None):
        if mask is None:
            mask = causal(x.shape[1])
        return self.head(self.encoder(x, mask, padding))


def tokens(batch, length=LENGTH):
    return torch.randn(batch, length, WIDTH).requires_grad_(torch.is_grad_enabled())


def attentions(optimised) -> list[tuple[bool, bool]]:
    """Of all graphs: (whether it reads a mask, whether it is causal)."""
    found = []
    for graph in optimised._ingot.graphs:
        for step in graph.compiled.captured.steps if graph.compiled else ():
            if isinstance(step, TorchStep) and step.target is ATTENTION:
                found.append((len(step.args) > 3 and step.args[3] is not None, *step.args[5:6]))
    return found


def made_here(module):
    yield module(tokens(5))
    yield module(tokens(4, 7))


def brought(module):
    mask = causal()
    yield module(tokens(5), mask)
    yield module(tokens(LENGTH), mask)  # as many as there are tokens
    yield module(tokens(4, 7), causal(7))
    yield module(padding=None, mask=causal(7, torch.bool), x=tokens(4, 7))


@pytest.mark.parametrize("script", selection.quick([made_here], [made_here, brought]))
def test_results_are_pytorchs(script):
    compare(lambda: LanguageModel(0.1), script, gradients=[True])
    compare(lambda: LanguageModel(0.1).eval(), script, gradients=[False])


@pytest.mark.thorough
@pytest.mark.parametrize("script", [made_here, brought])
def test_results_without_dropout_are_pytorchs(script):
    compare(LanguageModel, script)
    compare(lambda: LanguageModel().eval(), script, gradients=[True])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, causal(), causal(dtype=torch.bool)])
def test_attention_is_causal_and_the_graph_whole(mask, training):
    made = LanguageModel(0.1).train(training)
    with torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", ingot.IngotWarning)
        optimised = ingot.optimize(made)
        optimised(tokens(5), mask)
    (graph,) = optimised._ingot.graphs
    assert not optimised._ingot.breaks
    assert attentions(optimised) == [(False, True)]


def test_a_mask_that_is_causal_no_more():
    module = LanguageModel(0.1)
    twin, optimised = copy.deepcopy(module), ingot.optimize(module)
    mask, x = causal(), tokens(5)

    def called():
        torch.manual_seed(3)
        expected = twin(x, mask)
        torch.manual_seed(3)
        torch.testing.assert_close(optimised(x, mask), expected)
        return expected

    called()
    first = called()
    mask[3, 5] = 0.0  # in place: the same tensor
    assert not torch.equal(called(), first)
    mask = causal()
    assert torch.equal(called(), first)
    mask = torch.zeros_like(mask)
    called()
    with torch.inference_mode():
        mask = causal()
        called()
        mask[2, 4] = 0.0
        called()
    assert len([graph for graph in optimised._ingot.graphs if graph.compiled]) <= 2


def test_a_mask_that_was_not_causal_at_first_is_read():
    module = LanguageModel()
    optimised = ingot.optimize(module)
    mask = causal()
    mask[0, 3] = 0.0
    optimised(tokens(5), mask)
    assert attentions(optimised) in ([(True, False)], [(True,)])
    for each in (mask, causal(), mask):
        agree(optimised, module, tokens(5), each)


def test_with_a_mask_of_padding():
    """Both together: PyTorch reads them, whatever the answer."""
    padding = torch.zeros(5, LENGTH)
    padding[:, -2:] = float("-inf")
    compare(
        lambda: LanguageModel(0.1),
        lambda m: [m(tokens(5), causal(), padding)],
        gradients=[True],
    )


def test_a_mask_computed_from_a_call_is_compared_by_pytorch():
    class Shifted(LanguageModel):
        def forward(self, x):
            return super().forward(x, causal().minimum(x.detach()[0, 0, 0].abs()))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compare(Shifted, lambda m: [m(tokens(5)) for _ in range(2)], gradients=[True])
    assert any("cannot capture" in str(each.message) for each in said)


@pytest.mark.thorough
def test_tokens_in_front():
    """Their number is what changes from call to call, and no mask is a constant."""

    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, 0.1)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x):
            return self.head(self.encoder(x, causal(len(x)).to(x.device)))

    def script(module):
        for length in (LENGTH, 7, 9):
            yield module(torch.randn(length, 3, WIDTH))

    compare(Model, script, gradients=[True], graphs=2)
    optimised = ingot.optimize(Model())
    optimised(torch.randn(LENGTH, 3, WIDTH))
    assert attentions(optimised) == [(False, True)] and not optimised._ingot.breaks


@pytest.mark.thorough
@pytest.mark.parametrize("kept, expected", [(causal(20), True), (causal(20).T, False)])
def test_a_part_of_a_mask_that_the_module_keeps(kept, expected):
    class Model(LanguageModel):
        def __init__(self):
            super().__init__(0.1)
            self.register_buffer("mask", kept)

        def forward(self, x):
            return super().forward(x, self.mask[: x.shape[1], : x.shape[1]])

    compare(Model, lambda m: [m(tokens(5)), m(tokens(5, 7))], gradients=[True])
    optimised = ingot.optimize(Model())
    optimised(tokens(5))
    assert not optimised._ingot.breaks
    assert [reads for reads, *_ in attentions(optimised)] == [not expected]


@pytest.mark.thorough
def test_a_decoders_mask():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(WIDTH, HEADS, 1, 1, 128, 0.1, batch_first=True)

        def forward(self, source, target):
            return self.inner(source, target, tgt_mask=causal(target.shape[1]))

    compare(Translator, lambda m: [m(tokens(5, 9), tokens(5))], gradients=[True])
    optimised = ingot.optimize(Translator())
    optimised(tokens(5, 9), tokens(5))
    assert not optimised._ingot.breaks
    assert attentions(optimised).count((False, True)) == 1


class Attention(nn.Module):
    """By hand, under a mask that the forward makes."""

    def __init__(self, mask, dropout=0.0):
        super().__init__()
        self.linear, self.mask, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), mask, dropout

    def forward(self, x):
        parts = self.linear(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(
            *parts.unbind(0), self.mask(x.shape[1]), self.dropout
        )


def seen(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


BY_HAND = {
    "seen": (seen, 0.0, True),
    "framed": (lambda length: seen(length)[None, None], 0.0, True),
    "hidden": (lambda length: ~seen(length), 0.0, False),
    "added": (
        lambda length: torch.zeros(length, length).masked_fill(~seen(length), -1e9),
        0,
        False,
    ),
    "dropping": (seen, 0.1, False),
    "banded": (lambda length: seen(length) & seen(length).T.triu(-3), 0.0, False),
}


@pytest.mark.parametrize("mask, dropout, expected", BY_HAND.values(), ids=BY_HAND)
def test_attention_by_hand(mask, dropout, expected):
    """Where it drops something, a causal form would drop other elements."""
    if mask(3)[..., 0, 0].item() or mask(3).dtype is not torch.bool:  # else its first row is NaN
        compare(lambda: Attention(mask, dropout), made_here, taken=False, gradients=[True])
    optimised = ingot.optimize(Attention(mask, dropout))
    optimised(tokens(5))
    ((reads, *is_causal_too),) = attentions(optimised)
    assert (reads, any(is_causal_too)) == (not expected, expected)


def test_everybody_else_is_answered():
    ask = transformer._detect_is_causal_mask
    ingot.optimize(LanguageModel())(tokens(2))
    for question in (ask, transformer._detect_is_causal_mask):
        assert question(causal()) is True
        assert question(torch.zeros(LENGTH, LENGTH)) is False
        assert question(torch.zeros(LENGTH, LENGTH), is_causal=True) is True
    assert not was_asked()
    with question_put_off():
        assert transformer._detect_is_causal_mask(causal()) is False
        assert was_asked()
        with question_put_off(False):
            assert transformer._detect_is_causal_mask(causal()) is True
            assert not was_asked()
    by_inductor = []

    def backend(gm, examples):
        by_inductor.append(gm)
        return gm.forward

    model = LanguageModel()
    x = tokens(2)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert len(by_inductor) > 1  # cut at the question, as without Ingot


def test_what_is_causal():
    for dtype in (torch.float32, torch.bfloat16):
        assert is_causal(causal(dtype=dtype))
    assert is_causal(seen(5)) and is_causal(~seen(5), hides=True)
    assert not is_causal(seen(5), hides=True) and not is_causal(~seen(5))
    for other in (seen(5)[:4], seen(5)[None], torch.zeros(3, 3), causal()[:, :5]):
        assert not is_causal(other)
