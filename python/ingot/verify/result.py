"""What a verification found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from .measures import Measures


class PairError(Exception):
    """The pair cannot be compared, by no fault of the candidate's: bad input."""


@dataclass(frozen=True)
class Check:
    """One comparison. outcome: "passed", "failed", or "declined" (the candidate refused aloud what
    the original can do). trick: the name of the known trick that the failure looks like."""

    name: str
    mode: str
    outcome: str
    message: str = ""
    trick: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


@dataclass(frozen=True)
class AccuracyRow:
    """The measured error of one tensor on one family, candidate and eager alike. kind: "output",
    "buffer" or "gradient"."""

    family: str
    mode: str
    tensor: str
    candidate: Measures
    eager: Measures | None
    allowed_relative_error: float
    allowed_worst_row_error: float
    kind: str = "output"


@dataclass
class VerifyResult:
    original: str
    candidate: str
    device: str
    precision: str
    checks: list = field(default_factory=list)
    accuracy: list = field(default_factory=list)
    timing: dict | None = None
    notes: list = field(default_factory=list)
    strict: bool = True

    @property
    def failures(self) -> list:
        bad = ("failed", "declined") if self.strict else ("failed",)
        return [c for c in self.checks if c.outcome in bad]

    @property
    def verified(self) -> bool:
        return bool(self.checks) and not self.failures

    @property
    def tricks(self) -> list:
        """Names of the tricks that the failures look like, each once."""
        return list(dict.fromkeys(c.trick for c in self.failures if c.trick))

    def to_dict(self) -> dict:
        return {
            "original": self.original,
            "candidate": self.candidate,
            "device": self.device,
            "precision": self.precision,
            "verified": self.verified,
            "strict": self.strict,
            "tricks": self.tricks,
            "checks": [asdict(c) for c in self.checks],
            "accuracy": [asdict(a) for a in self.accuracy],
            "timing": self.timing,
            "notes": self.notes,
        }
