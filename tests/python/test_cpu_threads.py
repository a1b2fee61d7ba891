"""The CPU backend beside PyTorch's threads: concurrent callers, thread counts, forked children."""

import os
import signal
import threading

import pytest

torch = pytest.importorskip("torch")

from ingot.runtime.library import IngotError, library  # noqa: E402

BATCH_SIZE, INPUTS, OUTPUTS = 300, 96, 700


@pytest.fixture(scope="module")
def program():
    try:
        library()
    except IngotError as error:
        pytest.skip(str(error))
    from ingot.runtime.layouts import ResultLayout
    from ingot.runtime.program import Program
    from ingot.runtime.signature import BATCH

    values = [
        {"op": "input", "name": "x", "dtype": "f32", "shape": ["B", 1, 1, INPUTS]},
        {"op": "parameter", "name": "w", "dtype": "f32", "shape": [1, OUTPUTS, 1, INPUTS]},
        {"op": "linear", "args": [0, 1, -1]},
        {"op": "batch_norm", "args": [2, -1, -1, -1, -1, -1], "attributes": {"training": True}},
        {"op": "softmax", "args": [3]},
    ]
    results = [{"value": 4, "name": "y"}]
    graph = {"ingot_graph": 1, "name": "t", "values": values, "results": results, "updates": []}
    sizes = (BATCH, 1, 1, OUTPUTS)
    layout = ResultLayout(
        shape=sizes, axes=((0,), (1,), (2,), (3,)), extents=sizes, dtype=torch.float32
    )
    return Program(graph, result_layouts=[layout])


@pytest.fixture(scope="module")
def leaves():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH_SIZE, 1, 1, INPUTS, generator=generator)
    return [x, torch.randn(1, OUTPUTS, 1, INPUTS, generator=generator)]


def result(program, leaves):
    out = program.run(leaves)
    return out[0] if isinstance(out, (list, tuple)) else out


def test_against_pytorch(program, leaves):
    x, w = (leaf.double().flatten(0, -2) for leaf in leaves)
    y = torch.nn.functional.batch_norm(x @ w.t(), None, None, training=True)
    expected = torch.softmax(y, dim=1).reshape(BATCH_SIZE, 1, 1, OUTPUTS)
    torch.testing.assert_close(result(program, leaves).double(), expected, rtol=1e-4, atol=1e-8)


def test_bits_do_not_depend_on_set_num_threads(program, leaves):
    before = torch.get_num_threads()
    first = result(program, leaves)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(result(program, leaves), first)
    finally:
        torch.set_num_threads(before)


def test_concurrent_callers(program, leaves):
    expected = result(program, leaves)
    wrong = []

    def call():
        for _ in range(10):
            if not torch.equal(result(program, leaves), expected):
                wrong.append(threading.get_ident())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes(program, leaves):
    expected = result(program, leaves)  # the parent's pool exists
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang is a failure, not a stuck test
        same = bytes(result(program, leaves).numpy()) == bytes(expected.numpy())
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
