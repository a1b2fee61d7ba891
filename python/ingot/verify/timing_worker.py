"""The worker's part of timing: eager, torch.compile and the candidate, in interleaved rounds."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

from ..bench import RoundOptions, compare
from ..bench.subjects import EAGER, WeightChanger, baselines, calls
from ..model_file import load_model_file
from . import execution

CANDIDATE = "candidate"


class TimingSession:
    """Holds the candidate and, built here from its own file, the original."""

    def __init__(self, candidate: Any, device: torch.device, header: dict, tensors: dict) -> None:
        self._candidate = candidate
        self._device = device
        loaded = load_model_file(header["original"], header["overrides"])
        init_inputs = pickle.loads(base64.b64decode(header["init"]))
        self._original = execution.construct(loaded.Model, init_inputs, header["seed"])
        self._original.to(device)
        state = {k: v for k, v in tensors.items() if k[:2] in ("p:", "b:")}
        for module in (self._original, candidate):
            execution.set_state(module, state, through_data=False)
            module.train(header["training"])
        self._input_sets = [
            [
                tensors[a["tensor"]].to(device)
                if "tensor" in a
                else pickle.loads(base64.b64decode(a["pickle"]))
                for a in args
            ]
            for args in header["input_sets"]
        ]

    def compare(self, header: dict) -> tuple:
        """Samples of all subjects. Weights change before each call, by the same values for all."""
        subjects = baselines(
            self._original, self._input_sets, self._device, header["compiled"], False
        )
        subjects[CANDIDATE] = calls(self._candidate, self._input_sets)
        change = WeightChanger(self._original, self._candidate)
        options = RoundOptions(rounds=header["rounds"], budget_s=header["budget_s"], prepare=change)
        result = compare(subjects, self._device, options)
        change(0)  # the parameters that the parent sent
        return {"ok": True, "baseline": EAGER, **result.to_dict()}, {}

    def repeat(self, count: int) -> tuple:
        """Calls the candidate alone `count` times; the parent holds the watch. Returns the outputs
        of the last call, and the state from which a repetition of it starts."""
        with torch.no_grad():
            result: Any = None
            for i in range(count):
                before = None
                if i == count - 1:
                    before = {f"b:{n}": b.clone() for n, b in self._candidate.named_buffers()}
                result = self._candidate(*self._input_sets[i % len(self._input_sets)])
            execution.synchronize(self._device)
        outputs, _, _ = execution.outputs_of(result)
        sent = {f"o{i}": t for i, t in enumerate(outputs)}
        sent.update(before or {})
        last = (count - 1) % len(self._input_sets)
        return {"ok": True, "last": last, "outputs": len(outputs)}, sent
