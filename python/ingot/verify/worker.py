"""The process in which the candidate runs: `python -m ingot.verify.worker FD [MODULE ...]`.

It does as the parent asks and judges nothing. All that it says is taken as the word of the
candidate, which shares this process: see docs/verify.md.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import traceback
from typing import Any

import torch

# All that is used later is loaded before the candidate, which could put something in its place.
from . import arguments, execution, loading, passing, settings, timing_worker
from .confinement import confine_worker
from .families import lay_out
from .overlaps import overlaps_of
from .transport import Line, TransportError
from .watch import Watch

_GPU_MEMORY_SHARE = 0.6


class Worker:
    def __init__(self, line: Line) -> None:
        self._line = line
        self._watch = Watch()
        self._device = torch.device("cpu")
        self._module: torch.nn.Module | None = None
        self._inputs: list = []
        self._results: dict = {}
        self._calls = 0
        self._path = ""
        self._timing: Any = None
        self.operations = {
            "load": self._load,
            "call": self._call,
            "recheck": self._recheck,
            "forget": self._forget,
            "compare": self._compare,
            "repeat": self._repeat,
            "hello": self._nothing,
            "finish": self._nothing,
        }

    def serve(self) -> None:
        while True:
            try:
                header, tensors = self._line.receive()
            except TransportError:
                return  # the parent is done
            try:
                reply, sent = self.operations[header["op"]](header, tensors)
            except BaseException as error:  # sys.exit() too is an answer
                reply, sent = {"ok": False, "error": self._describe(error)}, {}
            acts = self._watch.acts()
            self._line.send({**reply, "id": header.get("id"), "acts": acts}, sent)

    def _load(self, header: dict, tensors: dict) -> tuple:
        self._device = torch.device(header["device"])
        self._path = header["path"]
        _leave_memory_to_the_parent(self._device)
        before = settings.process_settings()
        self._watch.start(self._path, header["original"])
        candidate = loading.load_file(self._path, header["overrides"], header.get("place", ""))
        model_class = loading.model_class(candidate, self._path, header["class_names"])
        init_inputs = passing.unpacked(header["init"], {})
        module = execution.construct(model_class, init_inputs, header["seed"])
        self._module = module.to(self._device)
        after = settings.process_settings()
        reply = {
            "ok": True,
            "class": model_class.__name__,
            "state_dict": list(module.state_dict()),
            "requires_grad": {n: p.requires_grad for n, p in module.named_parameters()},
            "settings_changed": settings.differences(before, after, settings.ONLY_BY_CALLS),
            "reseeded": torch.initial_seed() != header["seed"],
        }
        return reply, execution.named_state(self._module)

    def _call(self, header: dict, tensors: dict) -> tuple:
        module = self._module
        assert module is not None
        state = {k: v for k, v in tensors.items() if k[:2] in ("p:", "b:")}
        if header["arrives"] == execution.MOVED:
            execution.move(module)
        if header["arrives"] == execution.LOADED:
            execution.load_state(module, state)
        else:
            execution.set_state(module, state, header["through_data"])
        mode_gives_module = execution.set_mode(module, header["training"])
        values = passing.unpacked(header["args"], tensors)
        before = settings.process_settings()
        execution.seed_everything(header["seed"])
        self._inputs = execution.place_inputs(
            values, self._device, header["layout"], self._inputs if header["reuse"] else None, True
        )
        execution.poison_free_memory(header["poison"], self._device)
        generators = execution.generator_states(self._device)
        gradients = header["gradients"]
        others = execution.copied_decoys(self._inputs) if header["between"] else None
        if gradients and header["input_gradients"]:
            execution.require_gradients(self._inputs, header["only_input"])
        with torch.set_grad_enabled(gradients), execution.frozen(module, header["frozen"]):
            result = arguments.call(module, self._inputs, header["names"])
            more = [] if others is None else [module(*others)]
            recording = torch.is_grad_enabled()  # which is put back at the end of the `with`
        outputs, structure, complaints = execution.outputs_of(result)
        # What the caller's stream sees: work left on another stream is not in it.
        copied = self._device.type == "cuda"
        seen = [o.detach().clone() if copied else o.detach() for o in outputs]
        known, found = [bool(o.requires_grad) for o in outputs], {}
        if gradients:
            cotangents = {
                name: lay_out(value.to(self._device, copy=True), header["cotangent_layout"])
                for name, value in tensors.items()
                if name[:1] == "v"
            }
            wanted = [cotangents.get(f"v{i}") for i in range(len(outputs))]
            calls = [outputs, *(execution.outputs_of(other)[0] for other in more)]
            with execution.frozen(module, header["frozen"]):
                known, found = execution.backward(
                    module, self._inputs, calls, wanted, header["twice"]
                )
            found |= cotangents
        outputs = [o.detach() for o in outputs]
        execution.synchronize(self._device)
        self._calls += 1
        self._results[self._calls] = outputs  # kept alive: its memory must not serve a later call
        sent = {f"o{i}": t for i, t in enumerate(seen)}
        sent.update(found)
        sent.update({f"i{i}": t for i, t in enumerate(passing.tensors_of(self._inputs))})
        wanted = ("p:", "b:") if header["return_parameters"] else ("b:",)
        sent.update({k: v for k, v in execution.named_state(module).items() if k[:2] in wanted})
        reply = {
            "ok": True,
            "call": self._calls,
            "outputs": len(outputs),
            "structure": structure,
            "complaints": complaints,
            "aliases": execution.aliases_of(outputs, self._inputs, module),
            "overlaps": overlaps_of(outputs),
            "training": module.training,
            "mode_gives_module": mode_gives_module,
            "state_dict": execution.state_dict_of(module),
            "settings_changed": [
                *settings.differences(before, settings.process_settings()),
                *([] if recording == gradients else [f"gradient mode: {gradients} → {recording}"]),
            ],
            "reseeded": torch.initial_seed() != header["seed"],
            "requires_grad": known,
            "drew": generators != execution.generator_states(self._device),
        }
        return reply, sent

    def _recheck(self, header: dict, tensors: dict) -> tuple:
        """The outputs of an earlier call as they are now: at the given places, or all of them."""
        outputs = self._results[header["call"]]
        places = tensors.get("places")
        if places is not None:
            outputs = [execution.at_places(o, places) for o in outputs]
        return {"ok": True}, {f"o{i}": t for i, t in enumerate(outputs)}

    def _forget(self, header: dict, tensors: dict) -> tuple:
        self._results.clear()
        return {"ok": True}, {}

    def _compare(self, header: dict, tensors: dict) -> tuple:
        with self._watch.original_allowed():
            self._timing = timing_worker.TimingSession(
                self._module, self._device, header, tensors, self._watch.note
            )
        return self._timing.compare(header, self._watch.original_allowed)

    def _repeat(self, header: dict, tensors: dict) -> tuple:
        return self._timing.repeat(header["calls"], header["seed"])

    def _nothing(self, header: dict, tensors: dict) -> tuple:
        return {"ok": True}, {}

    def _describe(self, error: BaseException) -> dict:
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if os.path.abspath(frame.filename) == os.path.abspath(self._path):
                where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        if isinstance(error, SyntaxError) and error.lineno is not None:
            where = f"{os.path.basename(error.filename or self._path)}:{error.lineno}"
        return {"type": type(error).__name__, "message": str(error)[:2000], "where": where}


def _leave_memory_to_the_parent(device: torch.device) -> None:
    """The parent needs room on the GPU for the original, in fp64 too."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        free, total = torch.cuda.mem_get_info(index)
        torch.cuda.set_per_process_memory_fraction(_GPU_MEMORY_SHARE * free / total, index)


def main() -> None:
    confine_worker()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    Worker(Line(connection)).serve()


if __name__ == "__main__":
    main()
