"""Two processes train a network in ways that people share one, by PyTorch alone and through Ingot.

    python distributed_runs.py PORT WAY...

Prints a line of JSON a way: {"way", "results": of eager and of Ingot, "regions", "warnings"}.
On GPUs tools/gpu_checks/check_ranks.py does the same.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable

import ingot
import torch
import torch._dynamo
import torch.distributed as dist
from live import regions_run
from random_agreement import by_compile
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
GPU_SCALE = 8  # of widths and rows on a GPU, where smaller products are PyTorch's


def scale() -> int:
    return GPU_SCALE if torch.get_default_device().type == "cuda" else 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        thin, wide = 64 * scale(), 128 * scale()
        self.a, self.norm, self.b = (
            nn.Linear(thin, wide),
            nn.BatchNorm1d(wide),
            nn.Linear(wide, thin),
        )

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.norm(self.a(x))) * 0.5)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(64 * scale(), 32)

    def forward(self, x):
        return torch.log_softmax(self.head(self.second(self.first(x))) * 2, 1)


def mesh() -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def sharded(model: Network, **options) -> Network:
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh(), **options)
    return model


def in_half(model: Network) -> Network:
    # PyTorch's batch norm takes no bf16 weights beside fp32 statistics.
    wide = 128 * scale()
    model.first.norm, model.second.norm = nn.LayerNorm(wide), nn.LayerNorm(wide)
    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def split(model: Network) -> Network:
    plan = {f"{name}.a": ColwiseParallel() for name in ("first", "second")}
    plan |= {f"{name}.b": RowwiseParallel() for name in ("first", "second")}
    # A batch norm of split features would need its statistics split as well.
    model.first.norm = model.second.norm = nn.Identity()
    return parallelize_module(model, mesh(), plan)


class SumOfRanks(nn.Module):
    """Of their rows, by a DTensor that is made and taken apart between plain layers."""

    def __init__(self):
        super().__init__()
        self.mesh = mesh()

    def forward(self, x):
        rows = DTensor.from_local(x, self.mesh, [Shard(0)])
        first, second = rows.redistribute(self.mesh, [Replicate()]).to_local().chunk(RANKS)
        return first + 0.5 * second


def gathered(model: Network) -> Network:
    model.first.norm = nn.Sequential(model.first.norm, SumOfRanks())
    return model


def synchronised(model: Network) -> DistributedDataParallel:
    """PyTorch's batch norm of all ranks' rows; it wants a GPU."""
    return DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))


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
    "optimized with DTensors inside": (gathered, lambda m: ingot.optimize(gathered(m))),
}
GPU_WAYS = WAYS | {
    "optimized ddp with SyncBatchNorm": (synchronised, lambda m: ingot.optimize(synchronised(m))),
    "ddp of optimized with SyncBatchNorm": (
        synchronised,
        lambda m: DistributedDataParallel(
            ingot.optimize(nn.SyncBatchNorm.convert_sync_batchnorm(m))
        ),
    ),
}


def train(model: nn.Module, rank: int, same: bool) -> list[float]:
    """Losses of steps that gather two gradients each, a sum in eval mode, a sum of the state."""
    torch.manual_seed(0 if same else rank)
    found = []
    # On GPUs it would add tensors and tensor-parallel ones in one call, which PyTorch refuses.
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for _ in range(3):
        for last in (False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            rows, thin = 16 * scale(), 64 * scale()
            x, wanted = torch.randn(rows, thin), torch.randint(0, 32, (rows,))
            loss = nn.functional.nll_loss(model(x).float(), wanted) / 2
            loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        found.append(loss.item())
    model.eval()
    with torch.no_grad():
        found.append(model(torch.randn(8 * scale(), 64 * scale())).double().abs().sum().item())
    state = model.state_dict().values()
    whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in state]
    return [*found, sum(v.double().abs().sum().item() for v in whole)]


def run(way: str, rank: int, ways: dict[str, tuple[Callable, Callable]] = WAYS) -> dict:
    results = []
    for wrap in ways[way]:
        torch.manual_seed(0)
        with regions_run() as ran, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            results.append(train(wrap(Network()), rank, same="tensor" in way))
        torch._dynamo.reset()
    told = [str(w.message) for w in said if issubclass(w.category, ingot.IngotWarning)]
    return {"way": way, "results": results, "regions": len(ran), "warnings": told}


def judge(found: dict) -> None:
    """Of `run`: the same losses and state, and Ingot ran what it should."""
    eager, ours = (torch.tensor(r, dtype=torch.float64, device="cpu") for r in found["results"])
    tolerance = 2e-3 if "bf16" in found["way"] else 1e-5
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=0, msg=str(found))
    told = " ".join(found["warnings"])
    assert "fault" not in told, found
    if "tensor" in found["way"]:
        assert "DTensor" in told and not found["regions"], found
    elif "DTensors" in found["way"]:
        assert "from_local" in told and "redistribute" in told, found
        assert found["regions"] >= 7, found  # what is before and behind, in training
    else:  # both blocks and the head, in training and in eval mode
        # On a GPU a step of this size in 16 bits is the host's time: PyTorch's.
        assert found["regions"] >= (1 if scale() > 1 and "bf16" in found["way"] else 14), found


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
