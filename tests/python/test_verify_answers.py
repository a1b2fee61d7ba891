"""What a worker may send: whatever is no answer becomes a verdict, soon and without harm."""

from __future__ import annotations

import array
import fcntl
import json
import os
import random
import socket
import struct
import threading
import time

import pytest
import torch
from ingot.verify import passing
from ingot.verify.answers import problem_of
from ingot.verify.candidate import CandidateError, CandidateFailedError, CandidateProcess
from ingot.verify.transport import Line, TooLargeError, TransportError

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
ONE = [["o0", "float32", [16]]]


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield Line(ours, largest=1 << 20), theirs
    ours.close()
    theirs.close()


def send(connection: socket.socket, header: object, descriptor: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    rights = [] if descriptor is None else [descriptor]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))] if rights else []
    connection.sendmsg([struct.pack("<I", len(text))], ancillary)
    connection.sendall(text)


def memory(size: int, seals: int = SEALS) -> int:
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def test_tensors_arrive_as_they_were_sent(ends):
    line, theirs = ends
    tensors = {
        "plain": torch.randn(3, 4),
        "empty": torch.empty(0, 5),
        "number": torch.tensor(3.0),
        "transposed": torch.randn(4, 6).t(),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "needs a gradient": torch.ones(2, requires_grad=True),
    }
    Line(theirs).send({"id": "7", "x": 1}, tensors)
    header, received = line.receive("7", 5)
    assert header == {"id": "7", "x": 1}
    assert list(received) == list(tensors)
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())


def test_what_arrived_can_no_longer_be_changed(ends):
    line, theirs = ends
    sent = memory(64)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(sent, b"x", 0)
    send(theirs, {"id": "7", "tensors": ONE}, sent)
    received = line.receive("7", 5)[1]["o0"]
    received.fill_(2.0)  # of the receiver's own
    assert os.pread(sent, 4, 0) == bytes(4)
    os.close(sent)


def test_sparse_memory_is_refused_by_its_size(ends):
    line, theirs = ends
    sent = memory(8 << 40)
    send(theirs, {"id": "7", "tensors": [["o0", "float32", [2 << 40]]]}, sent)
    with pytest.raises(TooLargeError, match="8388608 MiB"):
        line.receive("7", 5)
    os.close(sent)


def a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def a_fifo() -> int:
    path = f"/tmp/ingot-test-{os.getpid()}-{time.monotonic_ns()}"
    os.mkfifo(path)
    try:
        return os.open(path, os.O_RDWR)
    finally:
        os.unlink(path)


MEMORIES = {
    "a pipe": a_pipe,
    "a FIFO, held open": a_fifo,
    "a device": lambda: os.open("/dev/zero", os.O_RDONLY),
    "a folder": lambda: os.open("/tmp", os.O_RDONLY),
    "a file": lambda: os.open(__file__, os.O_RDONLY),
    "memory that can be written": lambda: memory(64, 0),
    "memory that can be shortened": lambda: memory(64, SEALS & ~fcntl.F_SEAL_SHRINK),
    "memory that is too short": lambda: memory(32),
    "memory that is too long": lambda: memory(128),
    "nothing": lambda: None,
}


@pytest.mark.alone
@pytest.mark.parametrize("name", MEMORIES)
def test_only_sealed_memory_is_read(ends, name):
    line, theirs = ends
    descriptor = MEMORIES[name]()
    send(theirs, {"id": "7", "tensors": ONE}, descriptor)
    started = time.monotonic()
    with pytest.raises(TransportError):
        line.receive("7", 2)
    assert time.monotonic() - started < 1
    if descriptor is not None:
        os.close(descriptor)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100000,
        b'{"id": "7", "x": ' + b"[" * 100000,
        b'{"id": ' + b"7" * 10000 + b"}",
        b"\xff" * 64,
        b"[1, 2]",
        b"null",
        b"",
        {"id": "8"},
        {"x": 1},
        {"id": "7", "tensors": 3},
        {"id": "7", "tensors": [3]},
        {"id": "7", "tensors": [["o0", "float32", [-1]]]},
        {"id": "7", "tensors": [["o0", "float32", [True]]]},
        {"id": "7", "tensors": [["o0", "float32", [1.5]]]},
        {"id": "7", "tensors": [["o0", "float32", "16"]]},
        {"id": "7", "tensors": [["o0", "float33", [16]]]},
        {"id": "7", "tensors": [[["o0"], "float32", [16]]]},
        {"id": "7", "tensors": [["o0", ["float32"], [16]]]},
        {"id": "7", "tensors": [["o0", "float32", [1 << 62, 1 << 62]]]},
        {"id": "7", "tensors": {"o0": "float32"}},
    ],
    ids=lambda header: str(header)[:40],
)
def test_headers_that_are_none_are_refused(ends, header):
    line, theirs = ends
    sent = memory(64)
    send(theirs, header, sent)
    with pytest.raises(TransportError):
        line.receive("7", 5)
    os.close(sent)


def test_the_request_that_is_answered_is_looked_at_first(ends):
    line, theirs = ends
    sent = memory(8 << 40)
    send(theirs, {"id": "forged", "tensors": [["o0", "float32", [2 << 40]]]}, sent)
    with pytest.raises(TransportError, match="does not answer"):
        line.receive("7", 5)
    os.close(sent)


@pytest.mark.alone
def test_dribbling_does_not_outlast_the_limit(ends):
    line, theirs = ends

    def dribble() -> None:
        theirs.sendall(struct.pack("<I", 1000))
        for _ in range(40):
            try:
                theirs.sendall(b" ")
            except OSError:
                return
            time.sleep(0.05)

    threading.Thread(target=dribble, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        line.receive("7", 0.4)
    assert time.monotonic() - started < 1.5


def test_no_descriptor_is_left_open(ends):
    line, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    for header in ({"id": "7"}, {"id": "8"}, b"x", {"id": "7", "tensors": ONE}):
        sent = memory(64, 0)
        send(theirs, header, sent)
        os.close(sent)
        try:
            line.receive("7", 5)
        except TransportError:
            pass
    assert len(os.listdir("/proc/self/fd")) == before


CALL = {
    "ok": True,
    "acts": [],
    "call": 1,
    "outputs": 1,
    "structure": "*",
    "complaints": [],
    "aliases": [],
    "overlaps": [],
    "training": True,
    "mode_gives_module": True,
    "state_dict": {"weight": True},
    "settings_changed": [],
    "reseeded": False,
    "drew": False,
    "requires_grad": [True],
}
STRANGE = [None, True, -1, 1 << 80, 1.5, float("nan"), "x", [], [1], ["x"], {}, {"x": [1]}, [[1]]]


def test_forms_of_answers():
    tensors = {"o0": torch.ones(1)}
    assert problem_of("call", CALL, tensors) == ""
    assert "holds 0" in problem_of("call", CALL, {})
    assert "announces 9007199254740991" in problem_of(
        "call", {**CALL, "outputs": (1 << 53) - 1}, tensors
    )
    assert problem_of("call", CALL, {"o1": torch.ones(1)})
    assert problem_of("call", {"ok": False, "acts": []}, {})
    chance = random.Random(5)
    for name in CALL:
        for value in STRANGE:
            if type(value) is not type(CALL[name]):
                assert problem_of("call", {**CALL, name: value}, tensors), (name, value)
        assert problem_of("call", {k: v for k, v in CALL.items() if k != name}, tensors)
    times = {"cold_s": {"candidate": [1.0]}, "warm_s": {}, "sustained_s": {}, "note": ""}
    times |= {"ok": True, "acts": []}
    assert problem_of("compare", times, {}) == ""
    for bad in ([0.0], [-1.0], [float("inf")], ["1"], [1], 3, None):
        key = chance.choice(["cold_s", "warm_s", "sustained_s"])
        assert problem_of("compare", {**times, key: {"candidate": bad}}, {})


# Processor time and what is left behind


@pytest.mark.thorough
def test_time_of_child_processes_is_counted(tmp_path):
    """Those that were waited for, and those that left the session and still run."""
    burn = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.4: pass\n"
    source = f"""
import subprocess, sys, time
from torch import nn
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        subprocess.run([sys.executable, "-c", {burn!r}], check=True)
        other = [sys.executable, "-c", {burn!r} + "time.sleep(60)"]
        subprocess.Popen(["sh", "-c", '"$@" & ', "sh", *other], start_new_session=True).wait()
        time.sleep(4)
"""
    (tmp_path / "new.py").write_text(source)
    request = {
        "op": "load",
        "path": str(tmp_path / "new.py"),
        "class_names": ["ModelNew"],
        "overrides": {},
        "init": passing.packed_whole([]),
        "seed": 1,
        "device": "cpu",
        "original": str(tmp_path / "model.py"),
    }
    with CandidateProcess(8 << 30) as process:
        process.wait_until_ready()
        before = process.processor_seconds()
        process.request(request, None, 60)
        assert process.processor_seconds() - before > 0.75


def test_a_worker_that_ends_is_a_crash_and_one_that_raises_an_error():
    with CandidateProcess(8 << 30) as process:
        with pytest.raises(CandidateError, match="FileNotFoundError"):
            process.request(
                {
                    "op": "load",
                    "path": "/nowhere/at/all.py",
                    "original": "/nowhere/model.py",
                    "overrides": {},
                    "device": "cpu",
                },
                None,
                60,
            )
        process._process.kill()
        with pytest.raises(CandidateFailedError, match="SIGKILL") as caught:
            process.request({"op": "hello"}, None, 60)
        assert caught.value.kind == "crash"
