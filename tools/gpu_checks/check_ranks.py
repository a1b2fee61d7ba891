"""Networks that several GPUs train together: DDP, FSDP2, tensor parallel, SyncBatchNorm.

python check_ranks.py [--ranks 2] [--no-timing] [WAY ...]

A process a GPU, over NCCL. Each way of tests/python/distributed_runs.py (default: all) by PyTorch
alone and through Ingot: the same losses and state, and what Ingot is to run is run by it. Then the
ranks tune the same products with an empty cache, all at once, and give the same bits. Last the
time of a training step and its peak memory, PyTorch's and Ingot's in turns. With one GPU it says
so and passes. Prints a line a case; exit status 1 where something differs.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in ("python", "tests/python"):
    sys.path.insert(0, str(ROOT / folder))

import distributed_runs as runs  # noqa: E402
import ingot  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ingot.live.backend import ingot_backend  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

ROWS, WIDTH, DEPTH = 8192, 2048, 6
ROUNDS, STEPS = 5, 6


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(DEPTH)))


def by_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def by_fsdp(model: nn.Sequential) -> nn.Module:
    for part in (*model, model):
        fully_shard(part, mesh=runs.mesh())
    return model


SHARED = {"DDP": by_ddp, "FSDP2": by_fsdp}


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def check_ways(rank: int, ways: list[str]) -> int:
    failures = 0
    for way in ways:
        found = runs.run(way, rank, runs.GPU_WAYS)
        try:
            runs.judge(found)
            say(rank, f"{way}: the same, {found['regions']} regions")
        except AssertionError as error:
            failures += 1
            say(rank, f"{way}: DIFFERS: {str(error)[:1500]}")
    return failures


def check_bits(rank: int) -> int:
    """Ranks that tune at the same moment must choose alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1536, 1024), nn.BatchNorm1d(1024), nn.GELU())
    x = torch.randn(2048, 1536)
    ours = ingot.optimize(model)
    found = [ours(x).detach(), *(b.double() for b in model.buffers())]
    ours(x).square().mean().backward()
    found += [p.grad for p in model.parameters()]
    same = True
    for tensor in found:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        same = same and all(torch.equal(other, others[0]) for other in others)
    say(rank, f"bits of all ranks: {'the same' if same else 'DIFFER'}")
    return 0 if same else 1


def stepping(shared: Callable, model: nn.Module) -> Callable[[], None]:
    network = shared(model)
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-4)
    x, wanted = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def step() -> None:
        nn.functional.mse_loss(network(x), wanted).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def milliseconds(step: Callable) -> list[float]:
    found = []
    for _ in range(STEPS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return found[1:]


def time_steps(rank: int) -> int:
    slower = 0
    for name, shared in SHARED.items():
        steps = {
            "PyTorch": stepping(shared, perceptron()),
            "Ingot": stepping(shared, ingot.optimize(perceptron())),
        }
        times: dict = {who: [] for who in steps}
        memory = {}
        for step in steps.values():
            for _ in range(3):
                step()
        for _ in range(ROUNDS):
            for who, step in steps.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                times[who] += milliseconds(step)
                memory[who] = torch.cuda.max_memory_allocated() - before
        medians = {who: statistics.median(values) for who, values in times.items()}
        ratio = medians["PyTorch"] / medians["Ingot"]
        slower += ratio < 0.98
        say(
            rank,
            f"{name}, a step of {DEPTH} residual blocks {WIDTH}-{4 * WIDTH}, {ROWS} rows a rank: "
            f"PyTorch {medians['PyTorch']:.2f} ms, Ingot {medians['Ingot']:.2f} ms, {ratio:.2f} x; "
            f"memory above the model {memory['PyTorch'] >> 20} and {memory['Ingot'] >> 20} MB",
        )
        del steps
        torch.cuda.empty_cache()
    return slower


def rank_of(rank: int, ranks: int, port: int, ways: list[str], timing: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.set_default_device(torch.device("cuda", rank))
    dist.init_process_group(
        "nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    if "ingot" not in torch._dynamo.list_backends():  # run from the sources, not installed
        torch._dynamo.register_backend(ingot_backend, name="ingot")
    failures = check_bits(rank) + check_ways(rank, ways)
    if timing:
        failures += time_steps(rank)
    dist.destroy_process_group()
    sys.exit(1 if failures else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(runs.GPU_WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-timing", action="store_true")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.ways) - set(runs.GPU_WAYS))
    if unknown:
        parser.error(f"no such way: {', '.join(unknown)}")
    if torch.cuda.device_count() < arguments.ranks:
        print(f"{torch.cuda.device_count()} GPUs here: nothing to check")
        return 0
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["INGOT_CACHE_DIR"] = cache  # shared by the ranks, and empty
        try:
            torch.multiprocessing.start_processes(
                rank_of,
                (
                    arguments.ranks,
                    port,
                    arguments.ways or list(runs.GPU_WAYS),
                    not arguments.no_timing,
                ),
                nprocs=arguments.ranks,
                start_method="spawn",
            )
        except torch.multiprocessing.ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
