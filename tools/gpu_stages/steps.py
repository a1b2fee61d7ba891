"""What a stage of `tools/gpu-suite` is, and how a step runs a script and reads its answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CHECKS = ROOT / "tools" / "gpu_checks"


@dataclass(frozen=True)
class Settings:
    """machine: the name of its files under `results`. library: path of libingot.so. seconds: what
    a step may take."""

    device: str
    machine: str
    results: Path
    library: str
    rounds: int = 20
    compiled: bool = True
    half: bool = False
    programs: bool = True
    seconds: float = 600.0

    def file(self, folder: str = "") -> Path:
        return self.results / folder / f"{self.machine}.json"


Outcome = tuple[bool, str]


@dataclass(frozen=True)
class Step:
    name: str
    subject: Any = None
    alone: bool = False


@dataclass(frozen=True)
class Stage:
    """do(subject, settings) gives whether it passed, and a line about it. own_process: false where
    a step gains from what the one before left in memory. seconds: of a step, as long as nothing
    better is known. missing: what this machine lacks for it, or ""."""

    steps: Callable[[Settings], list[Step]]
    do: Callable[[Any, Settings], Outcome]
    about: str
    seconds: float
    own_process: bool = True
    missing: Callable[[Settings], str] = lambda settings: ""


def run_script(command: list, settings: Settings, **environment: str) -> tuple[int, list]:
    """Exit status, and the lines that the command printed."""
    answer = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=settings.seconds,
        env={**os.environ, **environment},
        check=False,
    )
    told = answer.stdout + answer.stderr if answer.returncode else answer.stdout or answer.stderr
    lines = told.strip().splitlines()
    return answer.returncode, lines or [f"exit status {answer.returncode}, no output"]


def outcome(code: int, lines: list, about: int = 1) -> Outcome:
    """The last lines: `about` of them where all is well; elsewhere enough to see what was wrong,
    behind the lines that say so."""
    if code == 0:
        return True, "; ".join(lines[-about:])
    wrong = [line for line in lines[:-25] if "WRONG" in line]
    return False, "\n".join(wrong[:25] + lines[-25:])


def check(
    name: str,
    settings: Settings,
    *options: Any,
    spare: float | None = 10.0,
    results: str = "",
    about: int = 1,
    **environment: str,
) -> Outcome:
    """Runs a script of tools/gpu_checks. spare: of the step's seconds, those that the script is not
    told of; None where it takes no time limit. results: the folder of its records."""
    command = [sys.executable, CHECKS / name, *options, "--device", settings.device]
    if results:
        command += ["--out", settings.file(results)]
    if spare is not None:
        command += ["--seconds", max(20.0, settings.seconds - spare)]
    return outcome(*run_script(command, settings, **environment), about=about)
