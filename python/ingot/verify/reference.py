"""The original, in the parent: its own results ("eager"), the fp64 truth and the allowed spread."""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import arguments, blocks, execution, passing
from .bounds import Disturbance, Roundings
from .cotangents import Cotangents, has_error
from .criteria import Spread
from .doubled import own_type, own_type_is_fp64
from .execution import same_bits
from .families import lay_out
from .hidden import Hidden
from .measures import Measures, measure
from .overlaps import overlaps_of
from .scalars import ElementByElement
from .terms import Forms

DISTURBED_RUNS = 3
# For so many elements one may be infinite, or not a number, by rounding alone. (A zero that is
# disturbed is none any longer, and an infinite multiple of it a number that the truth's is not.)
_ELEMENTS_OF_ONE_BEYOND = 10_000
_NO_MODE: contextlib.AbstractContextManager = contextlib.nullcontext()


@dataclass
class Results:
    """Outputs and state after one call, or the exception that it raised. state: the buffers
    ("b:name"), and the parameters ("p:name") of an original whose forward changes them.
    changed_inputs: numbers of those that it works on in place; inputs: all, as they are after it.
    overlaps: of the outputs' memory. drew: whether it took random numbers. gradients: by
    `execution.backward`'s names, None where there are none; requires_grad: of each output.
    mode_gives_module, state_dict: of `execution.set_mode` and, for eager, `state_dict_of`."""

    outputs: list
    structure: str
    state: dict
    aliases: list
    error: BaseException | None = None
    changed_inputs: frozenset = frozenset()
    inputs: list = field(default_factory=list)
    overlaps: list = field(default_factory=list)
    drew: bool = False
    gradients: dict | None = None
    requires_grad: list = field(default_factory=list)
    mode_gives_module: bool = True
    state_dict: dict = field(default_factory=dict)

    def named(self, changed_inputs: frozenset) -> dict:
        """What may carry a rounding, outputs aside: state, gradients, and these inputs ("i0")."""
        changed = {f"i{i}": self.inputs[i] for i in sorted(changed_inputs)}
        found = {**self.state, **changed, **(self.gradients or {})}
        return {name: value for name, value in found.items() if has_error(value)}


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
        exact = _another(fresh, model_class, init_inputs, seed)
        if dtype is not None:
            fresh, exact = fresh.to(dtype), exact.to(dtype)
        live = execution.named_state(fresh)
        self.initial_state = {k: v.to(device, copy=True) for k, v in live.items()}
        first_of: dict = {}
        # Names of one tensor (tied parameters) → the first of them.
        self.tied = {k: first_of.setdefault(id_of(v), k) for k, v in live.items()}
        self.buffer_names = {n for n, _ in fresh.named_buffers(remove_duplicate=False)}
        self.state_dict_names = list(fresh.state_dict())
        self.parameters = arguments.parameters_of(fresh)
        self.requires_grad = {n: p.requires_grad for n, p in fresh.named_parameters()}
        self._eager = fresh.to(device)
        self._exact = _doubled_module(exact.to(device))
        self._own_type: torch.dtype | None = None
        self._forms = Forms()
        self._written: dict = {}  # the parameters that each module holds, by module and name
        self._changes_parameters = False  # where its forward itself does
        self.remembers = False  # whether its last call has changed tensors that are mere attributes

    def release(self) -> None:
        """Frees the modules; their memory is needed for something else."""
        del self._eager, self._exact
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def parameter_dtype(self, values: list) -> torch.dtype:
        for tensor in passing.tensors_of(values) + list(self.initial_state.values()):
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.float32

    def eager(
        self,
        state: dict,
        values: list,
        training: bool,
        layout: str,
        seed: int,
        cotangents: Cotangents | None = None,
    ) -> Results:
        return self._run(self._eager, state, values, training, layout, seed, cotangents)

    def eager_element_by_element(
        self, state: dict, values: list, training: bool, seed: int, cotangents: Cotangents | None
    ) -> Results:
        """What the original gives where no derivative of an activation is vectorised."""
        call = (self._eager, state, values, training, "contiguous", seed, cotangents)
        return self._run(*call, mode=ElementByElement(), moves_on=False)

    def truth(
        self,
        state: dict,
        values: list,
        training: bool,
        seed: int,
        cotangents: Cotangents | None = None,
        moves_on: bool = True,
    ) -> Results:
        """moves_on: of `_run`."""
        doubled = self._doubled(values)
        call = (self._exact, state, doubled, training, "contiguous", seed, cotangents)
        return self._run(*call, moves_on=moves_on)

    def truth_and_spread(
        self,
        state: dict,
        values: list,
        training: bool,
        seed: int,
        roundings: Roundings,
        cotangents: Cotangents | None = None,
        runs: int = DISTURBED_RUNS,
    ) -> tuple:
        """(the truth, a Spread for each of its outputs, and by name for each floating buffer and
        each gradient), by so many runs. Products that they all have in common are computed once."""
        doubled = self._doubled(values)
        inputs: list | None = execution.place_inputs(doubled, self.device, "contiguous", None)
        placed = passing.tensors_of(inputs)
        fixed = [] if self._changes_parameters else list(self._exact.parameters())
        disturbance = Disturbance(roundings, self._forms, fixed)
        disturbance.start_run([*placed, *fixed], exact=True)

        def run(moves_on: bool = False) -> Results:
            call = (self._exact, state, doubled, training, "contiguous", seed, cotangents)
            return self._run(*call, inputs, disturbance, moves_on)

        kept = Hidden(self._exact)
        truth = run(moves_on=True)
        if truth.error is not None:
            return truth, [], {}
        if truth.changed_inputs or disturbance.has_written(placed):
            inputs, placed = None, []  # each run gets its own
        left = Hidden(self._exact)
        kept.restore()
        try:
            disturbed = _disturbed(run, runs, [*placed, *fixed], disturbance)
            return truth, *_spreads(truth, disturbed, self.parameter_dtype(values))
        finally:
            left.restore()

    def caller(self, state: dict, values: list, training: bool) -> Callable[[], None]:
        """One call of the original, to its end, and nothing else: for the clock."""
        self._prepare(self._eager, state, training)
        placed = execution.place_inputs(values, self.device, "contiguous", None)

        def call() -> None:
            with torch.no_grad():
                self._eager(*placed)
            execution.synchronize(self.device)

        return call

    def changed(self, state: dict, seed: int) -> dict:
        """Parameters and statistics as a training step or load_state_dict might leave them, made
        where the state lies."""
        generators: dict = {}
        changed: dict = {}
        by_storage: dict = {}  # tied parameters stay tied
        for key, value in state.items():
            if not has_error(value):
                changed[key] = value.clone()
                continue
            group = self.tied.get(key, key)
            if group not in by_storage:
                place = value.device
                if place not in generators:
                    generators[place] = torch.Generator(place).manual_seed(seed)
                drawn = generators[place], key[:2] == "p:"
                by_storage[group] = (
                    torch.view_as_complex(_changed(torch.view_as_real(value), *drawn))
                    if value.is_complex()
                    else _changed(value, *drawn)
                )
            changed[key] = by_storage[group]
        return changed

    def _doubled(self, values: list) -> list:
        """For a call in fp64, which `_call` makes."""
        state = [t for t in self.initial_state.values() if t.is_floating_point()]
        self._own_type = own_type(state or passing.tensors_of(values))
        return passing.map_tensors(values, in_fp64)

    def spread_again(self, *call, runs: int) -> list:
        """What truth_and_spread gives beside the truth, of a call whose truth is known: what the
        module keeps as mere attributes stays as that call has left it."""
        left = Hidden(self._exact)
        try:
            return list(self.truth_and_spread(*call, runs=runs)[1:])
        finally:
            left.restore()

    def _call(self, module: torch.nn.Module, inputs: list, cotangents: Cotangents | None) -> tuple:
        """(outputs, structure, which have a derivative, gradients or None)."""
        own = self._own_type if module is self._exact else None
        with torch.set_grad_enabled(cotangents is not None):
            between = cotangents is not None and cotangents.between
            others = execution.copied_decoys(inputs) if between else None
            with own_type_is_fp64(own):
                returned = module(*inputs)
                more = [] if others is None else [module(*others)]
            outputs, structure, _ = execution.outputs_of(returned)
            calls = [outputs, *(execution.outputs_of(result)[0] for result in more)]
        if cotangents is None:
            return outputs, structure, [bool(o.requires_grad) for o in outputs], None
        given = cotangents.of(outputs)
        if module is self._eager:
            # Not the truth: some of PyTorch's own kernels are wrong where it does not lie densely
            # (2.11's batch norm on a CPU, seen as an instance norm of one-pixel images).
            given = [c if c is None else lay_out(c, cotangents.layout) for c in given]
        known, gradients = execution.backward(module, inputs, calls, given, cotangents.twice)
        return [o.detach() for o in outputs], structure, known, gradients or None

    def _prepare(self, module: torch.nn.Module, state: dict, training: bool) -> bool:
        """`execution.set_mode`'s result. Parameters that it holds already are not written again:
        that is most of what a small call would take."""
        held = self._written.setdefault(id(module), {})
        missing = {k: v for k, v in state.items() if k[0] == "b" or held.get(k) is not v}
        if self._changes_parameters:
            missing = state
        if module is self._exact and any(k[0] == "p" for k in missing):
            self._forms.clear()
        held.clear()  # for as long as it is between two states
        for name in {n for n, _ in module.named_buffers()} - {k[2:] for k in state}:
            if name not in self.buffer_names:
                execution.place_buffer(module, name, None)  # which it was before a call made it
        converted = in_fp64 if module is self._exact else torch.clone
        execution.set_state(module, missing, False, lambda v: converted(v.to(self.device)))
        held.update({k: v for k, v in state.items() if k[0] == "p"})
        return execution.set_mode(module, training)

    def _run(
        self,
        module: torch.nn.Module,
        state: dict,
        values: list,
        training: bool,
        layout: str,
        seed: int,
        cotangents: Cotangents | None = None,
        inputs: list | None = None,
        mode: contextlib.AbstractContextManager = _NO_MODE,
        moves_on: bool = True,
    ) -> Results:
        """inputs: the values as placed before. mode: in which it is called. moves_on: whether what
        the module keeps as mere attributes stays as the call leaves it, as the candidate's does."""
        before = Hidden(module)
        mode_gives_module = self._prepare(module, state, training)
        if inputs is None:
            inputs = execution.place_inputs(values, self.device, layout, None)
        execution.seed_everything(seed)
        generators = execution.generator_states(self.device)
        if cotangents is not None and cotangents.of_inputs:
            execution.require_gradients(inputs, cotangents.only_input)
        try:
            with mode, execution.frozen(module, cotangents.frozen if cotangents else ()):
                outputs, structure, known, gradients = self._call(module, inputs, cotangents)
            execution.synchronize(self.device)
        except (Exception, SystemExit) as error:
            self._written.pop(id(module), None)  # it stopped midway
            before.restore()
            return Results([], "", {}, [], error)
        drew = generators != execution.generator_states(self.device)
        if module is self._eager and not self._changes_parameters:
            self._changes_parameters = not self._parameters_are(state)
        aliases = execution.aliases_of(outputs, inputs, module)
        overlaps = overlaps_of(outputs)
        left = {
            key: value.detach().clone()
            for key, value in execution.named_state(module).items()
            if key[0] == "b" or self._changes_parameters
        }
        # Clones: the next call must not reach into what this one returned.
        kept = [o.clone() if aliases else o for o in outputs]
        used_inputs = passing.tensors_of(inputs)
        pairs = zip(passing.tensors_of(values), used_inputs, strict=True)
        changed = frozenset(
            i for i, (value, used) in enumerate(pairs) if not execution.same_bits(value, used)
        )
        if module is self._eager:
            self.remembers = before.tensors_changed()
        if not moves_on:
            before.restore()
        return Results(
            kept,
            structure,
            left,
            aliases,
            changed_inputs=changed,
            inputs=[used.detach() for used in used_inputs],
            overlaps=overlaps,
            drew=drew,
            gradients=gradients,
            requires_grad=known,
            mode_gives_module=mode_gives_module,
            state_dict=execution.state_dict_of(module) if module is self._eager else {},
        )

    def _parameters_are(self, state: dict) -> bool:
        """Whether the call of the module has left its parameters as they were."""
        now = execution.named_state(self._eager)
        return all(execution.same_bits(state[k], now.get(k)) for k in state if k[0] == "p")


def id_of(tensor: torch.Tensor) -> tuple:
    return (execution.storage_of(tensor) or id(tensor), tensor.storage_offset(), tensor.shape)


def rows_of(output: torch.Tensor) -> int:
    """Rows are judged one by one. One number a row is judged by the scale of all of them: it may
    come near zero by cancellation, where no relative error can be promised."""
    rows = int(output.shape[0]) if output.dim() else 1
    return 1 if output.numel() == rows else rows


def _rows_of_named(name: str, values: dict) -> int:
    return 1 if name[:2] in ("b:", "p:") else rows_of(values[name])


def _changed(value: torch.Tensor, generator: torch.Generator, added: bool) -> torch.Tensor:
    """Times 0.5 to 1.5; where `added`, plus a tenth of the mean magnitude times normal numbers."""
    new = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    drawn: dict = {"generator": generator, "device": value.device}
    size = 0.0
    if added and value.numel():
        size = float(torch.linalg.vector_norm(value, 1, dtype=torch.float64)) / value.numel() or 1.0
    old = value.contiguous()
    for source, target in zip(blocks.parts_of(old), blocks.parts_of(new), strict=True):
        part = torch.rand(source.shape, **drawn).add_(0.5).mul_(source)
        if size:
            part.add_(torch.randn(source.shape, **drawn), alpha=0.1 * size)
        target.copy_(part)
    return new


def _another(
    fresh: torch.nn.Module, model_class: type, init_inputs: Any, seed: int
) -> torch.nn.Module:
    """A module like a fresh one, that shares nothing with it. Functions are not copied, and go on
    with what they close over: a module that holds such is constructed again."""
    if any(map(_holds_closures, fresh.modules())):
        again = execution.construct(model_class, copy.deepcopy(init_inputs), seed)
        known, found = execution.named_state(fresh), execution.named_state(again)
        if known.keys() == found.keys() and all(map(same_bits, known.values(), found.values())):
            return again
    return copy.deepcopy(fresh)


def _holds_closures(module: torch.nn.Module) -> bool:
    held = pytree.tree_leaves(dict(vars(module)))
    return any(isinstance(each, types.FunctionType) and each.__closure__ for each in held)


def _doubled_module(module: torch.nn.Module) -> torch.nn.Module:
    """In fp64 with tensors that are mere attributes, too."""
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) is torch.Tensor:
                vars(part)[name] = in_fp64(value)
    return module._apply(in_fp64)


def in_fp64(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _disturbed(
    run: Callable[[], Results], runs: int, leaves: list, disturbance: Disturbance
) -> Iterator[Results]:
    """Runs that all begin as the truth did. leaves: as `Disturbance.start_run` says."""
    for _ in range(runs):
        disturbance.start_run(leaves)
        found = run()
        if found.error is None:
            yield found


def _spreads(truth: Results, runs: Iterable[Results], dtype: torch.dtype) -> tuple:
    """(a Spread for each output, and by name for what else there is). dtype: the original's."""
    outputs_found: list = [[] for _ in truth.outputs]
    exact_of = truth.named(truth.changed_inputs)
    named_found: dict = {name: [] for name in exact_of}
    for disturbed in runs:
        disturbed_of = disturbed.named(truth.changed_inputs)
        compared = [
            *zip(outputs_found, truth.outputs, disturbed.outputs, map(rows_of, truth.outputs)),
            *(
                (found, exact_of[name], disturbed_of.get(name), _rows_of_named(name, exact_of))
                for name, found in named_found.items()
            ),
        ]
        for found, exact, value, rows in compared:
            if value is not None and value.shape == exact.shape:
                found.append(_difference(exact, value, rows, dtype))
    outputs = [_spread(*pair) for pair in zip(outputs_found, truth.outputs)]
    return outputs, {name: _spread(found, exact_of[name]) for name, found in named_found.items()}


def _difference(
    exact: torch.Tensor, value: torch.Tensor, rows: int, dtype: torch.dtype
) -> Measures:
    if has_error(exact):
        return measure(exact, value, rows, counted=False, dtype=dtype)
    unlike = share_of_unlike(exact, value)
    return Measures(unlike, unlike, unlike, 0, 0)


def share_of_unlike(exact: torch.Tensor, value: torch.Tensor) -> float:
    """Of flags and whole numbers, of which some may be a matter of the last bit before."""
    return float((exact != value).double().mean()) if exact.numel() else 0.0


def _spread(found: list, exact: torch.Tensor) -> Spread:
    def mean(name: str) -> float:
        values = [getattr(m, name) for m in found]  # squares of which a float may not hold
        return math.hypot(*values) / math.sqrt(len(values)) if values else 0.0

    beyond = max((m.nonfinite_mismatches for m in found), default=0)
    beyond = min(beyond, exact.numel() // _ELEMENTS_OF_ONE_BEYOND)
    return Spread(mean("relative_error"), mean("worst_row_error"), mean("scaled_error"), beyond)
