"""The original, in the parent: its own results ("eager"), the fp64 truth and the allowed spread."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import execution
from .bounds import Roundings, disturbed_runs
from .criteria import ErrorModel, Spread
from .measures import measure

DISTURBED_RUNS = 3
_BLOCK_OF_NOISE_SEED = 20211


@dataclass
class Results:
    """Outputs and buffers after one call, or the exception that it raised. changed_inputs: those
    that the original itself works on in place. drew: whether it took random numbers."""

    outputs: list
    structure: str
    buffers: dict
    aliases: list
    error: Exception | None = None
    changed_inputs: frozenset = frozenset()
    drew: bool = False


class Reference:
    """Runs the original from any state. All results lie on the reference's device."""

    def __init__(
        self,
        model_class: type,
        init_inputs: Any,
        seed: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: what the constructed module is converted to, where it is not to be its own."""
        self.device = device
        fresh = execution.construct(model_class, init_inputs, seed)
        if dtype is not None:
            fresh = fresh.to(dtype)
        self.initial_state = {k: v.clone() for k, v in execution.named_state(fresh).items()}
        live = execution.named_state(fresh)
        first_of: dict = {}
        # Names of one tensor (tied parameters) → the first of them.
        self.tied = {k: first_of.setdefault(id_of(v), k) for k, v in live.items()}
        self.state_dict_names = list(fresh.state_dict())
        self.requires_grad = {n: p.requires_grad for n, p in fresh.named_parameters()}
        self._eager = fresh.to(device)
        self._exact = copy.deepcopy(fresh).double()

    def release(self) -> None:
        """Frees the modules; their memory is needed for something else."""
        del self._eager, self._exact
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def parameter_dtype(self, values: list) -> torch.dtype:
        for tensor in list(values) + list(self.initial_state.values()):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                return tensor.dtype
        return torch.float32

    def eager(self, state: dict, values: list, training: bool, layout: str, seed: int) -> Results:
        return self._run(self._eager, state, values, training, layout, seed)

    def truth(self, state: dict, values: list, training: bool, seed: int) -> Results:
        return self._run(self._exact, state, _doubled(values), training, "contiguous", seed)

    def caller(self, state: dict, values: list, training: bool) -> Callable[[], None]:
        """One call of the original, to its end, and nothing else: for the clock."""
        self._prepare(self._eager, state, training)
        placed = execution.on_device(values, self.device)

        def call() -> None:
            with torch.no_grad():
                self._eager(*placed)
            execution.synchronize(self.device)

        return call

    def changed(self, state: dict, seed: int) -> dict:
        """Parameters and statistics as a training step or load_state_dict might leave them."""
        generator = torch.Generator().manual_seed(seed)
        changed: dict = {}
        by_storage: dict = {}  # tied parameters stay tied
        for key, value in state.items():
            if not value.is_floating_point():
                changed[key] = value.clone()
                continue
            group = self.tied.get(key, key)
            if group not in by_storage:
                factor = 0.5 + torch.rand(value.shape, generator=generator)
                new = value.float() * factor
                if key[:2] == "p:":
                    size = float(value.float().abs().mean()) if value.numel() else 0.0
                    new = new + 0.1 * (size or 1.0) * torch.randn(value.shape, generator=generator)
                by_storage[group] = new.to(value.dtype)
            changed[key] = by_storage[group]
        return changed

    def spread(
        self,
        truth: Results,
        state: dict,
        values: list,
        training: bool,
        seed: int,
        roundings: Roundings,
    ) -> tuple:
        """(a Spread for each output, a Spread for each floating buffer by name)."""
        inputs = execution.place_inputs(_doubled(values), self.device, "contiguous", None)
        leaves = [v for v in inputs if isinstance(v, torch.Tensor)]
        leaves += list(execution.named_state(self._exact).values())
        self._prepare(self._exact, state, training)
        buffers = dict(self._exact.named_buffers(remove_duplicate=False))

        def run() -> tuple:
            for key, value in state.items():
                if key[:2] == "b:":
                    buffers[key[2:]].copy_(value)
            execution.seed_everything(seed)
            with torch.no_grad():
                return execution.outputs_of(self._exact(*inputs))[0]

        outputs_found: list = [[] for _ in truth.outputs]
        buffers_found: dict = {}
        parameters_only = [t for t in leaves if not any(t is b for b in buffers.values())]
        for outputs in disturbed_runs(
            run, parameters_only, roundings, _BLOCK_OF_NOISE_SEED, DISTURBED_RUNS
        ):
            for found, exact, disturbed in zip(outputs_found, truth.outputs, outputs, strict=False):
                found.append(measure(exact, disturbed, rows_of(exact)))
            for name, exact in truth.buffers.items():
                if exact.is_floating_point():
                    found = buffers_found.setdefault(name, [])
                    found.append(measure(exact, buffers[name], 1))
        return (
            [_spread(found) for found in outputs_found],
            {name: _spread(found) for name, found in buffers_found.items()},
        )

    def _prepare(self, module: torch.nn.Module, state: dict, training: bool) -> None:
        execution.set_state(module, state, through_data=False)
        module.train(training)

    def _run(
        self,
        module: torch.nn.Module,
        state: dict,
        values: list,
        training: bool,
        layout: str,
        seed: int,
    ) -> Results:
        self._prepare(module, state, training)
        inputs = execution.place_inputs(values, self.device, layout, None)
        execution.seed_everything(seed)
        generators = execution.generator_states(self.device)
        try:
            with torch.no_grad():
                outputs, structure, _ = execution.outputs_of(module(*inputs))
            execution.synchronize(self.device)
        except Exception as error:
            return Results([], "", {}, [], error)
        drew = generators != execution.generator_states(self.device)
        aliases = execution.aliases_of(outputs, inputs, module)
        buffers = {n: b.clone() for n, b in module.named_buffers(remove_duplicate=False)}
        # Clones: the next call must not reach into what this one returned.
        kept = [o.clone() if aliases else o for o in outputs]
        changed = frozenset(
            i
            for i, (value, used) in enumerate(zip(values, inputs, strict=True))
            if isinstance(value, torch.Tensor) and not execution.same_bits(value, used)
        )
        return Results(kept, structure, buffers, aliases, changed_inputs=changed, drew=drew)


def id_of(tensor: torch.Tensor) -> tuple:
    return (execution.storage_of(tensor) or id(tensor), tensor.storage_offset(), tensor.shape)


def rows_of(output: torch.Tensor) -> int:
    return int(output.shape[0]) if output.dim() else 1


def roundings_for(precision: str, dtype: torch.dtype, model: ErrorModel) -> Roundings:
    return Roundings.of(precision, dtype, model)


def _doubled(values: list) -> list:
    return [
        v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values
    ]


def _spread(found: list) -> Spread:
    def mean(name: str) -> float:
        squares = [getattr(m, name) ** 2 for m in found]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    return Spread(mean("relative_error"), mean("worst_row_error"), mean("scaled_error"))
