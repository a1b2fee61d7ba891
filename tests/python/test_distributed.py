"""Networks that several processes train together: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_runs import WAYS, judge

QUICK = ("ddp of optimized", "optimized fsdp")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _check(ways) -> None:
    program = Path(__file__).with_name("distributed_runs.py")
    command = [sys.executable, str(program), str(_free_port()), *ways]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    assert [each["way"] for each in found] == list(ways)
    for each in found:
        judge(each)


@pytest.mark.thorough
def test_ways_to_share_a_network():
    _check(QUICK)


@pytest.mark.thorough
def test_more_ways_to_share_a_network():
    _check([way for way in WAYS if way not in QUICK])
