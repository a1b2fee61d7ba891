"""Several GPUs in one process: the same bits on each, whatever the current device.

python check_devices.py [--devices cuda:0,cuda:1] [--calls 200]

The same models with the same parameters on two devices: called in turn; called while another device
is the current one; one model moved back and forth; from two threads at once; replayed from CUDA
graphs captured on each. Every output, and every buffer that a call moves, is compared bit for bit
with the first device's; the current device must stay what it was. With one GPU it says so and
passes. Exit status 1 where something differs.
"""

from __future__ import annotations

import argparse
import copy
import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
EXAMPLES = ROOT / "examples"

MODELS = ("gemm_scale_bn", "gemm_bn_scale_softmax", "linear_gelu", "linear_layernorm")
SIZES = (
    {"batch_size": 512, "in_features": 1024, "out_features": 1024},
    {"batch_size": 67, "in_features": 133, "out_features": 64},
)


def current() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def made_current(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone().contiguous().reshape(-1).view(torch.uint8)


class Twins:
    """One model, optimised on each device, and what a call gives on the first."""

    def __init__(self, model: str, sizes: dict, training: bool, devices: list[torch.device]):
        import ingot
        from ingot.model_file import load_model_file

        self.name = f"{model} {sizes['batch_size']} {'training' if training else 'eval'}"
        loaded = load_model_file(EXAMPLES / f"{model}.py", sizes)
        self.original = loaded.make_module().train(training)
        self.host_inputs = loaded.make_inputs()
        self.devices = devices
        self.inputs = [[v.to(d) for v in self.host_inputs] for d in devices]
        self.modules, self.starts = [], []
        for device, inputs in zip(devices, self.inputs, strict=True):
            module = copy.deepcopy(self.original).to(device)
            self.starts.append({k: v.clone() for k, v in module.state_dict().items()})
            self.modules.append(ingot.optimize(module, inputs))
        if not self.modules[0].ingot_report()["programs"]:
            raise SystemExit(f"{self.name}: nothing was taken over")
        self.expected = self.state_of(0, self.call(0))

    def rewind(self, number: int) -> None:
        """Calls move the statistics: without this each would give other buffers."""
        self.modules[number].load_state_dict(self.starts[number])

    def call(self, number: int) -> torch.Tensor:
        self.rewind(number)
        return self.modules[number](*self.inputs[number])

    def state_of(self, number: int, output: torch.Tensor) -> list[torch.Tensor]:
        return [bits(output), *(bits(b) for b in self.modules[number].buffers())]

    def differs(self, number: int, output: torch.Tensor) -> bool:
        state = self.state_of(number, output)
        return not all(torch.equal(a, b) for a, b in zip(state, self.expected, strict=True))


class Findings:
    def __init__(self) -> None:
        self.checks, self.wrong = 0, []

    def expect(self, good: bool, what: str) -> None:
        self.checks += 1
        if not good:
            self.wrong.append(what)


def in_turn(twins: Twins, found: Findings) -> None:
    for here in twins.devices:
        with made_current(here):
            before = current()
            for number in (0, 1, 1, 0):
                output = twins.call(number)
                where = f"{twins.name}: {twins.devices[number]} while {here} is current"
                found.expect(output.device == twins.devices[number], f"{where}: on another device")
                found.expect(not twins.differs(number, output), f"{where}: other bits")
                found.expect(current() == before, f"{where}: the current device changed")


def moved(twins: Twins, found: Findings) -> None:
    """One optimised module, moved from device to device between calls."""
    import ingot

    module = ingot.optimize(copy.deepcopy(twins.original))
    start = copy.deepcopy(twins.original.state_dict())
    for number in (0, 1, 0):
        module.to(twins.devices[number]).load_state_dict(start)
        output = module(*twins.inputs[number])
        state = [bits(output), *(bits(b) for b in module.buffers())]
        same = all(torch.equal(a, b) for a, b in zip(state, twins.expected, strict=True))
        found.expect(same, f"{twins.name}: moved to {twins.devices[number]}: other bits")


def mixed(twins: Twins, found: Findings) -> None:
    """Inputs on another device than the parameters: PyTorch's error, and nothing after it."""
    if twins.devices[0] == twins.devices[1]:
        return
    try:
        twins.modules[0](*twins.inputs[1])
        found.expect(False, f"{twins.name}: inputs on another device were accepted")
    except RuntimeError:
        pass
    found.expect(not twins.differs(0, twins.call(0)), f"{twins.name}: after that error: other bits")


def two_threads(twins: Twins, calls: int, found: Findings) -> None:
    barrier = threading.Barrier(2)
    problems: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():  # the setting is a thread's own
                barrier.wait()
                for call in range(calls):
                    output = twins.call(number)
                    if call % 20 == 0 and twins.differs(number, output):
                        problems.append(f"call {call} on {twins.devices[number]}: other bits")
        except Exception as error:
            problems.append(f"{twins.devices[number]}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.expect(not problems, f"{twins.name}: two threads: {'; '.join(problems[:3])}")


def graphs(twins: Twins, found: Findings) -> None:
    if twins.devices[0].type != "cuda":
        return
    captured = []
    for number, device in enumerate(twins.devices):
        with torch.cuda.device(device):
            twins.modules[number].ingot_prepare(*twins.inputs[number])
            twins.call(number)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # Its own default is one stream for all devices, of the first that captured.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                output = twins.modules[number](*twins.inputs[number])
            captured.append((graph, output))
    for number in (0, 1, 1, 0):
        graph, output = captured[number]
        twins.rewind(number)
        torch.cuda.synchronize(twins.devices[number])
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(twins.devices[number])
        where = f"{twins.name}: graph on {twins.devices[number]}"
        found.expect(not twins.differs(number, output), f"{where}: other bits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--calls", type=int, default=200, help="of each thread")
    arguments = parser.parse_args()
    devices = [torch.device(name) for name in arguments.devices.split(",")]
    wanted = max(((d.index or 0) + 1 for d in devices if d.type == "cuda"), default=0)
    if torch.cuda.device_count() < wanted:
        print("skipped: one GPU" if torch.cuda.device_count() else "skipped: no GPU")
        return 0
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    found = Findings()
    for model in MODELS:
        for sizes in SIZES:
            for training in (True, False):
                twins = Twins(model, sizes, training, devices)
                in_turn(twins, found)
                moved(twins, found)
                mixed(twins, found)
                two_threads(twins, arguments.calls, found)
                graphs(twins, found)
                if found.wrong:
                    break
    for what in found.wrong[:20]:
        print(f"FAIL {what}")
    names = ", ".join(str(d) for d in devices)
    print(f"{found.checks} checks on {names}: {len(found.wrong)} failed")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
