"""Options and arguments that several commands share."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import click

from .errors import BadInputError

PRECISIONS = ["fp32", "ieee", "high", "tf32", "bf16", "fp16"]


class _Setting(click.ParamType):
    name = "NAME=VALUE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is not of the form name=value", param, ctx)
        try:
            return name, ast.literal_eval(text)
        except (ValueError, SyntaxError):
            self.fail(f"the value in {value!r} is no Python literal", param, ctx)


set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    type=_Setting(),
    help="Override a constant at the top of the model's file, e.g. --set batch_size=256; what the "
    "file computes from it follows. May be repeated.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
precision_option = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp32",
    show_default=True,
    help="Policy for matrix products; everything else is fp32.",
)
device_option = click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    show_default="cuda where there is a GPU",
    help="Where the model runs.",
)


def model_argument(name: str) -> Any:
    return click.argument(
        name, type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
    )


def chosen_device(device: str | None) -> str:
    """The device asked for, checked, or the best one that is here."""
    import torch

    here = torch.cuda.is_available()
    if device == "cuda" and not here:
        raise BadInputError(
            "--device cuda: PyTorch sees no GPU here ('ingot doctor' says why); use --device cpu"
        )
    return device or ("cuda" if here else "cpu")
