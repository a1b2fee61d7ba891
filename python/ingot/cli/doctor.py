"""`ingot doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys

import click

import ingot

from . import options as shared
from .console import output, print_json, table


@click.command("doctor")
@shared.json_option
@shared.log_options
def command(as_json: bool) -> None:
    """Says what this machine offers, what is missing, and what that costs.

    Exit status 0: `ingot optimize` can run here; 1: it cannot.
    """
    facts, missing = _system_facts(), []
    facts["Ingot"] = ingot.__version__
    machine: dict = {}
    try:
        from ingot.runtime.library import find_library, library

        facts["libingot"] = str(find_library())
        facts["libingot's version"] = library().version
        machine = library().doctor()
    except Exception as error:  # whatever it is, it is what this command reports
        missing.append(("libingot", str(error), "nothing of Ingot runs without it"))
    facts.update(_torch_facts(missing))
    usable = "PyTorch" in facts and not any(row[0] == "libingot" for row in missing)
    if as_json:
        lacking = [dict(zip(("what", "why", "cost"), row)) for row in missing]
        found = {"facts": facts, "machine": machine, "missing": lacking, "usable": usable}
        print_json("doctor", found)
    console = output(as_json)
    here = table("This machine", "what", "found")
    # The version stands among the facts.
    parts = {name: part for name, part in machine.items() if name != "version"}
    for name, value in [*facts.items(), *_flattened(parts)]:
        here.add_row(str(name), str(value))
    console.print(here)
    if missing:
        lacking = table("Missing", "what", "why", "what that costs")
        for row in missing:
            lacking.add_row(*row)
        console.print(lacking)
    else:
        console.print("Nothing is missing.")
    sys.exit(0 if usable else 1)


def _system_facts() -> dict:
    return {
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "C++ compiler": shutil.which("g++") or shutil.which("c++") or "none",
    }


def _torch_facts(missing: list) -> dict:
    if importlib.util.find_spec("torch") is None:
        missing.append(("PyTorch", "not installed", "only the C++ API works; install torch ≥ 2.6"))
        return {}
    import torch

    facts = {
        "PyTorch": torch.__version__,
        "PyTorch's CUDA": torch.version.cuda or "none",
        "PyTorch's threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            facts[f"GPU {index}"] = (
                f"{found.name}, compute capability {found.major}.{found.minor}, "
                f"{found.total_memory >> 20} MiB"
            )
    else:
        missing.append(("GPU", "PyTorch sees none", "models run on the CPU; explain still works"))
    if not (shutil.which("g++") or shutil.which("c++")):
        missing.append(("C++ compiler", "none found", "torch.compile is no baseline on a CPU"))
    return facts


def _flattened(value: dict, prefix: str = "") -> list:
    rows = []
    for name, inner in value.items():
        if isinstance(inner, dict):
            rows += _flattened(inner, f"{prefix}{name}: ")
        elif isinstance(inner, list) and any(isinstance(i, dict) for i in inner):
            for number, item in enumerate(inner):
                rows += _flattened(item, f"{prefix}{name} {number}: ")
        else:
            text = ", ".join(map(str, inner)) or "none" if isinstance(inner, list) else inner
            if text != "":
                rows.append((prefix + name.replace("_", " "), text))
    return rows
