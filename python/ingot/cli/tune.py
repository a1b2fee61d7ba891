"""`ingot tune`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from . import options as shared
from .console import output, print_json, progress, table
from .errors import BadInputError, bad_input_from


@click.command("tune")
@shared.model_argument("model")
@shared.precision_option
@click.option(
    "--mode",
    type=click.Choice(["training", "eval", "both"]),
    default="both",
    show_default=True,
    help="Mode of the module whose products are measured.",
)
@click.option("--again", is_flag=True, help="Measure anew what was measured before.")
@shared.set_option
@shared.json_option
@shared.log_options
def command(
    model: Path, precision: str, mode: str, again: bool, settings: tuple, as_json: bool
) -> None:
    """Measures the configurations of MODEL's matrix products on this GPU, at the batch size of its
    inputs, and remembers the fastest for every program that is made later.

    Another configuration adds in another order: results may differ in their last bits.
    """
    import torch

    from ingot import IngotError, tune
    from ingot.model_file import ModelFileError, load_model_file

    if not torch.cuda.is_available():
        raise BadInputError(
            "ingot tune measures on a GPU, and PyTorch sees none here ('ingot doctor' says why)"
        )
    found = []
    with progress() as say, bad_input_from(IngotError, ModelFileError):
        loaded = load_model_file(model, dict(settings))
        inputs = loaded.make_inputs("cuda")
        module = loaded.make_module().cuda()
        for training in (True, False):
            if mode in ("both", "training" if training else "eval"):
                module.train(training)
                found += tune(module, inputs, precision=precision, again=again, progress=say)
    found = list({product.key: product for product in found}.values())
    if as_json:
        print_json("tune", {"products": [{**dataclasses.asdict(p), "gain": p.gain} for p in found]})
        return
    console = output()
    if not found:
        console.print("No product of this model has configurations to choose from on this GPU.")
        return
    numbers = ("ms", "cost model's ms", "gain")
    made = table("Tuned products", "product", "configuration", *numbers, "", right=numbers)
    for p in found:
        made.add_row(
            p.key.partition(" | m ")[2] and "m " + p.key.partition(" | m ")[2],
            p.choice,
            _number(p.milliseconds.get(p.choice)),
            _number(p.milliseconds.get(p.estimated)),
            f"{p.gain:.3f}",
            "known" if p.known else "measured",
        )
    console.print(made)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
