"""Calls that are replayed, while what they rest on changes: weights, memory, layouts, streams.

python user_replay.py [--device cuda|cpu]

An optimised module and a twin that PyTorch runs see the same changes; outputs and running
statistics must agree at every call. Streams and captures are tried on a GPU alone. Try it as well
with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and =backend:cudaMallocAsync. One line each,
PASS or FAIL; exit status 1 after a FAIL.
"""

from __future__ import annotations

import sys
import threading

import ingot
import torch
from torch import nn
from user_support import Verdicts, arguments, close, quiet

WIDTH, ROWS = 512, 256


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.relu(self.norm(self.layer(x)))


class Replays:
    def __init__(self, device: str) -> None:
        self.device = device
        self.module, self.twin = (Normalised().to(device) for _ in range(2))
        self.twin.load_state_dict(self.module.state_dict())
        self.ours = ingot.optimize(self.module)

    def both(self, x: torch.Tensor) -> bool:
        return close(self.ours(x), self.twin(x))

    def change_weights(self, step: int) -> None:
        weight = torch.randn(WIDTH, WIDTH, device=self.device) / WIDTH**0.5
        for model in (self.module, self.twin):
            if step % 3 == 0:
                model.layer.weight.mul_(1.01)
            if step % 7 == 0:
                model.layer.weight.data = weight.clone()
            if step % 13 == 0:
                model.train(not model.training)

    def weights_modes_and_inputs_in_place(self):
        x = torch.randn(ROWS, WIDTH, device=self.device)
        good = True
        for step in range(60):
            self.change_weights(step)
            if step % 11 == 0 and self.device == "cuda":
                torch.cuda.empty_cache()
            x.normal_()
            good &= self.both(x)
        return good

    def running_statistics(self):
        pairs = zip(self.module.buffers(), self.twin.buffers(), strict=True)
        return all(close(a.float(), b.float()) for a, b in pairs)

    def one_address_with_several_layouts(self):
        self.module.eval(), self.twin.eval()
        memory = torch.empty(2 * ROWS * WIDTH, device=self.device)
        good = True
        for step in range(40):
            whole = memory[: ROWS * WIDTH]
            view = (
                whole.view(ROWS, WIDTH),
                memory[: ROWS // 2 * WIDTH].view(ROWS // 2, WIDTH),
                memory[: WIDTH * WIDTH].view(WIDTH, WIDTH).t(),
                memory.view(ROWS, 2 * WIDTH)[:, ::2],
            )[step % 4]
            memory.normal_()
            good &= self.both(view)
        return good

    def an_earlier_result_keeps_its_values(self):
        x = torch.randn(ROWS, WIDTH, device=self.device)
        kept = []
        for _ in range(12):
            x.normal_()
            kept.append((self.ours(x), self.twin(x)))
        return all(close(a, b) for a, b in kept)

    def two_threads(self):
        """Each with inputs of its own."""
        wrong: list = []

        def work(seed: int) -> None:
            generator = torch.Generator(self.device).manual_seed(seed)
            with torch.no_grad():
                for rows in (64, 128, ROWS) * 8:
                    x = torch.randn(rows, WIDTH, device=self.device, generator=generator)
                    if not self.both(x):
                        wrong.append((seed, rows))

        return self._threads([lambda seed=seed: work(seed) for seed in (1, 2)], wrong)

    def three_streams(self):
        streams = [torch.cuda.Stream() for _ in range(3)]
        inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in streams]
        good = True
        for step in range(120):
            stream, x = streams[step % 3], inputs[step % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.normal_()
                good &= self.both(x)
        return good

    def one_tensor_from_two_streams(self):
        x, side = torch.randn(8192, WIDTH, device="cuda"), torch.cuda.Stream()
        good = True
        for _ in range(40):
            x.normal_()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = self.ours(x)
            y.record_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(side)
            good &= close(y, self.twin(x))
        return good

    def a_graph_that_users_capture(self):
        x = torch.randn(ROWS, WIDTH, device="cuda")
        self.ours.ingot_prepare(x)
        self.ours(x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = self.ours(x)
        good = True
        for _ in range(5):
            x.normal_()
            graph.replay()
            good &= close(y, self.twin(x))
        return good

    def replays_while_another_thread_captures(self):
        stop, wrong = threading.Event(), []
        own = nn.Linear(WIDTH, WIDTH).cuda()
        static = torch.randn(ROWS, WIDTH, device="cuda")
        # Drawn before: PyTorch refuses random numbers while any thread captures.
        drawn = [torch.randn(rows, WIDTH, device="cuda") for rows in range(64, 448, 64)]
        for _ in range(3):
            own(static)
        torch.cuda.synchronize()

        def replay() -> None:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    for x in drawn:
                        for _ in range(9):
                            self.ours(x)

        def capture() -> None:
            try:
                with torch.no_grad():
                    for _ in range(30):
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                            own(static)
                        graph.replay()
            finally:
                stop.set()

        return self._threads([replay, capture], wrong)

    @staticmethod
    def _threads(actions: list, wrong: list):
        def guarded(action) -> None:
            try:
                action()
            except Exception as error:  # it would end the thread in silence
                wrong.append(f"{type(error).__name__}: {str(error)[:160]}")

        threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not wrong, " ".join(map(str, wrong[:2]))


ANYWHERE = (
    "weights_modes_and_inputs_in_place",
    "running_statistics",
    "one_address_with_several_layouts",
    "an_earlier_result_keeps_its_values",
    "two_threads",
)
ON_A_GPU = (
    "three_streams",
    "one_tensor_from_two_streams",
    "a_graph_that_users_capture",
    "replays_while_another_thread_captures",
)


def main() -> int:
    given = arguments(__doc__)
    quiet()
    verdicts, replays = Verdicts(), Replays(given.device)
    with torch.no_grad():
        for name in ANYWHERE + (ON_A_GPU if given.device == "cuda" else ()):
            verdicts.attempt(name.replace("_", " "), getattr(replays, name))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
