"""The command line: `ingot optimize | verify | explain | bench | tune | run | doctor | ...`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import click

import ingot
from ingot import log

from .console import nothing_but_json, print_json, writable_streams
from .options import ARGUMENTS, log_options

__all__ = ["main"]

# Importing and capturing make objects by the million, nearly all of which stay.
_COLLECT_AFTER = 50_000

_COMMANDS = {
    "optimize": "Write a verified, faster ModelNew for a model's file.",
    "verify": "Compare, and time, any pair of files Model / ModelNew.",
    "explain": "Show graph, rewrites, plan and kernels of a model; needs no GPU.",
    "bench": "Time the bundled models against eager and torch.compile.",
    "tune": "Measure the configurations of a model's products, and remember the best.",
    "run": "Run any program with its fp32 products on Ingot. Experimental.",
    "doctor": "Say what this machine offers, what is missing, what that costs.",
    "completion": "Print a script that completes ingot's commands in a shell.",
}


class _LazyGroup(click.Group):
    """Imports a command's module, and PyTorch with it, when the command is used."""

    def make_context(self, info_name: Any, args: list, *rest: Any, **extra: Any) -> click.Context:
        given = list(args)  # parsing empties it
        ctx = super().make_context(info_name, args, *rest, **extra)
        ctx.meta[ARGUMENTS] = given
        return ctx

    def main(self, *args: Any, **extra: Any) -> Any:
        with writable_streams():
            return super().main(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        given = ctx.meta[ARGUMENTS]
        name = next((word for word in given if word in _COMMANDS), "")
        command = self.get_command(ctx, name)
        takes_json = command is not None and any(p.name == "as_json" for p in command.params)
        if not takes_json or "--json" not in given:
            return super().invoke(ctx)
        with nothing_but_json():
            try:
                return super().invoke(ctx)
            except click.ClickException as error:
                print_json(name, {"error": error.format_message()})
                raise

    def list_commands(self, ctx: click.Context) -> list:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        import importlib

        with _interrupts_end_it():
            return importlib.import_module(f"ingot.cli.{name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 as wished, 1 not verified or not possible, 2 bad input.",
)
@click.version_option(ingot.__version__, prog_name="ingot")
@log_options
def main() -> None:
    """Optimises the chains that people put behind a PyTorch linear layer.

    A model's file holds a class Model, get_inputs() and get_init_inputs(); both functions give a
    list of arguments, a dict of keyword arguments, or a list of both: [[x], {"scale": 2.0}]. Such a
    file is a program: every command that takes one runs it.
    """
    warnings.showwarning = _show_warning
    if "TORCH_LOGS" not in os.environ:  # a traceback where a model raises, of which we say the line
        logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    gc.set_threshold(_COLLECT_AFTER)


@contextlib.contextmanager
def _interrupts_end_it() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception it gets lost in the C++ of what is being
    imported, or aborts it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _show_warning(message: Any, category: type, *place: Any) -> None:
    """One line on stderr: where in our code a warning arose tells a user nothing."""
    shown = log.logger.isEnabledFor(logging.WARNING)
    if shown and not issubclass(category, (DeprecationWarning, FutureWarning)):
        click.echo(f"Warning: {message}", err=True)
