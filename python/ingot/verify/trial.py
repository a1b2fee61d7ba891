"""One call that the candidate is asked for, and its request."""

from __future__ import annotations

from dataclasses import dataclass

from . import passing
from .cotangents import Cotangents
from .criteria import ErrorModel


@dataclass
class Trial:
    """One call of the candidate, and what it is compared under."""

    name: str
    training: bool
    values: list
    model: ErrorModel = ErrorModel.INDEPENDENT
    new_state: dict | None = None  # what to write before the call; else the state is as it was
    through_data: bool = False
    arrives: str = ""  # how the new state does: of `execution`
    layout: str = "contiguous"
    reuse: bool = False
    own: bool = False
    return_parameters: bool = False
    unannounced: bool = False  # of a size that no candidate can know beforehand
    names: tuple = ()  # by which the candidate gets the last of the values
    cotangents: Cotangents | None = None  # where gradients are asked for


def request_of(trial: Trial, seed: int) -> tuple:
    """A plain call, with nothing kept from others: (header, tensors)."""
    text, tensors = passing.packed(trial.values, "a")
    cotangents = trial.cotangents
    header = {
        "op": "call",
        "args": text,
        "training": trial.training,
        "layout": trial.layout,
        "reuse": False,
        "through_data": False,
        "arrives": "",
        "names": list(trial.names),
        "between": cotangents is not None and cotangents.between,
        "twice": cotangents is not None and cotangents.twice,
        "frozen": [] if cotangents is None else list(cotangents.frozen),
        "cotangent_layout": "" if cotangents is None else cotangents.layout,
        "seed": seed,
        "poison": [],
        "return_parameters": False,
        "gradients": cotangents is not None,
        "input_gradients": cotangents is not None and cotangents.of_inputs,
        "only_input": None if cotangents is None else cotangents.only_input,
    }
    return header, tensors
