"""`ingot.tune`: measures the configurations of a model's matrix products on this GPU, once.

Each configuration that the library names for a product (explain's "tuning") is run within the
whole compiled graph, its epilogue and what follows included, in interleaved rounds with L2 cold.
The fastest is remembered in the file that every program of this user reads when it is made. A
product that has an entry keeps it, so that its bits stay the same; `again=True` measures anew.
"""

from __future__ import annotations

import json
import os
import stat
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from ingot.runtime.library import IngotError
from ingot.runtime.program import Program
from ingot.runtime.signature import TORCH_DTYPES

FORMAT = "ingot_tuned_products"
ROUNDS = 15
BUDGET_S = 5.0  # of one product's rounds, of which there are at least FEWEST
FEWEST = 5
# What a configuration must gain on the cost model's choice: less is within the noise.
LEAST_GAIN = 0.01

# (programs by configuration, the graph's leaves) → seconds of a call by configuration.
Measure = Callable[[dict, list], dict]


@dataclass(frozen=True)
class TunedProduct:
    """choice: the configuration to use, "library" for the library's product; estimated: what the
    cost model takes; milliseconds: of the whole graph, by configuration. known: it had been
    measured before (then `milliseconds` are those of that time)."""

    key: str
    choice: str
    estimated: str
    milliseconds: dict
    known: bool = False

    @property
    def gain(self) -> float:
        """Time with the cost model's choice over time with this one."""
        times = self.milliseconds
        if self.estimated not in times or self.choice not in times:
            return 1.0
        return times[self.estimated] / times[self.choice]


def tune(
    module: nn.Module,
    example_inputs: Sequence[Any],
    *,
    precision: str | None = None,
    again: bool = False,
    options: dict | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> list[TunedProduct]:
    """Measures what `ingot.optimize(module, example_inputs)` would run on the GPU where the inputs
    are, for their batch size, and remembers it. Modules optimised later, in any process of this
    user, take what was found; those made before keep what they have. The module is not changed.

    Another configuration adds in another order: its results may differ in their last bits, within
    the promise of docs/numerics.md. Raises ValueError where the module is not on a GPU.
    """
    device = _gpu_of(module, example_inputs)
    found: list[TunedProduct] = []
    for program, batch in _programs(module, example_inputs, precision, options):
        if program.on_cuda:
            with torch.cuda.device(device):
                found += tune_program(program, batch, device, again=again, progress=progress)
    return found


def tune_program(
    program: Program,
    batch: int,
    device: torch.device,
    *,
    again: bool = False,
    progress: Callable[[str], None] = lambda message: None,
    measure: Measure | None = None,
) -> list[TunedProduct]:
    """The same for one compiled graph. measure: in the place of timing on the device."""
    found = []
    for tuning in _tunable(program, batch):
        file = Path(tuning["file"]) if tuning["file"] else None
        known = read(file).get(tuning["key"]) if file and not again else None
        if known is not None:
            found.append(_from_entry(tuning["key"], known))
            continue
        product = _measured(program, batch, device, tuning, progress, measure)
        if file is not None:
            remember(file, [product])
        found.append(product)
    return found


def _programs(module, example_inputs, precision, options) -> list[tuple[Program, int]]:
    """What the module is compiled to, with the batch size of the inputs."""
    from ingot.capture.feed import batched_inputs
    from ingot.live.module import optimize

    with torch.no_grad():
        optimized = optimize(module, example_inputs, precision=precision, options=options)
    batch = batched_inputs([v for v in example_inputs if isinstance(v, torch.Tensor)])[1]
    graphs = [g for g in optimized._ingot.graphs if g.compiled is not None]
    return [each for graph in graphs for each in graph.compiled.for_batch(batch)]


def _tunable(program: Program, batch: int) -> list[dict]:
    """What explain says of the products that have a choice."""
    sweeps = program.explain(batch)["executable"].get("sweeps", [])
    return [s["tuning"] for s in sweeps if len(s.get("tuning", {}).get("candidates", [])) > 1]


def _measured(program, batch, device, tuning, progress, measure) -> TunedProduct:
    key, programs, estimated = tuning["key"], {}, ""
    for number, name in enumerate(["estimated", *tuning["candidates"]]):
        progress(f"compiling configuration {number} of {len(tuning['candidates'])}")
        made = _with_choice(program, {key: name})
        taken = next(t for t in _tunable(made, batch) if t["key"] == key)["choice"]
        if name == "estimated":
            estimated = taken
        elif taken == name:  # otherwise this shape does not have it
            programs[name] = made
    progress(f"measuring {len(programs)} configurations")
    leaves = random_leaves(program.graph, batch, device)
    seconds = (measure or _Timing(device, batch))(programs, leaves)
    milliseconds = {name: round(s * 1e3, 5) for name, s in sorted(seconds.items())}
    best = min(milliseconds, key=milliseconds.__getitem__)
    if estimated in milliseconds:
        gain = milliseconds[estimated] / milliseconds[best] - 1
        best = best if gain > LEAST_GAIN else estimated
    return TunedProduct(key, best, estimated, milliseconds)


def _with_choice(program: Program, choices: dict) -> Program:
    """The same graph with the configuration fixed, its leaves as dense tensors of four axes."""
    return Program(
        program.graph,
        device=program.device,
        precision=program.precision,
        result_layouts=program.result_layouts,
        options={**program.options, "product_choices": choices},
    )


def random_leaves(graph: dict, batch: int, device: torch.device) -> list[torch.Tensor]:
    """Tensors like a model's: zeros would be multiplied faster than real data."""
    generator = torch.Generator(device).manual_seed(0)
    leaves = []
    for value in graph["values"]:
        if value["op"] not in ("input", "parameter", "buffer"):
            continue
        shape = [batch if extent == "B" else extent for extent in value["shape"]]
        dtype = TORCH_DTYPES[value["dtype"]]
        if dtype.is_floating_point:
            tensor = torch.rand(shape, generator=generator, device=device)
            if value["op"] == "parameter" and tensor.numel() > max(shape):
                tensor = (2 * tensor - 1) / max(1, shape[3]) ** 0.5
            leaves.append(tensor.to(dtype))
        else:
            leaves.append(torch.zeros(shape, dtype=dtype, device=device))
    return leaves


class _Timing:
    """Seconds of a call of each program, the median over interleaved rounds."""

    def __init__(self, device: torch.device, batch: int):
        self.device, self.batch = device, batch

    def __call__(self, programs: dict, leaves: list) -> dict:
        from ingot.bench.timers import timer_for

        timer = timer_for(self.device)
        seconds: dict[str, list] = {name: [] for name in programs}
        for program in programs.values():
            program.prepare(self.batch, self.device.index or 0)
            program.run(leaves)
        begun, names = time.monotonic(), list(programs)
        for number in range(ROUNDS):
            if number >= FEWEST and time.monotonic() - begun > BUDGET_S:
                break
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                call = programs[name].run
                seconds[name] += timer.time_calls(lambda _, call=call: call(leaves), 1, True)
        return {name: median(values) for name, values in seconds.items()}


def _gpu_of(module: nn.Module, example_inputs: Sequence[Any]) -> torch.device:
    tensors = [v for v in (*example_inputs, *module.parameters()) if isinstance(v, torch.Tensor)]
    devices = {t.device for t in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        where = ", ".join(sorted(map(str, devices))) or "nowhere"
        raise ValueError(
            f"ingot.tune measures on a GPU, but module and inputs are on {where}: move both to one"
        )
    return next(iter(devices))


# The file -----------------------------------------------------------------------------------------


def read(file: Path) -> dict:
    """Entries by key; none where the file is absent, damaged or of another format."""
    try:
        content = json.loads(_private_text(file))
        if content[FORMAT] != 1:
            return {}
        return {k: v for k, v in content["products"].items() if isinstance(v.get("choice"), str)}
    except FileNotFoundError:
        return {}
    except OSError as problem:
        warnings.warn(f"ingot: {file} is not used: {problem}", stacklevel=2)
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        warnings.warn(f"ingot: {file} is damaged; what was tuned before is lost", stacklevel=2)
        return {}


def _private_text(file: Path) -> str:
    """Of a file that nobody but this user can have written: the library reads no other."""
    with open(
        os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8"
    ) as opened:
        about = os.fstat(opened.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError("another user may have written it")
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is no plain file")
        return opened.read()


def remember(file: Path, products: Sequence[TunedProduct]) -> None:
    """Adds entries. Several processes may do so at once; a reader sees the old text or the new."""
    from filelock import FileLock

    from ingot.bench.records import write_whole

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=30):
            entries = read(file)
            for product in products:
                entry = asdict(product)
                del entry["key"], entry["known"]
                entry["date"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                entries[product.key] = entry
            content = {FORMAT: 1, "products": dict(sorted(entries.items()))}
            write_whole(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except OSError as problem:
        raise IngotError(f"what was tuned cannot be kept in {file}: {problem}") from problem


def _from_entry(key: str, entry: dict) -> TunedProduct:
    times = entry.get("milliseconds")
    times = times if isinstance(times, dict) else {}
    return TunedProduct(key, entry["choice"], str(entry.get("estimated", "")), times, known=True)
