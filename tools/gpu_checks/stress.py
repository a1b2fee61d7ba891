"""Many calls at once, each compared bit for bit with a first serial run of the same case.

python stress.py path/to/libingot.so [--calls 10000] [--threads 6] [--seconds 55]

Threads with several streams each run, in random order: graphs of every kind of sweep at several
batch sizes, in training and eval mode, through the library; replays of CUDA graphs captured from
them; and whole optimised modules, some shared by all threads. Outputs and workspaces are poisoned
before a call. Results are compared on the device, NaN by NaN; exit status 1 if one bit differs, 3
if time ran out before the calls were made.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from graphs import gemm_bn_scale_softmax, gemm_scale_bn, pointwise_chain, residual_layer_norm, zoo
from runner import Library, empty_results, make_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

CHECK_EVERY = 16  # calls in flight of a thread before it looks at what came out
STREAMS = 2  # of each thread
GRAPH_CASES = 4  # captured by each thread
# Of the zoo: each kind of sweep once or twice. Every graph has kernels of its own to compile.
GRAPHS = (
    "gemm_scale_bn",
    "gemm_scale_bn odd",
    "gemm_scale_bn eval",
    "gemm_bn_scale_softmax",
    "log_sum_exp",
    "argmax",
    "min columns",
    "group_norm_softmax",
    "residual_layer_norm odd",
    "channel_norm",
    "pooled",
    "two_linears",
)
MODELS = ("gemm_scale_bn", "gemm_bn_scale_softmax", "linear_gelu", "linear_layernorm")
MODEL_BATCHES = (3, 64, 257)

Tensors = list[torch.Tensor]


def larger_graphs() -> dict[str, tuple[dict, list[int]]]:
    """Sizes at which tiles are full and every multiprocessor has some."""
    return {
        "gemm_scale_bn large": (gemm_scale_bn(1024, 1536), [512, 1100]),
        "gemm_scale_bn large eval": (gemm_scale_bn(1024, 1536, training=False), [777]),
        "gemm_bn_scale_softmax large": (gemm_bn_scale_softmax(2048, 1024), [300, 1024]),
        "residual_layer_norm large": (residual_layer_norm(512, 4), [64, 333]),
        "pointwise_chain large": (pointwise_chain(4096, 1024), [16, 600]),
    }


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, so that NaN equals NaN and -0 differs from 0."""
    tensor = tensor.detach()
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def differing(got: Tensors, expected: Tensors) -> torch.Tensor:
    """How many elements differ, on the tensors' device."""
    counts = [(words(a) != words(b)).sum() for a, b in zip(got, expected, strict=True)]
    return torch.stack(counts).sum()


@dataclass
class Case:
    """call() does it once on the current stream and gives its results; `expected` are those of
    the first run."""

    name: str
    call: Callable[[], Tensors]
    expected: Tensors
    capturable: bool = False


class LibraryCase:
    """A graph at a batch size through the library; buffers start anew at every call."""

    def __init__(self, library: Library, name: str, graph: dict, batch: int, options: dict):
        self.graph, self.batch, self.device = graph, batch, options["device"]
        self.leaves = make_leaves(graph, batch, seed=batch, device=self.device)
        if "special" in name:
            self.leaves[0].flatten()[:: self.leaves[0].numel() // 7] = float("inf")
        self.program = library.program(graph, **options)
        roles = [v["op"] for v in graph["values"] if v["op"] in ("input", "parameter", "buffer")]
        self.is_buffer = [role == "buffer" for role in roles]

    def prepare(self) -> None:
        self.program.prepare(self.batch, 0 if self.device == "cuda" else -1)

    def __call__(self) -> Tensors:
        own = [t.clone() if b else t for t, b in zip(self.leaves, self.is_buffer, strict=True)]
        results = empty_results(self.graph, self.batch, self.device)
        self.program.run(self.batch, own, results, self.program.workspace(self.batch, self.device))
        return results + [t for t, b in zip(own, self.is_buffer, strict=True) if b]


def library_cases(library: Library, device: str, cache: str) -> list[Case]:
    graphs = {name: zoo()[name] for name in GRAPHS} | larger_graphs()
    graphs["gemm_scale_bn special"] = (gemm_scale_bn(96, 128), [65])
    calls = {}
    for name, (graph, batches) in graphs.items():
        for batch, precision in itertools.product(batches, ("fp32", "ieee")):
            if precision == "fp32" or (batch == batches[-1] and "large" in name):
                options = {"device": device, "precision": precision, "cache_dir": cache}
                call = LibraryCase(library, name, graph, batch, options)
                calls[f"{name}, {precision}, batch {batch}"] = call
    with ThreadPoolExecutor(8) as pool:  # most of it is compiling
        list(pool.map(LibraryCase.prepare, calls.values()))
    return [Case(name, call, call(), True) for name, call in calls.items()]


class ModuleCall:
    """One optimised module, called with its buffers as they were after construction."""

    def __init__(self, module: torch.nn.Module, inputs: Tensors):
        self.module, self.inputs = module, inputs
        self.start = [b.clone() for b in module.buffers()] if module.training else []

    def __call__(self) -> Tensors:
        if self.start:
            for buffer, value in zip(self.module.buffers(), self.start, strict=True):
                buffer.copy_(value)
        with torch.no_grad():
            out = self.module(*self.inputs)
        return [out, *(b.clone() for b in self.module.buffers())] if self.start else [out]


def optimised_modules(device: str) -> list[tuple[str, torch.nn.Module, list[Tensors]]]:
    import ingot
    from ingot.model_file import constants_of, load_model_file

    sizes = {"in_features": 512, "hidden_features": 384, "out_features": 640, "num_groups": 8}
    made = []
    for name, training in itertools.product(MODELS, (True, False)):
        path = ROOT / "examples" / f"{name}.py"
        known = constants_of(path.read_text(encoding="utf-8"), str(path))
        inputs = []
        for batch in MODEL_BATCHES:
            settings = {k: v for k, v in {**sizes, "batch_size": batch}.items() if k in known}
            loaded = load_model_file(path, settings)
            inputs.append([v.to(device) for v in loaded.make_inputs()])
        module = loaded.make_module().to(device).train(training)
        optimised = ingot.optimize(module, inputs[0], precision="fp32", device=device)
        mode = "training" if training else "eval"
        made.append((f"module {name}, {mode}", optimised, inputs))
    return made


def module_cases(modules: list) -> list[Case]:
    """What all threads share: training mode moves buffers, so it is not among them."""
    return [
        Case(f"{name}, batch {len(i[0])}", call, call())
        for name, module, inputs in modules
        if not module.training
        for i in inputs
        for call in [ModuleCall(module, i)]
    ]


def first_training_runs(modules: list) -> list[list[Tensors]]:
    """What calls of the modules in training mode give, by module and inputs."""
    results = []
    for _, module, inputs in modules:
        if module.training:
            mine = copy.deepcopy(module)
            calls = [ModuleCall(mine, i) for i in inputs]  # all begin with the same buffers
            results.append([call() for call in calls])
    return results


def own_module_cases(modules: list, expected: list[list[Tensors]]) -> list[Case]:
    """Copies of those in training mode, whose buffers move, for one thread."""
    training = [entry for entry in modules if entry[1].training]
    cases = []
    for (name, module, inputs), results in zip(training, expected, strict=True):
        mine = copy.deepcopy(module)
        for i, result in zip(inputs, results, strict=True):
            cases.append(Case(f"{name}, batch {len(i[0])}", ModuleCall(mine, i), result))
    return cases


def captured_cases(cases: list[Case], stream) -> list[Case]:
    """Replays of CUDA graphs of these cases, for one thread: results have fixed places."""
    made = []
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = case.call()
        poisons = [t for t in results if t.is_floating_point()]

        def replay(graph=graph, results=results, poisons=poisons) -> Tensors:
            for tensor in poisons:
                tensor.fill_(float("nan"))
            graph.replay()
            return [t.clone() for t in results]

        made.append(Case(f"{case.name}, captured", replay, case.expected))
    return made


class Worker:
    def __init__(self, index: int, shared: list[Case], own: list[Case], device: str, calls: int):
        self.random = random.Random(index)
        self.device, self.calls, self.done = device, calls, 0
        self.problems: list[str] = []
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)] if device == "cuda" else []
        # What keeps state between calls belongs to one stream of one thread.
        self.bound = own
        if device == "cuda":
            candidates = [case for case in shared if case.capturable]
            self.bound += captured_cases(
                self.random.sample(candidates, GRAPH_CASES), self.streams[0]
            )
        self.shared = shared

    def run(self, deadline: float) -> None:
        try:
            while self.done < self.calls and time.monotonic() < deadline:
                self.burst(min(CHECK_EVERY, self.calls - self.done))
        except Exception as failure:  # noqa: BLE001 - reported by the main thread
            self.problems.append(f"{type(failure).__name__}: {failure}")

    def burst(self, count: int) -> None:
        """Some calls on all streams, then one look at what they gave."""
        looked: list[tuple[str, torch.Tensor]] = []
        for _ in range(count):
            bound = self.random.random() < 0.3
            case = self.random.choice(self.bound if bound else self.shared)
            number = 0 if bound else self.random.randrange(STREAMS)
            stream = torch.cuda.stream(self.streams[number]) if self.streams else nullcontext()
            with stream:
                looked.append((case.name, differing(case.call(), case.expected)))
        for stream in self.streams:
            stream.synchronize()
        self.problems += [f"{name}: {int(n)} elements differ" for name, n in looked if int(n)]
        self.done += count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=55.0, help="stop before this")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    parser.add_argument("--cache", default="/tmp/ingot-check-cache")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    begun = time.monotonic()
    os.environ["INGOT_LIBRARY"] = str(Path(arguments.library).resolve())
    library = Library(os.environ["INGOT_LIBRARY"])
    modules = optimised_modules(arguments.device)
    shared = library_cases(library, arguments.device, arguments.cache) + module_cases(modules)
    expected = first_training_runs(modules)
    share = -(-arguments.calls // arguments.threads)
    workers = [
        Worker(i, shared, own_module_cases(modules, expected), arguments.device, share)
        for i in range(arguments.threads)
    ]
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    prepared = time.monotonic() - begun
    cases = len(shared) + sum(len(w.bound) for w in workers)
    print(f"{cases} cases prepared in {prepared:.1f} s", flush=True)
    threads = [
        threading.Thread(target=w.run, args=(begun + arguments.seconds,), daemon=True)
        for w in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=max(1.0, begun + arguments.seconds + 10 - time.monotonic()))
    done = sum(w.done for w in workers)
    problems = [p for w in workers for p in w.problems]
    stuck = sum(thread.is_alive() for thread in threads)
    for problem in sorted(set(problems))[:20]:
        print(problem)
    print(
        f"{done} calls by {arguments.threads} threads in {time.monotonic() - begun:.1f} s: "
        f"{len(problems)} wrong" + (f"; {stuck} threads hang" if stuck else "")
    )
    if stuck:
        sys.stdout.flush()
        os._exit(1)  # nothing waits for a thread that hangs
    if problems:
        return 1
    return 0 if done >= arguments.calls else 3


if __name__ == "__main__":
    sys.exit(main())
