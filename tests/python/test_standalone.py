"""The standalone file of each bundled model: its text, and what it does without a GPU."""

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from ingot.cli import main
from ingot.model_file import load_model_file
from ingot.standalone_writer import Standalone, StandaloneError
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SIZES = {"batch_size": 6, "in_features": 64, "hidden_features": 96, "out_features": 64}


def small(path):
    sizes = {k: v for k, v in SIZES.items() if f"{k} =" in path.read_text(encoding="utf-8")}
    return load_model_file(path, sizes)


def loaded(folder, standalone):
    """A written file and the namespace that it makes."""
    path = folder / "model_new.py"
    path.write_text(standalone.render(), encoding="utf-8")
    file = load_model_file(path, class_name="ModelNew")
    return file, sys.modules[file.Model.__module__]


def written(folder, text):
    path = folder / "model.py"
    path.write_text(text, encoding="utf-8")
    return load_model_file(path)


@pytest.fixture
def gemm(tmp_path):
    file, namespace = loaded(tmp_path, Standalone(small(EXAMPLES / "gemm_scale_bn.py")))
    return file, namespace


@pytest.mark.parametrize("model", MODELS)
def test_text(model):
    standalone = Standalone(small(EXAMPLES / f"{model}.py"))
    text = standalone.render()
    cuda = re.search(r"_INGOT_CUDA = r'''\n(.*?)'''", text, re.DOTALL)[1]
    # Nothing of ours is included, each header is there once, and PyTorch's are not.
    assert '#include "' not in cuda
    assert "torch" not in cuda
    assert "#pragma once" not in cuda
    headers = re.findall(r"^// ---- (\S+) -*$", cuda, re.MULTILINE)
    assert len(headers) == len(set(headers)) and "common/types.cuh" in headers
    merged = any(name.endswith("_merge") for names in standalone.kernels.values() for name in names)
    assert ("sweeps/columns.cuh" in headers) == merged
    # Every kernel is named in the docstring, and launched.
    assert standalone.kernels["training"]
    for names in standalone.kernels.values():
        for name in names:
            assert name.startswith("fused_") and name in text.split('"""')[1]
            assert f"launch(call, {name}," in cuda or f"describe_{name}(batch)" in cuda
    for part in ("Operators replaced:", "Optimisations made:", "not measured here"):
        assert part in text.split('"""')[1]


@pytest.mark.parametrize("model", MODELS)
def test_runs_the_original_on_the_host(model, tmp_path):
    original = small(EXAMPLES / f"{model}.py")
    file, _ = loaded(tmp_path, Standalone(original))
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
    assert len(said) == 1 and "its input is on cpu" in str(said[0].message)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


WATCHED = {
    "a dispatch mode": Dispatching,
    "a function mode": lambda: torch.device("cpu"),
    "forward differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("watched", WATCHED)
def test_sees_what_watches_its_operators(gemm, watched):
    _, namespace = gemm
    assert not namespace._ingot_watched()
    with WATCHED[watched]():
        assert namespace._ingot_watched()
    assert not namespace._ingot_watched()


def test_sees_transforms_traces_and_compilers(gemm):
    _, namespace = gemm
    seen = []

    def look(x):
        seen.append(namespace._ingot_watched())
        return x + 1

    x = torch.ones(3, 2)
    torch.vmap(look)(x)
    torch.jit.trace(look, (x,), check_trace=False)
    assert seen == [True, True]

    def choose(x):
        return x + 1 if namespace._ingot_watched() else x - 1

    compiled = torch.compile(choose, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 1) and torch.equal(choose(x), x - 1)


def test_another_threads_export_does_not_divert_a_call(gemm, monkeypatch):
    _, namespace = gemm
    # torch.export raises this flag for all threads; what it traces itself runs under modes.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling() and not namespace._ingot_watched()


def test_source_is_the_models_own(gemm):
    file, _ = gemm
    original = (EXAMPLES / "gemm_scale_bn.py").read_text(encoding="utf-8")
    model = original[original.index("class Model") : original.index("def get_inputs")].rstrip()
    assert model in file.source


def refusal(namespace, module):
    return namespace._ingot_differs(dict(module.named_modules()))


def change_eps(module):
    module.bn.eps = 1e-3


def change_class(module):
    module.bn = nn.LayerNorm(64)


def add_hook(module):
    module.gemm.register_forward_hook(lambda *unused: None)


def drop_bias(module):
    module.gemm.bias = None


def grow(module):
    module.scale = nn.Parameter(torch.ones(1))


def add_child(module):
    module.act = nn.ReLU()


def replace_forward(module):
    module.gemm.forward = lambda x: x


def parametrize(module):
    nn.utils.parametrizations.weight_norm(module.gemm)


@pytest.mark.parametrize(
    "change",
    [change_eps, change_class, add_hook, drop_bias, grow, add_child, replace_forward, parametrize],
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
    assert "in_features" in refusal(namespace, file.Model(32, 64))


def test_flags_choose_the_program(gemm):
    file, namespace = gemm
    module = file.make_module()

    def program():
        return namespace._INGOT_PROGRAMS.get(tuple(m.training for m in module.modules()))

    assert program().name == "training"
    module.bn.eval()
    frozen = program()
    module.eval()
    assert program() is frozen and frozen.name == "eval"
    module.bn.train()
    assert program() is None


def test_leaves_are_looked_up(gemm):
    file, namespace = gemm
    module = file.make_module()
    program = namespace._ingot_training
    names = {leaf for leaf in program.leaves if leaf[0] != "input"}
    assert ("gemm", "weight") in names and ("", "scale") in names
    updated = {program.leaves[i] for i in program.updated}
    buffers = {("bn", name) for name in module.bn._buffers}
    assert updated == buffers
    assert namespace._ingot_eval.updated == ()
    assert program.result(5) == ((5, 64), (64, 1))
    assert 1 in program.original_batches  # PyTorch's own error


def test_architectures(gemm, monkeypatch):
    _, namespace = gemm
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0 9.0+PTX")
    flags = namespace._ingot_architectures()
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags and "-DINGOT_HOPPER" in flags
    assert "-gencode=arch=compute_80,code=sm_80" in flags and "-DINGOT_PORTABLE" in flags
    assert not any("75" in flag for flag in flags)
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert "-DINGOT_HOPPER" not in namespace._ingot_architectures()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    with pytest.raises(RuntimeError, match="7.5"):
        namespace._ingot_architectures()


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


@pytest.mark.parametrize(
    ("forward", "init", "message"),
    [
        ("return torch.fft.fft(self.linear(x)).real", "pass", "which PyTorch would run"),
        ("return self.linear(x), x + 1", "pass", "one tensor"),
        ("return self.linear(x) * self.table", "self.table = torch.ones(16)", "buffer"),
        ("return self.linear(x)", "self.config = object()", "attribute config"),
    ],
)
def test_refuses_what_it_cannot_hold(tmp_path, forward, init, message):
    with pytest.raises(StandaloneError, match=message):
        Standalone(model(tmp_path, forward, init)).render()


def test_refuses_other_precisions():
    with pytest.raises(StandaloneError, match="precision is tf32"):
        Standalone(small(EXAMPLES / "linear_gelu.py"), precision="tf32")


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
    file, namespace = loaded(tmp_path, Standalone(written(tmp_path, text)))
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


def test_command_refuses_in_one_message(tmp_path):
    model(tmp_path, "return torch.fft.fft(self.linear(x)).real")
    arguments = ["optimize", str(tmp_path / "model.py"), "--standalone", "--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "PyTorch would run" in " ".join(result.output.split())
    assert not (tmp_path / "model_new.py").exists()
