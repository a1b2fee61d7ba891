"""Calls in the mode "reduce-overhead", which CUDA graphs replay, beside a twin that PyTorch runs.
By hand: the mode is not offered until this passes.

python user_reduced.py [--device cuda|cpu]

Both see the same steps: losses, gradients, running statistics, random numbers and weights must
agree at every one. One line each, PASS or FAIL; exit status 1 after a FAIL.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time

import ingot
import torch
from ingot.live.recording import CudaGraphs, Recording
from torch import nn
from user_support import Verdicts, arguments, close, quiet

WIDTH, ROWS, STEPS = 256, 128, 10
MODE = {"mode": "reduce-overhead"}


class Block(nn.Module):
    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.dropout = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Attends(nn.Module):
    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.qkv, self.out, self.rate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), rate

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Gives its logits, too, of which no loss reads."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        self.words, self.body = nn.Embedding(1000, WIDTH), nn.Sequential()
        for _ in range(3):
            self.body.append(Attends(rate)).append(Block(rate))
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        logits = self.head(self.body(self.words(words)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        return loss, logits


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.relu(self.norm(self.layer(x)))


class Pair:
    """A module, optimised, and its twin."""

    def __init__(self, module: nn.Module, device: str, compiled: bool = False):
        module = module.to(device)
        self.twin = copy.deepcopy(module)
        self.module = module
        if compiled:
            self.ours = torch.compile(module, backend="ingot", mode="reduce-overhead")
        else:
            self.ours = ingot.optimize(module, options=MODE)
        both = (self.module, self.twin)
        self.optimisers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in both]

    def steps(self):
        """The module that is called, the one that holds the weights, and an optimiser of each."""
        return zip((self.ours, self.twin), (self.module, self.twin), self.optimisers, strict=True)

    def agree(self, tolerance: float = 1e-3) -> bool:
        named = zip(self.module.named_parameters(), self.twin.parameters(), strict=True)
        for (_, a), b in named:
            if (a.grad is None) != (b.grad is None):
                return False
            if not close(a, b, tolerance):
                return False
            # A gradient that is rounding alone (of a bias before a norm) is no measure.
            if a.grad is not None and b.grad.norm() > 1e-6 and not close(a.grad, b.grad, tolerance):
                return False
        pairs = zip(self.module.buffers(), self.twin.buffers(), strict=True)
        return all(close(a.float(), b.float(), tolerance) for a, b in pairs)


class Reduced:
    def __init__(self, device: str):
        self.device, self.launches = device, 0
        forward = Recording.forward

        def counted(recording, args):
            self.launches += 1
            return forward(recording, args)

        Recording.forward = counted

    def replayed(self, good: bool, least: int = 1):
        if self.device == "cuda" and self.launches < least:
            return False, f"{self.launches} calls were replayed"
        found, self.launches = self.launches, 0
        return good, f"({found} replayed)"

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device)

    def training(self, pair: Pair, draw, loss_of, context=contextlib.nullcontext, tolerance=1e-3):
        good = True
        for step in range(STEPS):
            batch, losses = draw(step), []
            for called, _, optimiser in pair.steps():
                optimiser.zero_grad()
                torch.manual_seed(step)
                with context():
                    loss = loss_of(called(batch))
                loss.backward()
                losses.append(loss.detach().clone())
                if step % 2:
                    optimiser.step()
            good &= close(*losses, tolerance) and pair.agree(20 * tolerance)
        return self.replayed(good, STEPS - 5)

    def words(self, step: int) -> torch.Tensor:
        return torch.randint(1000, (8, 64), device=self.device)

    def a_language_model(self):
        return self.training(Pair(Language(), self.device), self.words, lambda r: r[0])

    def a_language_model_by_torch_compile(self):
        pair = Pair(Language(), self.device, compiled=True)
        return self.training(pair, self.words, lambda r: r[0])

    def a_language_model_with_dropout(self):
        return self.training(Pair(Language(0.1), self.device), self.words, lambda r: r[0])

    def under_autocast(self):
        def context():
            return torch.autocast(self.device, torch.bfloat16)

        pair = Pair(Language(0.1), self.device)
        return self.training(pair, self.words, lambda r: r[0].float(), context, 2e-2)

    def running_statistics(self):
        pair = Pair(nn.Sequential(Normalised(), Normalised()), self.device)
        return self.training(pair, lambda _: self.random(ROWS, WIDTH), _square)

    def accumulated_gradients(self):
        pair, good = Pair(Block(), self.device), True
        for _ in range(STEPS):
            x = self.random(ROWS, WIDTH)
            for called, _, _ in pair.steps():
                called(x).square().mean().backward()
            good &= pair.agree()
        return self.replayed(good, STEPS - 5)

    def scaled_gradients(self):
        pair, good = Pair(Block(), self.device), True
        scalers = [torch.amp.GradScaler(self.device) for _ in range(2)]
        for _ in range(STEPS):
            x = self.random(ROWS, WIDTH)
            for (called, _, optimiser), scaler in zip(pair.steps(), scalers):
                optimiser.zero_grad()
                with torch.autocast(self.device, torch.float16):
                    loss = called(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimiser)
                torch.nn.utils.clip_grad_norm_(optimiser.param_groups[0]["params"], 1.0)
                scaler.step(optimiser)
                scaler.update()
            good &= pair.agree(3e-2)
        return self.replayed(good, STEPS - 5)

    def two_forwards_and_one_backward(self):
        pair, good = Pair(Block(0.1), self.device), True
        for step in range(STEPS):
            x, y = self.random(ROWS, WIDTH), self.random(ROWS, WIDTH)
            for called, _, optimiser in pair.steps():
                optimiser.zero_grad()
                torch.manual_seed(step)
                (called(x).square().mean() + called(y).mean()).backward()
            good &= pair.agree()
        return self.replayed(good, 4)

    def two_backwards_of_one_forward(self):
        pair, good = Pair(nn.Sequential(Block(0.1), Normalised()), self.device), True
        for step in range(STEPS):
            x = self.random(ROWS, WIDTH)
            for called, _, optimiser in pair.steps():
                optimiser.zero_grad()
                torch.manual_seed(step)
                result = called(x)
                result.square().mean().backward(retain_graph=True)
                (3 * result).mean().backward()
            good &= pair.agree()
        return self.replayed(good, 4)

    def a_gradient_penalty(self):
        pair, good = Pair(Block(), self.device), True
        for _ in range(STEPS):
            x = self.random(ROWS, WIDTH)
            for called, _, optimiser in pair.steps():
                optimiser.zero_grad()
                y = x.clone().requires_grad_()
                result = called(y).square().sum()
                (slope,) = torch.autograd.grad(result, y, create_graph=True)
                (slope.norm() - 1).square().backward()
            good &= pair.agree()
        return self.replayed(good, 4)

    def evaluation_between_steps_and_other_sizes(self):
        pair, good = Pair(nn.Sequential(Block(), Normalised()), self.device), True
        for step in range(6 * STEPS):
            rows = (ROWS, 96, 160)[step // 8 % 3]
            x = self.random(rows, WIDTH)
            if step % 4 == 3:
                self_evaluated = [m.eval() and c for c, m, _ in pair.steps()]
                with torch.no_grad():
                    good &= close(*[called(x) for called in self_evaluated])
                for _, module, _ in pair.steps():
                    module.train()
                continue
            for called, _, optimiser in pair.steps():
                optimiser.zero_grad()
                called(x).square().mean().backward()
                optimiser.step()
            good &= pair.agree(5e-3)
        return self.replayed(good, STEPS)

    def kept_results(self):
        pair, kept = Pair(Block().eval(), self.device), []
        with torch.no_grad():
            for _ in range(STEPS):
                x = self.random(ROWS, WIDTH)
                kept.append([called(x) for called, _, _ in pair.steps()])
        return self.replayed(all(close(a, b) for a, b in kept), STEPS - 5)

    def weights_that_move(self):
        pair, good = Pair(Block(), self.device), True
        for step in range(4 * STEPS):
            x = self.random(ROWS, WIDTH)
            for called, module, _ in pair.steps():
                if step % 10 == 7:
                    module.up.weight.data = module.up.weight.data * 1.5
                if step == 25:
                    module.down.weight = nn.Parameter(module.down.weight.detach() * 0.5)
                module.zero_grad()
                called(x).square().mean().backward()
            good &= pair.agree()
        return self.replayed(good, STEPS)

    def images(self):
        layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        module = nn.Sequential(*layers, nn.Conv2d(16, 32, 3), nn.GELU(), nn.Flatten(1))
        pair = Pair(module, self.device)
        return self.training(pair, lambda _: self.random(16, 3, 32, 32), _square)

    def streams(self):
        if self.device != "cuda":
            return True
        pair, good = Pair(Block(), self.device), True
        streams = [torch.cuda.Stream() for _ in range(3)]
        for step in range(3 * STEPS):
            stream = streams[step % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x = self.random(ROWS, WIDTH)
                for called, module, _ in pair.steps():
                    module.zero_grad()
                    called(x).square().mean().backward()
                good &= pair.agree()
            torch.cuda.current_stream().wait_stream(stream)
        return self.replayed(good, STEPS)

    def threads(self):
        pair, wrong = Pair(Block().eval(), self.device), []

        def work(seed: int) -> None:
            generator = torch.Generator(self.device).manual_seed(seed)
            with torch.no_grad():
                for _ in range(3 * STEPS):
                    x = torch.randn(ROWS, WIDTH, device=self.device, generator=generator)
                    if not close(pair.ours(x), pair.twin(x)):
                        wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.replayed(not wrong)

    def what_waits_for_the_gpu(self):
        """Reads a number in its forward, which no graph can: it runs as without the mode."""

        class Asks(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                y = torch.relu(self.layer(x))
                return y[y.sum(1) > 3]

        pair, good = Pair(Asks(), self.device), True
        for _ in range(STEPS):
            x = self.random(ROWS, WIDTH)
            with torch.no_grad():
                good &= close(pair.ours(x), pair.twin(x))
            pair.ours(x).sum().backward()
        self.launches = 0
        return good

    def what_fails_to_be_recorded(self):
        """Within a graph that TorchDynamo captures whole the host looks at an error of the GPU."""

        class Solves(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                y = torch.relu(self.layer(x)).view(-1, 16, 16)
                return torch.linalg.solve(y @ y.mT + torch.eye(16, device=x.device), y)

        pair, good = Pair(Solves(), self.device), True
        for _ in range(STEPS):
            x = self.random(ROWS, WIDTH)
            for called, module, _ in pair.steps():
                module.zero_grad()
                called(x).square().mean().backward()
            good &= pair.agree(2e-2)
        found, self.launches = self.launches, 0
        return good, f"({found} replayed)"

    def a_recording_that_fails(self):
        """What is left of it must not stop random numbers, memory or other recordings."""
        if self.device != "cuda":
            return True
        x = self.random(ROWS, WIDTH)
        try:
            CudaGraphs(x.device).recorded(lambda: (x * 2).sum().item())
        except Exception as error:
            drawn = torch.rand(4, device="cuda")
            return bool(drawn.isfinite().all()), type(error).__name__
        return False, "it did not fail"

    def a_language_model_afterwards(self):
        return self.a_language_model_with_dropout()

    def steps_are_faster(self):
        if self.device != "cuda":
            return True
        seconds = []
        for options in (None, MODE):
            module = ingot.optimize(Language().cuda(), options=options)
            words = self.words(0)
            for step in range(40):
                if step == 10:
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                module.zero_grad()
                with torch.autocast("cuda", torch.bfloat16):
                    loss, _ = module(words)
                loss.backward()
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - begun) / 30)
        before, after = (1e3 * s for s in seconds)
        return self.replayed(after < before)[0], f"{before:.2f} ms, replayed {after:.2f} ms"


def _square(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


_SHARED = ("replayed", "random", "training", "words")
NAMES = [n for n in vars(Reduced) if n not in _SHARED and not n.startswith("_")]


def main() -> int:
    given = arguments(__doc__)
    os.environ["INGOT_MODES"] = "all"
    quiet()
    verdicts, reduced = Verdicts(), Reduced(given.device)
    for name in NAMES:
        reduced.launches = 0
        verdicts.attempt(name.replace("_", " "), getattr(reduced, name))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
