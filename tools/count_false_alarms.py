"""Counts how often `ingot verify` refuses what is right: files that `ingot optimize` writes for the
models of tests/models, by many seeds.

    python count_false_alarms.py [--models TEXT] [--seeds FIRST COUNT] [--seconds N] [--device cpu]

The judgement is verify's own; the candidate runs in this process, which is honest, and not in a
worker: a run then takes a second rather than ten. Prints each refusal and the count; exits with 1
where there was one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from ingot.cli.optimize import _rendering  # noqa: E402
from ingot.model_file import load_model_file  # noqa: E402
from ingot.verify import VerifyOptions, ahead, verify_pair  # noqa: E402
from ingot.verify.candidate import CandidateError  # noqa: E402
from ingot.verify.worker import Worker  # noqa: E402


class HonestProcess:
    """Answers as CandidateProcess does, here."""

    def __init__(self, *unused: Any) -> None:
        self._worker = Worker(None)
        self._worker._watch.start = lambda *unused: None

    def __enter__(self) -> HonestProcess:
        return self

    def expect(self, message_bytes: int) -> HonestProcess:
        return self

    def wait_until_ready(self) -> None:
        pass

    def __exit__(self, *unused: Any) -> None:
        pass

    def ask(self, header: dict, tensors: dict | None, limit: float) -> None:
        self._asked = header, tensors

    def answer(self) -> tuple:
        return self.request(*self._asked, 0.0)

    def request(self, header: dict, tensors: dict | None, limit: float) -> tuple:
        sent = {k: v.clone() for k, v in (tensors or {}).items()}
        try:
            reply, received = self._worker.operations[header["op"]](header, sent)
        except Exception as error:
            raise CandidateError(self._worker._describe(error)) from error
        return reply, {k: v.detach().cpu().clone() for k, v in received.items()}, 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="only those whose name contains this")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 4), metavar=("FIRST", "COUNT"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    runs, refused = 0, 0
    names = sorted((ROOT / "tests/models").glob("*.py"))
    names = [n for n in names if arguments.models in n.stem]
    with tempfile.TemporaryDirectory() as folder:
        written = {model: write(model, Path(folder), arguments.device) for model in names}
        first, count = arguments.seeds
        for seed in range(first, first + count):
            for model, file in written.items():
                if file is None or time.monotonic() - started > arguments.seconds:
                    continue
                options = VerifyOptions(device=arguments.device, seed=seed)
                with mock.patch.object(ahead, "CandidateProcess", HonestProcess):
                    result = verify_pair(str(model), str(file), options)
                runs += 1
                refused += not result.verified
                for check in result.failures[:1]:
                    print(f"{model.stem} seed {seed}: {check.name} [{check.mode}] {check.message}")
            print(f"seed {seed}: {refused} of {runs} refused", flush=True)
    print(f"{refused} of {runs} runs over {len(names)} models refused what is right")
    return 1 if refused else 0


def write(model: Path, folder: Path, device: str) -> Path | None:
    """The file that `ingot optimize` would write, None where nothing is taken over."""
    report, render = _rendering(load_model_file(model), "fp32", device, False)
    file = folder / f"{model.stem}_new.py"
    file.write_text(render(None), encoding="utf-8")
    return file if report["programs"] else None


if __name__ == "__main__":
    sys.exit(main())
