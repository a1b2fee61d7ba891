"""`verify_pair`: is a candidate's ModelNew the same function as the original's Model?"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import passing, timing
from .ahead import Ahead, candidate_modules, room_beside
from .candidate import CandidateError, CandidateFailedError, CandidateProcess, acts_of
from .confinement import Seal, unreadable
from .construction import construction_problem
from .original import Original
from .randomness import Randomness
from .result import Check, PairError, VerifyResult
from .settings import without_own
from .trials import OWN_INPUTS, Session, Trials

CANDIDATE_CLASSES = ["ModelNew", "Model"]
TIMING_BUDGET_S = {"cuda": 120.0, "cpu": 15.0}  # on a CPU a call may take seconds
_TIMED_INPUT_SETS = 3


@dataclass
class VerifyOptions:
    """precision: the policy that the candidate was made under. overrides: values for constants at
    the top of the files. candidate_place: the path that the candidate's file will have, where it is
    tried before it is put there. seed: None takes fresh randomness, so that no candidate can know
    the inputs. strict: a candidate that refuses aloud what the original can do fails. hostile: the
    families beyond the model's own inputs. timing_budget_s: None takes 120, on a CPU 15.
    Limits: seconds per request, bytes of the process."""

    device: str = "cpu"
    precision: str = "fp32"
    overrides: dict = field(default_factory=dict)
    candidate_place: str = ""
    seed: int | None = None
    strict: bool = True
    hostile: bool = True
    timing: bool = False
    compile_baseline: bool = True
    timing_budget_s: float | None = None
    rounds: int = 20
    time_limit_s: float = 600.0
    memory_limit: int | None = None
    progress: Callable[[str], None] = lambda message: None


def verify_pair(
    original_file: str,
    candidate_file: str,
    options: VerifyOptions | None = None,
    ahead: Ahead | None = None,
) -> VerifyResult:
    """Compares `ModelNew` of the candidate's file with `Model` of the original's.

    The candidate runs in a process of its own; inputs, truth and judgement stay in this one.
    ahead: what `begin` has started for these options. Raises PairError where the original itself
    cannot be loaded or run.
    """
    with unreadable(), _cleaned_up_when_terminated():
        verification = _Verification(original_file, candidate_file, options or VerifyOptions())
        return verification.run(ahead)


def begin(original_file: str, candidate_source: bytes, options: VerifyOptions) -> Ahead:
    """Starts what a verification will need, for a caller who has other work before it; to be used
    in a `with`. candidate_source: the candidate's file, or what it will begin with."""
    ahead = Ahead(
        options.memory_limit,
        candidate_modules(candidate_source),
        options.timing,
        options.compile_baseline,
    )
    ahead.begin_kernels(os.path.abspath(original_file), options.overrides, options.device)
    return ahead


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
        self._second_loads = False

    def run(self, ahead: Ahead | None) -> VerifyResult:
        try:
            # A process loads Python and PyTorch while the original is loaded here.
            with ahead or self._begin() as self._ahead:
                with self._ahead.first() as process:
                    self._original = Original(
                        self.result.original, self.options.overrides, self.device, self._random
                    )
                    self._check_accuracy(process)
                if self.options.timing and self._files_unchanged() and self.result.verified:
                    with self._ahead.second() as process:
                        self._time(process)
                    self._files_unchanged()
        except passing.InputClassError as error:
            raise PairError(
                f"{self.result.original}: its inputs are of a class of its own, {error}, which "
                f"{self.result.candidate} does not define: define it there too, or in a module "
                "that both import"
            ) from error
        return self.result

    def _begin(self) -> Ahead:
        source = b""
        with contextlib.suppress(OSError):
            source = Path(self._candidate_path).read_bytes()
        return begin(self._original_path, source, self.options)

    def _another_process(self) -> CandidateProcess:
        return self._ahead.process().expect(self._original.message_bytes())

    def _check_accuracy(self, process: CandidateProcess) -> None:
        name = "candidate's process"
        process.expect(self._original.message_bytes())
        session = Session(process, self.load_request(), self.options.time_limit_s)
        try:
            self._trials = Trials(
                self._original,
                session,
                self.result,
                self._random,
                self.options.progress,
                self._another_process,
            )
            if self._check_construction(session):
                self._ahead.begin_second()
                self._trials.own()
                self._trials.gradients()
                self._trials.arguments()
                self._trials.arrivals()
                self._load_second()
                if self.options.hostile:
                    self._trials.hostile()
                session.request({"op": "finish"})
        except CandidateFailedError as failure:
            self._fail(name, "", str(failure), failure.kind)
        except torch.OutOfMemoryError as error:
            self._fail(name, "", f"it leaves no memory on the GPU: {error}", "memory")

    def load_request(self) -> dict:
        return {
            "op": "load",
            "path": self._candidate_path,
            "place": self.options.candidate_place,
            "class_names": CANDIDATE_CLASSES,
            "overrides": self.options.overrides,
            "init": self._original.packed_init,
            "seed": self._random.construction,
            "device": self.options.device,
            "original": self._original_path,
        }

    def _check_construction(self, session: Session) -> bool:
        """Same seed, bit-equal parameters and buffers. False: nothing more can be compared."""
        self.options.progress("loading the candidate")
        name = "construction"
        try:
            with ThreadPoolExecutor(1) as beside:  # asked as soon as the process listens
                asked = beside.submit(session.ask, session.load_request)
                self._trials.begin()
                asked.result()
            reply, state, _ = session.answer()
        except CandidateError as error:
            trick = error.acts[0][0] if error.acts else ""
            self._fail(name, "", f"the candidate cannot be constructed: {error}", trick)
            return False
        if reply["class"] != CANDIDATE_CLASSES[0]:
            candidate, name = self.result.candidate, CANDIDATE_CLASSES[0]
            self.result.notes.append(f"{candidate} defines no {name}: its Model was compared")
        for setting in without_own(reply["settings_changed"], self._original.settings):
            self._fail("process settings", "", f"loading it changes {setting}", "patched settings")
        for trick, what in acts_of(reply):
            self._fail("conduct", "", f"loading it: the candidate {what}", trick)
        if reply["reseeded"]:
            self._fail("conduct", "", "loading it seeds the random generator", "seeded generator")
        problem = construction_problem(self._original.reference, reply, state)
        self.result.checks.append(Check(name, "", "failed" if problem else "passed", problem))
        return not problem

    def _load_second(self) -> None:
        """The candidate that will be timed is loaded beside the other one where there is room."""
        second = self._ahead.begin_second()
        if second is None or not room_beside(self._original.message_bytes(), self.device):
            return
        with contextlib.suppress(CandidateFailedError):  # which its next request says
            second.ask(self.load_request(), None, self.options.time_limit_s)
            self._second_loads = True

    def _files_unchanged(self) -> bool:
        broken = self._seal.broken()
        if broken:
            self._fail("files", "", f"while it ran, {broken[0]} was changed", "tampered files")
        return not broken

    def _time(self, process: CandidateProcess) -> None:
        """In another process, which has the original as well."""
        options, original = self.options, self._original
        options.progress("timing eager, torch.compile and the candidate")
        budget = options.timing_budget_s
        if budget is None:
            budget = TIMING_BUDGET_S[self.device.type]
        state = self._trials.changed_state()
        input_sets = [original.fresh_inputs() for _ in range(_TIMED_INPUT_SETS)]
        header = {
            "original": self._original_path,
            "overrides": options.overrides,
            "init": original.packed_init,
            "seed": self._random.next("calls"),
            "construction_seed": self._random.construction,
            "training": True,
            "compiled": options.compile_baseline,
            "rounds": options.rounds,
            "budget_s": budget,
            "form": original.form,
            "restores": original.changes_what_it_gets,
        }
        truth = self._timed_truth(state, input_sets[0])
        process.expect(4 * original.message_bytes())
        try:
            if not self._second_loads:
                process.ask(self.load_request(), None, options.time_limit_s)
            self.result.timing = timing.time_pair(
                process,
                header,
                state,
                input_sets,
                options.time_limit_s,
                truth,
                self.device.type,
            )
        except CandidateError as error:
            self._fail("timing", "training", f"the candidate raises {error}")
        except CandidateFailedError as failure:
            self._fail("timing", "training", str(failure), failure.kind)
        except timing.ClaimRefusedError as refusal:
            self._fail("timing", "training", str(refusal), refusal.trick)

    def _timed_truth(self, state: dict, values: list) -> timing.Truth:
        """Errors are held against those of the accuracy checks at the model's own size. state,
        values: for a call of the original."""
        eager = self._original.reference.caller(state, values, True)
        restoring = self._original.restoring_seconds(values)
        output_error = 1e-6
        buffer_errors: dict = {}
        for row in self.result.accuracy:
            if row.family == OWN_INPUTS and row.kind == "output":
                output_error = max(output_error, row.candidate.worst_row_error)
            elif row.family == OWN_INPUTS and row.kind == "buffer":
                known = buffer_errors.get(row.tensor, 1e-6)
                buffer_errors[row.tensor] = max(known, row.allowed_relative_error)
        results = self._original.timed_truth
        remembers = self._original.reference.remembers
        if self._original.draws or remembers:
            why = "keeps tensors in attributes" if remembers else "draws random numbers"
            self.result.notes.append(
                f"The original {why}: results of timed calls were not compared."
            )
            return timing.Truth(None, output_error, buffer_errors, eager, restoring_s=restoring)
        by_eager = self._original.timed_eager
        return timing.Truth(results, output_error, buffer_errors, eager, by_eager, restoring)

    def _fail(self, name: str, mode: str, message: str, trick: str = "") -> None:
        self.result.checks.append(Check(name, mode, "failed", message, trick))


class _TerminatedError(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _cleaned_up_when_terminated() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that whatever the candidate started is ended; then the program
    exits as the signal would have it. Where somebody else listens to it, nothing changes."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _TerminatedError

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _TerminatedError:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
