"""The process in which the candidate runs: `python -m ingot.verify.worker FD FOLDER`.

It does as the parent asks and judges nothing. All that it says is taken as the word of the
candidate, which shares this process: see docs/verify.md.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from . import execution, loading
from .transport import Line, TransportError


class Worker:
    def __init__(self, line: Line) -> None:
        self._line = line
        self._device = torch.device("cpu")
        self._module: torch.nn.Module | None = None
        self._inputs: list = []
        self._results: dict = {}
        self._calls = 0
        self._path = ""
        self._timing: Any = None

    def serve(self) -> None:
        operations = {
            "load": self._load,
            "call": self._call,
            "recheck": self._recheck,
            "forget": self._forget,
            "compare": self._compare,
            "repeat": self._repeat,
        }
        while True:
            try:
                header, tensors = self._line.receive()
            except TransportError:
                return  # the parent is done
            try:
                reply, sent = operations[header["op"]](header, tensors)
            except Exception as error:
                reply, sent = {"ok": False, "error": self._describe(error)}, {}
            self._line.send(reply, sent)

    def _load(self, header: dict, tensors: dict) -> tuple:
        self._device = torch.device(header["device"])
        self._path = header["path"]
        before = execution.process_settings()
        candidate = loading.load_file(self._path, header["overrides"])
        model_class = loading.model_class(candidate, self._path, header["class_names"])
        init_inputs = pickle.loads(base64.b64decode(header["init"]))
        module = execution.construct(model_class, init_inputs, header["seed"])
        self._module = module.to(self._device)
        after = execution.process_settings()
        reply = {
            "ok": True,
            "state_dict": list(module.state_dict()),
            "requires_grad": {n: p.requires_grad for n, p in module.named_parameters()},
            "settings_changed": _differences(before, after),
        }
        return reply, execution.named_state(self._module)

    def _call(self, header: dict, tensors: dict) -> tuple:
        module = self._module
        assert module is not None
        state = {k: v for k, v in tensors.items() if k[:2] in ("p:", "b:")}
        execution.set_state(module, state, header["through_data"])
        module.train(header["training"])
        values = _decode(header["args"], tensors)
        self._inputs = execution.place_inputs(
            values, self._device, header["layout"], self._inputs if header["reuse"] else None
        )
        before = execution.process_settings()
        execution.seed_everything(header["seed"])
        execution.poison_free_memory(header["poison"], self._device)
        execution.synchronize(self._device)
        with torch.no_grad():
            result = module(*self._inputs)
        outputs, structure, complaints = execution.outputs_of(result)
        execution.synchronize(self._device)
        self._calls += 1
        self._results[self._calls] = outputs  # kept alive: its memory must not serve a later call
        sent = {f"o{i}": t for i, t in enumerate(outputs)}
        sent.update({f"i{i}": t for i, t in enumerate(self._inputs) if isinstance(t, torch.Tensor)})
        wanted = ("p:", "b:") if header["return_parameters"] else ("b:",)
        sent.update({k: v for k, v in execution.named_state(module).items() if k[:2] in wanted})
        reply = {
            "ok": True,
            "call": self._calls,
            "outputs": len(outputs),
            "structure": structure,
            "complaints": complaints,
            "aliases": execution.aliases_of(outputs, self._inputs, module),
            "training": module.training,
            "settings_changed": _differences(before, execution.process_settings()),
        }
        return reply, sent

    def _recheck(self, header: dict, tensors: dict) -> tuple:
        outputs = self._results[header["call"]]
        return {"ok": True}, {f"o{i}": t for i, t in enumerate(outputs)}

    def _forget(self, header: dict, tensors: dict) -> tuple:
        self._results.clear()
        return {"ok": True}, {}

    def _compare(self, header: dict, tensors: dict) -> tuple:
        from . import timing_worker

        self._timing = timing_worker.TimingSession(self._module, self._device, header, tensors)
        return self._timing.compare(header)

    def _repeat(self, header: dict, tensors: dict) -> tuple:
        return self._timing.repeat(header["calls"])

    def _describe(self, error: BaseException) -> dict:
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if os.path.abspath(frame.filename) == os.path.abspath(self._path):
                where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        if isinstance(error, SyntaxError) and error.lineno is not None:
            where = f"{os.path.basename(error.filename or self._path)}:{error.lineno}"
        return {"type": type(error).__name__, "message": str(error)[:2000], "where": where}


def _decode(args: list, tensors: dict) -> list:
    return [
        tensors[a["tensor"]] if "tensor" in a else pickle.loads(base64.b64decode(a["pickle"]))
        for a in args
    ]


def _differences(before: dict, after: dict) -> list:
    return [f"{n}: {before[n]} → {after[n]}" for n in before if before[n] != after[n]]


def _die_with_parent() -> None:
    """Asks the kernel (PR_SET_PDEATHSIG) to end this process when the parent ends."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def main() -> None:
    _die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    Worker(Line(connection, Path(sys.argv[2]), "worker")).serve()


if __name__ == "__main__":
    main()
