"""Optimised models under the settings that users have, against eager's under the same ones.

python user_settings.py [--device cuda|cpu] [--only SETTING] [--times]

Truth is the original in fp64. Ours may err twice as much as eager under the same setting (where
eager errs by less than 1e-6: by 2e-6). --times: plain timings at real sizes instead, where ours
must not be slower than eager. One line for each thing tried, PASS or FAIL; exit status 1 after a
FAIL.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time

import ingot
import torch
from torch import nn
from user_support import Verdicts, arguments, error, exact_twin, quiet

FLOOR = 1e-6
SLACK = 2.0
NOT_SLOWER = 1.02
CALLS = 5  # of a round, one behind another
_BF16 = torch.bfloat16


class Chain(nn.Module):
    """The first seed model."""

    def __init__(self, features: int):
        super().__init__()
        self.gemm = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.rand(features) + 0.5)
        self.bn = nn.BatchNorm1d(features)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


class Block(nn.Module):
    """A residual block of a transformer."""

    def __init__(self, features: int):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 2 * features)
        self.down = nn.Linear(2 * features, features)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def pair(cls: type, device: str, features: int, training: bool):
    """(module, optimised twin with parameters of its own)."""
    module = cls(features).to(device).train(training)
    own = cls(features).to(device).train(training)
    own.load_state_dict(module.state_dict())
    return module, ingot.optimize(own)


def no_worse(found, eager, exact) -> tuple[bool, str]:
    ours, theirs = error(found, exact), error(eager, exact)
    return ours <= SLACK * max(theirs, FLOOR), f"error {ours:.1e}, eager's {theirs:.1e}"


class Tried:
    """Both seed forms, in both modes, at a size."""

    def __init__(self, verdicts: Verdicts, device: str, rows: int, features: int) -> None:
        self.verdicts, self.device = verdicts, device
        self.rows, self.features = rows, features

    def cases(self):
        for cls in (Chain, Block):
            for training in (True, False):
                name = f"{cls.__name__}, {'training' if training else 'eval'}"
                yield name, cls, training

    def made(self, cls: type, training: bool):
        module, ours = pair(cls, self.device, self.features, training)
        return module, ours, exact_twin(module), torch.rand(
            self.rows, self.features, device=self.device
        )  # fmt: skip

    def outputs(self, name: str, context, dtype: torch.dtype | None = None) -> None:
        """Two calls of each under the context, outputs and buffers compared."""
        for case, cls, training in self.cases():

            def compare(cls=cls, training=training):
                module, ours, exact, x = self.made(cls, training)
                if dtype is not None:
                    module, x = module.to(dtype), x.to(dtype)
                    ours.to(dtype)
                with context():
                    for _ in range(2):
                        eager, found = module(x), ours(x)
                with torch.no_grad():
                    for _ in range(2):
                        truth = exact(x.double())
                same = (found.dtype, found.requires_grad) == (eager.dtype, eager.requires_grad)
                good, remark = no_worse(found.detach(), eager.detach(), truth)
                for (key, a), b in zip(ours.named_buffers(), module.buffers(), strict=True):
                    good &= a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-2, atol=1e-3)
                    remark += "" if good else f" ({key})"
                return good and same, remark

            self.verdicts.attempt(f"{name}: {case}", compare)

    # The settings ----------------------------------------------------------------------------

    def gradients(self) -> None:
        """Outputs with gradients on, and every gradient of a weighted sum."""
        self.outputs("gradients on", torch.enable_grad)
        for case, cls, training in self.cases():

            def compare(cls=cls, training=training):
                module, ours, exact, x = self.made(cls, training)
                weights, found = torch.randn_like(x), {}
                for key, model in (("eager", module), ("ours", ours), ("exact", exact)):
                    own = x.detach().double() if key == "exact" else x.detach().clone()
                    own.requires_grad_()
                    (model(own) * weights).sum().backward()
                    found[key] = [own.grad, *(p.grad for p in model.parameters())]
                good, worst = True, ""
                for a, e, t in zip(found["ours"], found["eager"], found["exact"], strict=True):
                    # Behind a batch norm some gradients are zero but for rounding.
                    if t.norm() < 1e-9 * max(g.norm() for g in found["exact"]):
                        continue
                    fine, remark = no_worse(a, e, t)
                    good, worst = good and fine, remark if not fine or not worst else worst
                return good, worst

            self.verdicts.attempt(f"backward: {case}", compare)

    def second_order(self) -> None:
        """A gradient penalty: the derivative of a gradient's norm."""
        for case, cls, training in self.cases():

            def compare(cls=cls, training=training):
                module, ours, exact, x = self.made(cls, training)
                weights, found = torch.randn_like(x), []
                for model in (ours, module, exact):
                    own = x.detach().to(next(model.parameters()).dtype).requires_grad_()
                    loss = (model(own) * weights).tanh().sum()
                    (g,) = torch.autograd.grad(loss, own, create_graph=True)
                    g.square().sum().backward()
                    found.append(own.grad)
                return no_worse(*found)

            self.verdicts.attempt(f"second order: {case}", compare)

    def tf32(self) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        self.outputs("TF32 allowed", torch.no_grad)
        torch.set_float32_matmul_precision(before)

    def default_device(self) -> None:
        torch.set_default_device(self.device)
        try:
            self.outputs("default device", torch.no_grad)
            _, ours, _, x = self.made(Chain, True)
            with torch.no_grad():
                ours(x)
            taken = len(ours.ingot_report()["programs"])
            self.verdicts.say("default device: taken over", bool(taken), f"{taken} programs")
        finally:
            torch.set_default_device(None)

    def autocast(self) -> None:
        context = lambda: torch.autocast(self.device, dtype=_BF16)  # noqa: E731
        self.outputs("autocast, gradients on", context)

        @contextlib.contextmanager
        def without_gradients():
            with torch.no_grad(), context():
                yield

        self.outputs("autocast", without_gradients)

    def inference_mode(self) -> None:
        self.outputs("inference mode", torch.inference_mode)

    def bf16_module(self) -> None:
        self.outputs("bf16 module", torch.no_grad, _BF16)

    def compiled(self) -> None:
        """An optimised module inside somebody's torch.compile."""
        for case, cls, training in self.cases():

            def compare(cls=cls, training=training):
                module, ours, exact, x = self.made(cls, training)
                with torch.no_grad():
                    whole = torch.compile(nn.Sequential(nn.Identity(), ours))
                    return no_worse(whole(x), module(x), exact(x.double()))

            self.verdicts.attempt(f"torch.compile around: {case}", compare)


# Times -------------------------------------------------------------------------------------------


def milliseconds(module, x, flush, device: str, context) -> float:
    """Of one call in a context of its own, L2 cold, synchronised before and after."""
    flush.zero_()
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        with context():
            module(x)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)
    begun = time.perf_counter()
    with context():
        module(x)
    return (time.perf_counter() - begun) * 1e3


def of_a_round(*call) -> float:
    """What holds the host up for a moment, where a call is half a millisecond, is nobody's time."""
    return statistics.median(milliseconds(*call) for _ in range(CALLS))


def timed(verdicts: Verdicts, device: str) -> None:
    """The first seed model at its own size on a GPU, as a harness of others times it."""
    rows, features = (1024, 8192) if device == "cuda" else (64, 256)
    flush = torch.empty((128 if device == "cuda" else 1) << 20, dtype=torch.int32, device=device)
    once = contextlib.nullcontext
    autocast = functools.partial(torch.autocast, device, dtype=_BF16)
    settings = {  # around all calls, and around each
        "gradients on": (torch.enable_grad, once),
        "no_grad": (torch.no_grad, once),
        "inference mode": (torch.inference_mode, once),
        "autocast around all calls": (autocast, once),
        "autocast around each call": (once, autocast),
        "TF32 allowed": (tf32_allowed, once),
        "default device": (lambda: torch.device(device), once),
    }
    factors = []
    for name, (around_all, around_each) in settings.items():
        module, ours = pair(Chain, device, features, True)
        x = torch.rand(rows, features, device=device)
        rounds = []
        with around_all():
            for number in range(25):
                order = (module, ours) if number % 2 else (ours, module)
                took = {id(m): of_a_round(m, x, flush, device, around_each) for m in order}
                if number >= 5:
                    rounds.append((took[id(module)], took[id(ours)]))
        ratio = statistics.median(b / a for a, b in rounds)
        eager, own = (statistics.median(column) for column in zip(*rounds, strict=True))
        factors.append(f"{name} {1 / ratio:.2f}")
        remark = f"ours {own:.4f} ms, eager {eager:.4f} ms, {1 / ratio:.2f} times as fast"
        verdicts.say(f"{name}: not slower", ratio <= NOT_SLOWER or device == "cpu", remark)
        del module, ours
    print("times as fast as eager: " + ", ".join(factors))


@contextlib.contextmanager
def tf32_allowed():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def main() -> int:
    only = ("--only", {"default": "", "help": "one setting, by its method's name"})
    given = arguments(__doc__, only, ("--times", {"action": "store_true"}))
    quiet()
    verdicts = Verdicts()
    if given.times:
        timed(verdicts, given.device)
        return verdicts.end()
    rows, features = (512, 1024) if given.device == "cuda" else (48, 64)
    tried = Tried(verdicts, given.device, rows, features)
    names = ["gradients", "second_order", "tf32", "default_device", "autocast", "inference_mode"]
    for name in [given.only] if given.only else [*names, "bf16_module", "compiled"]:
        getattr(tried, name)()
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
