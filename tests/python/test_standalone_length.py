"""How much of a standalone file is neither the model's source nor kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ingot.model_file import load_model_file
from ingot.standalone_writer import Standalone

ROOT = Path(__file__).resolve().parents[2]
# Characters: half of what the same count found in the files that commit c567e885 wrote; where
# backward has kernels, whose launches and tables are text as well, 1.15 to 1.31 times that.
MOST = {
    "examples/gemm_bn_scale_softmax.py": 64200,
    "examples/linear_gelu.py": 46900,
    "examples/linear_residual_rmsnorm.py": 50600,
    "tests/models/gelu_dropout_scale_layernorm.py": 48939,
    "tests/models/groupnorm_swish_multiply_swish.py": 42211,
    "tests/models/residual_mlp_block.py": 43719,
    "tests/models/swiglu.py": 44709,
}


def without_kernels(text: str, source: str) -> str:
    text = text.replace(source.partition('"""\n')[2].strip(), "", 1)
    # Headers of kernels/ for the device; those for the host (.h) launch them.
    text = re.sub(r"(?ms)^// ---- \S+\.cuh -+$.*?(?=^// ---- |^// What packs fp32|^''')", "", text)
    # What is generated: functors, and kernels with the comment above them.
    functor = (
        r"(?ms)^(//[^\n]*\n)*\n?^namespace ingot \{\n\nstruct Fused.*?^\}  // namespace ingot$"
    )
    text = re.sub(functor, "", text)
    return re.sub(r"(?ms)^(template <[^\n]*\n)?[^\n]*\b__global__ .*?^\}$", "", text)


@pytest.mark.parametrize("model", MOST)
def test_text_beside_the_kernels(model):
    original = load_model_file(ROOT / model)
    rest = without_kernels(Standalone(original).render(), original.source)
    assert "class ModelNew" in rest and "run(launch, " in rest and "class Model(" not in rest
    assert "INGOT_D" not in rest.partition("_INGOT_PLAIN = ")[2]
    assert len(rest) <= MOST[model]
