"""What the file commands capture of a module: names, results, batch sizes, and what they refuse."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from capture_support import check_capture, run_fp64, same
from ingot.capture import CaptureError, Region
from ingot.model_capture import capture, capture_in_pieces, captured_graph
from torch import nn

TABLE = torch.arange(16.0)


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.ones(16))
        self.table = torch.full((16,), 0.5)
        self.unregistered = [nn.Parameter(torch.ones(16))]
        self.count, self.seen, self.state = 3, [], None
        self.body = body

    def forward(self, *inputs):
        return self.body(self, *inputs)


def rows(batch: int = 8, columns: int = 16) -> torch.Tensor:
    return torch.rand(batch, columns)


def kinds(captured) -> list[str]:
    return ["region" if isinstance(s, Region) else s.what for s in captured.steps]


def assign(m, x):
    m.state = m.linear(x)
    return m.state.relu()


def count(m, x):
    m.count += 1
    return m.linear(x).relu()


def remember(m, x):
    m.seen.append(m.count)
    return m.linear(x).relu()


def replace_buffer(m, x):
    m.mean = m.mean * 0.9
    return m.linear(x) + m.mean


def write_buffer(m, x):
    m.mean.mul_(0.9)
    return m.linear(x) + m.mean


def write_input(m, x):
    x.mul_(2)
    return m.linear(x).relu()


def return_a_size(m, x):
    return m.linear(x).relu(), x.shape[0]


def branch_on_data(m, x):
    return m.linear(x) if x.sum() > 0 else x


def use_unregistered(m, x):
    return m.linear(x).relu() * m.unregistered[0]


REFUSED = {
    assign: "changes 'state' of the module itself",
    count: "changes 'count' of the module itself",
    remember: "changes 'seen' of the module itself",
    replace_buffer: "changes 'mean' of the module itself",
    write_buffer: "writes into mean",
    write_input: "writes into its input",
    return_a_size: "a number that depends on its inputs",
    branch_on_data: r"one graph: Data-dependent branching \(test_model_capture.py:\d+\)",
    use_unregistered: "no module has registered a parameter",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_refuses_what_a_graph_would_not_repeat_and_leaves_the_module_alone(body):
    module = Model(body)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CaptureError, match=REFUSED[body]):
        capture(module, [rows()])
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert (module.count, module.seen, module.state) == (3, [], None)


def test_switching_gradients_counts_where_there_are_any():
    def partly(m, x):
        with torch.no_grad():
            h = m.linear(x).relu()
        return m.linear(h)

    assert kinds(capture(Model(partly), [rows()])) == ["region"]
    with pytest.raises(CaptureError, match="switches gradients"):
        capture(Model(partly), [rows()], gradients=True)


def divide_by_batch(m, x):
    return m.linear(x).relu() / x.shape[0]


def rows_of_a_batch(m, x):
    return m.linear(x).view(8, 4, 4).relu()


def another_at_eight(m, x):
    return m.linear(x).relu() if x.shape[0] == 8 else m.linear(x).exp()


@pytest.mark.parametrize(
    "body, only", [(divide_by_batch, None), (rows_of_a_batch, 8), (another_at_eight, 8)]
)
def test_says_for_which_batch_sizes_a_graph_is(body, only):
    module = Model(body)
    captured = check_capture(module, rows(), batches=(8,) if only else (3, 5))
    assert captured.static_batch == only


@pytest.mark.parametrize("gradients", [False, True])
def test_a_convolution_says_nothing_of_the_batch(gradients):
    """Whose kernel PyTorch chooses by it on a CPU."""

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.thin = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            return torch.tanh(self.thin(torch.relu(self.wide(x)))) * 0.5

    before = torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled()
    captured = capture(Images(), [torch.randn(4, 3, 8, 8)], gradients=gradients)
    assert captured.static_batch is None
    assert (torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled()) == before


def test_a_batch_of_one_stands_for_any():
    captured = check_capture(Model(lambda m, x: m.linear(x).relu()), rows(1))
    assert captured.static_batch is None


def test_inputs_share_the_batch_where_nothing_joins_them():
    module = Model(lambda m, x, y: (m.linear(x).relu(), m.linear(y).sigmoid()))
    captured = check_capture(module, rows(), rows())
    assert captured.static_batch is None


def test_one_tensor_given_twice_is_two_inputs():
    x = rows().double()
    module = Model(lambda m, a, b: (m.linear(a) - b).relu()).double()
    captured = capture(module, [x, x])
    y = rows().double()
    same(run_fp64(captured, module, [x, y]), module(x, y))


def test_results_keep_their_form_and_what_they_are():
    def body(m, x, y):
        h = m.linear(x).relu()
        return {"h": h, "again": (h, y), "weight": m.linear.weight, "number": 3, "none": None}

    module = Model(body).double()
    x, y = rows().double(), torch.rand(2, 3).double()
    captured = capture(module, [x, y])
    found, expected = run_fp64(captured, module, [x, y]), module(x, y)
    assert list(found) == list(expected) and found["again"][0] is found["h"]
    assert found["again"][1] is y and found["weight"] is module.linear.weight
    assert (found["number"], found["none"]) == (3, None)
    same(found["h"], expected["h"])


def test_names_tensors_as_the_module_does():
    module = Model(lambda m, x: m.linear(x).relu() * m.mean + m.table * TABLE)
    captured = check_capture(module, rows())
    found = {(s.kind, s.path) for s in captured.sources}
    assert {("parameter", "linear.weight"), ("buffer", "mean"), ("constant", "table")} <= found
    (anonymous,) = [s for s in captured.sources if s.kind == "constant" and s.path != "table"]
    assert anonymous.tensor is TABLE


def test_results_that_share_memory_still_do():
    def body(m, x):
        h = m.linear(x).relu()
        return h, h.view(-1, 4, 4)

    h, view = run_fp64(capture(Model(body), [rows()]), Model(body), [rows()])
    assert view.data_ptr() == h.data_ptr()


def test_a_broken_forward_gives_its_graphs():
    def body(m, x):
        x = m.linear(x).relu()
        if x.sum() > 0:
            m.mean.mul_(0.5)
            m.count += 1
        return m.linear(x).sigmoid() * m.mean

    module = Model(body)
    pieces = [piece for piece in capture_in_pieces(module, [rows()]) if piece.regions]
    found = [[o["what"] for region in piece.regions for o in region.operators] for piece in pieces]
    assert len(found) == 2 and {"linear", "relu"} <= set(found[0]) and "sigmoid" in found[1]
    assert module.count == 3 and torch.equal(module.mean, torch.ones(16))


def test_messages_do_not_break_a_graph():
    def body(m, x):
        print("in a forward")
        warnings.warn("in a forward", stacklevel=1)
        logging.info("in a forward")
        return m.linear(x).relu()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kinds(capture(Model(body), [rows()])) == ["region"]


def test_what_computes_nothing_has_no_region():
    assert capture(Model(lambda m, x: x), [rows()]).regions == []


def test_a_graph_may_be_for_another_device():
    """Where it was traced is not told by anything in it, masks that the code makes included."""

    def body(m, x):
        places = torch.arange(x.shape[1], device=x.device)
        return m.linear(x).relu() * (places > 1)

    feed = captured_graph(Model(body), [rows()], device_type="cuda")
    values = [node.meta.get("val") for node in feed.graph.nodes]
    assert feed.device_type == "cuda"
    assert {v.device.type for v in values if isinstance(v, torch.Tensor)} == {"cuda"}
    assert captured_graph(Model(body), [rows()]).device_type == "cpu"
    made = capture(Model(body), [rows()], device_type="cuda")  # where there need be no such device
    assert kinds(made) == kinds(capture(Model(body), [rows()]))
