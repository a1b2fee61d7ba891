"""Checks `ingot verify` on a GPU: honest CUDA candidates pass, dishonest ones are caught and named.

    python check_verify.py [--only TEXT] [--which all|checked|timed] [--processes N] [--seconds N]
                           [--device cuda|cpu]

Each candidate goes through verify_pair, in several processes at once; those whose trick shows in
times go last, alone. Prints a table and exits with 1 if a verdict is not the expected one, and with
3 if time ran out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("python", "tests/python"):
    sys.path.insert(0, str(ROOT / folder))
os.environ["PYTHONPATH"] = os.pathsep.join(
    p for p in (str(ROOT / "python"), os.environ.get("PYTHONPATH", "")) if p
)

from verify_cases import CASES, ORIGINAL, source_of  # noqa: E402


def check(name: str, device: str) -> dict:
    from ingot.verify import VerifyOptions, verify_pair

    case = CASES[name]
    started = time.monotonic()
    options = VerifyOptions(
        device=device,
        hostile=case.hostile,
        timing=case.timed,
        compile_baseline=False,
        timing_budget_s=1.0,
        rounds=7,
        time_limit_s=case.time_limit_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        files = {"model.py": ORIGINAL, "model_new.py": source_of(case)}
        for file, text in files.items():
            (Path(folder) / file).write_text(text, encoding="utf-8")
        result = verify_pair(f"{folder}/model.py", f"{folder}/model_new.py", options)
    found = result.tricks[0] if result.tricks else ""
    named = found in case.trick.split(" or ")
    good = result.verified if not case.trick else not result.verified and named
    first = result.failures[0] if result.failures else None
    why = f"{first.name} [{first.mode}] {first.message}" if first else ""
    return {
        "case": name,
        "expected": case.trick,
        "verified": result.verified,
        "named": found,
        "good": good,
        "why": " ".join(why.split())[:240],
        "seconds": round(time.monotonic() - started, 1),
    }


def run_share(names: list, device: str) -> None:
    """In a process of its own: one line of JSON a case."""
    for name in names:
        try:
            row = check(name, device)
        except Exception as error:
            row = {"case": name, "expected": CASES[name].trick, "verified": None, "named": ""}
            row |= {"good": False, "why": f"{type(error).__name__}: {error}"[:240], "seconds": 0.0}
        print(json.dumps(row), flush=True)


def start(names: list, device: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--device", device, "--share", json.dumps(names)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def collect(processes: list, deadline: float) -> list:
    rows = []
    for process in processes:
        try:
            text, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it
            text, _ = process.communicate()
        rows += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--which", default="all", choices=("all", "checked", "timed"), help="timed: those that are"
    )
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=90.0, help="stop then (90)")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share is not None:
        run_share(json.loads(arguments.share), arguments.device)
        return 0
    started = time.monotonic()
    deadline = started + arguments.seconds
    wanted = {"all": (True, False), "checked": (False,), "timed": (True,)}[arguments.which]
    names = [n for n in CASES if arguments.only in n and CASES[n].timed in wanted]
    at_once = sorted((n for n in names if not CASES[n].timed), key=lambda n: not CASES[n].hostile)
    shares = [at_once[i :: arguments.processes] for i in range(arguments.processes)]
    rows = collect([start(s, arguments.device) for s in shares if s], deadline)
    timed = [n for n in names if CASES[n].timed]
    rows += collect([start(timed, arguments.device)] if timed else [], deadline)
    by_name = {row["case"]: row for row in rows}
    print(f"{'verdict':8} {'expected':28} {'named':28} {'s':>5}  case")
    for name in names:
        row = by_name.get(name)
        if row is None:
            print(f"{'NOT RUN':8} {CASES[name].trick or '(passes)':28} {'':28} {'':>5}  {name}")
            continue
        verdict = ("passed" if row["verified"] else "caught") if row["good"] else "WRONG"
        expected = row["expected"] or "(passes)"
        print(f"{verdict:8} {expected:28} {row['named']:28} {row['seconds']:5.1f}  {name}")
        if not row["good"]:
            print(f"         {row['why']}")
    bad = sum(not r["good"] for r in by_name.values())
    missing = len(names) - len(by_name)
    caught = sum(r["good"] and bool(r["expected"]) for r in by_name.values())
    passed = sum(r["good"] and not r["expected"] for r in by_name.values())
    print(
        f"{caught} dishonest candidates caught and named, {passed} honest ones passed, {bad} wrong "
        f"verdicts, {missing} not run, {time.monotonic() - started:.0f} s"
    )
    return 1 if bad else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
