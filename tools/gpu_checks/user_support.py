"""What the programs of the stage `user` share: lines of PASS and FAIL, and errors against fp64."""

from __future__ import annotations

import argparse
import copy
import faulthandler
import traceback
import warnings
from collections.abc import Callable

import torch

faulthandler.enable()  # a crash tells where


class Verdicts:
    """Prints a line for each thing that was tried; the last line counts them."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def say(self, name: str, good: bool, more: object = "") -> None:
        self.passed += bool(good)
        self.failed += not good
        print(f"{'PASS' if good else 'FAIL'} {name} {more}".rstrip(), flush=True)

    def attempt(self, name: str, action: Callable[[], object]) -> None:
        """action() gives whether all was well, or that and a remark; an exception is a failure."""
        try:
            found = action()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:160]
            found = False, f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})"
        self.say(name, *(found if isinstance(found, tuple) else (found,)))

    def end(self) -> int:
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed else 0


def arguments(document: str | None, *options: tuple) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here)
    for name, settings in options:
        parser.add_argument(name, **settings)
    return parser.parse_args()


def quiet() -> None:
    """Warnings that a call is left to PyTorch are no failures here."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative Frobenius error."""
    exact = exact.double()
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def exact_twin(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(module).double()


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return found.shape == wanted.shape and error(found, wanted) <= tolerance
