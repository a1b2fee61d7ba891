"""The worker's part of timing: eager, torch.compile and the candidate, in interleaved rounds."""

from __future__ import annotations

import base64
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch

from ..bench import RoundOptions, compare
from ..bench.subjects import COMPILE, EAGER, WeightChanger, baselines, calls
from ..model_file import load_model_file
from . import execution

CANDIDATE = "candidate"
_SAMPLES = 2


class TimingSession:
    """Holds the candidate and, built here from its own file, the original."""

    def __init__(self, candidate: Any, device: torch.device, header: dict, tensors: dict) -> None:
        self._candidate = candidate
        self._device = device
        loaded = load_model_file(header["original"], header["overrides"])
        init_inputs = pickle.loads(base64.b64decode(header["init"]))
        self._original = execution.construct(loaded.Model, init_inputs, header["construction_seed"])
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
        self._pristine = [
            [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            for values in self._input_sets
        ]

    def compare(self, header: dict, original_allowed: Callable) -> tuple:
        """Samples of all subjects. Weights and inputs change before each call, so that no result
        can be kept; the weights by the same values for all. original_allowed: of the watch."""
        subjects = baselines(
            self._original, self._input_sets, self._device, header["compiled"], False
        )
        if COMPILE in subjects:
            with original_allowed():  # torch.compile reads the file that it compiles from
                for i in range(len(self._input_sets)):
                    subjects[COMPILE](i)
        subjects[CANDIDATE] = calls(self._candidate, self._input_sets)
        change_weights = WeightChanger(self._original, self._candidate)
        change_inputs = execution.InputChanger(self._input_sets, header["seed"])

        def change(i: int) -> None:
            change_weights(i)
            change_inputs(i)

        options = RoundOptions(rounds=header["rounds"], budget_s=header["budget_s"], prepare=change)
        result = compare(subjects, self._device, options)
        change_weights(0)  # the parameters that the parent sent
        return {"ok": True, "baseline": EAGER, **result.to_dict()}, {}

    def repeat(self, count: int, seed: int) -> tuple:
        """Calls the candidate alone `count` times; the parent holds the watch. Returns the outputs
        of the last call and of some others, which are chosen only after each was made."""
        for values, pristine in zip(self._input_sets, self._pristine):
            for value, kept in zip(values, pristine):
                if isinstance(value, torch.Tensor):
                    value.copy_(kept)
        change = execution.InputChanger(self._input_sets, seed)
        before = {f"b:{n}": b.clone() for n, b in self._candidate.named_buffers()}
        chance = random.SystemRandom()
        sampled: dict = {}
        with torch.no_grad():
            result: Any = None
            for i in range(count):
                change(i)
                if i == count - 1:
                    before = {f"b:{n}": b.clone() for n, b in self._candidate.named_buffers()}
                result = self._candidate(*self._input_sets[i % len(self._input_sets)])
                place = len(sampled) if len(sampled) < _SAMPLES else chance.randrange(i + 1)
                if place < _SAMPLES:
                    sampled[place] = (i, result)
            execution.synchronize(self._device)
        calls_kept = [*sampled.values(), (count - 1, result)]
        sent: dict = dict(before)
        for number, (_, kept_result) in enumerate(calls_kept):
            outputs, _, _ = execution.outputs_of(kept_result)
            sent.update({f"r{number}.o{i}": t for i, t in enumerate(outputs)})
        return {"ok": True, "calls": [i for i, _ in calls_kept]}, sent
