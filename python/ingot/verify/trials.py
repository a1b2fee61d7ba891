"""The trials: which calls the candidate is asked for, in which order, and what is asked after."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from . import arguments, execution, families, passing, tricks
from .candidate import CandidateError, CandidateFailedError, CandidateProcess
from .cotangents import Cotangents, has_error
from .execution import same_bits
from .families import Family
from .judging import MODES, Judge, OriginalNotInFp64Error
from .measures import measure
from .original import Original
from .randomness import Randomness
from .reference import Results, rows_of
from .repeats import Repeats, excuse_of_gradients, excuse_of_hostile, excuse_of_hostile_gradients
from .result import Check, PairError, VerifyResult
from .trial import Trial, request_of

OWN_INPUTS = "own inputs"
_MOMENT_S = 0.3
_PLACES = 1 << 16
_SINGLE_OUTPUTS = 3
_SINGLE_INPUTS = 3
_FATAL = {"OutOfMemoryError": "memory", "AcceleratorError": "crash", "SystemExit": "crash"}


class Session:
    """A candidate's process, loaded: requests to it under the options' limits."""

    def __init__(self, process: CandidateProcess, load_request: dict, time_limit_s: float) -> None:
        self.process = process
        self.load_request = load_request
        self.time_limit_s = time_limit_s

    def request(self, header: dict, tensors: dict | None = None) -> tuple:
        self.ask(header, tensors)
        return self.answer()

    def ask(self, header: dict, tensors: dict | None = None) -> None:
        self.process.ask(header, tensors, self.time_limit_s)

    def answer(self) -> tuple:
        return self.process.answer()


class Trials:
    """Runs them in a session. state: the candidate's, as it is now. another_process(): a fresh one,
    in which a wrong result is tried again."""

    def __init__(
        self,
        original: Original,
        session: Session,
        result: VerifyResult,
        random: Randomness,
        progress: Any,
        another_process: Any,
    ) -> None:
        self.state: dict = {}
        self._original = original
        self._reference = original.reference
        self._session = session
        self._result = result
        self._random = random
        self._progress = progress
        self._another_process = another_process
        evidence = tricks.Evidence(
            self._read_again, self._error_in_fresh_process, original.truth_outputs
        )
        self._judge = Judge(self._reference, result, evidence, original.settings)
        self._repeats = Repeats(result)
        self._calls: list = []
        parameters = [v for k, v in self._reference.initial_state.items() if k[:2] == "p:"]
        self._hostile_batch = families.hostile_batch(
            self._reference.device, sum(p.numel() for p in parameters)
        )
        self._ahead: tuple | None = None

    # Which ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What the first trial is held against, which asks nothing of the candidate: to be called
        while it loads."""
        trial = Trial(
            OWN_INPUTS,
            True,
            self._original.own_values,
            own=True,
            new_state=self._reference.initial_state,
            return_parameters=True,
        )
        seed = self._random.next("calls")
        before = {**self.state, **self._reference.initial_state}
        eager = self._original.first_call(seed)
        self._ahead = trial, seed, eager, self._prepared(trial, before, seed)

    def _prepared(self, trial: Trial, before: dict, seed: int) -> tuple:
        try:
            return self._judge.prepare(trial, before, seed)
        except OriginalNotInFp64Error as error:
            raise PairError(str(error)) from error

    def own(self) -> None:
        """At the model's own size. The order is the test: a result, weight or statistic kept from
        an earlier call is wrong in a later one."""
        fresh, changed = self._original.fresh_inputs, self.changed_state
        training, evaluation = True, False
        in_place = "parameters changed through .data"
        if self._ahead is None:
            self.begin()
        self._run(*self._ahead)
        second = fresh()
        self._trial("fresh inputs in the same memory", training, second, reuse=True)
        self._recheck_earlier()
        data = {"through_data": True, "reuse": True}
        self._trial(in_place, training, second, new_state=changed(), **data)
        self._trial(OWN_INPUTS, evaluation, fresh())
        self._trial(in_place, evaluation, second, new_state=changed(), **data)
        self._trial("statistics moved on", training, fresh())
        self._trial("statistics moved on", evaluation, fresh(), return_parameters=True)
        self._recheck_earlier()
        self._session.request({"op": "forget"})
        self._calls.clear()

    def gradients(self) -> None:
        """With gradients on, of inputs and of parameters. Each mode is asked twice, so that a
        gradient kept from a call shows in the next."""
        for training in MODES:
            for name, change in (("gradients", False), ("gradients after a change", True)):
                self._gradient_trial(name, training, change)
        every = self._asked_parameters()
        seed = self._random.next("inputs")
        for name, training, more in (
            # What is kept for the way back must be this call's.
            ("gradients, another call between", True, {"between": True}),
            # What a loss gives to an output may lie in memory otherwise than the output does.
            ("gradients of a turned output", False, {"layout": "turned"}),
            ("gradients of an output's sum", False, {"layout": "expanded"}),
            *self._of_single_outputs(),
            # As one who trains a part of a model asks.
            ("gradients of some parameters", True, {"frozen": _half(every, seed)}),
            *self._one_sided(every),
        ):

            def ask(
                attempt: int, name: str = name, training: bool = training, more: dict = more
            ) -> None:
                cotangents = Cotangents(self._random.next("inputs"), **more)
                self._trial(name, training, self._gradient_inputs(), cotangents=cotangents)

            self._repeats.ask(name, training, ask, excuse_of_gradients)
        self._gradients_of_few_rows()
        self._session.request({"op": "forget"})
        self._calls.clear()

    def _gradients_of_few_rows(self) -> None:
        """What does not depend on sizes, with as few rows as the hostile families have."""
        for name, training, more in (
            ("gradients twice over one graph", True, {"twice": True}),
            *self._of_single_inputs(),
        ):

            def ask(
                attempt: int, name: str = name, training: bool = training, more: dict = more
            ) -> None:
                cotangents = Cotangents(self._random.next("inputs"), **more)
                values = self._few_rows(self._original.fresh_inputs())
                trial = Trial(name, training, values, cotangents=cotangents)
                # On a CPU as many rows as before, whose spread is known.
                trial.own = self._reference.device.type == "cpu"
                self._run_if_possible(trial)

            self._repeats.ask(name, training, ask, excuse_of_hostile_gradients)

    def _of_single_inputs(self) -> list:
        """Of several inputs one may be data and another what came out of a model."""
        inputs = passing.tensors_of(self._original.own_values)
        numbers = [i for i, value in enumerate(inputs) if has_error(value)]
        if len(numbers) < 2:
            return []
        return [
            (f"gradients of input {i}, not of others", True, {"only_input": i})
            for i in numbers[:_SINGLE_INPUTS]
        ]

    def _of_single_outputs(self) -> list:
        """A loss may take one of several outputs; of each, as long as they are few."""
        count = len(self._original.output_bytes)
        numbers = range(min(count, _SINGLE_OUTPUTS)) if count > 1 else ()
        return [(f"gradients of output {i} alone", True, {"only": i}) for i in numbers]

    def _one_sided(self, every: tuple) -> list:
        """As a step of training asks, whose data need no gradient; and as one asks who looks at a
        frozen model's. Where only one side has gradients, nothing further is to be asked."""
        inputs = passing.tensors_of(self._original.own_values)
        if not every or not any(map(has_error, inputs)):
            return []
        return [
            *(("gradients of parameters alone", mode, {"of_inputs": False}) for mode in MODES),
            ("gradients of inputs alone", False, {"frozen": every}),
        ]

    def _asked_parameters(self) -> tuple:
        """Those that have gradients."""
        return tuple(name for name, asked in self._reference.requires_grad.items() if asked)

    def _gradient_trial(self, name: str, training: bool, change: bool) -> None:
        def ask(attempt: int) -> None:
            new_state = self.changed_state() if change else None
            more = {"through_data": change, "cotangents": self._cotangents()}
            self._trial(name, training, self._gradient_inputs(), new_state=new_state, **more)

        self._repeats.ask(name, training, ask, excuse_of_gradients)

    def arrivals(self) -> None:
        """New parameters as a user gives them: loaded, and moved to other memory. Who holds the old
        ones, or loads by its own way, is found out."""
        for name, arrives in (
            ("after load_state_dict", execution.LOADED),
            ("after .to()", execution.MOVED),
        ):
            new_state: dict | None = self.changed_state()
            for training in MODES:
                values = self._few_rows(self._original.fresh_inputs())
                self._run(
                    Trial(
                        name,
                        training,
                        values,
                        new_state=new_state,
                        arrives=arrives if new_state else "",
                        return_parameters=True,
                    )
                )
                new_state = None

    def arguments(self) -> None:
        """As callers give them who do not go by places: by the names that the original's forward
        has for them, and not at all where it has a default."""
        parameters = self._reference.parameters
        values = self._few_rows(self._original.fresh_inputs())
        given, names = arguments.by_name(parameters, values)
        if names:
            trial = Trial("arguments by name", False, given, names=tuple(names))
            self._run_if_possible(trial)
        fewer = arguments.left_out(parameters, values)
        if fewer is not None:
            self._run_if_possible(Trial("optional arguments left out", False, fewer))

    def _few_rows(self, values: list) -> list:
        own = families.own_batch(values)
        return values if own is None else families.with_batch(values, min(own, self._hostile_batch))

    def _gradient_inputs(self) -> list:
        """Of the model's own size where that is quick: on a GPU."""
        values = self._original.fresh_inputs()
        own = families.own_batch(values)
        if self._reference.device.type == "cuda" or own is None:
            return values
        rows = min(own, self._hostile_batch)
        note = f"gradients were asked for with {rows} of the inputs' {own} rows, on a CPU"
        if rows < own and note not in self._result.notes:
            self._result.notes.append(note)
        return families.with_batch(values, rows)

    def hostile(self) -> None:
        own = self._original.fresh_inputs()
        own_batch = families.own_batch(own)
        if own_batch is None:
            self._result.notes.append("no input has a batch extent: only its own inputs were tried")
            return
        base = self.changed_state()
        buffers = {k: v for k, v in base.items() if k[:2] == "b:"}
        new_state: dict | None = base
        drawn = self._drawn_batches(own_batch)
        for family in families.hostile_families(
            own, self._result.precision, drawn, self._hostile_batch
        ):
            first = self._made(family, own)

            def make(attempt: int, family: Family = family, first: list = first) -> list:
                return self._made(family, own) if attempt else first

            for training in MODES:
                self._family_trial(family, training, make, new_state, False)
                new_state = buffers  # statistics of one family must not spoil the next
            if family.gradients is not None:
                self._family_trial(family, family.gradients, make, new_state, True)

    def _made(self, family: Family, own: list) -> list:
        """Inputs of a family, drawn anew."""
        generator = torch.Generator().manual_seed(self._random.next("inputs"))
        start = self._random.between(0, max(0, (families.own_batch(own) or 0) - 1))
        return family.make(families.with_batch(own, family.batch, start), generator)

    def _cotangents(self) -> Cotangents:
        return Cotangents(self._random.next("inputs"))

    def changed_state(self) -> dict:
        return self._reference.changed(self.state, self._random.next("parameters"))

    def _family_trial(
        self, family: Family, training: bool, make: Callable, new_state: dict | None, grad: bool
    ) -> None:
        name = f"{family.name}, gradients" if grad else family.name

        def ask(attempt: int) -> None:
            self._run(
                Trial(
                    name,
                    training,
                    make(attempt),
                    family.model,
                    new_state,
                    layout=family.layout,
                    return_parameters=family.name == "NaN and ±Inf",
                    unannounced=family.unannounced,
                    cotangents=self._cotangents() if grad else None,
                )
            )

        excuse = excuse_of_hostile_gradients if grad else excuse_of_hostile
        self._repeats.ask(name, training, ask, excuse)

    def _drawn_batches(self, own_batch: int) -> tuple:
        largest = self._hostile_batch
        small = min(own_batch, largest) - 1
        drawn = [self._random.between(4, small)] if small >= 4 else []
        if own_batch > 2 * largest:  # any ratio to the largest is as likely as any other
            ratio = (own_batch - 1) / (largest + 1)
            part = self._random.between(0, 1 << 30) / (1 << 30)
            drawn.append(round((largest + 1) * ratio**part))
        return tuple(drawn)

    def _trial(self, name: str, training: bool, values: list, **more: Any) -> None:
        more.setdefault("return_parameters", more.get("new_state") is not None)
        self._run(Trial(name, training, values, own=True, **more))

    # One --------------------------------------------------------------------------------------

    def _run(
        self,
        trial: Trial,
        seed: int | None = None,
        eager: Results | None = None,
        prepared: tuple | None = None,
    ) -> None:
        """eager, prepared: of this trial with this seed, where they are known."""
        self._progress(f"{MODES[trial.training]}: {trial.name}")
        before = {**self.state, **(trial.new_state or {})}
        seed = self._random.next("calls") if seed is None else seed
        if eager is None:
            eager = self._eager(trial, before, seed)
        if trial.cotangents is not None and eager.gradients is None:
            return  # the original itself has none
        header, tensors = request_of(trial, seed)
        if trial.cotangents is not None:
            cotangents = trial.cotangents.of(eager.outputs)
            tensors.update({f"v{i}": c for i, c in enumerate(cotangents) if c is not None})
        tensors.update(trial.new_state or {})
        sizes = [o.numel() * o.element_size() for o in eager.outputs]
        header |= {
            "reuse": trial.reuse,
            "through_data": trial.through_data,
            "arrives": trial.arrives,
            "poison": sizes or self._original.output_bytes,
            "return_parameters": trial.return_parameters or any(k[0] == "p" for k in eager.state),
        }
        self.state = before
        try:
            self._session.ask(header, tensors)
            # On a GPU the host has nothing to do until the answer comes.
            overlap = self._reference.device.type == "cuda" and eager.error is None
            if overlap and prepared is None:
                prepared = self._prepared(trial, before, seed)
            if overlap and trial.own:
                self._original.prefetch()
            reply, received, _ = self._session.answer()
            if eager.error is not None:
                self._check(
                    trial,
                    f"the original raises {type(eager.error).__name__} ({eager.error}), "
                    "the candidate raises nothing",
                )
                return
            problem = self._judge.judge_call(trial, before, eager, reply, received, seed, prepared)
        except CandidateError as error:
            self._judge_error(trial, eager, error)
            return
        except OriginalNotInFp64Error as error:
            raise PairError(str(error)) from error
        self._check(trial, *problem)
        # What is an input, or the state, changes with it: in the original too.
        lent = {f"o{alias.partition('=')[0]}" for alias in eager.aliases}
        outputs = {k: v for k, v in received.items() if k[:1] == "o" and k not in lent}
        self._calls.append((reply["call"], outputs))
        for key, value in received.items():
            wanted, old = eager.state.get(key, before.get(key)), before.get(key)
            if wanted is None or wanted.shape != value.shape or wanted.dtype != value.dtype:
                continue
            if not same_bits(value, old):
                self.state[key] = value.to(wanted.device)

    def _eager(self, trial: Trial, before: dict, seed: int) -> Results:
        call = (before, trial.values, trial.training, trial.layout, seed)
        eager = self._reference.eager(*call, trial.cotangents)
        if trial.cotangents is not None and eager.error is not None:
            # It works on its input in place, perhaps: gradients of parameters are left.
            trial.cotangents = trial.cotangents.without_inputs()
            eager = self._reference.eager(*call, trial.cotangents)
        return eager

    def _run_if_possible(self, trial: Trial) -> None:
        """Where the original itself can do it, in fp64 too: not all models are made for it."""
        seed = self._random.next("calls")
        eager = self._eager(trial, self.state, seed)
        if eager.error is not None:
            return
        if trial.cotangents is not None and eager.gradients is None:
            return
        with contextlib.suppress(OriginalNotInFp64Error):
            prepared = self._judge.prepare(trial, self.state, seed)
            self._run(trial, seed, eager, prepared)

    def _judge_error(self, trial: Trial, eager: Results, error: CandidateError) -> None:
        for trick, what in error.acts:
            self._check(trial, f"the candidate {what}", trick)
            return
        same = eager.error is not None and type(eager.error).__name__ == error.type
        if error.type in _FATAL and not same:
            self._check(trial, f"the candidate raises {error}", _FATAL[error.type])
        elif eager.error is not None:
            self._check(
                trial,
                ""
                if same
                else f"the original raises {type(eager.error).__name__}, the candidate {error}",
            )
        elif trial.cotangents is not None and trial.cotangents.twice:
            # What torch.compile makes does so, aloud: nobody gets a wrong gradient.
            self._result.notes.append(f"{trial.name}: the candidate raises {error}")
        elif trial.own and trial.cotangents is None:
            self._check(trial, f"the candidate raises {error}")
        else:
            message = f"the candidate raises {error}"
            self._result.checks.append(
                Check(trial.name, MODES[trial.training], "declined", message)
            )

    def _check(self, trial: Trial, message: str, trick: str = "") -> None:
        outcome = "failed" if message else "passed"
        mode = MODES[trial.training]
        self._result.checks.append(Check(trial.name, mode, outcome, message, trick))

    # What is asked after ----------------------------------------------------------------------

    def _recheck_earlier(self) -> None:
        """Results of earlier calls must still hold what they held: at as many places as show any
        change that is worth making, drawn now."""
        for call, outputs in self._calls:
            generator = torch.Generator().manual_seed(self._random.next("places"))
            places = torch.randint(1 << 48, (_PLACES,), generator=generator)
            try:
                request = {"op": "recheck", "call": call}
                _, received, _ = self._session.request(request, {"places": places})
            except CandidateError as error:
                self._fail("earlier results", str(error))
                return
            for key, output in outputs.items():
                if not same_bits(execution.at_places(output, places), received.get(key)):
                    self._fail(
                        "earlier results",
                        "a later call, or a thread left running, changed the result "
                        f"of call {call}",
                        tricks.REUSED,
                    )
                    return
        self._result.checks.append(Check("earlier results keep their values", "", "passed"))

    def _fail(self, name: str, message: str, trick: str = "") -> None:
        self._result.checks.append(Check(name, "", "failed", message, trick))

    def _error_in_fresh_process(
        self, trial: Trial, before: dict, seed: int, index: int, truth: torch.Tensor
    ) -> float:
        """The relative error of this trial's output from a candidate that has made no call yet."""
        header, tensors = request_of(trial, seed)
        limit = self._session.time_limit_s
        try:
            with self._another_process() as process:
                process.request(self._session.load_request, None, limit)
                _, received, _ = process.request(header, {**tensors, **before}, limit)
        except (CandidateError, CandidateFailedError):
            return math.inf
        output = received.get(f"o{index}")
        if output is None or output.shape != truth.shape:
            return math.inf
        return measure(truth, output, rows_of(truth)).relative_error

    def _read_again(self, call: Any) -> list | None:
        """What the outputs of this call hold a moment later."""
        time.sleep(_MOMENT_S)
        try:
            _, received, _ = self._session.request({"op": "recheck", "call": call})
        except CandidateError:
            return None
        return [v for k, v in received.items() if k[:1] == "o"]


def _half(names: tuple, seed: int) -> tuple:
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
    return tuple(names[i] for i in order[: (len(names) + 1) // 2])
