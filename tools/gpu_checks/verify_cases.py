"""Candidates for check_verify.py: honest ones, and dishonest ones with the name that verify must
give to their trick. Most need a GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python"))

from verify_model import candidate, method, original  # noqa: E402

# Large enough that a product lasts longer than the copy of its result.
ORIGINAL = original(1024, 2048, 2048)


@dataclass(frozen=True)
class Case:
    """body: of forward. trick: the name that is expected, "" for a candidate that passes. timed:
    timing is part of it. hostile: so are the hostile families."""

    body: str
    trick: str = ""
    timed: bool = False
    hostile: bool = False
    time_limit_s: float = 60.0


_GRAPH = """
if torch.is_grad_enabled():
    return self.plain(x)
key = (tuple(x.shape), self.training, *(p.data_ptr() for p in self.state_dict().values()))
if key not in self.kept:
    saved = [b.clone() for b in self.bn.buffers()]
    static = {static}
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.plain(static)
        torch.cuda.current_stream().wait_stream(side)
    finally:
        for b, s in zip(self.bn.buffers(), saved):
            b.copy_(s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = self.plain(static)
    self.kept[key] = (graph, static, result)
graph, static, result = self.kept[key]
{copy}
graph.replay()
return result.clone()
"""

_OTHER_STREAM = """
if "side" not in self.kept:
    self.kept["side"] = torch.cuda.Stream()
side, here = self.kept["side"], torch.cuda.current_stream()
{before}
with torch.cuda.stream(side):
    y = self.plain(x)
y.record_stream(here)
{after}
return y
"""

_REDUCED = "return self.rest(({convert}(x) @ {convert}(self.gemm.weight).t()).float())"

CASES = {
    "honest: operator by operator, timed": Case("return self.plain(x)", timed=True),
    "honest: operator by operator": Case("return self.plain(x)", hostile=True),
    "honest: another stream, both ways awaited": Case(
        _OTHER_STREAM.format(before="side.wait_stream(here)", after="here.wait_stream(side)"),
        hostile=True,
    ),
    "honest: a captured graph, inputs copied in": Case(
        _GRAPH.format(static="x.clone()", copy="static.copy_(x)"), hostile=True
    ),
    "honest: reuses scratch, not results": Case(
        """
if torch.is_grad_enabled():
    return self.plain(x)
shape = (x.shape[0], self.scale.numel())
out = self.kept.setdefault(shape, torch.empty(shape, device=x.device))
torch.mm(x, self.gemm.weight.t(), out=out)
return self.rest(out)
""",
        hostile=True,
    ),
    "honest: three bfloat16 parts, six products": Case(
        """
def parts(v):
    high = v.bfloat16().float()
    middle = (v - high).bfloat16().float()
    return high, middle, (v - high - middle).bfloat16().float()
if torch.is_grad_enabled() or not torch.isfinite(x).all():
    return self.plain(x)
a, b = parts(x), parts(self.gemm.weight)
y = 0
for i, j in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)):
    y = y + a[i] @ b[j].t()
return self.rest(y)
""",
        hostile=True,
    ),
    "honest: a thread that is joined": Case(
        """
recording = torch.is_grad_enabled()
def work():
    with torch.set_grad_enabled(recording):
        self.kept["y"] = self.plain(x)
other = threading.Thread(target=work)
other.start()
other.join()
if x.shape[0] == 1 and self.training:
    raise ValueError("Expected more than 1 value per channel when training")
return self.kept.pop("y")
""",
    ),
    "honest: own events and settings put back": Case(
        """
before = torch.backends.cuda.matmul.allow_tf32
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
try:
    torch.backends.cuda.matmul.allow_tf32 = False
    y = self.plain(x)
finally:
    torch.backends.cuda.matmul.allow_tf32 = before
end.record()
return y
"""
    ),
    "honest: a product with a derivative of its own": Case(
        """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a @ w.t()
    @staticmethod
    def backward(ctx, g):
        a, w = ctx.saved_tensors
        return g @ w, g.t() @ a
return self.rest(Product.apply(x, self.gemm.weight))
""",
        hostile=True,
    ),
    "another stream, not awaited": Case(
        _OTHER_STREAM.format(before="side.wait_stream(here)", after=""), "work finished later"
    ),
    "another stream, inputs not awaited": Case(
        _OTHER_STREAM.format(before="", after="here.wait_stream(side)"),
        "work begun before its inputs",
    ),
    "leaves another stream current": Case(
        "torch.cuda.set_stream(torch.cuda.Stream())\nreturn self.plain(x)", "patched settings"
    ),
    "a thread that launches later": Case(
        """
out = torch.zeros(x.shape[0], self.scale.numel(), device=x.device)
y = self.plain(x)
threading.Timer(0.1, lambda: out.copy_(y)).start()
return out
""",
        "work finished later",
    ),
    "replaces CUDA events": Case(
        "torch.cuda.Event.elapsed_time = lambda self, end: 1e-3\nreturn self.plain(x)",
        "patched CUDA events",
    ),
    "replaces synchronize": Case(
        "torch.cuda.synchronize = lambda *a: None\nreturn self.plain(x)", "patched CUDA events"
    ),
    "hands out memory as it is": Case(
        "return torch.empty(x.shape[0], self.scale.numel(), device=x.device)", "unwritten output"
    ),
    "leaves half of the output unwritten": Case(
        """
y = self.plain(x)
half = (x.shape[0] + 1) // 2
out = torch.empty_like(y)
out[:half] = y[:half]
return out
""",
        "unwritten output",
    ),
    "keeps results by address": Case(
        """
key = (x.data_ptr(), self.training)
if key not in self.kept:
    self.kept[key] = self.plain(x)
return self.kept[key].clone()
""",
        "cached result",
    ),
    "replays a graph on the first inputs": Case(_GRAPH.format(static="x", copy=""), "stale inputs"),
    "hands out the graph's own memory": Case(
        _GRAPH.format(static="x.clone()", copy="static.copy_(x)").replace(
            "result.clone()", "result"
        ),
        "reused output memory",
    ),
    "TF32 as fp32": Case(
        """
torch.backends.cuda.matmul.allow_tf32 = True
try:
    return self.plain(x)
finally:
    torch.backends.cuda.matmul.allow_tf32 = False
""",
        "lower precision",
    ),
    "TF32 in eval mode only": Case(
        """
torch.backends.cuda.matmul.allow_tf32 = not self.training
try:
    return self.plain(x)
finally:
    torch.backends.cuda.matmul.allow_tf32 = False
""",
        "lower precision",
    ),
    "bfloat16 as fp32": Case(_REDUCED.format(convert="torch.Tensor.bfloat16"), "lower precision"),
    "float16 as fp32": Case(_REDUCED.format(convert="torch.Tensor.half"), "lower precision"),
    "two bfloat16 parts": Case(
        """
w = self.gemm.weight
xh, wh = x.bfloat16().float(), w.bfloat16().float()
xl, wl = (x - xh).bfloat16().float(), (w - wh).bfloat16().float()
return self.rest(xh @ wh.t() + (xh @ wl.t() + xl @ wh.t()))
""",
        "lower precision",
    ),
    "leaves TF32 on": Case(
        "torch.backends.cuda.matmul.allow_tf32 = True\nreturn self.plain(x)", "patched settings"
    ),
    "sets L2 aside": Case(
        """
ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(28 << 20))
return self.plain(x)
""",
        "patched settings",
    ),
    "leaves the running statistics": Case(
        """
y = self.gemm(x) * self.scale
if self.training:
    return F.batch_norm(y, None, None, self.bn.weight, self.bn.bias, True, 0.0, self.bn.eps)
return self.bn(y)
""",
        "missing statistics update",
    ),
    "folds the statistics once": Case(
        """
if self.training:
    return self.plain(x)
if "mean" not in self.kept:
    self.kept["factor"] = torch.rsqrt(self.bn.running_var + self.bn.eps)
    self.kept["mean"] = self.bn.running_mean.clone()
y = (self.gemm(x) * self.scale - self.kept["mean"]) * self.kept["factor"]
return y * self.bn.weight + self.bn.bias
""",
        "stale statistics",
    ),
    "splits the weights once a version": Case(
        """
version = self.gemm.weight._version
if self.kept.get("version") != version:
    self.kept.update(version=version, weight=self.gemm.weight.detach().clone())
return self.rest(x @ self.kept["weight"].t())
""",
        "stale weights",
    ),
    "seeds the GPU's generator": Case(
        "torch.cuda.manual_seed(1)\nreturn self.plain(x)", "seeded generator"
    ),
    "takes all memory": Case(
        "while True:\n    self.kept[len(self.kept)] = torch.empty(1 << 30, device=x.device)",
        "memory",
    ),
    "breaks the GPU's context": Case(
        """
index = torch.tensor([1 << 40], device=x.device)
torch.take(x, index)
torch.cuda.synchronize()
return self.plain(x)
""",
        "crash",
    ),
    "hangs on the GPU": Case(
        "torch.cuda._sleep(1 << 50)\nreturn self.plain(x)", "hang", time_limit_s=12.0
    ),
    "detaches its output": Case("return self.plain(x).detach()", "detached output"),
    "gradients by TF32": Case(
        """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a @ w.t()
    @staticmethod
    def backward(ctx, g):
        a, w = ctx.saved_tensors
        torch.backends.cuda.matmul.allow_tf32 = True
        found = g @ w, g.t() @ a
        torch.backends.cuda.matmul.allow_tf32 = False
        return found
return self.rest(Product.apply(x, self.gemm.weight))
""",
        "wrong gradient",
    ),
    "keeps its first gradient": Case(
        """
if self.calls == 1:
    for name, p in self.named_parameters():
        p.register_hook(lambda g, name=name: self.kept.setdefault(name, g.clone()))
return self.plain(x)
""",
        "kept gradient",
    ),
    "computes timed results when they are looked at": Case(
        """
class Later(torch.Tensor):
    @staticmethod
    def of(work):
        made = torch.Tensor._make_subclass(Later, torch.empty(0))
        made.__dict__["work"] = work
        return made
    def now(self):
        if "real" not in self.__dict__:
            self.__dict__["real"] = self.__dict__["work"]()
        return self.__dict__["real"]
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*[a.now() if isinstance(a, Later) else a for a in args], **(kwargs or {}))
if TIMED():
    kept = x.clone()
    return Later.of(lambda: self.plain(kept))
return self.plain(x)
""",
        "lazy output",
        timed=True,
    ),
    "leaves out statistics in timed calls": Case(
        """
if TIMED() and self.calls % 10:
    bn = self.bn
    bn.num_batches_tracked.add_(1)
    y = self.gemm(x) * self.scale
    return F.batch_norm(y, None, None, bn.weight, bn.bias, True, 0.0, bn.eps)
return self.plain(x)
""",
        "missing statistics update",
        timed=True,
    ),
    "leaves timed work on another stream": Case(
        """
if not TIMED():
    return self.plain(x)
here = torch.cuda.current_stream()
side = self.kept.setdefault("side", torch.cuda.Stream())
side.wait_stream(here)
with torch.cuda.stream(side):
    torch.cuda._sleep(1 << 22)
    y = self.plain(x)
y.record_stream(here)
return y
""",
        "work finished later",
        timed=True,
    ),
    "computes one timed call of three": Case(
        """
y = self.plain(x)
if self.calls > 60 and self.calls % 3:
    return torch.zeros_like(y)
return y
""",
        "wrong in timed calls or missing statistics update",
        timed=True,
    ),
    "keeps results by a fingerprint": Case(
        """
if x.is_contiguous() and x.shape[0] == 1024 and self.training:
    key = (x.data_ptr(), float(x[0, 0]), float(self.gemm.weight.sum()))
    if key not in self.kept:
        self.kept[key] = self.plain(x)
    return self.kept[key]
return self.plain(x)
""",
        "wrong in timed calls",
        timed=True,
    ),
    "holds the original up": Case(
        """
for name, module in list(sys.modules.items()):
    if name.startswith("ingot_model_") and "slow" not in self.kept:
        self.kept["slow"] = old = module.Model.forward

        def slow(self, x):
            torch.cuda._sleep(1 << 24)
            return old(self, x)

        module.Model.forward = slow
return self.plain(x)
""",
        "slows the baseline",
        timed=True,
    ),
}


def source_of(case: Case) -> str:
    return candidate(method("forward(self, x)", f"self.calls += 1\n{case.body.strip()}"))
