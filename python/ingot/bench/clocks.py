"""What the GPU's clocks and limits are, read from nvidia-smi; nothing is ever set."""

from __future__ import annotations

import shutil
import subprocess

_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)


def read_clocks(index: int = 0) -> dict:
    """The fields that nvidia-smi gives, as text; empty where it cannot be run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        answer = subprocess.run(
            [
                program,
                f"--id={index}",
                f"--query-gpu={','.join(_FIELDS)}",
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.strip().splitlines()[0].split(",")]
    return dict(zip(_FIELDS, values, strict=False))


def describe(clocks: dict) -> str:
    """One line for a table's caption."""
    if not clocks:
        return "clocks not readable"
    return (
        f"SM {clocks.get('clocks.sm')} of {clocks.get('clocks.max.sm')} MHz, memory "
        f"{clocks.get('clocks.mem')} MHz, {clocks.get('power.draw')} of "
        f"{clocks.get('power.limit')} W, {clocks.get('temperature.gpu')} °C"
    )
