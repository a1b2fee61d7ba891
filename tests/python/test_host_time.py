"""Which products in 16 bits are taken where gradients are needed: where the GPU, not the host, is
what a step waits for."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from ingot.capture.host_time import is_of_the_host, pays_in_halves
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


def chosen(graph: torch.fx.Graph, device_type: str = "cuda", beside: Sequence = ()) -> bool:
    """beside: what the graph holds besides."""
    computing = [node for node in graph.nodes if node.op == "call_function"]
    of_the_host = is_of_the_host([*graph.nodes, *beside])
    cut = SimpleNamespace(is_of_the_host=of_the_host, device_type=device_type)
    return pays_in_halves(cut, computing)


@pytest.mark.parametrize(("rows", "width", "is_host"), [(512, 768, True), (16384, 4096, False)])
def test_a_step_is_the_hosts_or_the_gpus(rows, width, is_host):
    graph = graph_of(Block(width), rows, width)
    assert is_of_the_host(graph.nodes) == is_host
    assert chosen(graph) == (not is_host)


def test_a_network_decides_for_its_parts():
    few, many = (graph_of(Block(768), rows, 768) for rows in (512, 32768))
    assert chosen(many) and not chosen(many, beside=list(few.nodes) * 40)


def test_a_plain_product_in_halves_is_pytorchs_on_any_device():
    graph = graph_of(nn.Linear(4096, 4096), 16384, 4096)
    assert not chosen(graph) and not chosen(graph, "cpu")


def test_on_a_cpu_and_in_fp32_it_is_taken():
    graph = graph_of(Block(768), 512, 768)
    assert chosen(graph, "cpu")
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = torch.empty(node.meta["val"].shape, device="meta")
    assert chosen(graph)
