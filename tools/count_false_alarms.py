"""Counts how often `ingot verify` refuses what is right: files that `ingot optimize` writes for the
models of tests/models, by many seeds.

    python count_false_alarms.py [--models TEXT] [--part I/N] [--seeds FIRST COUNT] [--seconds N]
                                 [--device cpu] [--rounded tf32|bf16] [--set NAME=VALUE ...]

The judgement is verify's own; the candidate runs in this process, which is honest, and not in a
worker: a run then takes a second rather than ten. Prints each refusal and the count; exits with 1
where there was one, with 3 if time ran out. What is refused again and again is no false alarm.

--rounded: the candidate is the model itself, the operands of whose products are rounded as this
policy rounds them, backwards too, which needs no GPU. --set: constants at the top of the files that
have them, e.g. batch_size=2048.
"""

from __future__ import annotations

import argparse
import contextlib
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
from ingot.model_file import constants_of, load_model_file  # noqa: E402
from ingot.verify import VerifyOptions, ahead, verify_pair  # noqa: E402
from ingot.verify.bounds import PRODUCTS  # noqa: E402
from ingot.verify.candidate import CandidateError  # noqa: E402
from ingot.verify.result import PairError  # noqa: E402
from ingot.verify.worker import Worker  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


def to_tf32(value: torch.Tensor) -> torch.Tensor:
    """To the nearest with 10 bits behind the point."""
    bits = value.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value)


ROUNDINGS = {
    "tf32": to_tf32,
    "bf16": lambda value: value.bfloat16().float(),
}


class Rounded(TorchDispatchMode):
    """Within it products are of rounded operands, added up in fp32."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self._round = ROUNDINGS[policy]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = PRODUCTS[func](args) if func in PRODUCTS else ()
        rounded = {id(v): self._round(v) for v in operands if v.dtype is torch.float32}
        args = [rounded.get(id(value), value) for value in args]
        return func(*args, **(kwargs or {}))


class HonestProcess:
    """Answers as CandidateProcess does, here."""

    policy = ""  # whose roundings its products have

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
        rounded = Rounded(self.policy) if self.policy else contextlib.nullcontext()
        try:
            with rounded:
                reply, received = self._worker.operations[header["op"]](header, sent)
        except Exception as error:
            raise CandidateError(self._worker._describe(error)) from error
        return reply, {k: v.detach().cpu().clone() for k, v in received.items()}, 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="only those whose name contains this")
    parser.add_argument("--part", default="0/1", help="the I-th of N parts of the models")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 4), metavar=("FIRST", "COUNT"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounded", choices=ROUNDINGS, default="")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    runs, refused = 0, 0
    names = sorted((ROOT / "tests/models").glob("*.py"))
    index, parts = map(int, arguments.part.split("/"))
    names = [n for n in names if arguments.models in n.stem][index::parts]
    with tempfile.TemporaryDirectory() as folder:
        HonestProcess.policy = arguments.rounded
        written = dict(zip(names, names))
        if not arguments.rounded:
            written = {model: write(model, Path(folder), arguments.device) for model in names}
        first, count = arguments.seeds
        for seed in range(first, first + count):
            for model, file in written.items():
                if time.monotonic() - started > arguments.seconds:
                    print("time ran out")
                    return 3
                if file is None:
                    continue
                options = VerifyOptions(
                    device=arguments.device,
                    seed=seed,
                    precision=arguments.rounded or "fp32",
                    overrides=overrides(model, arguments.set),
                )
                with mock.patch.object(ahead, "CandidateProcess", HonestProcess):
                    try:
                        result = verify_pair(str(model), str(file), options)
                    except PairError as error:  # it does not go with these constants
                        print(error)
                        continue
                runs += 1
                refused += not result.verified
                for check in result.failures[:1]:
                    print(f"{model.stem} seed {seed}: {check.name} [{check.mode}] {check.message}")
            print(f"seed {seed}: {refused} of {runs} refused", flush=True)
    print(f"{refused} of {runs} runs over {len(names)} models refused what is right")
    return 1 if refused else 0


def overrides(model: Path, settings: list) -> dict:
    """Of the settings NAME=VALUE those whose names the file gives a value."""
    known = constants_of(model.read_text(encoding="utf-8"))
    pairs = [setting.split("=") for setting in settings]
    return {name: int(value) for name, value in pairs if name in known}


def write(model: Path, folder: Path, device: str) -> Path | None:
    """The file that `ingot optimize` would write, None where nothing is taken over."""
    report, render = _rendering(load_model_file(model), "fp32", device, False)
    file = folder / f"{model.stem}_new.py"
    file.write_text(render(None), encoding="utf-8")
    return file if report["programs"] else None


if __name__ == "__main__":
    sys.exit(main())
