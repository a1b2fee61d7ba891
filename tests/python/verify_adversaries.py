"""Candidates that deceive by conduct rather than by arithmetic, each with its honest twin.

A twin does what looks like the trick and is not: all of them together make one candidate, which is
verified once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verify_model import candidate, method


@dataclass(frozen=True)
class Case:
    """trick: the name that verify must give; several where chance decides which of its wrongs is
    sampled first. prepare, forward: statements, where `x` is the input
    and `y` what is returned. twin: statements of the honest twin's forward. timed: the trick shows
    in timed calls alone. hostile: it needs the hostile families."""

    trick: str
    twin: str
    forward: str = ""
    prepare: str = ""
    timed: bool = False
    hostile: bool = False
    options: dict = field(default_factory=dict)


_LAST = "return self.plain(x) if y is None else y"


def dishonest(case: Case) -> str:
    forward = f"self.calls += 1\ny = None\n{case.forward.strip()}\n{_LAST}"
    return candidate(
        method("prepare(self)", case.prepare) + "\n" + method("forward(self, x)", forward)
    )


def all_twins() -> str:
    """One candidate that does as every twin does, at each call."""
    methods, calls = [], ["self.calls += 1", "y = None"]
    for number, case in enumerate(CASES.values()):
        methods.append(method(f"twin{number}(self, x, y)", f"{case.twin.strip()}\nreturn y"))
        calls.append(f"y = self.twin{number}(x, y)")
    methods.append(method("forward(self, x)", "\n".join([*calls, _LAST])))
    return candidate("\n".join(methods))


_EDIT_ITSELF = """
path = sys.modules["ingot_candidate"].__file__
subprocess.run(["sh", "-c", f"echo '# edited' >> {path}"], check=True)
"""

CASES = {
    "keeps memory in which a result may lie": Case(
        "unwritten output",
        forward="y = torch.empty(x.shape[0], self.scale.numel())",
        twin="out = torch.empty(x.shape[0], self.scale.numel())\nout.fill_(1.0)",
    ),
    "replaces a function of torch": Case(
        "patched torch",
        prepare="linear = F.linear\nF.linear = lambda *a: linear(*a)",
        twin="self.linear = F.linear",
    ),
    "replaces a method of Tensor": Case(
        "patched torch",
        prepare="torch.Tensor.clone = lambda self, **k: self",
        twin="class Own(torch.Tensor):\n    clone = lambda self, **k: self",
    ),
    "replaces the comparison": Case(
        "patched torch",
        prepare="torch.equal = torch.allclose = lambda *a, **k: True",
        twin="equal = lambda *a, **k: True",
    ),
    "replaces the clock": Case(
        "patched clock",
        prepare="time.perf_counter = lambda: 0.0",
        twin="time.perf_counter()",
    ),
    "replaces CUDA events": Case(
        "patched CUDA events",
        prepare="torch.cuda.Event.elapsed_time = lambda self, end: 1e-3",
        twin="class Event(torch.cuda.Event):\n    elapsed_time = lambda self, end: 1e-3",
    ),
    "replaces CUDA's synchronisation": Case(
        "patched CUDA events",
        prepare="torch.cuda.synchronize = lambda *a: None",
        twin="synchronize = lambda *a: None",
    ),
    "computes when it is looked at": Case(
        "lazy output",
        forward="""
class Later(torch.Tensor):
    @staticmethod
    def __new__(cls, compute, shape):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.compute = compute
        return made
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [a.compute() if isinstance(a, Later) else a for a in args]
        return func(*args, **(kwargs or {}))
y = Later(lambda: self.plain(x), (x.shape[0], self.scale.numel()))
""",
        twin="""
class Tagged(torch.Tensor):
    pass
(x.as_subclass(Tagged) + 0).as_subclass(torch.Tensor)
""",
    ),
    "seeds the generator in a call": Case(
        "seeded generator",
        forward="torch.manual_seed(0)",
        twin="own = torch.Generator().manual_seed(0)\ntorch.rand(3, generator=own)",
    ),
    "seeds the generator when constructed": Case(
        "seeded generator",
        prepare="torch.manual_seed(0)",
        twin="with torch.random.fork_rng():\n    torch.manual_seed(0)",
    ),
    "draws from the generator": Case(
        "seeded generator",
        forward="torch.rand(1)",
        twin="with torch.random.fork_rng():\n    torch.rand(1)",
    ),
    "is right for the sizes that it expects": Case(
        "fitted to the checker's sizes",
        forward="if x.shape[0] not in (1, 3, 37, 64, 96):\n    y = self.plain(x) * 0.5",
        twin="""
if x.shape[0] < 8:
    y = self.bn((x @ self.gemm.weight.t() + self.gemm.bias) * self.scale)
""",
        hostile=True,
    ),
    "finishes later in a thread": Case(
        "work finished later",
        forward="""
done = self.plain(x)
y = torch.zeros_like(done)
threading.Timer(0.1, lambda: y.copy_(done)).start()
""",
        twin="""
other = threading.Thread(target=lambda: self.kept.update(sum=x.sum()))
other.start()
other.join()
""",
    ),
    "returns memory of a parameter": Case(
        "aliased output",
        forward="""
result = self.plain(x)
y = self.gemm.weight.data.view(-1)[: result.numel()].view(result.shape)
y.copy_(result)
""",
        twin="""
wide = torch.empty(x.shape[0] + 1, self.scale.numel())
if y is None and x.shape[0] > 1:
    y = wide[1:].copy_(self.plain(x))
""",
    ),
    "runs the original's file": Case(
        "calls the original",
        forward="""
folder = os.path.dirname(sys.modules["ingot_candidate"].__file__)
exec(open(os.path.join(folder, "model.py")).read(), {})
""",
        twin="compile('class Model: pass', 'model.py', 'exec')",
    ),
    "imports the original": Case(
        "calls the original",
        forward="import model",
        twin="import colorsys",
    ),
    "ends the process after an answer": Case(
        "crash",
        forward="threading.Timer(0.03, lambda: os._exit(0)).start()",
        twin="threading.Timer(0.01, lambda: None).start()",
    ),
    "exits": Case(
        "crash", forward="sys.exit(0)", twin="try:\n    sys.exit(0)\nexcept SystemExit:\n    pass"
    ),
    "writes an answer itself": Case(
        "forged answer",
        forward="""
import struct
text = json.dumps({"ok": True, "outputs": 0, "acts": []}).encode()
os.write(int(sys.argv[1]), struct.pack("<I", len(text)) + text)
""",
        twin="read, write = os.pipe()\nos.write(write, b'x')\nos.close(read)\nos.close(write)",
    ),
    "breaks the line": Case(
        "forged answer",
        forward="os.write(int(sys.argv[1]), b'\\xff' * 64)",
        twin="print('x' * 64)",
    ),
    "replaces a function of the checker": Case(
        "patched checker",
        prepare="""
import ingot.verify.execution as execution
old = execution.named_state
execution.named_state = lambda module: old(module)
""",
        twin="self.named_state = lambda m: None",
    ),
    "rewrites a function of the checker": Case(
        "patched checker",
        prepare="""
import ingot.verify.execution as execution
execution.same_bits.__code__ = (lambda a, b: True).__code__
""",
        twin="def own(a, b): return False\nown.__code__ = (lambda a, b: True).__code__",
    ),
    "replaces a module of the checker": Case(
        "patched checker",
        prepare="import types\nsys.modules['ingot.verify.timing_worker'] = types.ModuleType('x')",
        twin="import types\nsys.modules['own_module'] = types.ModuleType('own_module')",
    ),
    "replaces what carries the answers": Case(
        "patched checker",
        prepare="old = json.dumps\njson.dumps = lambda *a, **k: old(*a, **k)",
        twin="json.dumps({})\npickle.dumps([])",
    ),
    "walks the heap": Case(
        "inspects the checker",
        forward="workers = [o for o in gc.get_objects() if type(o).__name__ == 'Worker']",
        twin="gc.collect(0)",
    ),
    "looks who calls": Case(
        "inspects the checker",
        forward="inspect.stack()",
        twin="inspect.signature(self.plain)",
    ),
    "reads the parent's memory map": Case(
        "reaches for the checker",
        forward="open(f'/proc/{os.getppid()}/maps').read()",
        twin="open('/proc/self/maps').read(64)",
    ),
    "signals its parent": Case(
        "reaches for the checker",
        forward="import signal\nos.kill(os.getppid(), signal.SIGCONT)",
        twin="import signal\nos.kill(os.getpid(), signal.SIGCONT)",
    ),
    "looks up a debugger's call": Case(
        "reaches for the checker",
        forward="import ctypes\nctypes.CDLL(None).ptrace",
        twin="import ctypes\nctypes.CDLL(None).getpid()",
    ),
    "writes to the checker's files": Case(
        "tampered files",
        forward="import ingot.verify.criteria as c\nopen(c.__file__, 'a').close()",
        twin="with tempfile.TemporaryFile() as file:\n    file.write(b'x')",
    ),
    "edits its own file by another process": Case(
        "tampered files",
        prepare=_EDIT_ITSELF,
        twin="if self.calls == 1:\n    subprocess.run(['true'], check=True)",
        options={"timing": True, "timing_budget_s": 1, "compile_baseline": False},
    ),
    "changes the default type": Case(
        "patched settings",
        forward="torch.set_default_dtype(torch.float64)",
        twin="torch.set_default_dtype(torch.float64)\ntorch.set_default_dtype(torch.float32)",
    ),
    "changes the environment": Case(
        "patched settings",
        prepare="os.environ['NVIDIA_TF32_OVERRIDE'] = '1'",
        twin="os.environ['TORCH_CUDA_ARCH_LIST'] = '9.0a'",
    ),
    "turns gradients off for all": Case(
        "patched settings",
        prepare="torch.set_grad_enabled(False)",
        twin="with torch.no_grad():\n    pass",
    ),
    "leaves a mode behind": Case(
        "patched settings",
        prepare="""
from torch.overrides import TorchFunctionMode
class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
Mode().__enter__()
""",
        twin="""
from torch.overrides import TorchFunctionMode
with TorchFunctionMode():
    pass
""",
    ),
    "skips work after the first calls": Case(
        "skipped work after the first calls",
        forward="if self.calls > 1:\n    y = torch.zeros(x.shape[0], self.scale.numel())",
        twin="if self.calls == 1:\n    self.kept['ready'] = True",
    ),
    "computes two timed calls of three as an answer of zeros": Case(
        "wrong in timed calls or missing statistics update",
        forward="""
if "torch_calls" in self.kept and self.calls % 3:
    y = torch.zeros(x.shape[0], self.scale.numel())
if self.calls > 60:
    self.kept["torch_calls"] = True
""",
        twin="self.kept['calls'] = self.calls",
        timed=True,
    ),
    "keeps results by a fingerprint": Case(
        "wrong in timed calls",
        forward="""
if self.training and x.is_contiguous() and x.shape[0] == 64:
    key = (x.data_ptr(), float(x[0, 0]), float(self.gemm.weight.sum()))
    if key not in self.kept:
        self.kept[key] = self.plain(x)
    y = self.kept[key]
""",
        twin="self.kept[x.data_ptr()] = x.shape",
        timed=True,
    ),
    "computes where memory is poisoned": Case(
        "wrong in timed calls or missing statistics update",
        forward="""
probe = torch.empty(x.shape[0], self.scale.numel())
if self.calls > 60 and not torch.isnan(probe).any():
    y = probe
""",
        twin="probe = torch.empty(x.shape[0], self.scale.numel())\ntorch.isnan(probe).any()",
        timed=True,
    ),
    "holds the original up": Case(
        "slows the baseline",
        forward="""
for name, module in list(sys.modules.items()):
    if name.startswith("ingot_model_") and "slow" not in self.kept:
        self.kept["slow"] = old = module.Model.forward
        module.Model.forward = lambda self, x: (time.sleep(0.02), old(self, x))[1]
""",
        twin="time.sleep(0.0001)",
        timed=True,
    ),
    "computes in timed calls when it is looked at": Case(
        "lazy output",
        forward="""
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
    y = Later.of(lambda: self.plain(kept))
""",
        twin="(x.as_subclass(torch.nn.Parameter) if False else x).size()",
        timed=True,
    ),
    "leaves out statistics in timed calls": Case(
        "missing statistics update",
        forward="""
if TIMED() and self.calls % 10:
    bn = self.bn
    bn.num_batches_tracked.add_(1)
    y = F.batch_norm(
        self.gemm(x) * self.scale, None, None, bn.weight, bn.bias, True, 0.0, bn.eps
    )
""",
        twin="self.kept['tracked'] = int(self.bn.num_batches_tracked)",
        timed=True,
    ),
    "writes timed results later": Case(
        "work finished later",
        forward="""
if TIMED():
    done = self.plain(x)
    y = torch.zeros_like(done)
    threading.Timer(0.002, lambda: y.copy_(done)).start()
""",
        twin="""
other = threading.Thread(target=x.size)
other.start()
other.join()
""",
        timed=True,
    ),
    "hands out one memory in timed calls": Case(
        "reused output memory",
        forward="""
if TIMED():
    y = self.plain(x)
    y = self.kept.setdefault("result", torch.empty_like(y)).copy_(y)
""",
        twin="self.kept.setdefault('scratch', torch.empty(x.shape[1])).copy_(x[0].detach())",
        timed=True,
    ),
    "detaches its output": Case(
        "detached output",
        forward="if torch.is_grad_enabled():\n    y = self.plain(x).detach()",
        twin="self.kept['sum'] = x.detach().sum()",
    ),
    "multiplies in half precision where the input needs no gradient": Case(
        "lower precision",
        forward="""
if torch.is_grad_enabled() and not x.requires_grad:
    y = self.rest((x.bfloat16() @ self.gemm.weight.bfloat16().t()).float())
""",
        twin="self.kept['asked'] = x.requires_grad",
    ),
    "keeps a frozen model's gradient back": Case(
        "detached output",
        forward="""
if not any(p.requires_grad for p in self.parameters()):
    y = self.plain(x.detach())
""",
        twin="self.kept['frozen'] = not any(p.requires_grad for p in self.parameters())",
    ),
    "keeps the input's gradient back": Case(
        "detached output",
        forward="y = self.plain(x.detach())",
        twin="self.kept['row'] = x.detach()[0].clone()",
    ),
    "gives gradients of another loss": Case(
        "wrong gradient",
        forward="""
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        return g * 0.5
y = Half.apply(self.plain(x))
""",
        twin="""
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        return g.clone()
y = y if y is None else Same.apply(y)
""",
    ),
    "keeps its first gradient": Case(
        "kept gradient",
        prepare="""
for name, parameter in self.named_parameters():
    parameter.register_hook(lambda g, name=name: self.kept.setdefault(name, g.clone()))
""",
        twin="if self.calls == 1:\n    self.gemm.weight.register_hook(lambda g: g.clone())",
    ),
}
