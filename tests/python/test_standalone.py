"""The standalone file of each bundled model: its text, and what it does without a GPU."""

import re
import warnings
from pathlib import Path

import pytest
import selection
import torch
from click.testing import CliRunner
from ingot.cli import main
from ingot.model_file import load_model_file
from ingot.standalone import printing
from ingot.standalone_writer import Standalone, StandaloneError
from standalone_support import loaded, on_the_host
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SIZES = {"batch_size": 6, "in_features": 64, "hidden_features": 96, "out_features": 64}


def small(path):
    sizes = {k: v for k, v in SIZES.items() if f"{k} =" in path.read_text(encoding="utf-8")}
    return load_model_file(path, sizes)


def written(folder, text):
    path = folder / "model.py"
    path.write_text(text, encoding="utf-8")
    return load_model_file(path)


@pytest.fixture
def gemm(tmp_path):
    return loaded(tmp_path, Standalone(small(EXAMPLES / "gemm_scale_bn.py")).render())


@pytest.mark.parametrize("model", MODELS)
def test_text(model):
    standalone = Standalone(small(EXAMPLES / f"{model}.py"))
    text = standalone.render()
    assert text == standalone.render()
    cuda = "".join(re.findall(r"_INGOT_(?:CUDA|PLAIN|STORING) = r'''\n(.*?)'''", text, re.DOTALL))
    # Nothing of ours is included, each header is there once, and PyTorch's are not.
    assert '#include "' not in cuda
    assert "torch" not in cuda
    assert "#pragma once" not in cuda
    headers = re.findall(r"^// ---- (\S+) -*$", cuda, re.MULTILINE)
    assert len(headers) == len(set(headers)) and "common/types.cuh" in headers
    # Every kernel is named in the docstring, and launched.
    docstring = text.split('"""')[1]
    assert standalone.kernels
    for names in standalone.kernels.values():
        for name in names:
            assert name.startswith("fused_") and name in docstring
            assert f"launch({name}," in cuda or f"_kernels({name})" in cuda
    for part in ("Operators replaced:", "Optimisations made:", "not measured here"):
        assert part in docstring
    ours = text[text.index("# ---- Written by Ingot") :]
    ours = re.sub(r"= r'''\n.*?'''", "", ours, flags=re.DOTALL)
    assert max(map(len, ours.splitlines())) <= 120


@pytest.mark.parametrize("model", selection.every(3, MODELS))
def test_runs_the_original_on_the_host(model, tmp_path):
    original = small(EXAMPLES / f"{model}.py")
    file, _ = loaded(tmp_path, Standalone(original).render())
    torch.manual_seed(3)
    expected = original.make_module()
    torch.manual_seed(3)
    found = file.make_module()
    assert list(found.state_dict()) == list(expected.state_dict())
    inputs = file.make_inputs()
    assert [t.shape for t in inputs] == [t.shape for t in original.make_inputs()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for training in (True, True, False):
            expected.train(training)
            found.train(training)
            assert torch.equal(found(*inputs), expected(*inputs))
    assert len(said) == 1 and "not plain tensors of a GPU" in str(said[0].message)
    assert said[0].filename == __file__
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


WATCHED = {
    "a dispatch mode": Dispatching,
    "forward differentiation": forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:User provided device_type")
@pytest.mark.parametrize("watched", WATCHED)
def test_sees_what_watches_its_operators(gemm, watched):
    _, namespace = gemm
    assert not namespace._ingot_intercepted()
    with WATCHED[watched]():
        seen = namespace._ingot_intercepted()
    # Without a GPU PyTorch switches its autocast off.
    assert seen or (watched == "autocast" and not torch.cuda.is_available())
    assert not namespace._ingot_intercepted()


def test_sees_transforms_traces_and_compilers(gemm):
    _, namespace = gemm
    seen = []

    def look(x):
        seen.append(namespace._ingot_intercepted())
        return x + 1

    x = torch.ones(3, 2)
    torch.vmap(look)(x)
    torch.jit.trace(look, (x,), check_trace=False)
    assert seen == [True, True]

    def choose(x):
        return x + 1 if namespace._ingot_declines(None, x) else x - 1

    assert torch.equal(torch.compile(choose, backend="eager", fullgraph=True)(x), x + 1)


def test_source_is_the_models_own(gemm):
    file, _ = gemm
    original = (EXAMPLES / "gemm_scale_bn.py").read_text(encoding="utf-8")
    model = original[original.index("class Model") : original.index("def get_inputs")].rstrip()
    assert model in file.source


def refusal(namespace, module):
    found = namespace._ingot_problem(module, ())
    return found


def change_eps(module):
    module.bn.eps = 1e-3


def change_class(module):
    module.bn = nn.LayerNorm(64)


def add_hook(module):
    module.gemm.register_forward_hook(lambda *unused: None)


def add_child(module):
    module.act = nn.ReLU()


def replace_forward(module):
    module.gemm.forward = lambda x: x


def parametrize(module):
    nn.utils.parametrizations.weight_norm(module.gemm)


@pytest.mark.parametrize(
    "change", [change_eps, change_class, add_hook, add_child, replace_forward, parametrize]
)
def test_notices_a_changed_module(gemm, change):
    file, namespace = gemm
    module = file.make_module()
    assert refusal(namespace, module) is None
    change(module)
    assert refusal(namespace, module)


def test_other_constructor_arguments_are_noticed(gemm):
    file, namespace = gemm
    assert refusal(namespace, file.Model(64, 64, eps=1e-5, momentum=0.1)) is None
    assert "momentum" in refusal(namespace, file.Model(64, 64, momentum=None))


def test_flags_choose_the_branch(tmp_path):
    file, _, calls = on_the_host(tmp_path, Standalone(small(EXAMPLES / "gemm_scale_bn.py")))
    module, inputs = file.make_module(), file.make_inputs()
    with torch.no_grad():
        module(*inputs)
        module.bn.eval()  # as in fine tuning
        module(*inputs)
        module.eval()
        module(*inputs)
    modes = [name.rpartition("_")[2] for name, _ in calls]
    assert modes == ["training", "eval", "eval"]


def test_batches_that_pytorch_refuses_are_its_to_refuse(tmp_path):
    file, _, calls = on_the_host(tmp_path, Standalone(small(EXAMPLES / "gemm_scale_bn.py")))
    module, inputs = file.make_module(), file.make_inputs()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(inputs[0][:1])
    assert not calls


def test_architectures(gemm, monkeypatch):
    _, namespace = gemm
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0 9.0+PTX")
    flags = namespace._ingot_flags()
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags and "-DINGOT_HOPPER" in flags
    assert "-gencode=arch=compute_80,code=sm_80" in flags
    assert not any("75" in flag for flag in flags)
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert "-DINGOT_HOPPER" not in namespace._ingot_flags()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    with pytest.raises(RuntimeError, match="7.5"):
        namespace._ingot_flags()


MODEL = """
import torch
from torch import nn
{extra}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        {init}
    def forward(self, x):
        {forward}
def get_inputs():
    return [torch.rand(4, 16)]
def get_init_inputs():
    return []
"""


def model(folder, forward, init="pass", extra=""):
    return written(folder, MODEL.format(forward=forward, init=init, extra=extra))


FORWARDS = {
    "an operator of PyTorch's": ("return torch.fft.fft(self.linear(x)).real.relu() + 1", "pass"),
    "several results": ("return self.linear(x), {'sum': x + 1}, 3", "pass"),
    "a plain tensor": ("return self.linear(x) * self.table", "self.table = torch.ones(16)"),
    "a config": (
        "return self.linear(x) * self.config.scale",
        "from types import SimpleNamespace\n        self.config = SimpleNamespace(scale=2.5)",
    ),
    "infinities": ("return self.linear(x).masked_fill(x > 0.5, float('-inf')).exp()", "pass"),
    "infinite attributes": (
        "return self.linear(x).clamp(max=self.most)",
        "self.most = float('inf')",
    ),
    "a constant": ("return self.linear(x) + torch.arange(16) * 0.5", "pass"),
    "names of ours": (
        "return self.torch(self.needs(x))",
        "self.torch, self.needs = nn.Linear(16, 16), nn.ReLU()",
    ),
    "a list of layers": (
        "for layer in self.layers:\n            x = layer(x).relu()\n        return x",
        "self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])",
    ),
    "two flags": (
        "return self.drop(self.bn(self.linear(x)))",
        "self.bn, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)",
    ),
    "its own flag": ("return self.linear(x) * (2 if self.training else 3)", "pass"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", FORWARDS)
def test_writes_every_forward(tmp_path, case, training):
    standalone = Standalone(model(tmp_path, *FORWARDS[case]))
    file, _, calls = on_the_host(tmp_path, standalone)
    torch.manual_seed(1)
    expected = standalone.original.make_module().train(training)
    torch.manual_seed(1)
    found = file.make_module().train(training)
    inputs = file.make_inputs()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(2)
            wanted = expected(*inputs)
            torch.manual_seed(2)
            torch.testing.assert_close(found(*inputs), wanted, rtol=1e-5, atol=1e-5)
    assert calls
    torch.testing.assert_close(found.state_dict(), expected.state_dict())


def test_holds_a_product_of_whose_result_two_things_are_wanted(tmp_path):
    forward = "y = self.linear(x)\n        return torch.tanh(y) * 2, torch.sqrt((y * y).sum(1))"
    standalone = Standalone(model(tmp_path, forward))
    assert not standalone.report["unsupported"]
    (region,) = standalone.regions.values()
    assert "matmul" in [value["op"] for value in region.region.graph["values"]]


def test_refuses_constants_too_large_to_write_down(tmp_path):
    forward = "return self.linear(x).relu() + torch.arange(70000).view(-1, 7)[:1, :1]"
    with pytest.raises(StandaloneError, match="constant tensor of 70000 numbers"):
        Standalone(model(tmp_path, forward))


def test_refuses_names_that_are_its_own(tmp_path):
    with pytest.raises(StandaloneError, match="its name _IngotRegion begins as those"):
        Standalone(model(tmp_path, "return self.linear(x).relu()", extra="_IngotRegion = nn.ReLU"))


def test_refuses_a_forward_of_several_graphs_and_says_what_takes_it(tmp_path):
    forward = "y = self.linear(x)\n        torch._dynamo.graph_break()\n        return y.relu()"
    with pytest.raises(StandaloneError, match=r"one graph: .*; without --standalone it is taken"):
        Standalone(model(tmp_path, forward))


def test_equal_layers_are_one_region(tmp_path):
    standalone = Standalone(model(tmp_path, *FORWARDS["a list of layers"]))
    assert len(standalone.regions) == 1


def test_every_combination_of_two_flags_has_a_branch(tmp_path):
    standalone = Standalone(model(tmp_path, *FORWARDS["two flags"]))
    file, _, calls = on_the_host(tmp_path, standalone)
    module, inputs = file.make_module(), file.make_inputs()
    for norm in (True, False):
        for drop in (True, False):
            module.bn.train(norm)
            module.drop.train(drop)
            before = len(calls)
            module(*inputs)
            assert len(calls) > before


def test_the_models_names_stay_its_own(tmp_path):
    text = MODEL.format(forward="return re(self.linear(x))", init="pass", extra="re = torch.relu")
    file, namespace, _ = on_the_host(tmp_path, Standalone(written(tmp_path, text)))
    assert namespace.re is torch.relu
    module, inputs = file.make_module(), file.make_inputs()
    expected = torch.relu(module.linear(inputs[0]))
    torch.testing.assert_close(module(*inputs), expected)


@pytest.mark.parametrize("name", ["re", "os", "functools", "torch"])
@pytest.mark.parametrize("taken", [True, False])
def test_an_argument_may_have_the_name_of_a_global(tmp_path, name, taken):
    """Of one that the file imports, too, whether the model's own text has taken that or not."""
    forward = f"return Torch.atan2(self.linear({name}).abs(), {name}.double()).mean(1)"
    forward += ".to(Torch.complex128).sum(0)"
    extra = f"Torch = torch\n{name} = 2.5" if taken else "Torch = torch"
    text = MODEL.format(forward=forward, init="pass", extra=extra)
    text = text.replace("forward(self, x)", f"forward(self, {name})")
    text = text.replace("return [torch.rand", "return [Torch.rand")
    file, namespace, calls = on_the_host(tmp_path, Standalone(written(tmp_path, text)))
    assert not taken or getattr(namespace, name) == 2.5
    module, inputs = file.make_module(), file.make_inputs()
    expected = super(file.Model, module).forward(*inputs)
    torch.testing.assert_close(module(*inputs), expected, rtol=1e-5, atol=1e-5)
    assert calls


def test_refuses_other_precisions():
    with pytest.raises(StandaloneError, match="precision is bf16"):
        Standalone(small(EXAMPLES / "linear_gelu.py"), precision="bf16")


def test_writes_tf32_products_for_hopper_and_split_ones_for_the_others():
    text = Standalone(small(EXAMPLES / "linear_gelu.py"), precision="tf32").render()
    assert "ScaledConfig<" in text
    assert "scale_rows" in text
    assert "portable::PackedConfig<" in text
    assert "split_rows" in text


def test_holds_functions_and_futures(tmp_path):
    original = model(
        tmp_path,
        "return self.act(self.own(self.linear(x)))",
        "self.act, self.own, self.sizes = torch.relu, double, (1, 2)",
        "def double(x):\n    return x * 2",
    )
    text = (
        '"""Of two lines;\nthe second."""\nfrom __future__ import annotations\n' + original.source
    )
    file, namespace = loaded(tmp_path, Standalone(written(tmp_path, text)).render())
    module = file.make_module()
    assert namespace.__doc__.startswith("Of two lines;\nthe second.")
    assert refusal(namespace, module) is None
    module.act = torch.sigmoid
    assert "act" in refusal(namespace, module)


def test_command_writes_and_says_that_nothing_ran(tmp_path):
    target = tmp_path / "new.py"
    arguments = ["optimize", str(EXAMPLES / "linear_gelu.py"), "--standalone", "-o", str(target)]
    arguments += ["--device", "cpu", "--set", "in_features=64", "--set", "out_features=64"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "were not run" in " ".join(result.output.split())
    assert "load_inline" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("(a * b)", "a * b"),
        ("(f(a, b) * c)", "f(a, b) * c"),
        ("(a, b)", "(a, b)"),
        ("(a * b) + (c * d)", "(a * b) + (c * d)"),
        ("f(a)", "f(a)"),
    ],
)
def test_brackets_around_an_operation_go(text, bare):
    assert printing.bare(text) == bare


def test_writes_sums_and_products_as_python_does():
    text = Standalone(small(EXAMPLES / "gemm_scale_bn.py")).render()
    assert "_ingot_aten.mul" not in text and "_ingot_aten.mm" not in text
    assert ".sum([0])" in text and " @ gemm_weight" in text
