"""The original's file: its module as the reference, and inputs that nobody has seen before."""

from __future__ import annotations

import math
import time

import torch

from ..model_file import ModelFileError, load_model_file, place_of
from . import execution, passing
from .execution import same_bits
from .looking import form_of
from .randomness import Randomness
from .reference import Reference, Results
from .result import PairError
from .settings import process_settings

_COPIES = 5  # of which the fastest counts


class Original:
    """Raises PairError where the original cannot be loaded or run on its own inputs."""

    def __init__(
        self, path: str, overrides: dict, device: torch.device, random: Randomness
    ) -> None:
        self.path = path
        self._random = random
        self._last_inputs: list | None = None
        self._next_inputs: list | None = None
        try:
            loaded = load_model_file(path, overrides)
            self._make_inputs = loaded.make_inputs
            with loaded.at_home():
                init_inputs = loaded.get_init_inputs()
                self.packed_init = passing.packed_whole(init_inputs)
                self.reference = Reference(loaded.Model, init_inputs, random.construction, device)
            state = self.reference.initial_state.values()
            execution.check_comparable(state, "a parameter or buffer")
            self.own_values = self.fresh_inputs()
        except ModelFileError as error:
            raise PairError(str(error)) from error
        except execution.NotComparableError as error:
            raise PairError(f"{path}: {error}") from error
        except (Exception, SystemExit) as error:
            raise PairError(f"{place_of(error, path)}: {type(error).__name__}: {error}") from error
        seed = self._random.next("calls")
        eager = self._first = self._call(seed)
        if isinstance(eager.error, execution.NotComparableError):
            raise PairError(f"{path}: {eager.error}")
        if eager.error is not None:
            error = eager.error
            raise PairError(
                f"{place_of(error, path)}: the original raises {type(error).__name__} on its own "
                f"inputs: {error}"
            )
        self.settings = process_settings()  # which its file, or its call, may have changed
        self.draws = eager.drew
        self.changes_what_it_gets = bool(eager.changed_inputs) or any(
            key[0] == "p" for key in eager.state
        )
        self.output_bytes = [o.numel() * o.element_size() for o in eager.outputs]
        self.form = form_of(eager.structure, eager.outputs, bool(eager.aliases))

    def first_call(self, seed: int) -> Results:
        """The results of training on its own inputs from its first state: those that are known,
        where they do not depend on the seed."""
        return self._call(seed) if self.draws else self._first

    def _call(self, seed: int) -> Results:
        state = self.reference.initial_state
        return self.reference.eager(state, self.own_values, True, "contiguous", seed)

    def prefetch(self) -> None:
        """Makes what `fresh_inputs` will give next: while there is nothing else to do."""
        if self._next_inputs is None:
            self._next_inputs = self.fresh_inputs()

    def fresh_inputs(self) -> list:
        if self._next_inputs is not None:
            values, self._next_inputs = self._next_inputs, None
            return values
        execution.seed_everything(self._random.next("inputs"))
        # Which calls are to give gradients of inputs is not the file's to say.
        made = self._make_inputs()
        execution.check_comparable(passing.tensors_of(made), "an input")
        values = passing.map_tensors(made, torch.Tensor.detach)
        tensors = passing.tensors_of(values)
        if self._last_inputs is not None and all(map(same_bits, self._last_inputs, tensors)):
            values = passing.map_tensors(values, _resampled)
        self._last_inputs = tensors
        return values

    def message_bytes(self) -> int:
        """Of the tensors in the largest answer: inputs, outputs, state, and gradients of all."""
        tensors = list(self.reference.initial_state.values())
        tensors += passing.tensors_of(self.own_values)
        returned = sum(t.numel() * t.element_size() for t in tensors) + sum(self.output_bytes)
        return 2 * returned

    def restoring_seconds(self, values: list) -> float:
        """What copying the inputs and the parameters takes, where a call changes them."""
        if not self.changes_what_it_gets:
            return 0.0
        device, fastest = self.reference.device, math.inf
        kept = execution.on_device(passing.tensors_of(values), device)
        kept += [v for k, v in self.reference.initial_state.items() if k[0] == "p"]
        copies = [t.clone() for t in kept]
        for _ in range(_COPIES):
            execution.synchronize(device)
            started = time.perf_counter()
            for source, target in zip(kept, copies):
                target.copy_(source)
            execution.synchronize(device)
            fastest = min(fastest, time.perf_counter() - started)
        return fastest

    def timed_truth(self, state: dict, values: list) -> Results:
        seed = self._random.construction
        return self.reference.truth(state, values, True, seed, moves_on=False)

    def timed_eager(self, state: dict, values: list) -> Results:
        return self.reference.eager(state, values, True, "contiguous", self._random.construction)

    def truth_outputs(self, state: dict, values: list, training: bool) -> list:
        seed = self._random.construction
        return self.reference.truth(state, values, training, seed, moves_on=False).outputs


def _resampled(value: torch.Tensor) -> torch.Tensor:
    """A fresh tensor of like mean and deviation, where get_inputs() gives the same each time."""
    if not value.is_floating_point() or value.numel() < 2:
        return value
    single = value.float()
    return (torch.randn_like(single) * single.std() + single.mean()).to(value.dtype)
