"""Random programs: the text of a small module, and of what a user does with it, by one source of
random choices. A program is text, so that a failure can be read, run by hand and cut down."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SETUP = """
import copy, dataclasses, types
import torch
from torch import nn
from torch.nn import functional as F

SCALE, TABLE = 2.0, {"shift": 0.5}
"""


@dataclass
class Program:
    """kind: the shape of an example of its first input, without the batch."""

    kind: tuple[int, ...]
    signature: str
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    result: str = ""

    def module(self) -> str:
        def body(lines: list[str]) -> str:
            return "".join(f"        {part}\n" for line in lines for part in line.split("\n"))

        return (
            f"{SETUP}\nclass Model(nn.Module):\n    def __init__(self):\n"
            f"        super().__init__()\n{body(self.init)}\n"
            f"    def forward(self, {self.signature}):\n{body(self.forward)}"
            f"        return {self.result}\n"
        )

    def __str__(self) -> str:
        return "\n".join([self.module(), f"# kind = {self.kind}", *self.script])


def draw_program(rng: random.Random, steps: int | None = None) -> Program:
    writer = _Writer(rng)
    writer.write_module(steps or rng.randint(2, 8))
    writer.write_script(rng.randint(2, 7))
    return writer.program


POINTWISE = [
    "torch.relu({a})",
    "F.gelu({a})",
    "F.gelu({a}, approximate='tanh')",
    "torch.tanh({a})",
    "torch.sigmoid({a})",
    "F.silu({a})",
    "F.mish({a})",
    "F.leaky_relu({a}, 0.1)",
    "F.elu({a})",
    "F.softplus({a})",
    "F.hardtanh({a})",
    "F.hardswish({a})",
    "{a}.clamp(-1.0, 0.5)",
    "{a}.clamp(min=self.floor)",
    "{a}.abs().sqrt()",
    "torch.exp(-{a}.square())",
    "{a} / (1.0 + {a}.abs())",
    "torch.where({a} > 0, {a}, 0.1 * {a})",
    "{a}.masked_fill({a} > 1.0, 0.5)",
    "torch.minimum({a}, torch.ones_like({a}))",
    "{a} * torch.rand_like({a})",
    "F.dropout({a}, 0.3, self.training)",
]
SCALINGS = [
    "{a} * self.gain",
    "{a} + self.table['k']",
    "{a} * self.config.scale",
    "{a} * SCALE",
    "{a} - TABLE['shift']",
    "{a} * 0.5 + 1",
    "{a} * self.calls",
    "{a} / (self.seen + 1)",
    "{a} * torch.tensor(0.5)",
    "{a} + torch.full((1,), 2.0)",
    "{a} * {a}.size(0)",
    "{a} * {a}.shape[-1] ** -0.5",
    "{a} + len(self.log)",
    "{a} * self.state.mean()",
]
CHANGES = [
    "self.calls += 1",
    "self.seen += 1",
    "self.seen.add_(1)",
    "self.log.append(1)",
    "self.state = {a}.mean().detach() + 0.5 * self.state",
    "self.state = {a}",
    "self.kept['last'] = {a}",
    "self.table['k'] = self.table['k'] + 0.5",
    "self.running.mul_(0.9).add_({a}.detach().mean(), alpha=0.1)",
    "self.gain = -self.gain",
]

SIGNATURES = [
    ("x, y", []),
    ("items", ["x, y = items"]),
    ("named", ["x, y = named['x'], named['y']"]),
    ("x, *, y=None", ["y = x if y is None else y"]),
    ("x, number=1.0", ["x = x * number"]),
    ("x, flag=False", ["x = x + 1 if flag else x"]),
]


class _Writer:
    """values: what the forward has computed, with shapes in which "B" is the batch."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        kind = rng.choice([(8,), (8,), (8,), (5, 8), (4, 6, 6)])
        self.program = Program(kind, "x")
        self.values: list[tuple[str, tuple]] = [("x", ("B", *kind))]
        self.modules: dict[str, str] = {}
        self.count = 0

    # Modules -------------------------------------------------------------------------------------

    def write_module(self, steps: int) -> None:
        add, forward = self.program.init.append, self.program.forward
        for line in (
            "self.gain, self.floor, self.calls, self.mode = 2.0, -0.5, 1, 'a'",
            "self.config = types.SimpleNamespace(scale=0.5, flag=True)",
            "self.table, self.log, self.kept = {'k': 0.25}, [], {}",
            "self.state = torch.ones(1)",
            "self.register_buffer('seen', torch.zeros((), dtype=torch.long))",
            "self.register_buffer('running', torch.zeros(()))",
        ):
            add(line)
        self._signature()
        self._step_linear()
        for _ in range(steps):
            self.rng.choice(self.STEPS)(self)
        if not any(("linear" in m or "conv" in m) for m in self.modules.values()):
            forward.append("# no product")
        self._result()

    def _signature(self) -> None:
        if self.rng.random() < 0.7:
            return
        signature, first = self.rng.choice(SIGNATURES)
        self.program.signature = signature
        self.program.forward += first
        if "y" in "".join([signature, *first]):
            self.values.append(("y", self.values[0][1]))

    def _new(self, text: str, shape: tuple) -> str:
        self.count += 1
        name = f"h{self.count}"
        self.program.forward.append(f"{name} = {text}")
        self.values.append((name, shape))
        return name

    def _pick(self, accept=lambda shape: True) -> tuple[str, tuple] | None:
        fitting = [v for v in self.values if accept(v[1])]
        if not fitting:
            return None
        return fitting[-1] if self.rng.random() < 0.75 else self.rng.choice(fitting)

    def _module(self, made: str) -> str:
        name = f"m{len(self.modules)}"
        self.modules[name] = made
        self.program.init.append(f"self.{name} = {made}")
        return name

    def _known_or_new(self, made: str) -> str:
        known = [n for n, m in self.modules.items() if m == made]
        return self.rng.choice(known) if known and self.rng.random() < 0.4 else self._module(made)

    def _step_linear(self) -> None:
        found = self._pick(lambda s: len(s) >= 2 and isinstance(s[-1], int) and s[-1] > 1)
        if found is None:
            return
        a, shape = found
        if len(shape) == 4 and self.rng.random() < 0.8:
            return self._step_convolution()
        out = self.rng.choice([4, 6, 8, shape[-1]])
        bias = self.rng.random() < 0.8
        name = self._known_or_new(f"nn.Linear({shape[-1]}, {out}, bias={bias})")
        form = self.rng.choice(["self.{m}({a})"] * 4 + ["F.linear({a}, self.{m}.weight)"])
        self._new(form.format(m=name, a=a), (*shape[:-1], out))

    def _step_convolution(self) -> None:
        found = self._pick(lambda s: len(s) == 4 and s[0] == "B" and s[-1] > 2 and s[-2] > 2)
        if found is None:
            return
        a, (b, c, h, w) = found
        size = self.rng.choice([1, 3])
        pad = self.rng.choice([0, size // 2])
        out = self.rng.choice([4, 8])
        name = self._known_or_new(f"nn.Conv2d({c}, {out}, {size}, padding={pad})")
        less = size - 1 - 2 * pad
        self._new(f"self.{name}({a})", (b, out, h - less, w - less))

    def _step_norm(self) -> None:
        a, shape = self._pick()
        kind = self.rng.choice(["batch", "batch", "layer", "group", "rms", "instance"])
        if shape[0] != "B" or len(shape) < 2:
            return
        c = shape[1]
        if kind == "layer":
            made = f"nn.LayerNorm({shape[-1]}, elementwise_affine={self.rng.random() < 0.8})"
        elif kind == "rms":
            made = f"nn.RMSNorm({shape[-1]})"
        elif kind == "group":
            made = f"nn.GroupNorm({2 if c % 2 == 0 else 1}, {c})"
        elif kind == "instance" and len(shape) == 4:
            made = f"nn.InstanceNorm2d({c}, affine=True)"
        else:
            options = self.rng.choice(["", "", ", affine=False", ", momentum=None"])
            options = options or self.rng.choice(["", "", ", track_running_stats=False"])
            made = f"nn.BatchNorm{2 if len(shape) == 4 else 1}d({c}{options})"
        self._new(f"self.{self._known_or_new(made)}({a})", shape)

    def _step_pointwise(self) -> None:
        a, shape = self._pick()
        self._new(self.rng.choice(POINTWISE).format(a=a), shape)

    def _step_scaling(self) -> None:
        a, shape = self._pick()
        form = self.rng.choice(SCALINGS)
        if "size(0)" in form and shape[0] != "B":
            return
        self._new(form.format(a=a), shape)

    def _step_parameter(self) -> None:
        a, shape = self._pick()
        if not isinstance(shape[-1], int):
            return
        name = f"p{len(self.program.init)}"
        kept = self.rng.choice(
            [
                f"self.{name} = nn.Parameter(torch.rand({shape[-1]}))",
                f"self.register_buffer('{name}', torch.rand({shape[-1]}))",
                f"self.register_buffer('{name}', torch.rand({shape[-1]}), persistent=False)",
                f"self.{name} = torch.rand({shape[-1]})",
                f"self.{name} = [torch.rand({shape[-1]})]",
            ]
        )
        self.program.init.append(kept)
        read = f"self.{name}[0]" if "[torch" in kept else f"self.{name}"
        self._new(f"{a} {self.rng.choice('+*-')} {read}", shape)

    def _step_softmax(self) -> None:
        a, shape = self._pick(lambda s: len(s) >= 2)
        dim = self.rng.choice([-1, -1, 1])
        name = self.rng.choice(["softmax", "log_softmax"])
        self._new(f"F.{name}({a}, dim={dim})", shape)

    def _step_residual(self) -> None:
        a, shape = self._pick()
        others = [n for n, s in self.values if s == shape and n != a]
        if others:
            b = self.rng.choice(others)
            form = self.rng.choice(
                [
                    "{a} + {b}",
                    "{a} + {b}",
                    "{a} * {b}",
                    "{a} - {b}.detach()",
                    "torch.maximum({a}, {b})",
                ]
            )
            self._new(form.format(a=a, b=b), shape)

    def _step_reduction(self) -> None:
        a, shape = self._pick(lambda s: len(s) >= 2)
        dim = self.rng.choice(range(1, len(shape)))
        name = self.rng.choice(
            [
                "{a}.sum({d}, keepdim={k})",
                "{a}.mean({d}, keepdim={k})",
                "{a}.amax({d}, keepdim={k})",
            ]
            + ["torch.logsumexp({a}, {d}, keepdim={k})", "{a}.max({d}, keepdim={k}).values"]
            + [
                "{a}.var({d}, keepdim={k})",
                "{a}.min({d}, keepdim={k})[0]",
                "{a}.norm(dim={d}, keepdim={k})",
            ]
        )
        keep = self.rng.random() < 0.6
        if "var" in name and shape[dim] == 1:
            return
        left = (*shape[:dim], *([1] if keep else []), *shape[dim + 1 :])
        self._new(name.format(a=a, d=dim, k=keep), left)

    def _step_view(self) -> None:
        a, shape = self._pick(lambda s: s[0] == "B" and len(s) >= 2)
        last = shape[-1]
        forms = [
            (f"{a}.unsqueeze(1)", (*shape[:1], 1, *shape[1:])),
            (f"{a}.flatten(1)", ("B", _product(shape[1:]))),
            (f"{a}.transpose(1, -1)", (shape[0], *_swapped(shape[1:]))),
            (f"{a}[:, ::2]", (shape[0], (shape[1] + 1) // 2, *shape[2:])),
            (f"{a}.detach()", shape),
            (f"{a}.clone()", shape),
            (f"{a}.contiguous()", shape),
            (f"{a}.reshape(-1, {_product(shape[1:])})", ("B", _product(shape[1:]))),
            (f"torch.cat([{a}, {a} * 2], dim=1)", (shape[0], 2 * shape[1], *shape[2:])),
            (f"{a}.flip(1)", shape),
            (f"{a}.squeeze(1) if {a}.size(1) == 1 else {a}", shape if shape[1] != 1 else None),
        ]
        if last % 2 == 0:
            half = (*shape[:-1], last // 2)
            forms += [
                (f"F.glu({a}, -1)", half),
                (f"{a}.chunk(2, dim=-1)[1]", half),
                (f"{a}[..., :{last // 2}]", half),
                (
                    f"{a}.view({a}.size(0), -1, {last // 2})",
                    ("B", 2 * _product(shape[1:-1]), last // 2),
                ),
            ]
        text, left = self.rng.choice(forms)
        if left is not None and len(left) <= 4 and _product(left[1:]) <= 512:
            self._new(text, left)

    def _step_product(self) -> None:
        found = self._pick(lambda s: len(s) == 3 and s[0] == "B")
        if found is None:
            found = self._pick(lambda s: len(s) == 2 and s[0] == "B")
            if found is None:
                return
            a, shape = found
            name = f"p{len(self.program.init)}"
            self.program.init.append(
                f"self.{name} = nn.Parameter(torch.rand({shape[-1]}, 6) - 0.5)"
            )
            forms = [
                "{a} @ self.{w}",
                "torch.mm({a}, self.{w})",
                "torch.einsum('bi,io->bo', {a}, self.{w})",
            ]
            self._new(self.rng.choice(forms).format(a=a, w=name), ("B", 6))
            return
        a, (b, t, c) = found
        forms = [
            (f"torch.bmm({a}, {a}.transpose(1, 2))", (b, t, t)),
            (f"F.scaled_dot_product_attention({a}, {a}, {a})", (b, t, c)),
            (f"torch.einsum('btc,bsc->bts', {a}, {a}) * 0.1", (b, t, t)),
            (f"{a}.transpose(1, 2) @ {a} * 0.1", (b, c, c)),
        ]
        self._new(*self.rng.choice(forms))

    def _step_branch(self) -> None:
        a, shape = self._pick(lambda s: s[0] == "B")
        condition = self.rng.choice(
            [
                "self.training",
                "self.mode == 'a'",
                "self.config.flag",
                "x.size(0) > 1",
                "self.gain > 0",
            ]
            + ["self.calls % 2", "torch.is_grad_enabled()", "SCALE > 1", "'last' in self.kept"]
            + ["len(self.log) < 2", "x.requires_grad", "x.shape[0] == 3"]
        )
        yes, no = (
            self.rng.choice(["{a} * 2", "torch.relu({a})", "{a}", "{a} - 1", "torch.tanh({a})"])
            for _ in "ab"
        )
        self._new(f"{yes.format(a=a)} if {condition} else {no.format(a=a)}", shape)

    def _step_change(self) -> None:
        a, shape = self._pick()
        self.program.forward.append(self.rng.choice(CHANGES).format(a=a))

    def _step_in_place(self) -> None:
        a, shape = self.values[-1]
        if a[0] == "h" and any(op in self.program.forward[-1] for op in ("self.m", " + ", " @ ")):
            form = self.rng.choice(
                [
                    "{a}.add_(1)",
                    "{a} += 0.5",
                    "{a}[:, 0] = 0.25",
                    "torch.relu_({a})",
                    "F.relu({a}, inplace=True)",
                ]
            )
            if len(shape) >= 2 and form.format(a=a):
                self.program.forward.append(form.format(a=a))

    def _step_block(self) -> None:
        a, shape = self._pick()
        form = self.rng.choice(
            [
                "with torch.no_grad():\n    {n} = {a} * 0.5",
                "with torch.enable_grad():\n    {n} = {a} * 0.5",
                "{n} = torch.utils.checkpoint.checkpoint(torch.tanh, {a}, use_reentrant=False)",
                "{n} = {a}\nfor factor in (0.5, 2.0):\n    {n} = torch.tanh({n} * factor)",
                "{n} = sum([{a}, {a} * 0.5], 1.0)",
                "{n} = {a}.double().mul(0.5).to({a}.dtype)",
                "{n} = {a} * {a}.new_ones(({a}.shape[-1],))",
            ]
        )
        self.count += 1
        self.program.forward.append(form.format(a=a, n=f"h{self.count}"))
        self.values.append((f"h{self.count}", shape))

    STEPS = (
        [_step_linear] * 3
        + [_step_convolution] * 2
        + [_step_norm] * 3
        + [_step_pointwise] * 4
        + [_step_scaling] * 3
        + [_step_view] * 3
        + [_step_residual] * 2
        + [_step_parameter] * 2
        + [_step_reduction, _step_reduction, _step_softmax, _step_softmax, _step_product]
        + [_step_branch] * 2
        + [_step_change] * 2
        + [_step_in_place, _step_block]
    )

    def _result(self) -> None:
        names = [name for name, _ in self.values]
        last, any_ = names[-1], self.rng.choice(names)
        self.program.result = self.rng.choice(
            [last] * 8
            + [f"{last}, {any_}", f"[{last}, 3, None]", f"{{'y': {last}, 'n': {{'z': {any_}}}}}"]
            + [f"{last}, {last}.detach()", f"{last}, {last}.transpose(0, -1)", f"({last}, x)"]
            + [f"{last}, {last}.shape, {any_}.argmax(-1)", f"{last}, torch.zeros(2)"]
            + [f"{last}.sum()", f"{last}.reshape(-1)", f"{last}, self.m0.weight", f"{last}.mean(0)"]
            + [f"{last}.squeeze()", f"{last}.t() if {last}.dim() == 2 else {last}"]
        )

    # Scripts -------------------------------------------------------------------------------------

    def write_script(self, length: int) -> None:
        script = self.program.script
        if self.rng.random() < 0.3:
            script.append("m.eval()")
        script.append(self._call())
        for _ in range(length):
            for _ in range(self.rng.choice([0, 1, 1, 2])):
                action = self._action()
                if action:
                    script.append(action)
            script.append(self._call())

    def _call(self) -> str:
        rng = self.rng
        batch = rng.choice([1, 2, 3, 3, 17, 4] * 3 + [0])
        options = [f"{batch}", f"seed={rng.randint(0, 99)}"]
        mode = rng.choice(["grad"] * 5 + ["no_grad", "no_grad", "inference"])
        if mode != "grad":
            options.append(f"mode={mode!r}")
        if rng.random() < 0.3:
            options.append("needs=True")
        layout = rng.choice(
            ["dense"] * 8 + ["transposed", "strided", "expanded", "channels_last", "offset"]
        )
        if layout != "dense":
            options.append(f"layout={layout!r}")
        if rng.random() < 0.15:
            options.append("second=True")
        if rng.random() < 0.04:
            options.append("wrong=True")
        if rng.random() < 0.2 and "number" in self.program.signature:
            options.append(f"number={rng.choice([2.0, 0.5, 1, True])}")
        if rng.random() < 0.5 and "flag" in self.program.signature:
            options.append("flag=True")
        return f"call({', '.join(options)})"

    def _action(self) -> str:
        rng = self.rng
        form = rng.choice(ACTIONS)
        if "{l}" in form:
            fitting = [n for n, m in self.modules.items() if "Linear" in m or "Conv" in m]
        elif "{n}" in form:
            fitting = [n for n, m in self.modules.items() if "BatchNorm" in m]
        else:
            fitting = list(self.modules)
        if not fitting:
            return ""
        name = rng.choice(fitting)
        made = self.modules[name]
        if "bias" in form and "bias=False" in made:
            return ""
        return form.format(l=name, n=name, s=name, made=made, v=rng.choice([0.5, -1.5, 3, 1]))


ACTIONS = [
    *["m.train()", "m.eval()"] * 4,
    *["m.gain = {v}", "m.floor = {v}", "m.mode = 'b'", "m.mode = 'a'", "m.config.scale = {v}"],
    "m.config = types.SimpleNamespace(scale={v}, flag=False)",
    *["m.config.flag = False", "m.table['k'] = {v}", "m.table = {{'k': {v}}}", "m.calls = 5"],
    *["globals()['SCALE'] = {v}", "TABLE['shift'] = {v}", "m.log.clear()", "m.kept.clear()"],
    *["m.state = torch.zeros(1)", "m.seen.zero_()", "m.seen = torch.tensor(3)"],
    *["step()"] * 3,
    "m.zero_grad()",
    "m.zero_grad(set_to_none=False)",
    "load(m)",
    "in_place(m.{l}.weight)",
    "m.{l}.weight.data = m.{l}.weight.data * 0.5",
    "m.{l}.weight.data.mul_(0.5)",
    "m.{l}.weight = nn.Parameter(m.{l}.weight.detach() * 0.5)",
    "m.{l}.bias = None",
    "m.{s} = {made}",
    "m.{s} = nn.Sequential({made})",
    "m.{s}.eval()",
    "m.{s}.train()",
    "m.{n}.momentum = 0.3",
    "m.{n}.eps = 0.1",
    "m.{n}.track_running_stats = False",
    "m.{l}.requires_grad_(False)",
    "m.{l}.weight.requires_grad_(False)",
    "m.requires_grad_(True)",
    "m.requires_grad_(False)",
    "m.running.requires_grad_()",
    "double(m)",
    "m.float()",
    "m.to('cpu')",
    "m.to(memory_format=torch.channels_last)",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_dtype(torch.float32)",
    "copied()",
    "hook(m.{s}.register_forward_hook(lambda m, i, o: o * 2))",
    "hook(m.{s}.register_forward_pre_hook(lambda m, i: (i[0] * 2,)))",
    "hook(m.register_forward_hook(lambda m, i, o: None))",
    "hook(m.{s}.register_full_backward_hook(doubled))",
    "hook(m.{l}.weight.register_hook(lambda g: g * 2))",
    "unhook()",
]


def _product(sizes) -> int:
    made = 1
    for size in sizes:
        made *= size
    return made


def _swapped(sizes: tuple) -> tuple:
    return (sizes[-1], *sizes[1:-1], sizes[0]) if len(sizes) > 1 else sizes
