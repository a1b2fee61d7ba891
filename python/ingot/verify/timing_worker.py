"""The worker's part of timing: eager, torch.compile and the candidate, in interleaved rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..bench import RoundOptions, compare
from ..bench.subjects import COMPILE, EAGER, Subject, WeightChanger, baselines, calls
from ..model_file import load_model_file
from . import execution, passing
from .looking import Look
from .tricks import WRONG_WHEN_TIMED

CANDIDATE = "candidate"
_SAMPLES = 2
_FEWEST_ON_CPU = 5  # of rounds that take longer than a second; shorter ones are as many as ever
_MARKED = 3
_POSITIONS = 256


class TimingSession:
    """Holds the candidate and, built here from its own file, the original. note(trick, what): where
    to tell what was noticed of the candidate."""

    def __init__(
        self, candidate: Any, device: torch.device, header: dict, tensors: dict, note: Callable
    ) -> None:
        self._candidate = candidate
        self._device = device
        self._note = note
        self._form = header["form"]
        loaded = load_model_file(header["original"], header["overrides"])
        init_inputs = passing.unpacked(header["init"], {}, loaded.Model.__module__)
        with loaded.at_home():
            seed = header["construction_seed"]
            self._original = execution.construct(loaded.Model, init_inputs, seed)
        self._original.to(device)
        state = {k: v for k, v in tensors.items() if k[:2] in ("p:", "b:")}
        for module in (self._original, candidate):
            execution.set_state(module, state, through_data=False)
            module.train(header["training"])
        # The same tensors for both, in containers of the classes that each of them knows.
        placed = {k: v.to(device) for k, v in tensors.items() if k not in state}
        sets = header["input_sets"]
        self._original_sets = [
            passing.unpacked(packed, placed, loaded.Model.__module__) for packed in sets
        ]
        self._input_sets = [passing.unpacked(packed, placed) for packed in sets]
        self._tensors = placed
        self._pristine = {name: tensor.clone() for name, tensor in placed.items()}
        # Where a call of the original changes its inputs, or its parameters, each gets its own.
        self._restores = header["restores"]
        self._parameters = {k: v for k, v in state.items() if k[0] == "p"}
        self._kept_sets = self._input_sets
        if self._restores:
            self._kept_sets = [passing.map_tensors(v, torch.clone) for v in self._input_sets]

    def compare(self, header: dict, original_allowed: Callable) -> tuple:
        """Samples of all subjects. Weights and inputs change before each call, so that no result
        can be kept; the weights by the same values for all. original_allowed: of the watch."""
        subjects = baselines(
            self._original, self._original_sets, self._device, header["compiled"], False
        )
        if COMPILE in subjects:
            with original_allowed():  # torch.compile reads the file that it compiles from
                for i in range(len(self._original_sets)):
                    subjects[COMPILE](i)
        subjects[CANDIDATE] = calls(self._candidate, self._input_sets)
        # What they return is looked at within their time, the baselines' too: it costs the same.
        notes = {CANDIDATE: self._note}
        subjects = {
            name: _looked_at(subject, self._look(notes.get(name)))
            for name, subject in subjects.items()
        }
        change_weights = WeightChanger(self._original, self._candidate)
        change_inputs = execution.InputChanger(self._kept_sets, header["seed"])

        def change(i: int) -> None:
            change_weights(i)
            change_inputs(i)
            self._restore_inputs(i)

        # Somebody waits: shorter pauses, and fewer of the figures beside the one that counts, than
        # `ingot bench` makes.
        options = RoundOptions(
            rounds=header["rounds"],
            budget_s=header["budget_s"],
            rest_s=0.07,
            extra_rounds=2,
            prepare=change,
        )
        if self._device.type == "cpu":
            options.fewest = _FEWEST_ON_CPU
        result = compare(subjects, self._device, options)
        change_weights(0)  # the parameters that the parent sent
        return {"ok": True, "baseline": EAGER, **result.to_dict()}, {}

    def repeat(self, count: int, seed: int) -> tuple:
        """Calls the candidate alone `count` times; the parent holds the watch. Returns the outputs
        of the last call and of some others, which are chosen only after each was made, and what
        lay at some of their places right after the call; of other calls, the buffers before and
        after."""
        for name, pristine in self._pristine.items():
            self._tensors[name].copy_(pristine)
        for number, values in enumerate(self._input_sets):
            _copy(values, self._kept_sets[number])
        change = execution.InputChanger(self._kept_sets, seed)
        look = self._look(self._note)
        chance = random.SystemRandom()
        marked = {*chance.sample(range(count), min(count, _MARKED)), count - 1}
        sampled: dict = {}
        sent: dict = {}
        result: Any = None  # kept until the next one is there: memory in use is not free
        with torch.no_grad():
            for i in range(count):
                change(i)
                self._restore_inputs(i)
                if self._restores:
                    execution.set_state(self._candidate, self._parameters, through_data=False)
                if i in marked:
                    sent.update(self._buffers(f"m{i}<"))
                following = self._candidate(*self._input_sets[i % len(self._input_sets)])
                look(following, keeps=True)
                result = following
                if i in marked:
                    sent.update(self._buffers(f"m{i}>"))
                    if self._restores:
                        used = passing.tensors_of(self._input_sets[i % len(self._input_sets)])
                        sent.update({f"m{i}>i{j}": t.clone() for j, t in enumerate(used)})
                place = len(sampled) if len(sampled) < _SAMPLES else chance.randrange(i + 1)
                if place < _SAMPLES or i == count - 1:
                    kept = _SAMPLES if i == count - 1 else place
                    seen = self._as_it_is(result)
                    sampled[kept] = (i, seen, *_glimpse(seen, chance))
            execution.synchronize(self._device)
        positions = []
        for number, (_, kept_result, seen_at, seen) in enumerate(sampled.values()):
            outputs, structure, _ = execution.outputs_of(kept_result)
            if execution.without_numbers(structure) != self._form["structure"]:
                self._note(WRONG_WHEN_TIMED, f"in a timed call returns {structure}")
            positions.append(seen_at)
            sent.update({f"r{number}.o{i}": t for i, t in enumerate(outputs)})
            sent.update({f"g{number}.o{i}": t for i, t in enumerate(seen)})
        reply = {
            "ok": True,
            "calls": [i for i, *_ in sampled.values()],
            "positions": positions,
            "marked": sorted(marked) if self._restores or self._buffers("") else [],
        }
        return reply, sent

    def _as_it_is(self, result: Any) -> Any:
        """What lies in an input, in the original too, is written again before the next call."""
        if not self._form["aliases"]:
            return result
        return pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, result)

    def _restore_inputs(self, call: int) -> None:
        if self._restores:
            number = call % len(self._input_sets)
            _copy(self._kept_sets[number], self._input_sets[number])

    def _buffers(self, before: str) -> dict:
        return {
            f"{before}b:{name}": value.clone() for name, value in self._candidate.named_buffers()
        }

    def _look(self, note: Callable | None) -> Look:
        tensors = [*self._tensors.values(), *execution.named_state(self._candidate).values()]
        return Look(self._form, self._device, tensors, note)


def _copy(source: list, target: list) -> None:
    if source is not target:
        for ours, theirs in zip(passing.tensors_of(target), passing.tensors_of(source)):
            ours.copy_(theirs)


def _looked_at(subject: Subject, look: Look) -> Subject:
    def call(i: int) -> object:
        result = subject(i)
        look(result)
        return result

    return call


def _glimpse(result: Any, chance: random.Random) -> tuple:
    """(places drawn now, what lies there now in each output): work that is still under way, or put
    off until somebody looks at the whole, shows by another value later."""
    outputs, _, _ = execution.outputs_of(result)
    seen_at = [chance.randrange(1 << 40) for _ in range(_POSITIONS)]
    places = torch.tensor(seen_at)
    return seen_at, [execution.at_places(output, places) for output in outputs]
