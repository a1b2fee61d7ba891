"""Two processes train a network in ways that people share one, by PyTorch alone and through Ingot.

    python distributed_runs.py PORT WAY...

Prints a line of JSON a way: {"way", "results": of eager and of Ingot, "regions", "warnings"}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import ingot
import torch
import torch._dynamo
import torch.distributed as dist
from live import regions_run
from random_agreement import by_compile
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.norm(self.a(x))) * 0.5)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(64, 32)

    def forward(self, x):
        return torch.log_softmax(self.head(self.second(self.first(x))) * 2, 1)


def sharded(model: Network, **options) -> Network:
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def in_half(model: Network) -> Network:
    # PyTorch's batch norm takes no bf16 weights beside fp32 statistics.
    model.first.norm, model.second.norm = nn.LayerNorm(128), nn.LayerNorm(128)
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def split(model: Network) -> Network:
    plan = {f"{name}.a": ColwiseParallel() for name in ("first", "second")}
    plan |= {f"{name}.b": RowwiseParallel() for name in ("first", "second")}
    # A batch norm of split features would need its statistics split as well.
    model.first.norm = model.second.norm = nn.Identity()
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


def blocks(model: Network) -> Network:
    model.first, model.second = ingot.optimize(model.first), ingot.optimize(model.second)
    return model


# (by PyTorch alone, through Ingot)
WAYS = {
    "ddp of optimized": (
        DistributedDataParallel,
        lambda m: DistributedDataParallel(ingot.optimize(m)),
    ),
    "optimized ddp": (
        DistributedDataParallel,
        lambda m: ingot.optimize(DistributedDataParallel(m)),
    ),
    "compiled ddp": (DistributedDataParallel, lambda m: by_compile(DistributedDataParallel(m))),
    "static ddp": (
        DistributedDataParallel,
        lambda m: DistributedDataParallel(
            ingot.optimize(m), static_graph=True, gradient_as_bucket_view=True
        ),
    ),
    "fsdp of optimized": (sharded, lambda m: sharded(ingot.optimize(m))),
    "optimized fsdp": (sharded, lambda m: ingot.optimize(sharded(m))),
    "compiled fsdp": (sharded, lambda m: by_compile(sharded(m))),
    "fsdp of optimized blocks": (sharded, lambda m: sharded(blocks(m))),
    "optimized fsdp in bf16": (in_half, lambda m: ingot.optimize(in_half(m))),
    "optimized tensor parallel": (split, lambda m: ingot.optimize(split(m))),
}


def train(model: nn.Module, rank: int, same: bool) -> list[float]:
    """Losses of steps that gather two gradients each, a sum in eval mode, a sum of the state."""
    torch.manual_seed(0 if same else rank)
    found = []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for last in (False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            x, wanted = torch.randn(16, 64), torch.randint(0, 32, (16,))
            loss = nn.functional.nll_loss(model(x).float(), wanted) / 2
            loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        found.append(loss.item())
    model.eval()
    with torch.no_grad():
        found.append(model(torch.randn(8, 64)).double().abs().sum().item())
    state = model.state_dict().values()
    whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in state]
    return [*found, sum(v.double().abs().sum().item() for v in whole)]


def run(way: str, rank: int) -> dict:
    results = []
    for wrap in WAYS[way]:
        torch.manual_seed(0)
        with regions_run() as ran, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            results.append(train(wrap(Network()), rank, same="tensor" in way))
        torch._dynamo.reset()
    told = [str(w.message) for w in said if issubclass(w.category, ingot.IngotWarning)]
    return {"way": way, "results": results, "regions": len(ran), "warnings": told}


def rank_of(rank: int, port: str, ways: list[str]) -> None:
    # The loopback alone: a host without a name or a network has nothing else.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for way in ways:
        found = run(way, rank)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    # What takes longest is imported once: nothing has run here that a fork would leave half done.
    torch.multiprocessing.start_processes(
        rank_of, (sys.argv[1], sys.argv[2:]), nprocs=RANKS, start_method="fork"
    )
