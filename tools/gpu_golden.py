"""The stage `golden` of tools/gpu-suite: this build of libingot beside an older one, whose path
INGOT_OLD_LIBRARY names."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def steps(settings) -> list:
    from gpu_stages import Step

    return [Step("outputs", "outputs"), Step("times", "times", alone=True)]


def do(subject: str, settings) -> tuple[bool, str]:
    from gpu_stages import outcome, run_script

    tool = Path(__file__).with_name("golden.py")
    old = os.environ["INGOT_OLD_LIBRARY"]
    command = [sys.executable, tool, old, settings.library, "--device", settings.device]
    if subject == "times":
        command += ["--time", "--only", "gemm"]
    return outcome(*run_script(command, settings))


def missing(settings) -> str:
    old = os.environ.get("INGOT_OLD_LIBRARY", "")
    if not Path(old).is_file():
        return "INGOT_OLD_LIBRARY names no build to compare with"
    return ""
