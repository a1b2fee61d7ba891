"""Puts the errors of bugs.py into a copy of the tree, one at a time, and says which are found.

    python tests/seeded/run.py [--jobs N] [--whole-stage | --everything] [NAME...]

NAME: part of a bug's name, or of its file's. The copy is the last commit, in build/seeded; its
builds are kept from one run to the next. Only the tests named with a bug are run, of those that
`make test` runs: --whole-stage runs all of that stage instead, --everything all that `make test`
runs. What is run must pass before an error is put in. Exit status 0: all were found.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from bugs import BUGS, Bug

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "seeded"
# By what is run: the preset, and what is built of it.
BUILDS = {
    "asan": ("asan", ["ingot_tests"]),
    "python": ("release", ["ingot", "ingot_blas"]),
    "stage": ("release", ["ingot", "ingot_blas"]),
}


def shell(command: list[str], log: Path) -> bool:
    environment = {
        **os.environ,
        "INGOT_VENV": sys.prefix,
        "INGOT_LIBRARY": str(COPY / "build/release/libingot.so"),
        "PYTHONPATH": str(COPY / "python"),
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n$ {shlex.join(command)}\n")
        output.flush()
        return not subprocess.run(
            command, cwd=COPY, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode


def make_copy() -> None:
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not (COPY / ".git").exists():
        subprocess.run([*git, "worktree", "prune"], check=True)
        subprocess.run([*git, "worktree", "add", "--detach", str(COPY), head], check=True)
    subprocess.run(["git", "-C", str(COPY), "checkout", "-q", "-f", "--detach", head], check=True)


def build(preset: str, targets: list[str], jobs: int, log: Path) -> bool:
    folder = f"build/{preset}"
    configure = ["cmake", "--preset", preset, "-DINGOT_WARNINGS_AS_ERRORS=ON"]
    configured = (COPY / folder / "CMakeCache.txt").exists()
    return (configured or shell(configure, log)) and shell(
        ["cmake", "--build", folder, "-j", str(jobs), "--target", *targets], log
    )


def check(seen_by: str, jobs: int, scope: str, log: Path) -> bool:
    """Whether the checks pass: builds first, since an error that does not compile is found."""
    kind, _, what = seen_by.partition(" ")
    if scope == "everything":
        return shell(["tools/check", "--quick", "all"], log)
    if not build(*BUILDS[kind], jobs, log):
        return False
    if scope == "stage" or kind == "stage":
        return shell(["tools/check", "--quick", what if kind == "stage" else kind], log)
    if kind == "python":
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs)]
        return shell([*command, "-m", "not thorough", *what.split()], log)
    program = f"build/{BUILDS[kind][0]}/tests/cpp/ingot_tests"
    return shell([program, f"--gtest_filter={what}", "--gtest_brief=1"], log)


def seed(bug: Bug) -> str:
    """Puts the error in; the file's text before."""
    path = COPY / bug.file
    text = path.read_text(encoding="utf-8")
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: {text.count(bug.old)} places in {bug.file}, not one")
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    scope = parser.add_mutually_exclusive_group()
    for name in ("whole-stage", "everything"):
        value = name.removeprefix("whole-")
        scope.add_argument(f"--{name}", dest="scope", action="store_const", const=value)
    arguments = parser.parse_args()
    chosen = [
        bug
        for bug in BUGS
        if not arguments.names or any(n in bug.name or n in bug.file for n in arguments.names)
    ]
    make_copy()
    log = COPY / "build" / "log.txt"
    log.parent.mkdir(exist_ok=True)
    log.write_text("", encoding="utf-8")
    for seen_by in dict.fromkeys(bug.seen_by for bug in chosen):
        if not check(seen_by, arguments.jobs, arguments.scope, log):
            print(f"fails without any error put in: {seen_by} ({log})", file=sys.stderr)
            return 2
        if arguments.scope == "everything":
            break
    missed = 0
    for number, bug in enumerate(chosen, 1):
        started = time.monotonic()
        before = seed(bug)
        try:
            found = not check(bug.seen_by, arguments.jobs, arguments.scope, log)
        finally:
            (COPY / bug.file).write_text(before, encoding="utf-8")
        missed += not found
        verdict = "found" if found else "MISSED"
        took = time.monotonic() - started
        print(f"[{number}/{len(chosen)}] {verdict:6} {took:4.0f} s  {bug.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} errors found")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
