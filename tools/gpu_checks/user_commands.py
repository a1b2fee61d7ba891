"""What users type, typed: a wheel in a clean virtual environment, and commands in fresh processes.

Each scenario runs in an empty folder with an empty home. A command is judged by its exit status, by
the files that it writes and by what it prints; the first that is not as it should be ends the
scenario, which then says what was typed and what came.

The wheel is installed over the PyTorch of the Python that runs this. Nothing is built and nothing
is fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MODELS = ROOT / "tests" / "models"
CHECKS = ROOT / "tools" / "gpu_checks"
DOCS = ROOT / "docs"
VENVS = ROOT / "build" / "user"
WHEEL_VARIABLE = "INGOT_WHEEL"

SEEDS = ("gemm_scale_bn", "gemm_bn_scale_softmax", "gemm_scale_bn_large")
PRECISIONS = ("fp32", "ieee", "high", "tf32", "bf16", "fp16")
OTHER_MODELS = (
    "swiglu",
    "residual_mlp_block",
    "rmsnorm_by_hand",
    "several_results",
    "groupnorm_swish_multiply_swish",
    "batchnorm_gelu_relu",
)
SMALL = {
    "batch_size": 48,
    "in_features": 96,
    "out_features": 96,
    "hidden_features": 128,
    "num_groups": 8,
}
# At these a verification takes seconds on a GPU, and tiles are filled.
MEDIUM = {
    "batch_size": 256,
    "in_features": 1024,
    "out_features": 1024,
    "hidden_features": 1536,
    "num_groups": 16,
}


class WrongError(Exception):
    """Something that a user typed did not do what it should; the message says what came."""


# The installation --------------------------------------------------------------------------------


def wheel_given() -> Path | None:
    given = os.environ.get(WHEEL_VARIABLE, "")
    return Path(given).resolve() if given else None


def missing() -> str:
    """What is lacking for these scenarios, or ""."""
    wheel = wheel_given()
    if wheel is None:
        return f"no wheel is given (--wheel or {WHEEL_VARIABLE}); --help says how to make one"
    return "" if wheel.is_file() else f"{wheel} is no file"


def installed(wheel: Path) -> Path:
    """The folder of a virtual environment that holds the wheel; made once for each wheel."""
    VENVS.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(wheel.read_bytes() + sys.executable.encode()).hexdigest()[:12]
    folder = VENVS / digest
    with open(VENVS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other steps may want it at the same moment
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _check_sources(wheel)
            _install(wheel, folder)
            (folder / "complete").touch()
    return folder


def _check_sources(wheel: Path) -> None:
    """A wheel of other sources would be judged under these sources' name."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in sorted((ROOT / "python").rglob("*.py")):
            name = path.relative_to(ROOT / "python").as_posix()
            if name not in names or archive.read(name) != path.read_bytes():
                raise WrongError(f"{wheel.name} is not of these sources ({name}): make it anew")


def _install(wheel: Path, folder: Path) -> None:
    pip = [folder / "bin" / "python", "-m", "pip"]
    if _run([sys.executable, "-m", "venv", "--system-site-packages", folder])[0]:
        # Without ensurepip, as Debian and Ubuntu split it off: this Python's pip serves.
        shutil.rmtree(folder, ignore_errors=True)
        _checked([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder])
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    quiet = ["--disable-pip-version-check", "-q", "--no-index", "--no-deps"]
    _checked([*pip, "install", *quiet, wheel])
    if _run([folder / "bin" / "python", "-c", "import torch"])[0]:
        # This Python is itself in a virtual environment, which a new one does not see.
        library = Path(next(folder.glob("lib/python3*/site-packages")))
        paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]
        (library / "machine.pth").write_text("".join(lines), encoding="utf-8")
        _checked([folder / "bin" / "python", "-c", "import torch"])


def _run(words: list) -> tuple[int, str]:
    answer = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_clean_environment(),
        check=False,
    )
    return answer.returncode, answer.stdout


def _checked(words: list) -> None:
    status, printed = _run(words)
    if status:
        raise WrongError(f"{shlex.join(map(str, words))}: exit status {status}\n{printed}")


def _clean_environment() -> dict:
    """Without what would lead past the installed package."""
    leading = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in leading and not k.startswith("INGOT_")}


# Typing ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    out: str
    err: str

    def json(self) -> dict:
        return json.loads(self.out)


class Session:
    """One scenario's folder, home and environment.

    sizes: own sizes where None. Options that a GPU's machine does not need (--device cpu, small
    sizes) are added for a try without one.
    """

    def __init__(self, settings: Any, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.on_gpu = settings.device == "cuda"
        self.python = installed(wheel_given()) / "bin" / "python"
        self.device = [] if self.on_gpu else ["--device", "cpu"]
        self.taken: list[str] = []
        home = folder / "home"
        home.mkdir()
        self.work = folder / "work"
        self.work.mkdir()
        self.environment = {
            **{k: v for k, v in _clean_environment().items() if not k.startswith("XDG_")},
            "HOME": str(home),
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }

    def copied(self, path: Path) -> str:
        shutil.copy(path, self.work)
        return path.name

    def sizes(self, name: str, own: bool = False) -> list[str]:
        """--set words for a model's file: its own sizes on a GPU if wished, else smaller ones."""
        if own and self.on_gpu:
            return []
        text = (self.work / name).read_text(encoding="utf-8")
        sizes = MEDIUM if self.on_gpu else SMALL
        known = {k: v for k, v in sizes.items() if re.search(rf"^{k} = ", text, re.M)}
        return [word for k, v in known.items() for word in ("--set", f"{k}={v}")]

    def type(
        self,
        *words: object,
        status: int = 0,
        writes: tuple = (),
        says: tuple = (),
        never: tuple = (),
    ) -> Printed:
        """Runs a command. says, never: regular expressions that what it prints must, must not hold;
        a traceback never."""
        line = shlex.join(map(str, words))
        begun = time.monotonic()
        answer = subprocess.run(
            [str(word) for word in words],
            cwd=self.work,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.settings.seconds,
            check=False,
        )
        seconds = time.monotonic() - begun
        self.taken.append(f"{' '.join(Path(str(w)).name for w in words[:2])} {seconds:.0f} s")
        both = answer.stdout + answer.stderr
        problems = [] if answer.returncode == status else [f"exit status {answer.returncode}"]
        problems += [f"{name} was not written" for name in writes if not self._holds(name)]
        problems += [f"it does not say {w!r}" for w in says if not re.search(w, both, re.M)]
        wrong = (r"^Traceback \(most recent call last\)", *never)
        problems += [f"it says {w!r}" for w in wrong if re.search(w, both, re.M)]
        if problems:
            lines = answer.stdout.strip().splitlines()[-12:]
            said = [text for text in answer.stderr.splitlines() if not text.startswith("… ")]
            tail = "\n".join([*_failed_checks(answer.stdout), *lines, *said[-10:]])
            raise WrongError(f"$ {line}\n{'; '.join(problems)} ({seconds:.0f} s):\n{tail}")
        return Printed(answer.stdout, answer.stderr)

    def _holds(self, name: str) -> bool:
        path = self.work / name
        return path.is_file() and path.stat().st_size > 0

    def text(self, name: str) -> str:
        return (self.work / name).read_text(encoding="utf-8")


def _failed_checks(printed: str) -> list[str]:
    """Of a verification that a command printed as JSON: its end says nothing of them."""
    try:
        found = json.loads(printed)
    except ValueError:
        return []
    checks = (found.get("verification") or found).get("checks", ())
    failed = [c for c in checks if c["outcome"] != "passed"]
    return [f"{c['outcome']}: {c['name']} ({c['mode']}): {c['message']}" for c in failed[:6]]


def judged(scenario: Callable[[Session], str], settings: Any) -> tuple[bool, str]:
    """Whether all was as it should be, and what the scenario says, or what was wrong."""
    with tempfile.TemporaryDirectory(prefix="ingot-user-") as name:
        try:
            session = Session(settings, Path(name))
            said = scenario(session)
        except WrongError as error:
            return False, str(error)
        except subprocess.TimeoutExpired as error:
            return False, f"$ {shlex.join(error.cmd)}\nran out of time"
    return True, "; ".join(part for part in (said, ", ".join(session.taken)) if part)


def script(session: Session, name: str, *words: object, about: int = 1) -> str:
    """A program of this folder, run by the environment's Python: its last lines."""
    command = (session.python, CHECKS / name, "--device", session.settings.device, *words)
    lines = session.type(*command).out.strip().splitlines()
    return "; ".join(lines[-about:])
