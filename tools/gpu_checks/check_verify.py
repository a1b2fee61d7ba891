"""Checks `ingot verify` on a GPU: honest CUDA candidates pass, dishonest ones are caught and named.

    python check_verify.py [--only TEXT] [--which all|checked|timed] [--processes N] [--seconds N]
                           [--device cuda|cpu]

Each candidate goes through verify_pair, in several processes at once; those whose trick shows in
times go last, alone. Prints a table and exits with 1 if a verdict is not the expected one, and with
3 if time ran out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("python", "tests/python"):
    sys.path.insert(0, str(ROOT / folder))
os.environ["PYTHONPATH"] = os.pathsep.join(
    p for p in (str(ROOT / "python"), os.environ.get("PYTHONPATH", "")) if p
)

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
key = (tuple(x.shape), self.training)
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
if not torch.isfinite(x).all():
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
def work():
    with torch.no_grad():
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
    "computes one timed call of three": Case(
        """
y = self.plain(x)
if self.calls > 60 and self.calls % 3:
    return torch.zeros_like(y)
return y
""",
        "wrong in timed calls",
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


def check(name: str, device: str) -> dict:
    from ingot.verify import VerifyOptions, verify_pair

    case = CASES[name]
    started = time.monotonic()
    options = VerifyOptions(
        device=device,
        hostile=case.hostile,
        timing=case.timed,
        compile_baseline=False,
        timing_budget_s=1.0,
        rounds=7,
        time_limit_s=case.time_limit_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        files = {"model.py": ORIGINAL, "model_new.py": source_of(case)}
        for file, text in files.items():
            (Path(folder) / file).write_text(text, encoding="utf-8")
        result = verify_pair(f"{folder}/model.py", f"{folder}/model_new.py", options)
    found = result.tricks[0] if result.tricks else ""
    good = result.verified if not case.trick else not result.verified and found == case.trick
    first = result.failures[0] if result.failures else None
    why = f"{first.name} [{first.mode}] {first.message}" if first else ""
    return {
        "case": name,
        "expected": case.trick,
        "verified": result.verified,
        "named": found,
        "good": good,
        "why": " ".join(why.split())[:240],
        "seconds": round(time.monotonic() - started, 1),
    }


def run_share(names: list, device: str) -> None:
    """In a process of its own: one line of JSON a case."""
    for name in names:
        try:
            row = check(name, device)
        except Exception as error:
            row = {"case": name, "expected": CASES[name].trick, "verified": None, "named": ""}
            row |= {"good": False, "why": f"{type(error).__name__}: {error}"[:240], "seconds": 0.0}
        print(json.dumps(row), flush=True)


def start(names: list, device: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--device", device, "--share", json.dumps(names)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def collect(processes: list, deadline: float) -> list:
    rows = []
    for process in processes:
        try:
            text, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it
            text, _ = process.communicate()
        rows += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--which", default="all", choices=("all", "checked", "timed"), help="timed: those that are"
    )
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=90.0, help="stop then (90)")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share is not None:
        run_share(json.loads(arguments.share), arguments.device)
        return 0
    started = time.monotonic()
    deadline = started + arguments.seconds
    wanted = {"all": (True, False), "checked": (False,), "timed": (True,)}[arguments.which]
    names = [n for n in CASES if arguments.only in n and CASES[n].timed in wanted]
    at_once = sorted((n for n in names if not CASES[n].timed), key=lambda n: not CASES[n].hostile)
    shares = [at_once[i :: arguments.processes] for i in range(arguments.processes)]
    rows = collect([start(s, arguments.device) for s in shares if s], deadline)
    timed = [n for n in names if CASES[n].timed]
    rows += collect([start(timed, arguments.device)] if timed else [], deadline)
    by_name = {row["case"]: row for row in rows}
    print(f"{'verdict':8} {'expected':28} {'named':28} {'s':>5}  case")
    for name in names:
        row = by_name.get(name)
        if row is None:
            print(f"{'NOT RUN':8} {CASES[name].trick or '(passes)':28} {'':28} {'':>5}  {name}")
            continue
        verdict = ("passed" if row["verified"] else "caught") if row["good"] else "WRONG"
        expected = row["expected"] or "(passes)"
        print(f"{verdict:8} {expected:28} {row['named']:28} {row['seconds']:5.1f}  {name}")
        if not row["good"]:
            print(f"         {row['why']}")
    bad = sum(not r["good"] for r in by_name.values())
    missing = len(names) - len(by_name)
    caught = sum(r["good"] and bool(r["expected"]) for r in by_name.values())
    passed = sum(r["good"] and not r["expected"] for r in by_name.values())
    print(
        f"{caught} dishonest candidates caught and named, {passed} honest ones passed, {bad} wrong "
        f"verdicts, {missing} not run, {time.monotonic() - started:.0f} s"
    )
    return 1 if bad else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
