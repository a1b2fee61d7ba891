"""Holding one call of the candidate against eager and the fp64 truth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import passing, tricks
from .bounds import Roundings
from .candidate import acts_of
from .cotangents import has_error
from .criteria import GRADIENT_FACTOR, SPREAD_FACTOR, Spread, judge
from .execution import same_bits, same_structure
from .measures import measure
from .reference import Reference, Results, in_fp64, rows_of
from .result import AccuracyRow, VerifyResult
from .settings import without_own
from .trial import Trial

MODES = {True: "training", False: "eval"}
# An original whose own fp32 result is further than this from its fp64 result is random (dropout)
# or hopelessly conditioned: fp64 is then no truth, and the candidate must equal eager.
TRUTH_LIMIT = 1e-2
_NO_SPREAD = Spread(0.0, 0.0, 0.0)  # of what the truth leaves as it was
_CALLS_KEPT = 4  # whose gradients are remembered
_MORE_RUNS = 16  # disturbed, behind a call that seems to be wrong
_SECOND_LOOKS = 8  # at so many calls of a candidate, at most: that of a wrong one is wrong often


class OriginalNotInFp64Error(Exception):
    """The original runs in its own type and not in fp64: there is no truth to compare with."""


@dataclass(frozen=True)
class _Call:
    """A call that is judged. before: the state; eager, truth: what the original makes of it;
    reply, received: what the candidate's worker says and sends."""

    trial: Trial
    before: dict
    seed: int
    eager: Results
    truth: Results
    reply: dict
    received: dict
    outputs: list


class Judge:
    """evidence: where to ask about a wrong result, so that it gets a name. settings: the process's,
    as the original leaves them."""

    def __init__(
        self,
        reference: Reference,
        result: VerifyResult,
        evidence: tricks.Evidence,
        settings: dict,
    ) -> None:
        self.reference = reference
        self.result = result
        self.device = reference.device
        self._settings = settings
        self._history = tricks.History(result, evidence)
        self._spreads: dict = {}
        self._second_looks = _SECOND_LOOKS
        self._gradients: list = []  # of the calls so far

    def prepare(self, trial: Trial, before: dict, seed: int) -> tuple:
        """(the truth of a call, the spreads of the disturbed runs): what the candidate has no part
        in, and can be found while it works."""
        # Own inputs of one mode are alike, and costly at full size: their spread is kept.
        asked = trial.cotangents and (trial.cotangents.of_inputs, trial.cotangents.only_input)
        key = (trial.training, trial.new_state is None, asked)
        spreads = self._spreads.get(key) if trial.own else None
        if trial.own and asked and spreads is None:  # those of all gradients, where all can be had
            spreads = self._spreads.get((*key[:2], (True, None)))
        if spreads is not None:
            call = (before, trial.values, trial.training, seed)
            truth = self.reference.truth(*call, trial.cotangents)
        else:
            truth, *spreads = self.reference.truth_and_spread(*self._asked(trial, before, seed))
        if truth.error is not None:
            raise OriginalNotInFp64Error(
                f"{self.result.original}: the original runs in its own type, but in fp64 raises "
                f"{type(truth.error).__name__}: {truth.error}"
            )
        if trial.own:
            self._spreads[key] = spreads
        return truth, spreads

    def _asked(self, trial: Trial, before: dict, seed: int) -> tuple:
        """A call, as the disturbed runs take it."""
        dtype = self.reference.parameter_dtype(trial.values)
        roundings = Roundings.of(self.result.precision, dtype, trial.model)
        return before, trial.values, trial.training, seed, roundings, trial.cotangents

    def judge_call(
        self,
        trial: Trial,
        before: dict,
        eager: Results,
        reply: dict,
        received: dict,
        seed: int,
        prepared: tuple | None = None,
    ) -> tuple:
        """("", "") or (message, trick). prepared: of `prepare`, where that has been called."""
        outputs = [received.get(f"o{i}") for i in range(reply["outputs"])]
        problem = self._judge_conduct(trial, before, eager, reply, received, outputs)
        if problem[0]:
            return problem
        truth, spreads = prepared or self.prepare(trial, before, seed)
        without = sorted(set(eager.gradients or ()) - set(truth.gradients or ()))
        if without:
            raise OriginalNotInFp64Error(
                f"{self.result.original}: of the original in its own type there is a "
                f"{_gradient_name(without[0])}, of what was made of it in fp64 there is none"
            )
        earlier, rows = self._gradients, len(self.result.accuracy)
        judged = _Call(trial, before, seed, eager, truth, reply, received, outputs)
        problem = self._judge_results(judged, spreads, named=False)
        if problem[0]:
            # Few runs hardly show what is rare, a value that changes sides; those of an earlier
            # call do not know that statistics have moved.
            if self._second_looks:
                self._second_looks -= 1
                asked = self._asked(trial, before, seed)
                spreads = self.reference.spread_again(*asked, runs=_MORE_RUNS)
            self._gradients = earlier
            del self.result.accuracy[rows:]
            problem = self._judge_results(judged, spreads, named=True)
        self._history.remember(trial, before, outputs)
        return problem

    def _judge_results(self, call: _Call, spreads: Sequence, named: bool) -> tuple:
        """named: whether what is wrong is to get a name, which may take long."""
        problem = self._judge_values(call, spreads, named)
        if call.eager.gradients is not None:
            found = self._judge_gradients(call, spreads[1])
            problem = problem if problem[0] else found
        return problem

    def _element_by_element(self, call: _Call) -> Callable | None:
        """For the name of a gradient, what it is without vectorised kernels, which on a CPU may
        send a NaN elsewhere."""
        if self.device.type != "cpu":
            return None
        trial = call.trial
        asked = (call.before, trial.values, trial.training, call.seed, trial.cotangents)
        made = functools.cache(lambda: self.reference.eager_element_by_element(*asked).gradients)
        return lambda key: (made() or {}).get(key)

    def _judge_conduct(
        self,
        trial: Trial,
        before: dict,
        eager: Results,
        reply: dict,
        received: dict,
        outputs: list,
    ) -> tuple:
        """Everything but the values: structure, types, tampering, memory."""
        for setting in without_own(reply["settings_changed"], self._settings):
            return f"the call changes {setting}", "patched settings"
        for trick, what in acts_of(reply):
            return f"the candidate {what}", trick
        for complaint in reply.get("complaints", []):
            return complaint, tricks.LAZY
        structure = str(reply.get("structure"))
        same = same_structure(structure, eager.structure)
        if not same or len(outputs) != len(eager.outputs):
            return f"it returns {structure}, the original {eager.structure}", ""
        for i, (output, wanted) in enumerate(zip(outputs, eager.outputs, strict=False)):
            if output.shape != wanted.shape or output.dtype != wanted.dtype:
                return (
                    f"output {i} is {output.dtype} {list(output.shape)}, the original's is "
                    f"{wanted.dtype} {list(wanted.shape)}",
                    "",
                )
        if reply.get("reseeded") or (reply.get("drew") and not eager.drew):
            return (
                "the call moves a random generator, the original's does not",
                "seeded generator",
            )
        added = set(reply.get("aliases", [])) - set(eager.aliases)
        if added:
            return (
                f"an output shares memory with an input or with the state ({sorted(added)[0]}), "
                "the original's does not",
                tricks.ALIASED,
            )
        shared = set(reply.get("overlaps", [])) - set(eager.overlaps)
        if shared:
            return f"{sorted(shared)[0]} share memory, the original's do not", tricks.ALIASED
        for i, value in enumerate(passing.tensors_of(trial.values)):
            if i in eager.changed_inputs:
                continue  # judged by its values
            if not same_bits(value, received.get(f"i{i}")):
                return f"the call changes input {i}", "input tampering"
        problem = self._judge_surroundings(trial, eager, reply, received)
        if problem[0]:
            return problem
        for key, value in before.items():
            if key in eager.state:
                continue  # likewise
            returned = key[:2] == "p:" and trial.return_parameters
            if returned and not same_bits(value, received.get(key)):
                return f"the call changes parameter {key[2:]}", "parameter tampering"
        if reply.get("training") != trial.training:
            return "the call changes the module's training flag", "changed mode"
        return _problem_of_module(eager, reply), ""

    def _judge_surroundings(
        self, trial: Trial, eager: Results, reply: dict, received: dict
    ) -> tuple:
        """What autograd and the caller hold: graphs, and the gradient that goes backwards."""
        if trial.cotangents is None:
            for i, (asks, wanted) in enumerate(zip(reply["requires_grad"], eager.requires_grad)):
                if asks and not wanted:
                    return f"output {i} has a derivative where gradients are off", ""
            return "", ""
        for i, value in enumerate(trial.cotangents.of(eager.outputs)):
            if value is not None and not same_bits(value, received.get(f"v{i}")):
                return f"going backwards changes the gradient of output {i}", "input tampering"
        return "", ""

    def _judge_values(self, call: _Call, all_spreads: Sequence, named: bool) -> tuple:
        trial, before, eager, truth = call.trial, call.before, call.eager, call.truth
        outputs, received = call.outputs, call.received
        spreads, named_spreads = all_spreads
        problem: tuple = ("", "")
        for i, (output, own) in enumerate(zip(outputs, eager.outputs, strict=True)):
            exact = truth.outputs[i]
            name = "output" if len(outputs) == 1 else f"output {i}"
            if not (output.is_floating_point() or output.is_complex()):
                here = output.to(own.device)
                allowed = SPREAD_FACTOR * spreads[i].relative_error
                if not _is_eagers_or_true(here, own, exact.to(own.device), allowed):
                    problem = problem if problem[0] else (f"{name} differs from eager's", "")
                continue
            message = self._judge_tensor(
                trial,
                name,
                exact,
                output.to(self.device),
                own,
                rows_of(exact),
                spreads[i],
                random=eager.drew,
            )
            if message and not problem[0]:
                asked = call.seed, call.reply["call"]
                wrong = tricks.Wrong(trial, before, *asked, i, output, exact)
                problem = (message, self._history.name_trick(wrong) if named else "")
        for key, exact, own in _left_behind(eager, truth):
            kind, name = _kind_and_name(key)
            found = received.get(key)
            if found is None or found.shape != own.shape or found.dtype != own.dtype:
                return f"{kind} {name} is gone or has changed its type or shape", ""
            message = ""
            if not has_error(found):
                if not torch.equal(found.to(own.device), own):
                    message = f"{kind} {name} is not what the original's becomes"
            else:
                found_there = found.to(self.device)
                if kind != "input":
                    found_there = _with_nonfinite_of(exact, found_there)
                rows = rows_of(exact) if kind == "input" else 1
                shown = name if kind == "buffer" else f"{kind} {name}"
                message = self._judge_tensor(
                    trial,
                    shown,
                    exact,
                    found_there,
                    own,
                    rows,
                    named_spreads.get(key, _NO_SPREAD),
                    kind,
                    eager.drew,
                )
            if message and not problem[0]:
                stale = same_bits(found, _before_call(trial, before, key))
                trick = {"buffer": tricks.MISSING_STATISTICS, "input": tricks.MISSING_WRITE}
                problem = (
                    message + (" (it was left as it was before the call)" if stale else ""),
                    trick.get(kind, "") if stale else "",
                )
        return problem

    def _judge_gradients(self, call: _Call, spreads: dict) -> tuple:
        """By the criteria of outputs, beside eager's own gradients of the same call."""
        trial, eager, truth, received = call.trial, call.eager, call.truth, call.received
        again = self._element_by_element(call)
        found_here = {k: v for k, v in received.items() if k[:2] == "dp" or k[:2] == "di"}
        earlier, self._gradients = self._gradients, [*self._gradients, found_here][-_CALLS_KEPT:]
        with_derivative = call.reply["requires_grad"]
        if with_derivative != eager.requires_grad:
            return (
                f"of its outputs {with_derivative} have a derivative, of the original's "
                f"{eager.requires_grad}",
                tricks.DETACHED,
            )
        for key in {**eager.gradients, **found_here}:
            name = _gradient_name(key)
            own, found = eager.gradients.get(key), found_here.get(key)
            if trial.cotangents is not None and trial.cotangents.only is not None:
                # What only other outputs depend on has none, or zeros.
                if all(g is None or not g.any() for g in (own, found)):
                    continue
            if own is None or found is None:
                which = "has none" if found is None else "has one, the original's has not"
                return f"{name}: {which}", tricks.DETACHED
            if found.shape != own.shape or found.dtype != own.dtype:
                return f"{name} is {found.dtype} {list(found.shape)}", tricks.WRONG_GRADIENT
            exact = truth.gradients[key]
            message = self._judge_tensor(
                trial,
                name,
                exact,
                found.to(self.device),
                own,
                rows_of(exact),
                spreads[key],
                "gradient",
                eager.drew,
                None if again is None else functools.partial(again, key),
            )
            if message:
                kept = any(same_bits(found, calls.get(key)) for calls in earlier)
                return message, tricks.KEPT_GRADIENT if kept else tricks.WRONG_GRADIENT
        return "", ""

    def _judge_tensor(
        self,
        trial: Trial,
        name: str,
        exact: torch.Tensor,
        found: torch.Tensor,
        own: torch.Tensor,
        rows: int,
        spread: Any,
        kind: str = "output",
        random: bool = False,
        again: Callable | None = None,
    ) -> str:
        """random: whether the original draws random numbers, other ones in fp64 perhaps, so that
        there may be no truth. Where nothing is random, a gradient may be zero but for rounding (of
        a bias before a batch norm), which the spread knows. again(): eager's by other kernels,
        where NaN and Inf may be as in either."""
        measured = measure(exact, found, rows, own)
        if measured.nonfinite_mismatches and again is not None:
            measured = measure(exact, found, rows, again())
        eager = measure(exact, own, rows)
        if (
            (random or (trial.own and kind != "gradient"))
            and eager.relative_error > TRUTH_LIMIT
            and torch.finfo(own.dtype).eps <= torch.finfo(torch.float32).eps
        ):
            difference = measure(in_fp64(own), found, rows).relative_error
            # Hostile inputs magnify roundings, which the disturbed runs of one seed know.
            allowed = 0.0 if trial.own else 2 * SPREAD_FACTOR * spread.relative_error
            if measured.nonfinite_mismatches:
                return (
                    f"{name}: {measured.nonfinite_mismatches} elements are NaN or Inf where the "
                    "original's are not, or the reverse"
                )
            if not difference <= max(1e-5, allowed):
                return (
                    f"{name}: the original is random or ill-conditioned (its own error is "
                    f"{eager.relative_error:.1e}), and the candidate differs from it by "
                    f"{difference:.1e}"
                )
            return ""
        unit_roundoff = torch.finfo(own.dtype).eps / 2
        factor = GRADIENT_FACTOR if kind == "gradient" else 1.0
        judgement = judge(measured, eager, spread, unit_roundoff, factor)
        self.result.accuracy.append(
            AccuracyRow(
                trial.name,
                MODES[trial.training],
                name,
                measured,
                eager,
                judgement.allowed_relative_error,
                judgement.allowed_worst_row_error,
                kind,
            )
        )
        passed = judgement.passed
        if not (passed or again is None or _is_finite(trial)):
            other = again()  # of sums, of which a NaN's row is a term, or is not
            difference = measure(in_fp64(other), found, rows, other)
            passed = not difference.nonfinite_mismatches and (
                difference.relative_error <= 2 * judgement.allowed_relative_error
            )
        return "" if passed else f"{name}: {judgement.reason}"


def _problem_of_module(eager: Results, reply: dict) -> str:
    """What the module's own methods give otherwise than the original's."""
    if eager.mode_gives_module and not reply["mode_gives_module"]:
        return "train() and eval() do not return the module, the original's do"
    names = sorted(eager.state_dict.keys() ^ reply["state_dict"].keys())
    if names:
        missing = names[0] in eager.state_dict
        return f"after the call its state_dict has {'no' if missing else 'a'} {names[0]}"
    for name, held in reply["state_dict"].items():
        if eager.state_dict[name] and not held:
            return f"after the call its state_dict gives for {name} what the module does not hold"
    return ""


def _is_eagers_or_true(
    output: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, allowed: float
) -> bool:
    """Of flags and whole numbers: each as eager gives it, or as fp64 does, but for this share,
    which roundings change. (Which of two neighbours is larger, or whether a difference is zero, is
    a matter of the last bit before.)"""
    if output.shape != own.shape or output.dtype != own.dtype:
        return False
    unlike = (output != own) & (output != exact)
    return int(unlike.sum()) <= allowed * unlike.numel()


def _is_finite(trial: Trial) -> bool:
    tensors = (t for t in passing.tensors_of(trial.values) if t.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _left_behind(eager: Results, truth: Results) -> list:
    """(key, fp64, eager's) of what a call leaves: state, and the inputs that it changes."""
    changed = sorted(eager.changed_inputs | truth.changed_inputs)
    inputs = [(f"i{i}", truth.inputs[i], eager.inputs[i]) for i in changed]
    return [(key, exact, eager.state[key]) for key, exact in truth.state.items()] + inputs


def _kind_and_name(key: str) -> tuple:
    if key[0] == "i":
        return "input", f"{key[1:]} after the call"
    return ("buffer", key[2:]) if key[0] == "b" else ("parameter", key[2:])


def _before_call(trial: Trial, before: dict, key: str) -> torch.Tensor | None:
    return passing.tensors_of(trial.values)[int(key[1:])] if key[0] == "i" else before.get(key)


def _gradient_name(key: str) -> str:
    """Of `execution.backward`'s names."""
    return f"gradient of {key[3:]}" if key[:3] == "dp:" else f"gradient of input {key[2:]}"


def _with_nonfinite_of(exact: torch.Tensor, statistic: torch.Tensor) -> torch.Tensor:
    """Statistics whose NaN and Inf count as one where the truth has either: the mean of a batch
    with one Inf is Inf by PyTorch's CPU kernels and NaN by its CUDA ones (Welford's update
    subtracts Inf from Inf)."""
    if exact.is_complex():
        return statistic
    undefined = ~torch.isfinite(exact) & ~torch.isfinite(statistic)
    return torch.where(undefined, exact.to(statistic.dtype), statistic)
