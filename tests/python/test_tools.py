"""The checks themselves: a check that cannot fail protects nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))  # as for a script there, which imports its neighbours


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CLEAN = """ptxas info    : Compiling entry function 'fused_gemm_scale_bn' for 'sm_90a'
ptxas info    : Function properties for fused_gemm_scale_bn
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


@pytest.mark.parametrize(
    ("log", "clean"),
    [
        (CLEAN, True),
        ("", True),
        (CLEAN.replace("0 bytes spill stores", "8 bytes spill stores"), False),
        (CLEAN.replace("0 bytes stack frame", "64 bytes stack frame"), False),
        (CLEAN + "ptxas info    : (C7517) Potential Performance Loss: wgmma serialized", False),
        (CLEAN + "ptxas info    : (C7508) Potential Performance Loss: setmaxnreg", False),
        ("kernel.cu(3): warning #177-D: variable declared but never referenced", False),
        ("kernel.cu(3): error: identifier undefined", False),
    ],
)
def test_kernel_log_complaints(log: str, clean: bool):
    assert (load("check_kernels").complaints(log) == []) is clean


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    docs = load("check_docs")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# A Heading, here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [b](other.md#a-heading-here) [c](https://example.org)\n")
    assert docs.broken_links(page) == []
    page.write_text("[a](gone.md) [b](other.md#no-such)\n```\n[c](in-code.md)\n```\n")
    assert len(docs.broken_links(page)) == 2


def test_results_table_follows_the_records(tmp_path: Path):
    table = load("results_table")
    record = {
        "model": "gemm_scale_bn",
        "shape": "1024×8192→8192",
        "dtype": "fp32",
        "precision": "fp32",
        "mode": "train",
        "eager_ms": 3.0,
        "ingot_ms": 0.6,
        "error": 5e-7,
        "date": "2026-11-21T04:00:00",
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    (tmp_path / "H200.json").write_text(json.dumps([record]))
    text = table.expected(page, table.tables(tmp_path))
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 3.000 | – | 0.600 | 5.00 | – | 5.0e-07 | – |" in text
    page.write_text(text)
    assert table.expected(page, table.tables(tmp_path)) == text
    (tmp_path / "H200.json").write_text(json.dumps([record | {"ingot_ms": 0.7}]))
    assert table.expected(page, table.tables(tmp_path)) != text
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="markers"):
        table.expected(page, "")


def test_results_table_sets_products_apart_by_work(tmp_path: Path):
    table = load("results_table")
    linear = {
        "model": "linear",
        "shape": "128×4096→4096",
        "dtype": "fp32",
        "precision": "fp32",
        "mode": "eval",
        "eager_ms": 30.0,
        "ingot_ms": 10.0,
        "ratio": 0.3333,
        "ratio_lower": 0.25,
        "ratio_upper": 0.5,
        "error": 5e-7,
        "eager_error": 6e-7,
        "date": "2026-11-21T04:00:00",
    }
    small = linear | {"shape": "2×3→4", "eager_ms": 0.01, "ingot_ms": 0.02, "ratio": 2.0}
    whole = linear | {"model": "m"}
    (tmp_path / "cpu.json").write_text(json.dumps([linear, whole, small]))
    lines = table.tables(tmp_path).splitlines()
    assert lines[4].startswith("| `m` | 128×4096→4096 |")
    assert "2 sizes" in lines[6]
    assert lines[10].startswith("| 2×3→4 | fp32 | 0.0100 | 0.0200 | 0.50 ")
    expected = "| 128×4096→4096 | fp32 | 30.0000 | 10.0000 | 3.00 (2.00–4.00) | 5.0e-07 | 6.0e-07 |"
    assert lines[11] == expected


def test_results_table_shows_other_products_beside_fp32_models(tmp_path: Path):
    table = load("results_table")
    key = {"model": "m", "shape": "2×3→4", "mode": "eval", "date": "2026-11-21"}
    fp32 = key | {"dtype": "fp32", "precision": "fp32", "eager_ms": 3.0, "ingot_ms": 0.5}
    high = fp32 | {"precision": "high", "eager_tf32_ms": 0.4}
    half = fp32 | {"dtype": "bf16", "precision": "bf16"}
    (tmp_path / "gpu.json").write_text(json.dumps([fp32, high, half]))
    assert "XLA" not in table.tables(tmp_path)
    product = {"shape": "2×3→4", "method": "XLA BF16_BF16_F32_X3", "ms": 0.9, "error": 1.8e-5}
    other = product | {"shape": "9×9→9", "error": 9e-6}
    (tmp_path / "products").mkdir()
    found = [product | {"version": "jax 1"}, other | {"version": "jax 1"}]
    (tmp_path / "products" / "gpu.json").write_text(json.dumps(found))
    lines = table.tables(tmp_path).splitlines()
    assert "| eager TF32 | torch.compile | XLA bf16×3 † | Ingot |" in lines[2]
    assert "bf16×6" not in lines[2]
    assert "| fp32 | eval | 3.000 | – | – | 0.900 | 0.500 | 6.00 |" in lines[4]
    assert "| fp32, high | eval | 3.000 | 0.400 | – | 0.900 | 0.500 |" in lines[5]
    assert "| bf16 | eval | 3.000 | – | – | – | 0.500 |" in lines[6]
    assert lines[-1].startswith("† The matrix product alone")
    assert "(jax 1); errors: XLA bf16×3 9.0e-06 to 1.8e-05." in lines[-1]


def test_results_table_adds_other_chains(tmp_path: Path):
    table = load("results_table")
    key = {"model": "m", "shape": "2×3→4", "mode": "eval", "date": "2026-11-21"}
    record = key | {"dtype": "fp32", "precision": "fp32", "eager_ms": 3.0, "ingot_ms": 0.5}
    (tmp_path / "gpu.json").write_text(json.dumps([record]))
    chain = {"model": "swiglu", "shape": "2×3→4", "mode": "eval", "eager_ms": 3.0}
    chain |= {"eager_tf32_ms": None, "ingot_ms": 0.75, "limit_ms": 0.5}
    chain |= {"error": 4e-7, "eager_error": 1.8e-6, "left_to_pytorch": [], "source_hash": "a"}
    (tmp_path / "chains").mkdir()
    (tmp_path / "chains" / "gpu.json").write_text(json.dumps([chain]))
    text = table.tables(tmp_path)
    assert "1 other chains" in text
    row = (
        "| `swiglu` | 2×3→4 | eval | 3.000 | – | 0.750 | 4.00 | 0.500 | 1.50 | 4.0e-07 | 1.8e-06 |"
    )
    assert row in text.splitlines()


def test_networks_stand_by_mode_and_setting_and_say_where_it_is_not_shown_which_is_faster():
    row = {"network": "net", "setting": "bf16", "mode": "training", "small": False, "wrong": ""}
    row |= {"eager_ms": 4.0, "compile_ms": 2.5, "ingot_ms": 2.0, "shape": "8×3", "source_hash": "a"}
    row |= {"ratio": 0.5, "ratio_lower": 0.48, "ratio_upper": 0.52, "date": "2026-11-28T01:02:03Z"}
    unsure = row | {"setting": "tf32", "ratio": 0.8, "ratio_lower": 0.5, "ratio_upper": 1.25}
    wrong = row | {"network": "other", "wrong": "gradient of a"}
    replayed = row | {"replayed": True}
    lines = load("network_table").network_tables([row, unsure, wrong, replayed])
    assert "| network | step TF32 | step bf16 |" in lines
    assert "| `net` | 1.25 (0.80–2.00) | 2.00 |" in lines
    assert "| geometric mean | **1.25** | **2.00** |" in lines
    assert "| `net` | 8×3 | step | bf16 | 4.00 | 2.50 | 2.00 | 2.00 | 1.25 |" in lines
    assert not any("other" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```bash\necho one 2\n```\n\n```text\none …\n```\n", ""),
        ("```bash\necho one\n```\n\n```text\ntwo\n```\n", "the page shows"),
        ("```bash\nfalse\n```\n", "exit status 1"),
        ("```python\nraise ValueError('what')\n```\n", "ValueError: what"),
        ("Needs a GPU.\n\n```python gpu\nraise ValueError\n```\n", ""),
        ("Needs one.\n\n```python gpu\npass\n```\n", "must say GPU"),
        ("It needs a GPU.\n\n```python gpu\nthis is no code\n```\n", "invalid syntax"),
        ("```python file=a.py\nx = 3\n```\n\n```python\nimport a\nassert a.x == 3\n```\n", ""),
    ],
)
def test_blocks_of_documents_are_run(tmp_path, monkeypatch, text, problem):
    blocks = load("doc_blocks")
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    found = blocks.Page(page, sys.executable).run()
    assert bool(found) == bool(problem)
    assert problem in "".join(found)
