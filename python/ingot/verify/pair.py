"""`verify_pair`: is a candidate's ModelNew the same function as the original's Model?"""

from __future__ import annotations

import math
import os
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
    acts_of,
    encode_args,
    pickled,
)
from .confinement import Seal, unreadable
from .construction import construction_problem
from .execution import same_bits
from .families import Family
from .judging import MODES, Judge, OriginalNotInFp64Error, Trial
from .measures import measure
from .randomness import Randomness
from .reference import Reference, Results, rows_of
from .result import Check, VerifyResult
from .tricks import Evidence

CANDIDATE_CLASSES = ["ModelNew", "Model"]


OWN_INPUTS = "own inputs"
_TIMED_INPUT_SETS = 3
_MEMORY_SHARE = 0.8
_MOMENT_S = 0.3
_FATAL_ON_GPU = {"OutOfMemoryError": "memory", "AcceleratorError": "crash"}


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
        self._random = Randomness(options.seed)
        self._seal = Seal(self._original_path, self._candidate_path)
        self._last_inputs: list | None = None
        self._load_original()
        self._state: dict = {}
        self._judge = Judge(
            self.reference,
            self.result,
            Evidence(self._read_again, self._error_in_fresh_process, self._truth_outputs),
        )
        self._calls: list = []

    def run(self) -> VerifyResult:
        with unreadable():
            self._check_accuracy()
            if self.options.timing and self._files_unchanged() and self.result.verified:
                self._time()
                self._files_unchanged()
        return self.result

    def _check_accuracy(self) -> None:
        name = "candidate's process"
        try:
            with CandidateProcess(self._memory_limit(), self._message_bytes()) as process:
                self._process = process
                if self._check_construction():
                    self._own_trials()
                    if self.options.hostile:
                        self._hostile_trials()
                    self._request({"op": "finish"})
        except CandidateFailedError as failure:
            self._fail(name, "", str(failure), failure.kind)
        except torch.OutOfMemoryError as error:
            self._fail(name, "", f"it leaves no memory on the GPU: {error}", "memory")

    def _request(self, header: dict, tensors: dict | None = None) -> tuple:
        return self._process.request(header, tensors, self.options.time_limit_s)

    def _files_unchanged(self) -> bool:
        broken = self._seal.broken()
        if broken:
            self._fail("files", "", f"while it ran, {broken[0]} was changed", "tampered files")
        return not broken

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
            "seed": self._random.next("calls"),
            "construction_seed": self._random.construction,
            "training": True,
            "compiled": options.compile_baseline,
            "rounds": options.rounds,
            "budget_s": options.timing_budget_s,
        }

        def truth_of(before: dict, values: list) -> list:
            return self._truth_outputs(before, values, True)

        own = [a.candidate.worst_row_error for a in self.result.accuracy if a.family == OWN_INPUTS]
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
                    self.reference.caller(state, input_sets[0], True),
                    allowed,
                    self.device.type,
                )
        except CandidateError as error:
            self._fail("timing", "training", f"the candidate raises {error}")
        except CandidateFailedError as failure:
            self._fail("timing", "training", str(failure), failure.kind)
        except timing.ClaimRefusedError as refusal:
            self._fail("timing", "training", str(refusal), refusal.trick)

    # The original -----------------------------------------------------------------------------

    def _load_original(self) -> None:
        path = self.result.original
        try:
            loaded = load_model_file(path, self.options.overrides)
            self._make_inputs = loaded.make_inputs
            self._init_inputs = loaded.get_init_inputs()
            self.reference = Reference(
                loaded.Model, self._init_inputs, self._random.construction, self.device
            )
            self.own_values = self.fresh_inputs()
        except ModelFileError as error:
            raise PairError(str(error)) from error
        except Exception as error:
            raise PairError(f"{path}: {type(error).__name__}: {error}") from error
        started = time.perf_counter()
        eager = self.reference.eager(
            self.reference.initial_state,
            self.own_values,
            True,
            "contiguous",
            self._random.next("calls"),
        )
        self.eager_seconds = time.perf_counter() - started
        self.output_bytes = [o.numel() * o.element_size() for o in eager.outputs]
        if eager.error is not None:
            raise PairError(
                f"{path}: the original raises {type(eager.error).__name__} on its own inputs: "
                f"{eager.error}"
            )

    def fresh_inputs(self) -> list:
        execution.seed_everything(self._random.next("inputs"))
        values = self._make_inputs()
        if self._last_inputs is not None and all(
            torch.equal(a, b)
            for a, b in zip(self._last_inputs, values, strict=True)
            if isinstance(a, torch.Tensor)
        ):
            values = [_resampled(v) for v in values]
        self._last_inputs = values
        return values

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
            "seed": self._random.construction,
            "device": self.options.device,
            "original": self._original_path,
        }

    def _check_construction(self) -> bool:
        """Same seed, bit-equal parameters and buffers. False: nothing more can be compared."""
        self.options.progress("loading the candidate")
        name = "construction"
        try:
            reply, state, _ = self._request(self.load_request())
        except CandidateError as error:
            trick = error.acts[0][0] if error.acts else ""
            self._fail(name, "", f"the candidate cannot be constructed: {error}", trick)
            return False
        for setting in reply.get("settings_changed", []):
            self._fail("process settings", "", f"loading it changes {setting}", "patched settings")
        for trick, what in acts_of(reply):
            self._fail("conduct", "", f"loading it: the candidate {what}", trick)
        if reply.get("reseeded"):
            self._fail("conduct", "", "loading it seeds the random generator", "seeded generator")
        problem = construction_problem(self.reference, reply, state)
        self.result.checks.append(Check(name, "", "failed" if problem else "passed", problem))
        return not problem

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
        self._request({"op": "forget"})
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
        for family in families.hostile_families(own_batch, self._drawn_batches(own_batch)):
            generator = torch.Generator().manual_seed(self._random.next("inputs"))
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
                unannounced=family.unannounced,
            )
        )

    def _drawn_batches(self, own_batch: int) -> tuple:
        small = min(own_batch, families.HOSTILE_BATCH) - 1
        drawn = [self._random.between(4, small)] if small >= 4 else []
        if own_batch > 2 * families.HOSTILE_BATCH:
            drawn.append(self._random.between(families.HOSTILE_BATCH + 1, own_batch - 1))
        return tuple(drawn)

    def _trial(self, name: str, training: bool, values: list, **more: Any) -> None:
        new_state = more.pop("new_state", None)
        state = new_state() if callable(new_state) else new_state
        more.setdefault("return_parameters", state is not None)
        self._run_trial(Trial(name, training, values, new_state=state, own=True, **more))

    def _changed_state(self) -> dict:
        return self.reference.changed(self._state, self._random.next("parameters"))

    def _run_trial(self, trial: Trial) -> None:
        self.options.progress(f"{MODES[trial.training]}: {trial.name}")
        before = dict(self._state)
        if trial.new_state is not None:
            before.update(trial.new_state)
        seed = self._random.next("calls")
        eager = self.reference.eager(before, trial.values, trial.training, trial.layout, seed)
        args, tensors = encode_args(trial.values)
        tensors.update(trial.new_state or {})
        sizes = [o.numel() * o.element_size() for o in eager.outputs] or self.output_bytes
        header = {
            **_call_header(trial, args, seed),
            "reuse": trial.reuse,
            "through_data": trial.through_data,
            "poison": sizes,
            "return_parameters": trial.return_parameters,
        }
        self._state = before
        try:
            reply, received, _ = self._request(header, tensors)
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
        header = _call_header(trial, args, seed)
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

    def _read_again(self, call: Any) -> list | None:
        """What the outputs of this call hold a moment later."""
        time.sleep(_MOMENT_S)
        try:
            _, received, _ = self._request({"op": "recheck", "call": call})
        except CandidateError:
            return None
        return [received[f"o{i}"] for i in range(len(received))]

    def _truth_outputs(self, state: dict, values: list, training: bool) -> list:
        return self.reference.truth(state, values, training, self._random.construction).outputs

    def _judge_error(self, trial: Trial, eager: Results, error: CandidateError) -> None:
        for trick, what in error.acts:
            self._check(trial, f"the candidate {what}", trick)
            return
        if error.type in _FATAL_ON_GPU:
            self._check(trial, f"the candidate raises {error}", _FATAL_ON_GPU[error.type])
        elif eager.error is not None:
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
                _, received, _ = self._request({"op": "recheck", "call": call})
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


def _call_header(trial: Trial, args: list, seed: int) -> dict:
    """A plain call, with nothing kept from others."""
    return {
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
