"""What is measured of one network: a row for each setting and mode (time_networks.py)."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import ingot
import torch
from ingot.bench.rounds import compare
from ingot.live.recording import Recording
from measures import short_rounds
from network_calls import SEED, Call, CapturedCall, tensors_of
from networks import Network
from row_table import COMPILE, EAGER, INGOT, times_of
from torch import nn
from torch.utils import _pytree as pytree
from turns import Turns

# An error may be this many times eager's own of that tensor, or the median of eager's over all.
FACTOR = 4.0
# By setting. bf16: by autocast; bf16_weights: modules and inputs of that dtype, as language models
# are tuned.
ROUNDING = {"fp32": 2e-6, "tf32": 5e-4, "bf16": 5e-3, "bf16_weights": 5e-3}
# A tensor this much smaller than the others holds rounding alone: the gradient of a bias in front
# of a batch norm, the mean of what another norm has centred.
NOTHING = 1e-9
KINDS = ("output", "gradient", "buffer")
# Calls until one is replayed: those that are counted, and the one that is recorded.
_BEFORE_A_REPLAY = 5


@dataclass(frozen=True)
class Options:
    device: torch.device
    small: bool
    rounds: int
    budget_s: float
    compiled: bool
    turns: Turns
    times: int = 1
    graphs: bool = False
    reduced: bool = False

    @property
    def how(self) -> str | None:
        """The mode of Ingot's and torch.compile's calls."""
        return "reduce-overhead" if self.reduced else None


@contextlib.contextmanager
def under(setting: str) -> Iterator[None]:
    """PyTorch's switches for a setting; autocast is each call's own."""
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if setting == "tf32" else "highest")
    cudnn.allow_tf32 = setting == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def without_randomness(module: nn.Module) -> bool:
    """Sets every rate of dropout to zero; whether there was one."""
    found = False
    for part in module.modules():
        for name, value in list(vars(part).items()):
            rate = "drop" in name or (name == "p" and "Drop" in type(part).__name__)
            rate = rate or (name == "p" and "Stochastic" in type(part).__name__)
            if rate and isinstance(value, float) and value > 0:
                setattr(part, name, 0.0)
                found = True
    return found


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The relative Frobenius error; infinite where NaN differs, or integers do."""
    if not truth.is_floating_point():
        return 0.0 if torch.equal(found.to(truth.dtype), truth) else float("inf")
    a, b = found.double(), truth.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return ((a - b).norm() / (b.norm() + 1e-300)).item()


def errors(found: dict, truth: dict) -> dict[str, float]:
    return {name: relative(found[name], truth[name]) for name in truth if name in found}


def matter(truth: dict) -> dict:
    """Without tensors that hold rounding alone."""
    size = {
        name: tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0
        for name, tensor in truth.items()
    }
    largest = {
        kind: max((s for name, s in size.items() if name.startswith(kind)), default=0.0)
        for kind in KINDS
    }
    return {
        name: tensor
        for name, tensor in truth.items()
        if not size[name] <= NOTHING * largest[name.partition(" ")[0]]
        or not tensor.is_floating_point()
        or name.startswith("output")
    }


def judge(found: dict, expected: dict, truth: dict, setting: str) -> tuple[str, float, float]:
    """What is wrong ("" if nothing is), the worst error, and eager's worst."""
    if set(found) != set(expected):
        differing = sorted(set(found) ^ set(expected))
        return f"only one of the two has {', '.join(differing[:4])}", float("inf"), 0.0
    for name, tensor in expected.items():
        if (tensor.shape, tensor.dtype) != (found[name].shape, found[name].dtype):
            return f"{name} is {found[name].dtype} {tuple(found[name].shape)}", float("inf"), 0.0
    judged = matter(truth)
    own, eager = errors(found, judged), errors(expected, judged)
    wrong = []
    for kind in KINDS:
        known = [e for name, e in eager.items() if name.startswith(kind)]
        typical = median(known) if known else 0.0
        for name, error in own.items():
            if name.startswith(kind):
                allowed = FACTOR * max(eager[name], typical) + ROUNDING[setting]
                if not error <= allowed:
                    wrong.append(f"{name}: error {error:.1e}, eager's {eager[name]:.1e}")
    said = "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    return said, max(own.values()), max(eager.values())


def fill_zeros(module: nn.Module) -> None:
    """Draws what is built as zeros, last layers above all: behind these every result is right."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(0.0, 0.02)


def batch_of(network: Network, options: Options) -> tuple | dict:
    parts = [network.inputs(options.small) for _ in range(options.times)]
    return pytree.tree_map(lambda *tensors: torch.cat(tensors), *parts)


class Subject:
    """A network in a mode: modules of equal weights, inputs, and what fp64 gives."""

    def __init__(self, network: Network, mode: str, options: Options, seed: int = SEED):
        torch.manual_seed(seed)
        self.network, self.mode, self.device = network, mode, options.device
        module = network.build(options.small).train(mode == "training").to(options.device)
        fill_zeros(module)
        given = batch_of(network, options)
        self.inputs = pytree.tree_map(lambda t: t.to(options.device), given)
        self.as_built, self.silent = module, copy.deepcopy(module)
        self.is_random = without_randomness(self.silent) and mode == "training"
        exact = copy.deepcopy(self.silent).double()
        wide = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, self.inputs)
        self.weights: list | None = None
        if mode == "training":
            shapes = Call("training", "fp32", wide).run(copy.deepcopy(exact))
            self.weights = [torch.randn(s.shape, device=s.device) for s in shapes]
        self.truth = {
            name: tensor.detach().clone()
            for name, tensor in Call(mode, "fp32", wide, self.weights).everything(exact).items()
        }

    def call(self, setting: str, graphs: bool = False) -> Call:
        """graphs: that CUDA graphs replay."""
        kind = CapturedCall if graphs else Call
        return kind(self.mode, setting, self.inputs, self.weights)

    def copied(self, setting: str, silent: bool = False) -> nn.Module:
        """silent: without dropout."""
        module = copy.deepcopy(self.silent if silent else self.as_built)
        return module.bfloat16() if setting == "bf16_weights" else module


def seconds_of(call: Callable, device: torch.device) -> tuple[Any, float]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begun = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - begun


def peak_bytes(call: Callable, device: torch.device) -> int | None:
    """Over what was held before the call."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def taken_by(module: ingot.OptimizedModule) -> dict:
    """What Ingot runs of the graphs that were captured, and what it says of the rest."""
    graphs = [g for g in module._ingot.graphs if g.compiled is not None]
    regions = [region for g in graphs for region in g.compiled.captured.regions]
    left = Counter(item.what for g in graphs for item in g.compiled.captured.unsupported)
    return {
        "graphs": len(module._ingot.graphs),
        "problems": [g.problem for g in module._ingot.graphs if g.problem],
        "regions": len(regions),
        "operators": sum(len(region.operators) for region in regions),
        "left_steps": sum(
            len(g.compiled.captured.steps) - len(g.compiled.captured.regions) for g in graphs
        ),
        "left": dict(left.most_common(8)),
    }


def allow_modes() -> None:
    """Also those that are not offered yet."""
    os.environ["INGOT_MODES"] = "all"


def optimised(module: nn.Module, folder: str, how: str | None = None) -> ingot.OptimizedModule:
    return ingot.optimize(module, options={"cache_dir": folder, "mode": how})


def recorded_call(call: Call, made: nn.Module, twin: nn.Module) -> dict:
    """What a call gives that is replayed, behind those before it that were not. twin: a module that
    was not called."""
    for _ in range(_BEFORE_A_REPLAY):
        call.run(made)
    for buffer, before in zip(made.buffers(), twin.buffers(), strict=True):
        buffer.copy_(before)
    return call.everything(made)


def check(subject: Subject, setting: str, folder: str, options: Options) -> tuple[dict, nn.Module]:
    """Results against fp64, and how long the first call took; the module that was optimised."""
    graphs, reduced = options.graphs, options.reduced
    call, device = subject.call(setting, graphs), subject.device
    torch._dynamo.reset()
    expected = subject.call(setting).everything(subject.copied(setting, silent=True))
    made = optimised(subject.copied(setting, silent=True), folder, options.how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, seconds = seconds_of(lambda: call.everything(made), device)
        if reduced:
            found = recorded_call(call, made, subject.copied(setting))
    wrong, error, eager_error = judge(found, expected, subject.truth, setting)
    row = {
        "first_call_s": round(seconds, 2),
        "error": error,
        "eager_error": eager_error,
        "wrong": wrong,
        "warnings": sorted({str(w.message).splitlines()[0][:200] for w in said}),
        **taken_by(made),
    }
    if subject.is_random:
        made = optimised(subject.copied(setting), folder, options.how)
        if reduced:
            recorded_call(call, made, subject.copied(setting))
        if graphs:  # which draw numbers of their own
            return row, made
        row["wrong"] = wrong or same_random_numbers(subject, call, made, eager_error, setting)
    return row, made


def again(subject: Subject, setting: str, folder: str, options: Options) -> str:
    """What is wrong with other weights and inputs: of a few units of a ReLU at zero, rounding puts
    one on the other side now and then, eager's or ours."""
    other = Subject(subject.network, subject.mode, options, SEED + 1)
    return check(other, setting, folder, options)[0]["wrong"]


def same_random_numbers(subject, call: Call, made, eager_error: float, setting: str) -> str:
    """With dropout, from the same seed: as near to eager as both are to the truth without, or to
    what PyTorch itself computes of the graph that TorchDynamo captures. A forward may ask whether
    it is being captured, and take another attention then, which draws other numbers."""
    found, differences = call.everything(made), []
    limit = 2 * FACTOR * eager_error + ROUNDING[setting]
    for captured in (False, True):
        twin = subject.copied(setting)
        expected = call.everything(twin, torch.compile(twin, backend="eager") if captured else None)
        outputs = {k: v for k, v in matter(expected).items() if k.startswith("output")}
        difference = max(errors(found, outputs).values(), default=0.0)
        if difference <= limit:
            return ""
        differences.append(f"{difference:.1e}")
    return f"with dropout it differs by {' (captured: '.join(differences)}) from eager"


def replays_of(call: Callable) -> int:
    """Recordings that one call replays."""
    counted, forward = [0], Recording.forward

    def counting(*arguments: Any) -> Any:
        counted[0] += 1
        return forward(*arguments)

    Recording.forward = counting
    try:
        call()
    finally:
        Recording.forward = forward
    return counted[0]


def contenders(subject: Subject, setting: str, made: nn.Module, options: Options) -> dict:
    """What is timed, by name; torch.compile's is called once, so that it compiles here."""
    call = subject.call(setting, options.graphs)
    eager = subject.copied(setting)
    named: dict = {
        EAGER: lambda i: call.run(eager),
        INGOT: lambda i: call.run(made),
    }
    if options.compiled:
        twin = subject.copied(setting)
        compiled = torch.compile(twin, dynamic=False, mode=options.how)
        named[COMPILE] = lambda i: call.run(twin, compiled)
        for _ in range(_BEFORE_A_REPLAY if options.reduced else 1):
            named[COMPILE](0)
    return named


def timed(named: dict, options: Options) -> dict:
    device = options.device
    peaks = {name: peak_bytes(lambda f=f: f(0), device) for name, f in named.items()}
    few = min(7, options.rounds)
    rounds = short_rounds(
        options.rounds, options.budget_s, fewest=few, calls=3, rest_s=0.02, apart=True
    )
    comparison = compare(named, device, rounds)
    return {
        **times_of(comparison, named),
        "eager_peak_bytes": peaks[EAGER],
        "compile_peak_bytes": peaks.get(COMPILE),
        "peak_bytes": peaks[INGOT],
    }


def row_of(subject: Subject, setting: str, options: Options) -> dict:
    with under(setting), tempfile.TemporaryDirectory() as folder:
        with options.turns.beside_others():
            row, made = check(subject, setting, folder, options)
            if row["wrong"]:
                row["wrong"] = again(subject, setting, folder, options) and row["wrong"]
            named = contenders(subject, setting, made, options) if options.rounds else {}
        if named:
            with options.turns.alone():
                row |= timed(named, options)
                if options.reduced:
                    row["replays"] = replays_of(lambda: named[INGOT](0))
    row["shape"] = " ".join("×".join(map(str, t.shape)) for t in tensors_of(subject.inputs))
    row["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return row
