"""Where the seconds of `ingot verify` go, for a model file verified against itself or a candidate.

    python verify_seconds.py MODEL.py [--device cuda] [--timing] [--candidate FILE] [--parts]
                             [--set NAME=VALUE ...]

Prints the seconds of each stage (until the first trial; trials at the model's own size; gradients;
hostile families; timing) and of the whole process. --parts: also what the process that judges does
in them, each part without those that it calls, and how long it waits for the candidate's process.
"""

from __future__ import annotations

import argparse
import functools
import resource
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

STARTED = time.time()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))


def stage_of(message: str) -> str:
    if message.startswith("loading"):
        return "loading"
    if message.startswith("timing"):
        return "timing"
    name = message.partition(": ")[2]
    if name in ("gradients", "gradients after a change"):
        return "gradients"
    own = ("own inputs", "fresh inputs", "parameters changed", "statistics moved")
    return "own size" if name.startswith(own) else "hostile"


class Parts:
    """Wall and processor seconds of functions of this process, those of what they call left out."""

    def __init__(self) -> None:
        self.spent: dict = defaultdict(lambda: [0, 0.0, 0.0])
        self._within: list = []

    def watch(self, owner: Any, name: str, label: Any) -> None:
        """label: a text, or what gives one for the function's arguments."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = (time.perf_counter(), time.process_time())
            self._within.append([0.0, 0.0])
            try:
                return function(*args, **kwargs)
            finally:
                inner = self._within.pop()
                took = (time.perf_counter() - began[0], time.process_time() - began[1])
                entry = self.spent[label if isinstance(label, str) else label(*args)]
                entry[0] += 1
                for i in range(2):
                    entry[1 + i] += took[i] - inner[i]
                    if self._within:
                        self._within[-1][i] += took[i]

        setattr(owner, name, timed)

    def watch_verify(self) -> None:
        from ingot.verify import candidate, execution, judging, original, pair, reference, trials
        from ingot.verify import timing as timing_module

        process = candidate.CandidateProcess
        self.watch(process, "wait_until_ready", "wait: Python and PyTorch in the worker")
        self.watch(process, "_wait", lambda me, what, *rest: f"wait: {what} in the worker")
        self.watch(process, "close", "ending the worker")
        self.watch(candidate.Line, "send", "sending")
        self.watch(candidate.Line, "receive", "receiving")
        self.watch(pair, "Original", "loading the original")
        self.watch(original.Original, "fresh_inputs", "inputs")
        for name, label in (
            ("eager", "eager"),
            ("truth", "fp64 truth"),
            ("truth_and_spread", "fp64 truth, with products kept"),
            ("_spread", "disturbed runs"),
            ("_prepare", "writing state"),
            ("changed", "new parameters"),
        ):
            self.watch(reference.Reference, name, label)
        for module in (judging, reference, timing_module):
            self.watch(module, "measure", "measures")
        for module in (judging, execution, trials):
            self.watch(module, "same_bits", "comparing bits")

    def show(self) -> None:
        print(f"{'part':44} {'calls':>6} {'wall s':>8} {'cpu s':>8}")
        for label, (calls, wall, busy) in sorted(self.spent.items(), key=lambda e: -e[1][1]):
            print(f"{label:44} {calls:6} {wall:8.2f} {busy:8.2f}")
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

    parts = Parts()
    if arguments.parts:
        parts.watch_verify()
    moments = [("imports", STARTED), ("original and worker", time.time())]
    options = VerifyOptions(
        device=arguments.device,
        timing=arguments.timing,
        overrides=dict(pair.split("=", 1) for pair in arguments.set),
        progress=lambda message: moments.append((stage_of(message), time.time())),
    )
    with tempfile.TemporaryDirectory() as folder:
        candidate = arguments.candidate or f"{folder}/new.py"
        if arguments.candidate is None:
            Path(candidate).write_text(Path(arguments.model).read_text())
        result = verify_pair(arguments.model, candidate, options)
    moments.append(("", time.time()))
    seconds: dict = {}
    for (stage, begun), (_, ended) in zip(moments, moments[1:]):
        seconds[stage] = seconds.get(stage, 0.0) + ended - begun
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())
    verdict = "verified" if result.verified else f"NOT verified: {result.failures[0]}"
    name = Path(arguments.model).stem
    if arguments.parts:
        parts.show()
    print(f"{name}: {time.time() - STARTED:.1f} s ({stages}); {verdict}", flush=True)
    return 0 if result.verified else 1


if __name__ == "__main__":
    sys.exit(main())
