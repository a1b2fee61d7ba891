"""Options and arguments that several commands share."""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path
from typing import Any

import click

from ingot import log

from .errors import BadInputError

# Keys of the contexts' `meta`: the arguments as given, and how often -v and -q were.
ARGUMENTS = "ingot.arguments"
_LOUDNESS = "ingot.loudness"
PRECISIONS = ["fp32", "ieee", "high", "tf32", "bf16", "fp16"]


class Seconds(click.ParamType):
    """A length of time that a clock can count."""

    name = "float"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = click.FLOAT.convert(value, param, ctx)
        if not 0 <= seconds <= 1e9:  # nor NaN
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


class Count(click.ParamType):
    """How many there are of something."""

    name = "integer"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        count = click.INT.convert(value, param, ctx)
        if count < 1:
            self.fail(f"{value} is too few: one at least", param, ctx)
        return count


class _Setting(click.ParamType):
    name = "NAME=VALUE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is not of the form name=value", param, ctx)
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            self.fail(
                f"the value in {value!r} is no Python literal; a text needs quotes of its own, "
                f"as in {name}=\"'gelu'\"",
                param,
                ctx,
            )
        # Of a text its literal: as it is, it would stand for the literal that it spells.
        return name, repr(found) if isinstance(found, str) else found


def log_options(command: Any) -> Any:
    """-v and -q: of the group and of each of its commands, so that both places serve."""
    quiet = click.option(
        "-q",
        "--quiet",
        count=True,
        expose_value=False,
        callback=_set_log_level,
        help="No progress and no warnings; only results and errors.",
    )
    verbose = click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        callback=_set_log_level,
        help="Say what is compiled and how long it takes; -vv: all.",
    )
    return verbose(quiet(command))


def _set_log_level(ctx: click.Context, option: click.Parameter, count: int) -> None:
    """What was given before the command's name and after it together, before INGOT_LOG."""
    if ctx.resilient_parsing:
        return
    given = ctx.meta.setdefault(_LOUDNESS, {"quiet": 0, "verbose": 0})
    given[option.name] += count
    if given["quiet"] and given["verbose"]:
        raise BadInputError("-q and -v exclude each other")
    log.show()
    try:
        wanted = log.level()
    except ValueError as error:
        raise BadInputError(str(error)) from error
    if given["quiet"]:
        wanted = "error"
    elif given["verbose"]:
        wanted = "info" if given["verbose"] == 1 else "debug"
    log.set_level(wanted)


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
budget_option = click.option(
    "--budget",
    type=Seconds(),
    show_default="120; 15 on a CPU",
    help="Seconds for the timed rounds.",
)
report_option = click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Write all of it as one HTML page that needs nothing else.",
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


def check_writable(option: str, target: Path | None, used: dict[str, Path | None]) -> None:
    """Says before the long work, not after it, that a file cannot be written, or that it would take
    the place of one that this command reads or writes. used: these, by what they are."""
    from ingot.model_file import ModelFileError, check_place

    if target is None:
        return
    if target in (Path(), Path("-")):
        raise BadInputError(f"{option}: give a file's name, not {str(target)!r}")
    try:
        check_place(target)
    except ModelFileError as error:
        raise BadInputError(f"{option}: {error}") from error
    for what, other in used.items():
        if other is not None and os.path.realpath(other) == os.path.realpath(target):
            raise BadInputError(f"{option}: {target} is {what}: give another file")


def make_folder(option: str, folder: Path) -> None:
    """Where files will be written; says now that none can be."""
    from ingot.model_file import ModelFileError, check_place

    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_place(folder / "any")
    except (OSError, ModelFileError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"{option}: cannot write to {folder}: {why}") from error


def command_line() -> str:
    """The command as it was given, for a shell."""
    arguments = click.get_current_context().find_root().meta.get(ARGUMENTS, ())
    return shlex.join(["ingot", *arguments])


def chosen_device(device: str | None) -> str:
    """The device asked for, checked, or the best one that is here."""
    import torch

    here = torch.cuda.is_available()
    if device == "cuda" and not here:
        raise BadInputError(
            "--device cuda: PyTorch sees no GPU here ('ingot doctor' says why); use --device cpu"
        )
    return device or ("cuda" if here else "cpu")
