"""`verify_pair`: is a candidate's ModelNew the same function as the original's Model?"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..model_file import ModelFileError, load_model_file
from . import execution, families, timing
from .candidate import (
    CandidateError,
    CandidateFailedError,
    CandidateProcess,
    encode_args,
    pickled,
)
from .execution import same_bits
from .families import Family
from .judging import MODES, Judge, OriginalNotInFp64Error, Trial
from .measures import measure
from .reference import Reference, Results, rows_of
from .result import Check, VerifyResult

CANDIDATE_CLASSES = ["ModelNew", "Model"]


OWN_INPUTS = "own inputs"
_TIMED_INPUT_SETS = 3
_MEMORY_SHARE = 0.8


class PairError(Exception):
    """The pair cannot be compared, by no fault of the candidate's: bad input."""


@dataclass
class VerifyOptions:
    """precision: the policy that the candidate was made under. overrides: values for constants at
    the top of the files. seed: None takes fresh randomness, so that no candidate can know the
    inputs. strict: a candidate that refuses aloud what the original can do fails. hostile: the
    families beyond the model's own inputs. Limits: seconds per request, bytes of the process."""

    device: str = "cpu"
    precision: str = "fp32"
    overrides: dict = field(default_factory=dict)
    seed: int | None = None
    strict: bool = True
    hostile: bool = True
    timing: bool = False
    compile_baseline: bool = True
    timing_budget_s: float = 120.0
    rounds: int = 20
    time_limit_s: float = 600.0
    memory_limit: int | None = None
    progress: Callable[[str], None] = lambda message: None


def verify_pair(
    original_file: str, candidate_file: str, options: VerifyOptions | None = None
) -> VerifyResult:
    """Compares `ModelNew` of the candidate's file with `Model` of the original's.

    The candidate runs in a process of its own; inputs, truth and judgement stay in this one.
    Raises PairError where the original itself cannot be loaded or run.
    """
    return _Verification(original_file, candidate_file, options or VerifyOptions()).run()


class _Verification:
    def __init__(self, original: str, candidate: str, options: VerifyOptions) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.result = VerifyResult(
            original, candidate, options.device, options.precision, strict=options.strict
        )
        self._original_path = os.path.abspath(original)
        self._candidate_path = os.path.abspath(candidate)
        for path in (original, candidate):
            if not Path(path).is_file():
                raise PairError(f"{path}: no such file")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise PairError("device cuda: PyTorch sees no GPU here; use --device cpu")
        self._seed = options.seed if options.seed is not None else secrets.randbits(31)
        self._seeds_taken = 0
        self._last_inputs: list | None = None
        self._load_original()
        self._state: dict = {}
        self._judge = Judge(self.reference, self.result, self._error_in_fresh_process)
        self._calls: list = []

    def run(self) -> VerifyResult:
        with CandidateProcess(self._memory_limit(), self._message_bytes()) as process:
            self._process = process
            try:
                if self._check_construction():
                    self._own_trials()
                    if self.options.hostile:
                        self._hostile_trials()
            except CandidateFailedError as failure:
                self._fail("candidate's process", "", str(failure), failure.kind)
        if self.options.timing and self.result.verified:
            self._time()
        return self.result

    def _time(self) -> None:
        """In another process, which has the original as well, in training mode where that runs."""
        self.options.progress("timing eager, torch.compile and the candidate")
        options = self.options
        state = self._changed_state()
        input_sets = [self.fresh_inputs() for _ in range(_TIMED_INPUT_SETS)]
        header = {
            "original": self._original_path,
            "overrides": options.overrides,
            "init": pickled(self._init_inputs),
            "seed": self._seed,
            "training": True,
            "compiled": options.compile_baseline,
            "rounds": options.rounds,
            "budget_s": options.timing_budget_s,
        }

        def truth_of(before: dict, values: list) -> list:
            return self.reference.truth(before, values, True, self._seed).outputs

        own = [a.candidate.relative_error for a in self.result.accuracy if a.family == OWN_INPUTS]
        allowed = max([*own, 1e-6])
        limit = options.time_limit_s
        try:
            with CandidateProcess(self._memory_limit(), self._message_bytes() * 3) as process:
                self.result.timing = timing.time_pair(
                    process,
                    self.load_request(),
                    header,
                    state,
                    input_sets,
                    limit,
                    truth_of,
                    allowed,
                    self.device.type,
                )
        except CandidateError as error:
            self._fail("timing", "training", f"the candidate raises {error}")
        except CandidateFailedError as failure:
            self._fail("timing", "training", str(failure), failure.kind)
        except timing.ClaimRefusedError as refusal:
            self._fail("timing", "training", str(refusal), "patched clock or skipped work")

    # The original -----------------------------------------------------------------------------

    def _load_original(self) -> None:
        path = self.result.original
        try:
            loaded = load_model_file(path, self.options.overrides)
            self._make_inputs = loaded.make_inputs
            self._init_inputs = loaded.get_init_inputs()
            self.reference = Reference(loaded.Model, self._init_inputs, self._seed, self.device)
            self.own_values = self.fresh_inputs()
        except ModelFileError as error:
            raise PairError(str(error)) from error
        except Exception as error:
            raise PairError(f"{path}: {type(error).__name__}: {error}") from error
        started = time.perf_counter()
        eager = self.reference.eager(
            self.reference.initial_state, self.own_values, True, "contiguous", self._next_seed()
        )
        self.eager_seconds = time.perf_counter() - started
        self.output_bytes = [o.numel() * o.element_size() for o in eager.outputs]
        if eager.error is not None:
            raise PairError(
                f"{path}: the original raises {type(eager.error).__name__} on its own inputs: "
                f"{eager.error}"
            )

    def fresh_inputs(self) -> list:
        execution.seed_everything(self._next_seed())
        values = self._make_inputs()
        if self._last_inputs is not None and all(
            torch.equal(a, b)
            for a, b in zip(self._last_inputs, values, strict=True)
            if isinstance(a, torch.Tensor)
        ):
            values = [_resampled(v) for v in values]
        self._last_inputs = values
        return values

    def _next_seed(self) -> int:
        self._seeds_taken += 1
        return (self._seed * 1000003 + self._seeds_taken * 7919) % (1 << 31)

    def _memory_limit(self) -> int:
        if self.options.memory_limit is not None:
            return self.options.memory_limit
        return int(_MEMORY_SHARE * _available_memory())

    def _message_bytes(self) -> int:
        tensors = list(self.reference.initial_state.values())
        tensors += [v for v in self.own_values if isinstance(v, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) + sum(self.output_bytes)

    # The candidate ----------------------------------------------------------------------------

    def load_request(self) -> dict:
        return {
            "op": "load",
            "path": self._candidate_path,
            "class_names": CANDIDATE_CLASSES,
            "overrides": self.options.overrides,
            "init": pickled(self._init_inputs),
            "seed": self._seed,
            "device": self.options.device,
        }

    def _check_construction(self) -> bool:
        """Same seed, bit-equal parameters and buffers. False: nothing more can be compared."""
        self.options.progress("loading the candidate")
        name = "construction"
        try:
            reply, state, _ = self._process.request(
                self.load_request(), None, self.options.time_limit_s
            )
        except CandidateError as error:
            self._fail(name, "", f"the candidate cannot be constructed: {error}")
            return False
        for setting in reply.get("settings_changed", []):
            self._fail("process settings", "", f"loading it changes {setting}", "patched settings")
        wanted = self.reference.initial_state
        missing = sorted(k[2:] for k in set(wanted) - set(state))
        extra = sorted(k[2:] for k in set(state) - set(wanted))
        if missing or extra:
            self._fail(
                name,
                "",
                "its parameters and buffers are not the original's: "
                f"missing {missing or 'none'}, added {extra or 'none'}",
            )
            return False
        for key, value in wanted.items():
            found = state[key]
            if found.shape != value.shape or found.dtype != value.dtype:
                self._fail(
                    name,
                    "",
                    f"{key[2:]} is {found.dtype} {list(found.shape)}, the original's is "
                    f"{value.dtype} {list(value.shape)}",
                )
                return False
        unlike = [k[2:] for k, v in wanted.items() if not same_bits(v, state[k])]
        if unlike:
            self._fail(name, "", f"with the same seed, {', '.join(unlike)} differ in value")
        elif reply.get("state_dict") != self.reference.state_dict_names:
            self._fail(name, "", "the names in its state_dict differ, or their order does")
        elif reply.get("requires_grad") != self.reference.requires_grad:
            self._fail(name, "", "requires_grad of its parameters differs")
        else:
            self.result.checks.append(Check(name, "", "passed"))
        return True

    # Trials -----------------------------------------------------------------------------------

    def _own_trials(self) -> None:
        """At the model's own size. The order is the test: a result, weight or statistic kept from
        an earlier call is wrong in a later one."""
        fresh, changed = self.fresh_inputs, self._changed_state
        first = self.own_values
        training, evaluation = True, False
        self._trial(OWN_INPUTS, training, first, new_state=self.reference.initial_state)
        second = fresh()
        self._trial("fresh inputs in the same memory", training, second, reuse=True)
        self._recheck_earlier()
        self._trial(
            "parameters changed through .data",
            training,
            second,
            new_state=changed,
            through_data=True,
            reuse=True,
        )
        self._trial(OWN_INPUTS, evaluation, fresh())
        self._trial(
            "parameters changed through .data",
            evaluation,
            second,
            new_state=changed,
            through_data=True,
            reuse=True,
        )
        self._trial("statistics moved on", training, fresh())
        self._trial("statistics moved on", evaluation, fresh(), return_parameters=True)
        self._recheck_earlier()
        self._process.request({"op": "forget"}, None, self.options.time_limit_s)
        self._calls.clear()

    def _hostile_trials(self) -> None:
        values = self.fresh_inputs()
        own_batch = families.own_batch(values)
        if own_batch is None:
            self.result.notes.append("no input has a batch extent: only its own inputs were tried")
            return
        base = self._changed_state()
        buffers = {k: v for k, v in base.items() if k[:2] == "b:"}
        new_state: dict | None = base
        for family in families.hostile_families(own_batch):
            generator = torch.Generator().manual_seed(self._next_seed())
            cut = families.with_batch(self.fresh_inputs(), family.batch)
            made = family.make(cut, generator)
            for training in MODES:
                self._family_trial(family, training, made, new_state)
                new_state = buffers  # statistics of one family must not spoil the next

    def _family_trial(
        self, family: Family, training: bool, values: list, new_state: dict | None
    ) -> None:
        self._run_trial(
            Trial(
                family.name,
                training,
                values,
                family.model,
                new_state,
                layout=family.layout,
                return_parameters=family.name == "NaN and ±Inf",
            )
        )

    def _trial(self, name: str, training: bool, values: list, **more: Any) -> None:
        new_state = more.pop("new_state", None)
        state = new_state() if callable(new_state) else new_state
        more.setdefault("return_parameters", state is not None)
        self._run_trial(Trial(name, training, values, new_state=state, own=True, **more))

    def _changed_state(self) -> dict:
        """Parameters and statistics as a training step or load_state_dict might leave them."""
        generator = torch.Generator().manual_seed(self._next_seed())
        changed: dict = {}
        by_storage: dict = {}  # tied parameters stay tied
        for key, value in self._state.items():
            if not value.is_floating_point():
                changed[key] = value.clone()
                continue
            group = self.reference.tied.get(key, key)
            if group not in by_storage:
                factor = 0.5 + torch.rand(value.shape, generator=generator)
                new = value.float() * factor
                if key[:2] == "p:":
                    size = float(value.float().abs().mean()) if value.numel() else 0.0
                    new = new + 0.1 * (size or 1.0) * torch.randn(value.shape, generator=generator)
                by_storage[group] = new.to(value.dtype)
            changed[key] = by_storage[group]
        return changed

    def _run_trial(self, trial: Trial) -> None:
        self.options.progress(f"{MODES[trial.training]}: {trial.name}")
        before = dict(self._state)
        if trial.new_state is not None:
            before.update(trial.new_state)
        seed = self._next_seed()
        eager = self.reference.eager(before, trial.values, trial.training, trial.layout, seed)
        args, tensors = encode_args(trial.values)
        tensors.update(trial.new_state or {})
        sizes = [o.numel() * o.element_size() for o in eager.outputs] or self.output_bytes
        header = {
            "op": "call",
            "args": args,
            "training": trial.training,
            "layout": trial.layout,
            "reuse": trial.reuse,
            "through_data": trial.through_data,
            "seed": seed,
            "poison": sizes,
            "return_parameters": trial.return_parameters,
        }
        self._state = before
        try:
            reply, received, _ = self._process.request(header, tensors, self.options.time_limit_s)
        except CandidateError as error:
            self._judge_error(trial, eager, error)
            return
        if eager.error is not None:
            self._check(
                trial,
                f"the original raises {type(eager.error).__name__} ({eager.error}), "
                "the candidate raises nothing",
            )
            return
        try:
            problem = self._judge.judge_call(trial, before, eager, reply, received, seed)
        except OriginalNotInFp64Error as error:
            raise PairError(str(error)) from error
        self._check(trial, *problem)
        outputs = [v for k, v in received.items() if k[:1] == "o"]
        self._calls.append((reply.get("call"), outputs))
        for key, value in received.items():
            old = before.get(key)
            if old is not None and old.shape == value.shape and old.dtype == value.dtype:
                self._state[key] = value

    def _error_in_fresh_process(
        self, trial: Trial, before: dict, seed: int, index: int, truth: torch.Tensor
    ) -> float:
        """The relative error of this trial's output from a candidate that has made no call yet."""
        args, tensors = encode_args(trial.values)
        header = {
            "op": "call",
            "args": args,
            "training": trial.training,
            "layout": trial.layout,
            "reuse": False,
            "through_data": False,
            "seed": seed,
            "poison": [],
            "return_parameters": False,
        }
        limit = self.options.time_limit_s
        try:
            with CandidateProcess(self._memory_limit(), self._message_bytes()) as process:
                process.request(self.load_request(), None, limit)
                _, received, _ = process.request(header, {**tensors, **before}, limit)
        except (CandidateError, CandidateFailedError):
            return math.inf
        output = received.get(f"o{index}")
        if output is None or output.shape != truth.shape:
            return math.inf
        return measure(truth, output, rows_of(truth)).relative_error

    def _judge_error(self, trial: Trial, eager: Results, error: CandidateError) -> None:
        if eager.error is not None:
            same = type(eager.error).__name__ == error.type
            self._check(
                trial,
                ""
                if same
                else f"the original raises {type(eager.error).__name__}, the candidate {error}",
            )
        elif trial.own:
            self._check(trial, f"the candidate raises {error}")
        else:
            self.result.checks.append(
                Check(
                    trial.name, MODES[trial.training], "declined", f"the candidate raises {error}"
                )
            )

    def _recheck_earlier(self) -> None:
        """Results of earlier calls must still hold what they held."""
        for call, outputs in self._calls:
            try:
                _, received, _ = self._process.request(
                    {"op": "recheck", "call": call}, None, self.options.time_limit_s
                )
            except CandidateError as error:
                self._fail("earlier results", "", str(error))
                return
            for i, output in enumerate(outputs):
                if not same_bits(output, received.get(f"o{i}")):
                    self._fail(
                        "earlier results",
                        "",
                        "a later call, or a thread left running, changed the result "
                        f"of call {call}",
                        "reused output memory",
                    )
                    return
        self.result.checks.append(Check("earlier results keep their values", "", "passed"))

    # Bookkeeping ------------------------------------------------------------------------------

    def _check(self, trial: Trial, message: str, trick: str = "") -> None:
        outcome = "failed" if message else "passed"
        self.result.checks.append(Check(trial.name, MODES[trial.training], outcome, message, trick))

    def _fail(self, name: str, mode: str, message: str, trick: str = "") -> None:
        self.result.checks.append(Check(name, mode, "failed", message, trick))


def _available_memory() -> int:
    """Bytes that programs can still have, the page cache given back."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resampled(value: Any) -> Any:
    """A fresh tensor of like mean and deviation, where get_inputs() gives the same each time."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return value
    single = value.float()
    return (torch.randn_like(single) * single.std() + single.mean()).to(value.dtype)
