"""verify and a candidate's callers: where their tensors lie, what their losses take, what they find
after a call. Each wrong candidate here is right for dense inputs and one weighted loss."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from ingot.verify import PairError, VerifyOptions, verify_pair
from ingot.verify.families import lay_out

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR = "self.gemm = nn.Linear(12, 10)"


def model(forward: str, init: str = LINEAR, extra: str = "", inputs: str = "[torch.rand(16, 12)]"):
    """The text of a file with one model; forward: its body."""
    return (
        "import random\nimport torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
        + textwrap.dedent(extra)
        + "\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        + textwrap.indent(init, " " * 8)
        + "\n    def forward(self, x):\n"
        + textwrap.indent(textwrap.dedent(forward).strip("\n"), " " * 8)
        + f"\ndef get_inputs():\n    return {inputs}\ndef get_init_inputs():\n    return []\n"
    )


def product(backward: str) -> dict:
    """A linear layer whose way back is `backward`, of x, w and the gradient g."""
    extra = (
        "class Product(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, w, b, module):\n"
        "        ctx.save_for_backward(x, w)\n"
        "        ctx.module = module\n"
        "        return F.linear(x, w, b)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        x, w = ctx.saved_tensors\n"
        + textwrap.indent(textwrap.dedent(backward).strip("\n"), " " * 8)
        + "\n"
    )
    call = "return Product.apply(x, self.gemm.weight, self.gemm.bias, self.gemm)"
    return {"forward": call, "extra": extra}


def other(name: str, forward: str, backward: str) -> str:
    """A function of one tensor, by the bodies of its two ways."""
    return (
        f"class {name}(torch.autograd.Function):\n"
        "    @staticmethod\n"
        f"    def forward(ctx, y):\n        {forward}\n"
        "    @staticmethod\n"
        f"    def backward(ctx, *g):\n        {backward}\n"
    )


def verify(folder: Path, original: str, candidate: str | None = None, **options):
    (folder / "model.py").write_text(original)
    (folder / "new.py").write_text(candidate or original)
    options = {"seed": 3, "hostile": False, "time_limit_s": 60, **options}
    files = str(folder / "model.py"), str(folder / "new.py")
    return verify_pair(*files, VerifyOptions(**options))


def why(result) -> str:
    return "\n".join(f"{c.name} [{c.mode}] {c.outcome}: {c.message}" for c in result.failures)


PLAIN = model("return self.gemm(x)")
TWO = model("y = self.gemm(x)\nreturn y * 1, torch.tanh(y)")
NOISY = model("y = self.gemm(x)\nreturn y + torch.randn_like(y) if self.training else y")
HOSTILE = {"hostile": True}
ONCE = product(
    """
ctx.calls = getattr(ctx, "calls", 0) + 1
if ctx.calls > 1:
    SECOND
return g @ w, g.t() @ x, g.sum(0), None
"""
)
STALE = """
def state_dict(self, *args, **more):
    found = super().state_dict(*args, **more)
    if not hasattr(self, "first"):
        self.first = {name: value.clone() for name, value in found.items()}
    return type(found)(self.first)
"""


def with_method(text: str, method: str) -> str:
    """The file with one more method of its model's."""
    return text.replace("def get_inputs", textwrap.indent(method, "    ") + "\ndef get_inputs")


def second(statement: str) -> str:
    """A linear layer of which a second way back over one graph does this first."""
    return model(ONCE["forward"], extra=ONCE["extra"].replace("SECOND", statement))


def of_two(forward: str, extra: str = "", takes: str = "x, y") -> str:
    inputs = "[torch.rand(16, 12), torch.rand(16, 10)]"
    return model(forward, extra=extra, inputs=inputs).replace("(self, x)", f"(self, {takes})")


OF_TWO = of_two("return self.gemm(x) * y")
OPTIONAL = of_two("return self.gemm(x) * (2.0 if y is None else y)", takes="x, y=None")
SQUARE = OF_TWO.replace("12", "10")
RENAMED = of_two("return self.gemm(a) * b", takes="a, b")
TRAIN = """
def train(self, mode=True):
    super().train(mode)
"""

# name: (original, candidate, options, what the verdict says)
WRONG = {
    "scales the gradient that it is given in place": (
        PLAIN,
        model(**product("r = g @ w, g.t() @ x, g.sum(0), None\ng.mul_(0.5)\nreturn r")),
        {},
        "changes the gradient of output 0",
    ),
    "takes the gradient for dense": (
        PLAIN,
        model(
            **product("g = g.as_strided(g.shape, (10, 1))\nreturn g @ w, g.t() @ x, g.sum(0), None")
        ),
        {},
        "gradients of a turned output",
    ),
    "writes the gradients itself, over earlier ones": (
        PLAIN,
        model(
            **product(
                """
for p, grad in ((ctx.module.weight, g.t() @ x), (ctx.module.bias, g.sum(0))):
    if p.requires_grad:
        p.grad = grad
return g @ w if ctx.needs_input_grad[0] else None, None, None, None
"""
            )
        ),
        {},
        "another call between",
    ),
    "needs a loss of all outputs": (
        TWO,
        model(
            "return Both.apply(self.gemm(x))",
            extra=other(
                "Both",
                "ctx.set_materialize_grads(False); t = torch.tanh(y); ctx.save_for_backward(t); "
                "return y * 1, t",
                "t, = ctx.saved_tensors; "
                "return torch.zeros_like(t) if None in g else g[0] + g[1] * (1 - t * t)",
            ),
        ),
        {},
        "gradients of output 0 alone",
    ),
    "takes rows for adjacent where columns are": (
        PLAIN,
        model(
            "x = x if x.stride(-1) == 1 else x.contiguous()\n"
            "return self.gemm(x.as_strided(x.shape, (12, 1)))"
        ),
        HOSTILE,
        "sliced",
    ),
    "wrong way back for negative inputs, in training": (
        model("return self.gemm(F.relu(x))"),
        model(
            "return self.gemm(Relu.apply(x) if self.training else F.relu(x))",
            extra=other("Relu", "return F.relu(y)", "return g[0]"),
        ),
        HOSTILE,
        "normal, gradients",
    ),
    "wrong way back for another batch, in training": (
        PLAIN,
        model(
            "y = self.gemm(x)\nreturn Mean.apply(y) if self.training else y",
            extra=other("Mean", "return y.clone()", "return g[0] * (g[0].shape[0] / 16)"),
        ),
        HOSTILE,
        "batch of 37, gradients",
    ),
    "leaves gradients off": (
        PLAIN,
        model("y = self.gemm(x)\ntorch.set_grad_enabled(False)\nreturn y"),
        {},
        "gradient mode: True → False",
    ),
    "records where gradients are off": (
        PLAIN,
        model("with torch.enable_grad():\n    return self.gemm(x)"),
        {},
        "has a derivative where gradients are off",
    ),
    "seeds Python's generator": (
        PLAIN,
        model("random.seed(0)\nreturn self.gemm(x)"),
        {},
        "moves a random generator",
    ),
    "no noise but for the model's own batch": (
        NOISY,
        model(
            "y = self.gemm(x)\n"
            "return y + torch.randn_like(y) if self.training and len(y) == 16 else y"
        ),
        HOSTILE,
        "the original is random",
    ),
    "the other input's gradient where both ask for one alone": (
        OF_TWO,
        of_two("z = self.gemm(x)\nreturn z * (y if x.requires_grad else y.detach())"),
        {},
        "gradient of input 1: has none",
    ),
    "other names of arguments": (
        OF_TWO,
        RENAMED,
        {},
        "arguments by name [eval] declined: the candidate raises TypeError",
    ),
    "names of arguments exchanged": (
        SQUARE,
        SQUARE.replace("x, y)", "y, x)").replace("(x) * y", "(y) * x"),
        {},
        "arguments by name",
    ),
    "another default": (
        OPTIONAL,
        OPTIONAL.replace("2.0", "1.0"),
        {},
        "optional arguments left out",
    ),
    "no gradient by a second way back": (
        PLAIN,
        second("g = g * 0"),
        {},
        "gradients twice over one graph",
    ),
    "train() gives nothing": (PLAIN, with_method(PLAIN, TRAIN), {}, "do not return the module"),
    "an old state_dict": (
        PLAIN,
        with_method(PLAIN, STALE),
        {},
        "its state_dict gives for gemm.weight what the module does not hold",
    ),
    "a further buffer": (
        PLAIN,
        model("self.register_buffer('seen', torch.ones(3))\nreturn self.gemm(x)"),
        {},
        "after the call its state_dict has a seen",
    ),
    "all warnings silenced": (
        PLAIN,
        model("import warnings\nwarnings.simplefilter('ignore')\nreturn self.gemm(x)"),
        {},
        "the call changes warnings",
    ),
    "NaN for noise, at first": (
        NOISY,
        model(
            "y = self.gemm(x)\nself.calls += 1\n"
            "if self.calls == 1:\n    return y * float('nan')\n"
            "return y + torch.randn_like(y) if self.training else y",
            LINEAR + "\nself.calls = 0",
        ),
        {},
        "are NaN or Inf",
    ),
}
_TELLING = (
    "scales the gradient that it is given in place",
    "takes the gradient for dense",
    "writes the gradients itself, over earlier ones",
    "takes rows for adjacent where columns are",
    "no gradient by a second way back",
    "an old state_dict",
)


def _marked(name: str):
    return name if name in _TELLING else pytest.param(name, marks=pytest.mark.thorough)


@pytest.mark.parametrize("name", [_marked(name) for name in WRONG])
def test_what_only_some_callers_notice_is_found(tmp_path, name):
    original, candidate, options, said = WRONG[name]
    result = verify(tmp_path, original, candidate, **options)
    assert not result.verified
    assert said in why(result)


LISTED = LINEAR + "\nself.all = [self.gemm.weight, self.gemm.bias]"
RIGHT = {
    "an LSTM": model("return self.l(x[:, None])[0]", "self.l = nn.LSTM(12, 8)"),
    "a list of its parameters": model("return F.linear(x, *self.all)", LISTED),
    "two outputs": TWO,
    "noise": NOISY,
    "Python's random numbers": model("return self.gemm(x) * random.random()"),
    "an optional argument": OPTIONAL,
    "train() that gives nothing": with_method(PLAIN, TRAIN),
    "a state_dict of copies": with_method(
        PLAIN,
        "def state_dict(self, *args, **more):\n"
        "    found = super().state_dict(*args, **more)\n"
        "    return {name: value.clone() for name, value in found.items()}\n",
    ),
    "a buffer that its first call makes": model(
        "if not hasattr(self, 'seen'):\n    self.register_buffer('seen', torch.ones(3))\n"
        "return self.gemm(x)"
    ),
    "an embedding with sparse gradients": model(
        "return self.e(x)",
        "self.e = nn.Embedding(20, 8, sparse=True)",
        inputs="[torch.randint(0, 20, (16,))]",
    ),
}


@pytest.mark.parametrize(
    "name",
    ["an LSTM", *(pytest.param(n, marks=pytest.mark.thorough) for n in RIGHT if n != "an LSTM")],
)
def test_the_original_itself_is_verified(tmp_path, name):
    result = verify(tmp_path, RIGHT[name], hostile=True)
    assert result.verified, why(result)


@pytest.mark.parametrize(
    ("forward", "inputs", "said"),
    [
        ("return x", "[torch.rand(16, 12).to_sparse()]", "an input is a sparse_coo tensor"),
        ("return self.gemm(x).to_sparse()", "[torch.rand(16, 12)]", "an output is a sparse_coo"),
        ("return x.to(torch.uint16)", "[torch.rand(16, 12)]", "of type torch.uint16"),
    ],
)
def test_tensors_that_cannot_be_compared_are_named(tmp_path, forward, inputs, said):
    with pytest.raises(PairError, match=said):
        verify(tmp_path, model(forward, inputs=inputs))


def test_layouts_of_rows_and_of_one_number():
    value = torch.rand(5, 7)
    sliced = lay_out(value, "sliced")
    assert torch.equal(sliced, value)
    assert sliced.stride() == (23, 1)
    expanded = lay_out(torch.ones(5, 7), "expanded")
    assert torch.equal(expanded, torch.ones(5, 7))
    assert expanded.stride() == (0, 0)


def test_a_candidate_that_passes_its_arguments_on_is_verified(tmp_path):
    passes_on = of_two("return self.named(*args, **more)", takes="*args, **more")
    method = "def named(self, x, y=None):\n    return self.gemm(x) * (2.0 if y is None else y)\n"
    result = verify(tmp_path, OPTIONAL, with_method(passes_on, method))
    assert result.verified, why(result)
    names = {check.name for check in result.checks}
    assert {"arguments by name", "optional arguments left out"} <= names


def test_a_second_way_back_that_is_refused_aloud_is_noted(tmp_path):
    result = verify(tmp_path, PLAIN, second("raise RuntimeError('only once')"))
    assert result.verified, why(result)
    assert any("gradients twice over one graph" in n and "only once" in n for n in result.notes)
