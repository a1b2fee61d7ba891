"""Random programs whose tensors have equal extents wherever they can: what takes one dimension for
another of the same size shows there, and nowhere else.

A program is text, one operator a line. Lines are drawn blindly and kept where PyTorch runs them, at
two batch sizes: what is broadcast, contracted or merged with what is PyTorch's to say.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

MOST_ELEMENTS = 3000
NAMES = {"torch": torch, "nn": nn, "F": nn.functional}


@dataclass(frozen=True)
class Program:
    """parts: attributes of the module, as text; inputs: shapes, in which "B" is the batch, with how
    they lie in memory; lines: names and what they are; batches: of the calls, in order."""

    parts: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[tuple, str], ...]
    lines: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    batches: tuple[int, ...]
    training: bool
    gradients: bool

    def __str__(self) -> str:
        rows = [f"self.{name} = {text}" for name, text in self.parts]
        rows += [f"{name} = {shape} {layout}" for name, (shape, layout) in self.fed()]
        rows += [f"{name} = {text}" if name else text for name, text in self.lines]
        modes = f"training={self.training} gradients={self.gradients} batches={self.batches}"
        return "\n".join([*rows, f"return {', '.join(self.results)},  # {modes}"])

    def fed(self) -> list:
        return [(f"x{at}", each) for at, each in enumerate(self.inputs)]

    def source(self) -> str:
        made = "".join(f"        self.{name} = {text}\n" for name, text in self.parts)
        rows = [f"{name} = {text}" if name else text for name, text in self.lines]
        body = "".join(f"        {row}\n" for row in rows)
        return (
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"{made}    def forward(self, {', '.join(name for name, _ in self.fed())}):\n"
            f"{body}        return ({', '.join(self.results)},)\n"
        )

    def module(self, seed: int = 0) -> nn.Module:
        names = dict(NAMES)
        exec(compile(self.source(), "<square program>", "exec"), names)
        torch.manual_seed(seed)
        return names["Model"]().train(self.training)

    def tensors(self, batch: int, seed: int) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return [_input(shape, layout, batch, drawn) for shape, layout in self.inputs]


def _input(shape: tuple, layout: str, batch: int, drawn: torch.Generator) -> torch.Tensor:
    sizes = [batch if size == "B" else size for size in shape]
    if layout == "transposed":
        return torch.randn(sizes[::-1], generator=drawn).permute(*range(len(sizes))[::-1])
    if layout == "turned":  # the batch where it was, what is behind it the other way round
        order = [0, *range(len(sizes))[:0:-1]]
        return torch.randn([sizes[at] for at in order], generator=drawn).permute(order)
    if layout == "strided":
        return torch.randn((*sizes[:-1], 2 * sizes[-1]), generator=drawn)[..., ::2]
    if layout == "expanded":
        return torch.randn((*sizes[:-1], 1), generator=drawn).expand(sizes)
    made = torch.randn(sizes, generator=drawn)
    if layout == "channels_last" and len(sizes) == 4:
        return made.contiguous(memory_format=torch.channels_last)
    return made


# Drawing -----------------------------------------------------------------------------------------

UNARY = """
    torch.relu({a}) F.gelu({a}) torch.tanh({a}) torch.sigmoid({a}) F.silu({a})
    torch.exp(-{a}*{a}) F.leaky_relu({a},0.1) F.elu({a}) F.softplus({a}) {a}*0.5+1
    {a}.clamp(-1.0,0.5) {a}**2 2-{a} {a}/3 torch.where({a}>0,{a},0.1*{a})
    {a}.masked_fill({a}>1.0,0.5) F.hardswish({a})
""".split()
BINARY = """
    {a}+{b} {a}+{b} {a}*{b} {a}-{b} torch.maximum({a},{b}) torch.where({a}>{b},{a},{b})
    {a}/(1+{b}*{b}) torch.add({a},{b},alpha=2) torch.lerp({a},{b},0.3) F.silu({a})*{b}
    torch.sigmoid({a})*{b} torch.rsub({a},{b},alpha=2) {a}+{b}.detach()
    torch.addcmul({a},{b},{a})
""".split()
LAYOUTS = """
    {a}.permute({order}) {a}.permute({order}) {a}.transpose({i},{j}) {a}.transpose({i},{j})
    {a}.mT {a}.mT {a}.flatten({i},{j}) {a}.flatten({i},{j}) {a}.unflatten({i},({n},-1))
    {a}.unflatten({i},(-1,{n})) {a}.reshape({a}.size(0),-1) {a}.reshape(-1,{a}.size(-1))
    {a}.reshape({a}.size(0),{n},-1) {a}.unsqueeze({i}) {a}.unsqueeze({i}) {a}.squeeze({i})
    {a}[:,:,None] {a}[:,None] {a}.contiguous() {a}.movedim({i},{j}) {a}.view(-1,{n})
    {a}.expand(-1,{n},-1) {a}.expand({n},-1,-1) {a}.expand(-1,-1,{n}) {a}.expand_as({b})
    {a}.clone() {a}.expand(-1,-1,-1,{n}) {a}.T {a}.reshape({b}.shape)
""".split()
PARTS = """
    {a}[:,1:] {a}[...,:{n}] {a}[...,1:] {a}[:,::2] {a}.chunk(2,{i})[1] {a}.select({i},1)
    {a}.narrow({i},0,{n}) torch.cat([{a},{b}],{i}) torch.stack([{a},{b}],{i}) {a}.flip({i})
    {a}.unbind({i})[0] {a}.split({n},{i})[0] F.glu({a},{i}) {a}.diagonal(0,{i},{j})
    torch.cat([{a},{b}],{i}) {a}.cumsum({i})
""".split()
REDUCTIONS = """
    {a}.sum({i}) {a}.mean({i}) {a}.amax({i}) {a}.amin({i}) torch.logsumexp({a},{i}) {a}.var({i})
    {a}.sum({i},True) {a}.mean({i},True) {a}.amax({i},True) {a}.mean(({i},{j}))
    {a}.sum(({i},{j})) {a}.mean(({i},{j}),True) {a}.var(({i},{j}),unbiased=False,keepdim=True)
    {a}.max({i})[0] {a}.max({i},True)[0] torch.logsumexp({a},{i},True) {a}.norm(dim={i})
    {a}.mean() {a}.sum((0,1,2)) {a}.amax(({i},{j}),True) F.normalize({a},dim={i})
    {a}.argmax({i})
""".split()
ALONG = """
    F.softmax({a},{i}) F.softmax({a},{i}) F.log_softmax({a},{i}) {a}-{a}.mean({i},True)
    ({a}-{a}.mean({i},True))*torch.rsqrt({a}.var({i},keepdim=True)+0.1)
    {a}*torch.rsqrt({a}.square().mean({i},True)+0.1) {a}*{a}.amax(({i},{j}),True)
    F.layer_norm({a},({n},)) F.layer_norm({a},({n},{n})) F.instance_norm({a}) F.softmin({a},{i})
    F.batch_norm({a},None,None,training=True) F.group_norm({a},1)
    F.layer_norm({a},{a}.shape[1:]) F.layer_norm({a},({n},),{b})
    F.layer_norm({a},({n},{n}),{b},{c}) F.rms_norm({a},({n},),{b})
    F.batch_norm({a},None,None,{b},{c},True) F.group_norm({a},{n},{b},{c}) F.prelu({a},{b})
    F.layer_norm({a},{a}.shape) F.max_pool1d({a},2) F.avg_pool1d({a},2)
    F.rms_norm({a},({n},{n})) F.adaptive_avg_pool2d({a},1)
""".split()
PRODUCTS = """
    {a}@{b} {a}@{b} {a}@{b}.mT {a}.mT@{b} {a}@{a}.mT {a}.mT@{a} torch.bmm({a},{b}) {a}@self.w
    torch.bmm({a},{b}.transpose(1,2)) F.linear({a},{b}) F.linear({a},self.w,self.v)
    {a}@self.w.t() torch.einsum('bij,bjk->bik',{a},{b}) torch.einsum('bij,bkj->bki',{a},{b})
    {a}@self.v torch.einsum('bi,bij->bj',{a},{b}) torch.einsum('bi,ij->bj',{a},{b})
    torch.addmm({a},{b},{c}) torch.einsum('bij,kj->bki',{a},{b})
    torch.einsum('bij,jk->kbi',{a},{b}) torch.mm({a},{b}) torch.einsum('bi,bj->bij',{a},{b})
    torch.einsum('bij,bij->bi',{a},{b}) torch.mm({a}.t(),{b}) torch.baddbmm({a},{b},{c})
    F.linear({a},{b},{c}) torch.einsum('...i,ji->...j',{a},{b})
    torch.einsum('bcij,cd->bdij',{a},{b}) torch.einsum('bhij,bhjk->bhik',{a},{b}) self.w@{a}
    torch.einsum('bij,bik->bjk',{a},{b}) torch.einsum('bij->bji',{a})
    torch.addmm({a},{b},{c},beta=0) F.scaled_dot_product_attention({a},{b},{c})
    torch.outer({a},{b}) torch.mv({a},{b})
""".split()
IN_PLACE = """
    {a}.add_({b}) {a}.mul_({b}) {a}.mul_(0.5) {a}.relu_() {a}[:,0]={b} {a}[...,1:]*=2 {a}[0]=1
    {a}[:,:,0].add_({b}) {a}.transpose(0,1).add_({b}) {a}.copy_({b}) {a}.sigmoid_() {a}.t_()
""".split()
MODULES = """
    nn.Linear({n},{n}) nn.Linear({n},{n}) nn.Linear({n},{n},bias=False) nn.Linear({n},{n})
    nn.PReLU({n}) nn.Linear({n}*{n},{n}) nn.Linear({n},2*{n}) nn.BatchNorm1d({n})
    nn.BatchNorm1d({n}) nn.PReLU() nn.BatchNorm2d({n}) nn.LayerNorm({n}) nn.LayerNorm(({n},{n}))
    nn.GroupNorm(2,{n}) nn.RMSNorm({n}) nn.GroupNorm(1,{n}) nn.GroupNorm({n},{n})
    nn.InstanceNorm1d({n},affine=True) nn.Linear({n},1)
    nn.InstanceNorm2d({n},affine=True,track_running_stats=True) nn.BatchNorm3d({n})
    nn.BatchNorm1d(1) nn.Conv1d({n},{n},3,padding=1) nn.Conv2d({n},{n},1)
    nn.Conv2d({n},{n},3,padding=1) nn.BatchNorm2d(1) nn.Conv3d({n},{n},1)
    nn.BatchNorm1d({n}*{n}) nn.LayerNorm({n},elementwise_affine=False)
    nn.BatchNorm1d({n},affine=False,momentum=None)
    nn.InstanceNorm1d({n},track_running_stats=True)
""".split()
PARAMETERS = "{n} {n},{n} {n},{n} {n},1 {n},1,1 1,{n} {n},{n},{n} 1,{n},1 1".split()
SHAPES = ["B,{n}", "B,{n},{n}", "B,{n},{n}", "B,{n},{n},{n}", "B,{n},{n},{n}", "B,1,{n}", "B,{n},1"]
OTHERS = [*SHAPES, "{n},{n}", "{n},B", "B,B", "1,{n},{n}", "B,{n},{n},{n},{n}", "B,1", "{n},B,{n}"]
MEMORY = ["dense"] * 5 + ["transposed", "turned", "strided", "expanded", "channels_last"]


def draw_program(rng: random.Random, steps: int | None = None) -> Program:
    return _Writer(rng).program(steps or rng.randint(3, 10))


@dataclass
class _Writer:
    rng: random.Random
    parts: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    kinds: tuple = (UNARY, BINARY, BINARY, LAYOUTS, LAYOUTS, REDUCTIONS, ALONG, PRODUCTS, MODULES)

    def program(self, steps: int) -> Program:
        rng = self.rng
        self.n = rng.choice([2, 3, 4])
        self.parts = [("w", f"nn.Parameter(torch.randn({self.n},{self.n}))")]
        self.parts.append(("v", f"nn.Parameter(torch.randn({self.n}))"))
        shapes = [rng.choice(SHAPES), *(rng.choice(OTHERS) for _ in range(rng.randint(0, 2)))]
        inputs = tuple((self._shape(text), rng.choice(MEMORY)) for text in shapes)
        first = rng.choice([self.n, self.n, 2, 3, 4])
        batches = (first, *(rng.choice([self.n, 3, 5, 1, first]) for _ in range(rng.randint(0, 2))))
        training, gradients = rng.random() < 0.7, rng.random() < 0.7
        self.made = Program((), inputs, (), (), batches, training, gradients)
        self.worlds = []
        for batch in dict.fromkeys([first, max(batches), 6]):
            world: dict[str, Any] = dict(zip(("x0", "x1", "x2"), self.made.tensors(batch, 1)))
            self.worlds.append(world | {"self": nn.Module()})
        for name, text in self.parts:
            self._give(name, text)
        self._step(MODULES[:4] if rng.random() < 0.7 else PRODUCTS)
        for _ in range(steps):
            self._step(rng.choice([*self.kinds, rng.choice([PARTS, IN_PLACE, UNARY])]))
        made = [name for name in self.worlds[0] if name.startswith("h")]
        results = made[-1:] or ["x0"]
        results += rng.sample(made, min(len(made), rng.choice([0, 0, 1, 2])))
        results = tuple(dict.fromkeys(results))
        return replace(self.made, parts=tuple(self.parts), lines=tuple(self.lines), results=results)

    def _shape(self, text: str) -> tuple:
        return tuple(s if s == "B" else int(s) for s in text.format(n=self.n).split(","))

    def _give(self, name: str, text: str) -> None:
        made = eval(text, NAMES)
        for world in self.worlds:
            setattr(world["self"], name, made)

    def _step(self, kind: Sequence[str]) -> None:
        for _ in range(30):
            text = self.rng.choice(kind)
            part = None
            if kind is BINARY and self.rng.random() < 0.25:
                shape = self.rng.choice(PARAMETERS).format(n=self.n)
                part = (f"p{len(self.parts)}", f"nn.Parameter(torch.randn({shape}))")
            elif text.startswith("nn."):
                part = (f"m{len(self.parts)}", text.format(n=self.n))
                text = f"self.{part[0]}({{a}})"
            if self._try(text, part, kind is IN_PLACE):
                return

    def _try(self, text: str, part: tuple | None, writes: bool, moves: bool = False) -> bool:
        """writes: into a value; moves: a buffer of the module."""
        rng = self.rng
        known = [k for k, v in self.worlds[0].items() if isinstance(v, torch.Tensor)]
        latest = known[-3:]
        a, b, c = (rng.choice(latest if rng.random() < p else known) for p in (0.8, 0.5, 0.4))
        if part is not None and "self." not in text:
            b = f"self.{part[0]}"
        rank = self.worlds[0][a].dim()
        axes = list(range(rank))
        rng.shuffle(axes)
        i, j = (rng.randrange(-1, max(rank, 1)) for _ in "ij")
        order = ",".join(map(str, axes))
        text = text.format(a=a, b=b, c=c, i=i, j=j, n=self.n, order=order)
        if writes and (not a.startswith("h") or self._share(a, b)):
            return False  # what is read while it is written is nobody's to say
        worlds = [copy.copy(world) for world in self.worlds]
        if writes or moves:
            worlds = [copy.deepcopy(world) for world in self.worlds]
        name = "" if writes or moves else f"h{len(self.lines)}"
        try:
            with torch.no_grad():
                for world in worlds:
                    if part is not None:
                        _have(world, *part)
                    exec(f"{name} = {text}" if name else text, NAMES, world)
                    fits = all(_fits(v) for v in world.values() if isinstance(v, torch.Tensor))
                    if not fits:
                        return False
        except Exception:
            return False
        self.worlds = worlds
        self.lines.append((name, text))
        if part is not None:
            self.parts.append(part)
        return True

    def _share(self, a: str, b: str) -> bool:
        first, second = (self.worlds[0][name].untyped_storage().data_ptr() for name in (a, b))
        return a != b and first == second


def _have(world: dict, name: str, made: str) -> None:
    owner = world["self"] = copy.copy(world["self"])
    owner._modules, owner._parameters = dict(owner._modules), dict(owner._parameters)
    torch.manual_seed(0)
    setattr(owner, name, eval(made, NAMES))


def _fits(tensor: torch.Tensor) -> bool:
    small = 0 < tensor.numel() <= MOST_ELEMENTS and tensor.dim() <= 5
    usual = not tensor.is_floating_point() or tensor.detach().abs().max().item() < 1e3
    return small and usual and tensor.dtype in (torch.float32, torch.bool, torch.int64)


# Judging -----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a call left behind. shapes: what is to be the same; tensors: what is to be close."""

    raised: Exception | None = None
    shapes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def outcomes(
    program: Program, wrap: Callable, dtype: torch.dtype = torch.float32, noise: float = 0.0
) -> list[Outcome]:
    """Of each call, up to one that raises."""
    module = program.module().to(dtype)
    drawn = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=drawn))
    called, found = wrap(module), []
    for at, batch in enumerate(program.batches):
        found.append(Outcome())
        leaves = [t.to(dtype) for t in program.tensors(batch, 100 + at)]
        if noise:
            leaves = [t * (1 + noise * torch.randn(t.shape, generator=drawn)) for t in leaves]
        leaves = [t.detach().requires_grad_(program.gradients) for t in leaves]
        module.zero_grad()
        try:
            with torch.set_grad_enabled(program.gradients):
                _look(found[-1], called(*leaves), leaves, module)
        except Exception as error:
            found[-1].raised = error
            break
    return found


def _look(seen: Outcome, results: Sequence, leaves: Sequence, module: nn.Module) -> None:
    drawn, loss = torch.Generator().manual_seed(5), []
    for at, result in enumerate(results):
        varying = [d for d, size in enumerate(result.shape) if size > 1]
        order = [result.stride(d) for d in varying]
        dtype = "floating" if result.is_floating_point() else result.dtype
        seen.shapes[f"result {at}"] = (tuple(result.shape), order, dtype, result.requires_grad)
        seen.tensors[f"result {at}"] = result.detach().clone()
        if result.requires_grad:
            weight = torch.randn(result.shape, generator=drawn)
            loss.append((result * weight.to(result.dtype)).sum())
    if loss:
        sum(loss).backward()
    given = {f"input {at}": leaf for at, leaf in enumerate(leaves)}
    for name, tensor in {**given, **dict(module.named_parameters())}.items():
        seen.shapes[f"gradient of {name}"] = None
        if tensor.grad is not None:
            seen.shapes[f"gradient of {name}"] = tuple(tensor.grad.shape)
            seen.tensors[f"gradient of {name}"] = tensor.grad.clone()
    for name, buffer in module.named_buffers():
        seen.tensors[name] = buffer.clone()


def difference(program: Program, wrap: Callable) -> str | None:
    """Where the program differs through Ingot by more than PyTorch does from double precision, and
    than a change of what it reads by rounding makes."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = outcomes(program, lambda module: module)
        exact = outcomes(program, lambda module: module, torch.float64)
        if eager[-1].raised or exact[-1].raised:
            return None  # it cannot be differentiated
        found = outcomes(program, wrap)
        noisy: list = []
        for at, (ours, theirs, truth) in enumerate(zip(found, eager, exact)):
            if ours.raised:
                return f"call {at} raises {ours.raised!r}"
            for name, shape in theirs.shapes.items():
                if ours.shapes[name] != shape:
                    return f"call {at}: {name} is {ours.shapes[name]}, not {shape}"
            for name, wanted in truth.tensors.items():
                error, own = (_error(o.tensors[name], wanted) for o in (ours, theirs))
                if error <= 8 * own + 1e-5:
                    continue
                if not noisy:
                    noisy += [outcomes(program, lambda m: m, torch.float64, 1e-6) for _ in "12"]
                moved = max(_error(run[at].tensors[name], wanted) for run in noisy)
                if error > 8 * own + 20 * moved:
                    return f"call {at}: {name} is off by {error:.2g} (eager by {own:.2g})"
    return None


def _error(tensor: torch.Tensor, wanted: torch.Tensor) -> float:
    a, b = tensor.double(), wanted.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    finite = b.isfinite()
    size = b[finite].abs().max().item() if finite.any() else 0.0
    return (a - b)[finite].abs().max().item() / (size + 1e-2) if finite.any() else 0.0


def smaller(program: Program):
    """Programs with a part less, for `reduced`."""
    if len(program.batches) > 1:
        for batch in dict.fromkeys(program.batches):
            yield replace(program, batches=(batch,))
    made = [name for name, _ in program.lines if name]
    for name in made:
        if program.results != (name,):
            yield replace(program, results=(name,))
    if program.gradients:
        yield replace(program, gradients=False)
    if program.training:
        yield replace(program, training=False)
    for at in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:at] + program.lines[at + 1 :])
    for at, (name, text) in enumerate(program.lines):
        for other in ("x0", *(n for n, _ in program.lines[:at] if n)):
            if name and text != other and other in text:
                lines = (*program.lines[:at], (name, other), *program.lines[at + 1 :])
                yield replace(program, lines=lines)
    for at in range(len(program.parts)):
        yield replace(program, parts=program.parts[:at] + program.parts[at + 1 :])
