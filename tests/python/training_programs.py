"""Random programs of equal extents (square_programs.py) as they are trained: under autocast, with
inputs of which some need gradients and some are whole numbers or flags, with buffers that a forward
moves, with changes between the calls, with second derivatives and under torch.func.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import square_programs as squares
import torch
from torch import nn

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# What a change of the inputs by rounding is, where sums and functions of them are rounded so.
ROUNDING = {"": 1e-6, "bfloat16": 2.0**-9, "float16": 2.0**-12}
# Of errors in units of eager's own, and what is nothing.
TIMES = {"": (8, 1e-5), "bfloat16": (3, 8e-3), "float16": (3, 1e-3)}


@dataclass(frozen=True)
class Training(squares.Program):
    """autocast: a dtype's name, or "" for none; needs: which inputs need gradients; plain: those of
    whole numbers ("int") or flags ("bool"); buffers: names and shapes; changes: before each call,
    what is done to the module `m`; ways: how each call is differentiated."""

    autocast: str = ""
    needs: tuple[bool, ...] = ()
    plain: tuple[tuple[int, str], ...] = ()
    changes: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"autocast={self.autocast!r} needs={self.needs} plain={self.plain}"
        return f"{super().__str__()}\n# {told}\n# changes={self.changes} ways={self.ways}"

    def fed_tensors(self, batch: int, seed: int, dtype: torch.dtype, noise: Callable) -> list:
        found, plain = [], dict(self.plain)
        for at, tensor in enumerate(self.tensors(batch, seed)):
            kind = plain.get(at)
            if kind is not None:
                found.append((tensor * 2).long() if kind == "int" else tensor > 0)
                continue
            needs = self.gradients and self.needs[at]
            found.append(noise(tensor.to(dtype)).detach().requires_grad_(needs))
        return found


# Drawing -----------------------------------------------------------------------------------------

DECISIONS = """
    torch.where({a}>{b},{a},{b}*0.5) torch.where({a}>0,{a}*2,{a}) ({a}>{b}).to({a}.dtype)*{a}
    ({a}>0)*{a} {a}.masked_fill({a}>{b},0.5) torch.minimum({a},{b}) torch.fmax({a},{b})
    torch.where({a}>{a}.mean(),{a},0) {a}.clamp(min={b}) F.threshold({a},0.1,0.0) F.hardtanh({a})
    {a}.abs() F.relu6({a}) torch.where({a}.isnan(),0,{a}) {a}*({a}>=0) torch.max({a},{b})
    torch.where({a}==0,{a},{a}*2) {a}.sort({i})[0] {a}.topk(1,{i})[0] {a}.cummax({i})[0]
    {a}.max({i})[0] {a}.min({i},True)[0] {a}.amin({i}) {a}.median({i})[0] {a}.max() {a}.min()
    F.max_pool1d({a},2) {a}.kthvalue(1,{i})[0] {a}.norm(float('inf'),dim={i}) {a}.amax()
    F.threshold({a},0.0,0.1) F.softshrink({a}) F.hardshrink({a}) F.hardsigmoid({a})
""".split()
PLAIN = """
    torch.where({k}>0,{a},{b}) {a}*{k} {a}.masked_fill({k}>0,0.0) {a}+{k} torch.where({k}!=0,{a},0)
    {a}*({k}>0).to({a}.dtype) {a}*{k}.to({a}.dtype) {a}-({k}==1).float()
""".split()
COPIES = """
    {a}.clone().mul_({b}) torch.empty_like({a}).copy_({b}) {a}.clone().copy_({b}) {a}.detach()*{b}
    torch.zeros_like({a}).add_({b}) {a}.detach().clone()+{a} {a}.clone().fill_(0.5)*{b}
    {a}.clone().masked_fill_({a}>0,0.5) {a}.contiguous().add_({b}) {a}.clone().zero_()+{b}
    {a}.new_zeros({a}.shape).copy_({b}) {a}.float()*{b} {a}.to({b}.dtype)+{b} {a}.type_as({b})
    ({a}*1).clamp_(-0.5,0.5) {a}.repeat_interleave(2,{i}) {a}.roll(1,{i}) {a}.tril()
    {a}.cumprod({i})
""".split()
IN_PLACE = [
    *squares.IN_PLACE,
    *"""
    {a}.copy_({b}) {a}.zero_() {a}.fill_(0.5) {a}.clamp_(-0.5,0.5) {a}.masked_fill_({a}>0,0.5)
    {a}[:,1:].copy_({b}[:,1:]) {a}.sub_({b}) {a}.div_(2) {a}.tanh_() {a}[{a}>0]=0.5 {a}[:]={b}
    {a}.addcmul_({b},{b}) {a}.lerp_({b},0.3) {a}.abs_() {a}.unsqueeze_(0) {a}.transpose_(0,1)
    """.split(),
]
BUFFERS = """
    self.c.mul_(0.9).add_({a}.detach().mean()*0.1) self.c.copy_({a}.detach().mean())
    self.c+={a}.detach().amax() self.k+=1 self.c.add_(1)
""".split()
READING = "{a}*self.c {a}+self.c {a}/(1+self.k) {a}*self.c.clone()".split()
CHANGES = """
    m.eval() m.train() m.eval() m.train() m.w.requires_grad_(False) m.w.requires_grad_(True)
    m.requires_grad_(False) m.requires_grad_(True) step(m) step(m) step(m) m.c.zero_()
    m.w=nn.Parameter(m.w.detach()*0.5) m.v.data=m.v.data*0.5 freeze(m) load(m)
""".split()
WAYS = ["plain"] * 6 + ["second", "second", "func", "vmap", "no_grad", "accumulate", "retain"]


class _Writer(squares._Writer):
    def training(self, steps: int) -> Training:
        rng = self.rng
        self.kinds = (*self.kinds, DECISIONS, DECISIONS, COPIES)
        made = self.program(steps)
        count = len(made.inputs)
        calls = rng.randint(1, 4)
        sizes = [self.n, made.batches[0], 3, 5, 1]
        return Training(
            **{name: getattr(made, name) for name in squares.Program.__dataclass_fields__}
            | {"batches": (made.batches[0], *(rng.choice(sizes) for _ in range(calls - 1)))},
            autocast=rng.choice(["", "", "bfloat16", "bfloat16", "float16"]),
            needs=tuple(rng.random() < 0.6 for _ in range(count)),
            plain=self.whole,
            changes=("", *(self._change() for _ in range(calls - 1))),
            ways=tuple(rng.choice(WAYS) for _ in range(calls)),
        )

    def _change(self) -> str:
        return "; ".join(self.rng.choice(CHANGES) for _ in range(self.rng.randint(0, 2)))

    def _step(self, kind: Sequence[str]) -> None:
        if not self.lines:
            self._begin()
        roll = self.rng.random()
        if kind is squares.IN_PLACE:
            kind = IN_PLACE
        if roll < 0.06 and self.whole:
            kind = PLAIN
        elif roll < 0.1:
            kind = READING
        elif roll < 0.14:
            kind = BUFFERS
        for _ in range(30):
            if self._drawn(kind):
                return

    def _begin(self) -> None:
        """Of further inputs, some are whole numbers or flags."""
        rng = self.rng
        if hasattr(self, "whole"):
            return
        self.whole = ()
        for name, made in (("c", "torch.zeros(())"), ("k", "torch.zeros((),dtype=torch.long)")):
            self.parts.append((name, f"nn.Buffer({made})"))
            self._give(name, f"nn.Buffer({made})")
        for at in range(1, len(self.made.inputs)):
            if rng.random() < 0.35:
                self.whole += ((at, rng.choice(["int", "bool"])),)
        for world in self.worlds:
            for at, kind in self.whole:
                given = world[f"x{at}"]
                world[f"x{at}"] = (given * 2).long() if kind == "int" else given > 0

    def _drawn(self, kind: Sequence[str]) -> bool:
        text, part = self.rng.choice(kind), None
        if kind is squares.BINARY and self.rng.random() < 0.25:
            shape = self.rng.choice(squares.PARAMETERS).format(n=self.n)
            part = (f"p{len(self.parts)}", f"nn.Parameter(torch.randn({shape}))")
        elif text.startswith("nn."):
            part = (f"m{len(self.parts)}", text.format(n=self.n))
            text = f"self.{part[0]}({{a}})"
        if "{k}" in text:
            text = text.replace("{k}", f"x{self.rng.choice(self.whole)[0]}")
        return self._try(text, part, kind is IN_PLACE, kind is BUFFERS)


def draw_training(rng: random.Random, steps: int | None = None) -> Training:
    writer = _Writer(rng)
    return writer.training(steps or rng.randint(3, 9))


# Judging -----------------------------------------------------------------------------------------


@dataclass
class _Run:
    """One run of a program. called: the module as it is called."""

    program: Training
    module: nn.Module
    called: Callable
    dtype: torch.dtype
    noise: float
    drawn: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(17))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.noise:
            return tensor
        drawn = torch.randn(tensor.shape, generator=self.drawn)
        return tensor * (1 + self.noise * drawn.to(tensor.dtype))

    def outcomes(self) -> list[squares.Outcome]:
        found = []
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(self.moved(parameter))
        program = self.program
        for at, (batch, change, way) in enumerate(
            zip(program.batches, program.changes, program.ways)
        ):
            found.append(squares.Outcome())
            try:
                names = {"m": self.module, "nn": nn, "step": _step, "freeze": _freeze}
                exec(change, names | {"load": _load, "torch": torch})
                leaves = program.fed_tensors(batch, 100 + at, self.dtype, self.moved)
                if way != "accumulate":
                    self.module.zero_grad()
                self._call(found[-1], leaves, way if program.gradients else "no_grad")
            except Exception as error:
                found[-1].raised = error
                break
        return found

    @contextlib.contextmanager
    def _around(self):
        half = HALVES.get(self.program.autocast)
        enabled = half is not None and self.dtype is torch.float32
        with torch.autocast("cpu", half or torch.bfloat16, enabled=enabled):
            yield

    def _call(self, seen: squares.Outcome, leaves: list, way: str) -> None:
        if way in ("func", "vmap"):
            return self._transformed(seen, leaves, way)
        with self._around(), torch.set_grad_enabled(way != "no_grad"):
            results = self.called(*leaves)
        for at, result in enumerate(results):
            self._note(seen, f"result {at}", result)
            seen.shapes[f"result {at} needs"] = result.requires_grad
        loss = _loss(results)
        given = {f"input {at}": leaf for at, leaf in enumerate(leaves)}
        wanted = {**given, **dict(self.module.named_parameters())}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        if loss is not None and way == "second":
            first = torch.autograd.grad(
                loss, list(wanted.values()), create_graph=True, allow_unused=True
            )
            for name, gradient in zip(wanted, first):
                seen.shapes[f"first of {name} is given"] = gradient is not None
                if gradient is not None:
                    seen.tensors[f"first of {name}"] = gradient.detach().clone()
            more = [g.square().sum() for g in first if g is not None and g.requires_grad]
            loss = sum(more, loss)
        if loss is not None:
            loss.backward(retain_graph=way == "retain")
            if way == "retain":
                loss.backward()
        for name, tensor in wanted.items():
            seen.shapes[f"gradient of {name} is given"] = tensor.grad is not None
            if tensor.grad is not None:
                seen.shapes[f"gradient of {name}"] = tuple(tensor.grad.shape)
                seen.tensors[f"gradient of {name}"] = tensor.grad.clone()
        for name, buffer in self.module.named_buffers():
            seen.tensors[name] = buffer.clone()
        for name, leaf in given.items():
            seen.tensors[name] = leaf.detach().clone()

    def _transformed(self, seen: squares.Outcome, leaves: list, way: str) -> None:
        # torch.compile's module has names of its own.
        parameters = {n: p.detach() for n, p in self.called.named_parameters()}
        leaves = [leaf.detach() for leaf in leaves]
        batched = [leaf.dim() > 0 and leaf.size(0) == leaves[0].size(0) for leaf in leaves]

        def called(values: dict, *inputs: torch.Tensor):
            return torch.func.functional_call(self.called, values, inputs)

        with self._around():
            if way == "vmap":
                inner = [leaf[:, None] if has else leaf for leaf, has in zip(leaves, batched)]
                dims = (None, *(0 if has else None for has in batched))
                results = torch.func.vmap(called, in_dims=dims)(parameters, *inner)
                for at, result in enumerate(results):
                    self._note(seen, f"result {at}", result)
                return
            found = torch.func.grad(lambda values: _loss(called(values, *leaves), True))(parameters)
        for name, gradient in found.items():
            self._note(seen, f"gradient of {name.removeprefix('_orig_mod.')}", gradient)

    @staticmethod
    def _note(seen: squares.Outcome, name: str, result: torch.Tensor) -> None:
        dtype = "floating" if result.is_floating_point() else result.dtype
        varying = [d for d, size in enumerate(result.shape) if size > 1]
        order = [result.stride(d) for d in varying]
        seen.shapes[name] = (tuple(result.shape), order, dtype)
        seen.tensors[name] = result.detach().clone()


def _loss(results: Sequence[torch.Tensor], all_of_them: bool = False) -> torch.Tensor | None:
    drawn, loss = torch.Generator().manual_seed(5), []
    for result in results:
        weight = torch.randn(result.shape, generator=drawn)
        if result.is_floating_point() and (all_of_them or result.requires_grad):
            loss.append((result * weight.to(result.dtype)).float().sum())
    return sum(loss) if loss else None


def _step(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.05)


def _freeze(module: nn.Module) -> None:
    for parameter in list(module.parameters())[::2]:
        parameter.requires_grad_(False)


def _load(module: nn.Module) -> None:
    module.load_state_dict({n: t * 0.5 for n, t in module.state_dict().items() if n != "k"}, False)


def outcomes(
    program: Training, wrap: Callable, dtype: torch.dtype = torch.float32, noise: float = 0.0
) -> list[squares.Outcome]:
    module = program.module().to(dtype)
    return _Run(program, module, wrap(module), dtype, noise).outcomes()


def difference(program: Training, wrap: Callable) -> str | None:
    """Where the program differs through Ingot by more than PyTorch does from double precision, and
    than a change of what it reads by rounding makes."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = outcomes(program, lambda module: module)
        exact = outcomes(program, lambda module: module, torch.float64)
        if exact[-1].raised and not eager[-1].raised:
            return None
        found = outcomes(program, wrap)
        noisy: list = []

        def moved(at: int, name: str, wanted: torch.Tensor) -> float:
            if not noisy:
                noise = ROUNDING[program.autocast]
                noisy.extend(outcomes(program, _itself, torch.float64, noise * k) for k in (1, 2))
                noisy.extend(outcomes(program, _itself, torch.float32, noise * k) for k in (1, 2))
            runs = [run[at].tensors.get(name) for run in noisy if len(run) > at]
            return max((_error(t, wanted) for t in runs if t is not None), default=float("inf"))

        for at, (ours, theirs, truth) in enumerate(zip(found, eager, exact)):
            if theirs.raised:
                return None
            problem = _differs(ours, theirs, truth, program, lambda *a, at=at: moved(at, *a))
            if problem is not None:
                return f"call {at}: {problem}"
    return None


def _differs(ours, theirs, truth, program: Training, moved: Callable) -> str | None:
    if ours.raised:
        return f"raises {ours.raised!r}"
    for name, shape in theirs.shapes.items():
        if ours.shapes[name] != shape:
            return f"{name}: {ours.shapes[name]}, not {shape}"
    times, floor = TIMES[program.autocast]
    for name, mine in ours.tensors.items():
        if mine.dtype != theirs.tensors[name].dtype:
            return f"{name} is of {mine.dtype}, not {theirs.tensors[name].dtype}"
        wanted = truth.tensors.get(name)
        if wanted is None:
            continue
        error, own = _error(mine, wanted), _error(theirs.tensors[name], wanted)
        if error <= times * own + floor:
            continue
        noise = moved(name, wanted)
        if error > times * own + 20 * noise:
            return f"{name} is off by {error:.2g} (eager by {own:.2g}, noise {noise:.2g})"
    return None


_error = squares._error


def _itself(module: nn.Module) -> nn.Module:
    return module


def smaller(program: Training):
    """One step at a time."""
    calls = len(program.batches)
    for at in range(calls) if calls > 1 else ():
        parts = ("batches", "changes", "ways")
        yield replace(
            program,
            **{n: (*getattr(program, n)[:at], *getattr(program, n)[at + 1 :]) for n in parts},
        )
    for at, change in enumerate(program.changes):
        if change:
            yield replace(program, changes=(*program.changes[:at], "", *program.changes[at + 1 :]))
    for at, way in enumerate(program.ways):
        if way not in ("plain", "no_grad"):
            yield replace(program, ways=(*program.ways[:at], "plain", *program.ways[at + 1 :]))
    if program.autocast:
        yield replace(program, autocast="")
    for at, needs in enumerate(program.needs):
        if needs:
            yield replace(program, needs=(*program.needs[:at], False, *program.needs[at + 1 :]))
    for at, (shape, layout) in enumerate(program.inputs):
        if layout != "dense":
            inputs = (*program.inputs[:at], (shape, "dense"), *program.inputs[at + 1 :])
            yield replace(program, inputs=inputs)
    yield from squares.smaller(program)
