"""Running sums: which a region takes, for a GPU that need not be there."""

import pytest
import torch
from capture_support import run_fp64
from ingot.capture import gains
from ingot.model_capture import capture
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, body, width=8):
        super().__init__()
        self.body, self.linear = body, nn.Linear(width, width)

    def forward(self, x):
        return self.body(self, x)


def captured(body, x, **options):
    return capture(Model(body, x.shape[-1]), [x], device_type="cuda", **options)


def operators(made) -> list[list[str]]:
    return [
        [value["op"] for value in region.graph["values"] if value.get("args")]
        for region in made.regions
    ]


def test_a_region_has_them_with_what_is_around():
    made = captured(lambda m, x: torch.tanh((m.linear(x) * 2).cumsum(-1)), torch.randn(4, 8))
    assert operators(made) == [["matmul", "add", "mul", "cumsum", "tanh"]]
    assert not made.unsupported


def test_of_more_dimensions_along_the_last():
    made = captured(lambda m, x: torch.cumsum(F.relu(m.linear(x)), dim=2), torch.randn(4, 3, 8))
    assert operators(made) == [["matmul", "add", "relu", "cumsum"]]


PROGRAMS = {
    "in_the_middle": lambda m, x: F.softmax(m.linear(x).cumsum(-1), -1) * x,
    "twice": lambda m, x: m.linear(x).cumsum(-1).cumsum(-1) + 1,
    "of_a_view": lambda m, x: (m.linear(x) * 2).view(-1, 3, 2, 4).cumsum(-1).tanh(),
    "seen_flat_behind": lambda m, x: (x * 2).cumsum(-1).flatten(1) + 1,
    "of_a_row_spread": lambda m, x: (m.linear.bias * 2).expand(x.shape).cumsum(-1) * x,
    "of_a_column_spread": lambda m, x: x.mean(-1, True).expand(x.shape).cumsum(-1) + x,
    "of_halves": lambda m, x: torch.cat([x[..., :4].cumsum(-1) * 2, x[..., 4:]], -1) + 1,
    "transposed": lambda m, x: (x.transpose(1, 2) * 2).cumsum(-1).transpose(1, 2) + 1,
    "reduced": lambda m, x: ((x * 2).cumsum(-1) * x).mean((1, 2)),
    "of_statistics": lambda m, x: (x - x.mean(0)).cumsum(-1).var(0),
    "read_by_a_product": lambda m, x: m.linear(m.linear(x).relu().cumsum(-1)),
    "by_a_mask": lambda m, x: ((x > 0) * x).cumsum(-1),
    "of_one": lambda m, x: (x[..., :1] * 2).cumsum(-1) + x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_what_pytorch_gives(name):
    torch.manual_seed(1)
    model, x = Model(PROGRAMS[name]).double(), torch.randn(4, 3, 8, dtype=torch.float64)
    made = capture(model, [x], device_type="cuda")
    with torch.no_grad():
        torch.testing.assert_close(run_fp64(made, model, [x]), model(x))
    taken = any("cumsum" in names for names in operators(made))
    assert taken or name in ("of_a_column_spread", "transposed", "of_one"), made.unsupported


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda m, x: (m.linear(x) * 2).cumsum(1).sum(1), "across rows"),
        (lambda m, x: (m.linear(x) * 2).cumsum(0) + 1, "across rows"),
        (lambda m, x: (m.linear(x) * 2).cumsum(-1, dtype=torch.int64) + 1, "int64"),
    ],
)
def test_others_are_told(body, why):
    made = captured(body, torch.randn(4, 3, 8))
    assert made.unsupported[0].what == "cumsum"
    assert why in made.unsupported[0].why
    assert operators(made)[0] == ["matmul", "add", "mul"]


def test_long_rows_are_pytorchs():
    x = torch.randn(2, (1 << 15) + 1)
    body = lambda m, x: (x * 2).cumsum(-1) + x.sigmoid().sin()  # noqa: E731
    made = capture(Model(body), [x], device_type="cuda")
    assert "32768" in made.unsupported[0].why


def test_a_dtype_that_is_asked_for():
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    model = Model(lambda m, x: m.linear(x).relu().cumsum(-1, dtype=torch.float32)).bfloat16()
    (region,) = capture(model, [x], device_type="cuda").regions
    assert [v["op"] for v in region.graph["values"]][-2:] == ["cast", "cumsum"]


def test_where_a_gradient_goes_through_they_are_pytorchs():
    body = lambda m, x: torch.tanh((m.linear(x) * 2).cumsum(-1))  # noqa: E731
    made = captured(body, torch.randn(4, 8), gradients=True)
    assert [item.why for item in made.unsupported] == ["its derivative is PyTorch's"]
    assert "cumsum" not in sum(operators(made), [])


def test_alone_they_pay_from_some_size_on(monkeypatch):
    x = torch.randn(64, 128)
    monkeypatch.setattr(gains, "takes_everything", False)
    monkeypatch.setitem(gains._ALONE, "cumsum", (1e5, gains._always))
    assert not capture(Model(lambda m, x: x.cumsum(-1)), [x], device_type="cuda").regions
    monkeypatch.setitem(gains._ALONE, "cumsum", (1e4, gains._always))
    made = capture(Model(lambda m, x: x.cumsum(-1)), [x], device_type="cuda")
    assert operators(made) == [["cumsum"]]


def test_on_a_cpu_they_are_pytorchs():
    made = capture(Model(lambda m, x: (m.linear(x) * 2).cumsum(-1)), [torch.randn(4, 8)])
    assert [item.what for item in made.unsupported] == ["cumsum"]
