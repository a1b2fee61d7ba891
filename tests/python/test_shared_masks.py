"""A mask of flags that several attentions read is converted once, to the bits that each would make
of it."""

import copy

import ingot
import pytest
import selection
import torch
from ingot.capture import shared_masks
from ingot.capture.captured import TorchStep
from ingot.capture.shared_masks import convert_shared_masks, converted_mask, lay_out_masks
from ingot.capture.sharing import is_repeatable, share
from ingot.model_capture import capture
from regions import regions_run
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.profiler import ProfilerActivity, profile

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 3, 8, 16, 4, 3


class Block(nn.Module):
    """As transformers' models have it: each layer takes as much of the mask as there are keys."""

    def __init__(self):
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def operands(self, x):
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        return (p.view(shape).transpose(1, 2) for p in self.parts(self.norm(x)).chunk(3, -1))

    def forward(self, x, mask):
        q, k, v = self.operands(x)
        made = attend(q, k, v, attn_mask=mask[:, :, :, : k.shape[-2]])
        return x + self.out(made.transpose(1, 2).reshape(x.shape))


class Network(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(LAYERS))

    def forward(self, x, kept):
        length = x.shape[1]
        triangle = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = triangle[None, None] & kept[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def inputs(batch: int = BATCH, length: int = LENGTH, dtype=torch.float32):
    """With a sample of which nothing is seen, where PyTorch's kernels agree on no number."""
    kept = torch.ones(batch, length, dtype=torch.bool)
    kept[0, length // 2 :] = False
    kept[-1] = False
    return torch.randn(batch, length, WIDTH, dtype=dtype), kept


def conversions(call, *args) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        call(*args)
    found = [event for event in watched.events() if event.name == "aten::where"]
    return sum(getattr(each.cpu_parent, "name", "") != "aten::where" for each in found)


def outcome(call, module, x, kept, autocast=False, gradients=True):
    module.zero_grad()
    x = x.clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = call(x, kept)
    if not gradients:
        return [result]
    result.float().square().sum().backward()
    return [result.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def check(monkeypatch, module, given, wanted=1, compiled=ingot.optimize, **how):
    """wanted: conversions of a call. That what is computed is the same to the bit where each
    attention makes its own, as it does where its kernel is cuDNN's."""
    made = compiled(module)

    def call():
        return outcome(made, module, *given, **how)

    with regions_run() as ran:
        found = call()
    assert ran and conversions(call) == wanted
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_fused_sdp_choice", lambda *_, **__: shared_masks._CUDNN)
        expected = call()
        assert conversions(call) == LAYERS
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return made


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_conversion_and_the_same_bits(monkeypatch, autocast, gradients):
    how = {"autocast": autocast, "gradients": gradients}
    made = check(monkeypatch, Network(), inputs(), **how)
    told = {item["what"] for item in made.ingot_report()["unsupported"]}
    assert told == {"scaled_dot_product_attention"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_modules_of_other_types(monkeypatch, dtype):
    check(monkeypatch, Network().to(dtype), inputs(dtype=dtype), gradients=False)


def test_torch_compile(monkeypatch):
    def compiled(module):
        torch._dynamo.reset()
        return torch.compile(module, backend="ingot")

    check(monkeypatch, Network(), inputs(), compiled=compiled)


class Turned(Block):
    """Under autocast its queries and keys are of fp32, as rotary embeddings give them."""

    def operands(self, x):
        q, k, v = super().operands(x)
        turn = torch.linspace(0.5, 1.5, WIDTH // HEADS, device=x.device)
        return q * turn, k * turn, v


class NetworkOfTurned(Network):
    block = Turned


def test_operands_that_autocast_casts(monkeypatch):
    check(monkeypatch, NetworkOfTurned(), inputs(), autocast=True)


class KeptFromAutocast(Network):
    def forward(self, x, kept):
        mask = kept[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
            q, k, v = block.operands(x)
            with torch.autocast("cpu", enabled=False):
                x = x + attend(q.float(), k.float(), v.float(), mask).transpose(1, 2).flatten(2)
        return x


def test_each_type_has_a_conversion():
    module = KeptFromAutocast()
    made, given = ingot.optimize(copy.deepcopy(module)), inputs()
    found = outcome(made, made, *given, autocast=True)
    assert conversions(lambda: outcome(made, made, *given, autocast=True)) == 2
    expected = outcome(module, module, *given, autocast=True)
    for mine, theirs in zip(found, expected):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


class Written(Network):
    def forward(self, x, kept):
        mask = kept[:, None, None, :].expand(-1, 1, x.shape[1], -1).clone()
        for block in self.blocks[:2]:
            x = block(x, mask)
        mask[..., 0] = False
        for block in self.blocks[2:]:
            x = block(x, mask)
        return x


class InputWritten(Network):
    def forward(self, x, kept):
        for block in self.blocks[:2]:
            x = block(x, kept[:, None, None, :])
        kept[:, 0] = False
        for block in self.blocks[2:]:
            x = block(x, kept[:, None, None, :])
        return x


@pytest.mark.parametrize("kind", [Written, InputWritten])
def test_a_mask_that_is_written_between(monkeypatch, kind):
    x, kept = inputs()
    if kind is Written:
        check(monkeypatch, kind(), (x, kept), wanted=2)
    module = kind()
    made, given = ingot.optimize(copy.deepcopy(module)), kept.clone()
    found, expected = outcome(made, made, x, given), outcome(module, module, x, kept)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given, kept)


@pytest.mark.parametrize("gradients", selection.quick([True], [False, True]))
def test_other_sizes(gradients):
    module = Network()
    made = ingot.optimize(copy.deepcopy(module))
    for batch, length in ((3, 8), (5, 8), (4, 12), (4, 9), (1, 8)):
        given = inputs(batch, length)
        found = outcome(made, made, *given, gradients=gradients)
        assert conversions(lambda g=given: outcome(made, made, *g, gradients=gradients)) == 1
        expected = outcome(module, module, *given, gradients=gradients)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_standalone_files_have_pytorchs_operators():
    captured = capture(Network(), inputs())
    targets = {step.target for step in captured.steps if isinstance(step, TorchStep)}
    assert torch.ops.aten.scaled_dot_product_attention.default in targets
    assert converted_mask not in targets


# Graphs ------------------------------------------------------------------------------------------


def converted_in(function, *given) -> int:
    """How many conversions stand in a graph that is checked to compute the same."""
    trace = make_fx(lambda *given: function(*given), pre_dispatch=True, tracing_mode="fake")
    module = trace(*given)
    share(module.graph, is_repeatable)
    convert_shared_masks(module.graph, ())
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*given), function(*given), rtol=0, atol=0)
    return sum(node.target is converted_mask for node in module.graph.nodes)


def test_who_shares():
    q, keys = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    mask, other = torch.rand(2, 2, 1, 5, 6).gt(0.3).unbind()

    def pair(first, second=None, **options):
        def function(q, k, mask, other):
            masks = (first(mask), (second or first)(mask if second is None else other))
            return [attend(q, k, k, m, **options) for m in masks]

        return converted_in(function, q, keys, mask, other)

    assert pair(lambda m: m) == 1
    assert pair(lambda m: m[:1, :, :, :6]) == 1
    assert pair(lambda m: m.expand(-1, 4, -1, -1)) == 1
    assert pair(lambda m: m[0, 0]) == 1
    assert pair(lambda m: m, scale=0.5) == 1
    assert pair(lambda m: m, lambda m: m) == 0  # of two masks
    assert pair(lambda m: m.float()) == 0
    assert pair(lambda m: None, is_causal=True) == 0


@pytest.mark.parametrize("option", [{"scale": 0.25}, {"dropout_p": 1.0}])
def test_who_might_take_another_kernel_converts_for_itself(option):
    q, mask = torch.randn(2, 4, 6, 8), torch.rand(2, 1, 6, 6).gt(0.3)

    def function(q, mask, *alike):
        made = [attend(q, q, q, mask), attend(q, q, q, mask, **option)]
        return made + [attend(q, q, q, mask) for _ in alike]

    assert converted_in(function, q, mask) == 0
    assert converted_in(function, q, mask, q) == 1


def test_other_heads_convert_for_themselves():
    q, wide, mask = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 16), torch.ones(6, 6) > 0

    def function(q, wide, mask):
        return [attend(x, x, x, mask) for x in (q, wide)]

    assert converted_in(function, q, wide, mask) == 0


# The conversion ----------------------------------------------------------------------------------


def converted(mask, dtype=torch.float32):
    x = torch.ones(2, 4, 6, 8)
    return converted_mask(mask, dtype, x, x, x, 0.0, None, False)


def test_it_is_pytorchs():
    mask = torch.rand(6, 6, 1, 2).gt(0.5).permute(3, 2, 0, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        expected = torch.where(mask, 0.0, torch.tensor(float("-inf"), dtype=dtype))
        found = converted(mask, dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.dtype is dtype and found.stride() == expected.stride()


def test_cudnns_is_what_pytorch_hands_to_it(monkeypatch):
    mask = torch.rand(2, 1, 6, 6).gt(0.5)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: shared_masks._CUDNN)
    assert converted(mask) is mask  # nothing is handed to cuDNN here
    hidden = torch.tensor(-65504.0, dtype=torch.bfloat16)
    found = {(torch.bfloat16, mask.device): hidden}
    monkeypatch.setattr(shared_masks, "_hidden", found)
    expected = torch.where(mask, 0.0, hidden)
    torch.testing.assert_close(converted(mask, torch.bfloat16), expected, rtol=0, atol=0)


def test_no_other_kernel_is_chosen(monkeypatch):
    mask = torch.rand(2, 1, 6, 6).gt(0.5)

    def choice(query, key, value, mask, *_, **__):
        return 0 if mask.dtype is torch.bool else 2

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    assert converted(mask) is mask


def test_under_a_transform_it_stays():
    masks = torch.rand(3, 6, 6).gt(0.5)
    torch.testing.assert_close(torch.vmap(converted)(masks), masks)


def positions_bias(table, length):
    """As T5 has it: its last dimension is the table's."""
    places = torch.arange(length, device=table.device)
    return table[(places[:, None] - places).abs()].permute(2, 0, 1)[None]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_bias_that_lies_otherwise_is_copied_once(dropout):
    def forward(x, table):
        bias = positions_bias(table, LENGTH)
        for _ in range(LAYERS):
            x = torch.ops.aten.scaled_dot_product_attention.default(x, x, x, bias, dropout)
        return x

    given = torch.randn(BATCH, HEADS, LENGTH, 4), torch.randn(LENGTH, HEADS)
    graph = make_fx(forward, pre_dispatch=True)(*given).graph
    for node in graph.nodes:  # on a GPU
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = node.meta["val"].to("meta")
    lay_out_masks(graph)
    masks = {n.args[3] for n in graph.nodes if n.target is shared_masks._ATTENTION}
    (mask,) = masks
    assert (mask.target is torch.ops.aten._to_copy.default) is (dropout == 0.0)
    assert mask.meta["val"].is_contiguous() is (dropout == 0.0)
    graph.lint()
    made = torch.fx.GraphModule({}, graph)(*given)
    if not dropout:
        torch.testing.assert_close(made, forward(*given))


def test_rows_that_see_nothing_are_zeros_as_in_eager_mode():
    def forward(x, bias):
        return torch.ops.aten.scaled_dot_product_attention.default(x, x, x, bias)

    bias = torch.randn(LENGTH, LENGTH, HEADS)
    bias[2], bias[3, :, 1] = -torch.inf, -torch.inf
    given = torch.randn(BATCH, HEADS, LENGTH, 4), bias.permute(2, 0, 1)[None]
    graph = make_fx(forward, pre_dispatch=True)(*given).graph
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = node.meta["val"].to("meta")
    lay_out_masks(graph)
    (attention,) = (n for n in graph.nodes if n.target is shared_masks._ATTENTION)
    plain = torch.ops.aten.scaled_dot_product_attention.default
    # As a fused kernel that divides by a sum of no terms.
    attention.target = lambda *args: plain(*args).where(args[3].isfinite().any(-1, True), torch.nan)
    found = torch.fx.GraphModule({}, graph)(*given)
    torch.testing.assert_close(found, forward(*given))
    assert not found[:, :, 2].any() and not found[:, 1, 3].any() and found[:, 0, 3].all()


def test_a_mask_that_lies_as_a_kernel_reads_it_stays():
    graph = make_fx(attend, pre_dispatch=True)(
        *(torch.randn(BATCH, HEADS, LENGTH, 4) for _ in range(3)), torch.randn(LENGTH, LENGTH)
    ).graph
    before = str(graph)
    lay_out_masks(graph)
    assert str(graph) == before


class Relative(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.table = nn.Parameter(torch.randn(LENGTH, HEADS))

    def forward(self, x, hidden):
        mask = positions_bias(self.table, x.shape[1]) + hidden[:, None]
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.parametrize("autocast", [False, True])
def test_networks_with_a_bias_of_positions(autocast, monkeypatch):
    monkeypatch.setattr(shared_masks, "_is_dense", lambda mask: mask.stride(-1) in (0, 1))
    laid_out = []
    real = shared_masks._laid_out
    monkeypatch.setattr(shared_masks, "_laid_out", lambda *a: laid_out.append(a) or real(*a))
    model = Relative().eval()
    made = ingot.optimize(copy.deepcopy(model))
    for samples in (3, 5, 3):
        x, hidden = torch.randn(samples, LENGTH, WIDTH), torch.zeros(samples, LENGTH, LENGTH)
        hidden[0, :3] = hidden[1, :, 4:] = -torch.inf
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, found = model(x, hidden), made(x, hidden)
        assert found.isfinite().all() and found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, atol=0.05 if autocast else 1e-5, rtol=0.02)
    assert len(laid_out) == 1
