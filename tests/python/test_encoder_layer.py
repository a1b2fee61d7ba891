"""nn.TransformerEncoderLayer where gradients are off, which PyTorch runs as one operator."""

import ingot
import pytest
import torch
from ingot.capture.encoder_layer import encoder_layer, traceable
from live import agree, no_gradients, programs_of  # noqa: F401
from test_gradients import error, three_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

LENGTH, WIDTH, HEADS = 12, 64, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
OPERATOR = "aten::_transformer_encoder_layer_fwd"


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        nested = options.pop("enable_nested_tensor", True)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 256, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, **masks):
        return self.head(self.encoder(x, **masks))


class Causal(Encoder):
    def forward(self, x):
        return super().forward(x, mask=CAUSAL, is_causal=True)


class Padded(Encoder):
    def forward(self, x, padding):
        return super().forward(x, src_key_padding_mask=padding)


def tokens(batch):
    return torch.randn(batch, LENGTH, WIDTH)


@pytest.fixture(autouse=True)
def forgotten():
    """That another model's layer had another activation makes Dynamo take it for a variable."""
    torch._dynamo.reset()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_all_of_it_is_taken(activation, norm_first):
    made = Encoder(activation=activation, norm_first=norm_first).eval()
    optimised, module, exact = three_of(made)
    for batch in (6, 2, 1, 6):
        agree(optimised, module, tokens(batch))
    assert len(optimised._ingot.graphs) == 2  # a batch of one is its own
    for graph in optimised._ingot.graphs:
        assert [item.what for item in graph.compiled.captured.unsupported] == [
            "scaled_dot_product_attention"
        ] * 2
    x = tokens(6)
    truth = exact(x.double())
    assert error(optimised(x), truth) <= 3 * error(module(x), truth)


@pytest.mark.parametrize("norm_first", [False, True])
def test_under_autocast_of_the_cpu_all_of_it_is_cast(norm_first):
    """PyTorch's operator is, so that its result has 16 bits."""
    module = Encoder(norm_first=norm_first).eval()
    module.head = nn.Identity()
    optimised, x = ingot.optimize(module), tokens(4)
    for on in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            agree(optimised, module, x, tolerance=3e-2)


def test_under_a_mask_the_attention_alone_is_pytorchs():
    module = Causal().eval()
    optimised = ingot.optimize(module)
    for batch in (5, 3):
        agree(optimised, module, tokens(batch))
    (graph,) = optimised._ingot.graphs
    left = {item.what for item in graph.compiled.captured.unsupported}
    assert left == {"_native_multi_head_attention"}
    assert len(programs_of(optimised)) > 1


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("nested", [True, False])
def test_padding_gives_what_it_gives_eager(batch, nested):
    """Zeros for tokens of padding, where PyTorch leaves them away."""
    module = Padded(enable_nested_tensor=nested).eval()
    optimised = ingot.optimize(module)
    padding = torch.zeros(batch, LENGTH, dtype=torch.bool)
    padding[:, -3:] = True
    for _ in range(2):
        result = agree(optimised, module, tokens(batch), padding)
    zeros = torch.equal(result[:, -3:], module.head.bias.expand(batch, 3, -1))
    assert zeros == nested


def test_nobody_else_is_told():
    def known():
        return torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "Meta")

    before = known()
    with traceable(), traceable():
        assert known()
    assert known() == before
    ingot.optimize(Encoder().eval())(tokens(2))
    assert known() == before


@pytest.mark.parametrize("device, approximate", [("cpu", "none"), ("cuda", "tanh")])
def test_gelu_is_the_one_of_pytorchs_operator(device, approximate):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 256, activation="gelu", batch_first=True)
    attention = layer.self_attn
    norms = [layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias]
    products = [layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias]
    projections = [attention.in_proj_weight, attention.in_proj_bias]
    projections += [attention.out_proj.weight, attention.out_proj.bias]
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, *weights = (
            torch.empty(t.shape, device=device)
            for t in (tokens(2), *projections, *norms, *products)
        )
        graph = make_fx(
            lambda x, *w: encoder_layer(x, WIDTH, HEADS, *w[:4], True, False, 1e-5, *w[4:]),
            pre_dispatch=True,
        )(x, *weights).graph
    (gelu,) = (node for node in graph.nodes if node.target is torch.ops.aten.gelu.default)
    assert gelu.kwargs.get("approximate", "none") == approximate
