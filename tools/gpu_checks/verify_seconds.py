"""Where the seconds of `ingot verify` go, for a model file verified against itself.

    python verify_seconds.py MODEL.py [--device cuda] [--timing] [--candidate FILE]

Prints the seconds of each stage (until the first trial; trials at the model's own size; gradients;
hostile families; timing) and of the whole process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--candidate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timing", action="store_true")
    arguments = parser.parse_args()
    from ingot.verify import VerifyOptions, verify_pair

    moments = [("imports", STARTED), ("original and worker", time.time())]
    options = VerifyOptions(
        device=arguments.device,
        timing=arguments.timing,
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
    print(f"{name}: {time.time() - STARTED:.1f} s ({stages}); {verdict}", flush=True)
    return 0 if result.verified else 1


if __name__ == "__main__":
    sys.exit(main())
