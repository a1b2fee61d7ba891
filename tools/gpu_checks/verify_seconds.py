"""Where the seconds of `ingot verify` go, for a model file verified against itself or a candidate.

    python verify_seconds.py MODEL.py [--device cuda] [--timing] [--candidate FILE] [--parts]
                             [--set NAME=VALUE ...]

Prints the seconds of each stage (until the first trial; trials at the model's own size; gradients;
hostile families; timing) and of the whole process. --parts: also the longest steps, and what the
process that judges does in them, by Python's profiler: where it waits for the candidate's process,
too.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.time()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))


def stage_of(message: str) -> str:
    if message in ("imports", "original and worker"):
        return message
    if message.startswith("loading"):
        return "loading"
    if message.startswith("timing"):
        return "timing"
    name = message.partition(": ")[2]
    if name.startswith("gradients"):
        return "gradients"
    own = ("own inputs", "fresh inputs", "parameters changed", "statistics moved")
    return "own size" if name.startswith(own) else "hostile"


def show(profile: cProfile.Profile) -> None:
    """What the process that judges does, each function with those that it calls and without."""
    stats = pstats.Stats(profile)
    stats.sort_stats("cumulative").print_stats("ingot/verify", 40)
    stats.sort_stats("tottime").print_stats(25)
    for who, whose in (("this process", "SELF"), ("the worker", "CHILDREN")):
        used = resource.getrusage(getattr(resource, f"RUSAGE_{whose}"))
        print(
            f"{who}: user {used.ru_utime:.1f} s, system {used.ru_stime:.1f} s, "
            f"{used.ru_minflt / 1e6:.1f} million page faults, {used.ru_maxrss >> 10} MiB"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--candidate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    from ingot.verify import VerifyOptions, verify_pair

    profile = cProfile.Profile()
    if arguments.parts:
        profile.enable()
    moments = [("imports", STARTED), ("original and worker", time.time())]
    options = VerifyOptions(
        device=arguments.device,
        timing=arguments.timing,
        overrides=dict(pair.split("=", 1) for pair in arguments.set),
        progress=lambda message: moments.append((message, time.time())),
    )
    with tempfile.TemporaryDirectory() as folder:
        candidate = arguments.candidate or f"{folder}/new.py"
        if arguments.candidate is None:
            Path(candidate).write_text(Path(arguments.model).read_text())
        result = verify_pair(arguments.model, candidate, options)
    moments.append(("", time.time()))
    steps = [(ended - begun, what) for (what, begun), (_, ended) in zip(moments, moments[1:])]
    seconds: dict = {}
    for taken, what in steps:
        stage = stage_of(what)
        seconds[stage] = seconds.get(stage, 0.0) + taken
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())
    verdict = "verified" if result.verified else f"NOT verified: {result.failures[0]}"
    name = Path(arguments.model).stem
    if arguments.parts:
        profile.disable()
        show(profile)
        for taken, what in sorted(steps, reverse=True)[:30]:
            print(f"{taken:7.2f} s  {what}")
    print(f"{name}: {time.time() - STARTED:.1f} s ({stages}); {verdict}", flush=True)
    return 0 if result.verified else 1


if __name__ == "__main__":
    sys.exit(main())
