"""What is taken where gradients are needed: products in 16 bits and TF32 where the GPU, not the
host, is what a step waits for; anything of a network where that gains more than guards cost."""

from collections.abc import Sequence
from types import SimpleNamespace

import ingot.capture.importer  # noqa: F401 (its rows say which operators are views)
import pytest
import torch
from ingot.capture import token_chains
from ingot.capture.cutting import Cut
from ingot.capture.host_time import (
    is_of_the_host,
    nears_the_host,
    pays_for_guards,
    pays_in_few_bits,
    turns_tokens,
)
from torch import nn


def graph_of(module: nn.Module, *shape: int) -> torch.fx.Graph:
    """Traced without memory, in bf16, with `linear` as it is."""
    x = torch.empty(*shape, dtype=torch.bfloat16, device="meta")
    return torch.export.export(module.to("meta", torch.bfloat16), (x,)).graph


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = (nn.Linear(a, b) for a, b in ((width, 4 * width), (4 * width, width)))

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def chosen(
    graph: torch.fx.Graph,
    device_type: str = "cuda",
    beside: Sequence = (),
    tf32: bool = False,
    autocast: bool = False,
    replayed: bool = False,
) -> bool:
    """beside: what the graph holds besides."""
    computing = [node for node in graph.nodes if node.op == "call_function"]
    on_host = device_type == "cuda" and not replayed
    waits = on_host and is_of_the_host([*graph.nodes, *beside])
    feed = SimpleNamespace(tf32=tf32, graph=graph, is_replayed=replayed)
    given = {"device_type": device_type, "autocast": autocast, "feed": feed}
    given["taken"] = dict.fromkeys(computing, 1)
    given["turning"] = list(filter(turns_tokens, graph.nodes))
    given |= {"needing": set(computing), "computes": set(computing).__contains__}
    nears = on_host and nears_the_host([*graph.nodes, *beside], True)
    cut = SimpleNamespace(waits_for_host=waits, nears_host_in_16_bits=nears, **given)
    return pays_in_few_bits(cut, computing)


@pytest.mark.parametrize(("rows", "width", "is_host"), [(512, 768, True), (16384, 4096, False)])
def test_a_step_is_the_hosts_or_the_gpus(rows, width, is_host):
    graph = graph_of(Block(width), rows, width)
    assert is_of_the_host(graph.nodes) == is_host
    assert chosen(graph) == (not is_host)  # of four operators


def test_a_network_decides_for_its_parts():
    few, many = (graph_of(Block(768), rows, 768) for rows in (512, 32768))
    assert chosen(many) and not chosen(many, beside=list(few.nodes) * 40)


def test_a_region_of_more_operators_relieves_the_host_in_16_bits():
    graph = graph_of(nn.Sequential(Block(64), Block(64)), 32, 64)
    assert is_of_the_host(graph.nodes) and chosen(graph)
    assert not chosen(in_fp32(graph), tf32=True)


class Normed(nn.Module):
    def __init__(self, width, drops):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.drop = nn.Dropout(0.0) if drops else nn.Identity()

    def forward(self, x):
        return self.norm(x + self.drop(self.linear(x)))


@pytest.mark.parametrize("drops", [False, True])
def test_around_a_norm_fewer_do_and_fewest_where_autocast_casts(drops):
    graph = graph_of(Normed(64, drops), 32, 64)  # three operators: a rate of zero drops nothing
    assert not chosen(graph, autocast=True)
    four = graph_of(nn.Sequential(Normed(64, drops), nn.ReLU()), 32, 64)
    assert chosen(four, autocast=True) and not chosen(four)
    assert chosen(graph_of(nn.Sequential(Normed(64, drops), nn.ReLU(), nn.ReLU()), 32, 64))


def test_a_plain_product_in_halves_is_pytorchs_on_any_device():
    graph = graph_of(nn.Linear(4096, 4096), 16384, 4096)
    assert not chosen(graph) and not chosen(graph, "cpu")


def in_fp32(graph: torch.fx.Graph) -> torch.fx.Graph:
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = node.meta["val"].float()
    return graph


def test_on_a_cpu_and_in_fp32_it_is_taken():
    graph = graph_of(Block(768), 512, 768)
    assert chosen(graph, "cpu")
    assert chosen(in_fp32(graph))


def test_tf32_is_as_fast_that_the_host_decides():
    few, many = (in_fp32(graph_of(Block(768), rows, 768)) for rows in (512, 32768))
    assert not chosen(few, tf32=True) and chosen(many, tf32=True)
    assert chosen(few, "cpu", tf32=True)
    assert chosen(few, tf32=True, replayed=True)


def test_a_lone_product_of_tf32_must_gain_what_its_region_takes_of_the_host():
    few, many = (in_fp32(graph_of(nn.Linear(512, 10000), rows, 512)) for rows in (4096, 16384))
    assert not chosen(few, tf32=True) and chosen(many, tf32=True)
    assert chosen(few)


@pytest.mark.parametrize(("width", "is_chosen"), [(768, False), (8192, True)])
def test_a_product_of_tf32_and_one_operator_must_gain_the_rest_of_that(width, is_chosen):
    module = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
    graph = in_fp32(graph_of(module, 2048, width))
    beside = in_fp32(graph_of(Block(4096), 16384, 4096)).nodes  # which keeps the GPU busy
    assert chosen(graph, beside=beside, tf32=True) == is_chosen
    assert chosen(graph, "cpu", tf32=True)


class Mixing(nn.Module):
    """Tokens, turned, through a product, and back, so many times."""

    def __init__(self, turns: int, width: int, tokens: int):
        super().__init__()
        self.turns, self.norm, self.a = turns, nn.LayerNorm(width), nn.Linear(tokens, tokens)

    def forward(self, x):
        for _ in range(self.turns):
            y = torch.nn.functional.gelu(self.norm(x).transpose(1, 2))
            x = x + self.a(y).permute(0, 2, 1)
        return x


def test_what_turns_tokens_again_and_again_gains_nothing_in_tf32():
    few, many = (in_fp32(graph_of(Mixing(n, 768, 1024), 64, 1024, 768)) for n in (1, 3))
    assert not is_of_the_host(many.nodes)
    assert chosen(few, tf32=True) and not chosen(many, tf32=True)
    assert chosen(many)


@pytest.mark.parametrize("added", [False, True])
def test_a_right_operand_may_lie_either_way(added):
    class Scores(nn.Module):
        def forward(self, x):
            for _ in range(5):
                turned = x.transpose(1, 2)
                scores = torch.baddbmm(x[..., :1], x, turned) if added else x @ turned
                x = torch.softmax(scores, -1) @ x
            return x

    graph = in_fp32(graph_of(Scores(), 64, 1024, 512))
    assert not is_of_the_host(graph.nodes) and chosen(graph, tf32=True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_that_lie_innermost_are_not_turned(channels_last):
    """A ConvNeXt's blocks, between convolutions of either format."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a = nn.LayerNorm(96), nn.Linear(96, 96)

        def forward(self, x):
            for _ in range(4):
                y = self.a(torch.nn.functional.gelu(self.norm(x.permute(0, 2, 3, 1))))
                x = x + y.permute(0, 3, 1, 2)
            return x

    x = torch.empty(64, 96, 56, 56, device="meta", dtype=torch.bfloat16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    module = Blocks().to("meta", torch.bfloat16)
    graph = in_fp32(torch.export.export(module, (x,)).graph)
    assert any(map(turns_tokens, graph.nodes)) != channels_last
    assert chosen(graph, tf32=True) == channels_last


def test_convolutions_are_work_of_the_gpus():
    few = graph_of(nn.Conv2d(256, 256, 3), 1, 256, 14, 14)
    many = graph_of(nn.Conv2d(256, 256, 3, groups=1), 64, 256, 56, 56)
    assert is_of_the_host(few.nodes) and not is_of_the_host(many.nodes)


class Images(nn.Module):
    """Of so many equal parts, of PyTorch's operators alone."""

    def __init__(self, channels: int, parts: int):
        super().__init__()
        convs = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(parts))
        self.parts = nn.Sequential(*(nn.Sequential(conv, nn.ReLU()) for conv in convs))

    def forward(self, x):
        return self.parts(x)


def test_small_images_are_nearly_the_hosts():
    small, large = (in_fp32(graph_of(Images(64, 8), 32, 64, s, s)) for s in (14, 112))
    assert nears_the_host(small.nodes, True) and not nears_the_host(large.nodes, True)


def test_what_few_operators_gain_in_16_bits_is_not_seen_beside_small_images():
    """Which take the GPU somewhat longer than the host."""
    small, large = (list(graph_of(Images(128, 8), 48, 128, s, s).nodes) for s in (26, 112))
    four, eight = (graph_of(nn.Sequential(*[Block(64)] * times), 64, 64) for times in (1, 2))
    assert nears_the_host(small, True) and not is_of_the_host([*four.nodes, *small])
    assert not chosen(four, beside=small) and chosen(eight, beside=small)
    assert chosen(four, beside=large)


def test_convolutions_of_fp32_take_the_gpu_longer():
    images = in_fp32(graph_of(Images(256, 8), 32, 256, 14, 14))
    assert nears_the_host(images.nodes, True) and not nears_the_host(images.nodes, False)
    for tf32, autocast in ((True, False), (False, True), (False, False)):
        feed = SimpleNamespace(graph=images, tf32=tf32)
        cut = SimpleNamespace(feed=feed, autocast=autocast, _has_host=True)
        assert Cut.nears_host.func(cut) == (tf32 or autocast)


def test_only_networks_of_images_are_told_to_be_nearly_the_hosts():
    block = in_fp32(graph_of(Block(64), 16, 64))
    assert not nears_the_host(block.nodes, True)


# Guards --------------------------------------------------------------------------------------


def network(rows: int, width: int, modules: int = 40, **of_cut) -> SimpleNamespace:
    """A cut of a block as a network of so many modules has it, all of it taken."""
    graph = in_fp32(graph_of(Block(width), rows, width))
    computing = [node for node in graph.nodes if node.op == "call_function"]
    for number in range(modules):
        computing[number % len(computing)].meta.setdefault("nn_module_stack", {})[str(number)] = ""
    feed = SimpleNamespace(graph=graph, tf32=of_cut.pop("tf32", False), is_replayed=False)
    given = {"taken": dict.fromkeys(computing, 0), "device_type": "cuda", "gradients": False}
    few_bits = {"multiplies_in_few_bits": feed.tf32, "nears_host": False}
    return SimpleNamespace(feed=feed, **{**given, **few_bits, **of_cut})


def test_a_network_is_taken_where_it_gains_more_than_guards_cost():
    assert not pays_for_guards(network(16, 64))
    assert pays_for_guards(network(4096, 1024))


def test_products_of_no_region_gain_too():
    assert pays_for_guards(network(4096, 1024, taken={}))
    assert pays_for_guards(network(4096, 1024, taken={}, tf32=True))  # nothing there to leave


def test_guards_cost_more_where_the_host_is_waited_for():
    assert pays_for_guards(network(2048, 256))
    assert not pays_for_guards(network(2048, 256, nears_host=True))


def test_few_modules_have_few_guards():
    assert pays_for_guards(network(16, 64, modules=8))
    assert pays_for_guards(network(16, 64, device_type="cpu"))


def test_chains_alone_must_save_enough():
    def chain(rows: int) -> SimpleNamespace:
        cut = network(rows, 1024)
        taken = {n: 0 for n in cut.taken if "gelu" in str(n.target) or "add" in str(n.target)}
        return SimpleNamespace(**{**vars(cut), "taken": taken, "multiplies_in_few_bits": True})

    assert not pays_for_guards(chain(256)) and pays_for_guards(chain(65536))


class Added(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x + x.detach())


class HandRMS(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def chain_pays(norm: nn.Module, rows: int, is_host: bool, **of_cut) -> bool:
    graph = in_fp32(graph_of(Added(norm), rows, 1024))
    computing = [node for node in graph.nodes if node.op == "call_function"]
    chain = [node for node in computing if "detach" not in node.name]
    feed = SimpleNamespace(graph=graph, tf32=False, trains_chains=True, is_replayed=False)
    given = {"device_type": "cuda", "gradients": True, "waits_for_host": is_host}
    given["multiplies_in_few_bits"] = True
    whole = {"needing": set(graph.nodes), "computes": lambda node: node in chain}
    return token_chains.pays(SimpleNamespace(feed=feed, **{**given, **whole, **of_cut}), chain)


def test_a_chain_of_tokens_must_relieve_the_host_or_save_bytes():
    few, many = nn.LayerNorm(1024), HandRMS()
    assert not chain_pays(few, 65536, True) and chain_pays(many, 64, True)
    assert not chain_pays(few, 65536, False) and chain_pays(many, 65536, False)
    for other in ({"device_type": "cpu"}, {"gradients": False}, {"multiplies_in_few_bits": False}):
        assert not chain_pays(many, 65536, True, **other)
