"""The bundled models at the sizes that Ingot promises to be fast at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Case:
    """rows × inner → columns: the sizes of the linear layer. overrides: for the constants at the
    top of the model's file."""

    model: str
    rows: int
    inner: int
    columns: int
    dtype: str = "fp32"
    precision: str = "fp32"
    mode: str = "training"
    overrides: dict = field(default_factory=dict, hash=False)

    @property
    def shape(self) -> str:
        return f"{self.rows}×{self.inner}→{self.columns}"

    @property
    def key(self) -> tuple:
        return (self.model, self.shape, self.dtype, self.precision, self.mode)

    @property
    def settings(self) -> dict:
        sizes = {"batch_size": self.rows, "in_features": self.inner, "out_features": self.columns}
        return {**sizes, **self.overrides}

    def shrunk(self) -> Case:
        """The same model at a size for checks that are slow: nothing a multiple of anything."""
        return replace(self, rows=67, inner=133, columns=71)


def bundled_cases(half: bool = False) -> list:
    """Every bundled model and size, in training and eval mode; `half`: bf16 and fp16 as well."""
    sizes = [
        ("gemm_scale_bn", 1024, 8192, 8192),
        ("gemm_scale_bn", 16384, 4096, 4096),
        ("gemm_bn_scale_softmax", 1024, 8192, 8192),
    ]
    cases = []
    for dtype in ("fp32", "bf16", "fp16") if half else ("fp32",):
        for model, rows, inner, columns in sizes:
            for mode in ("training", "eval"):
                cases.append(Case(model, rows, inner, columns, dtype, dtype, mode))
    return cases


def examples_folder(given: str | None = None) -> Path:
    """The folder of the bundled models: given, or beside the package in a source tree."""
    candidates = [Path(given)] if given else []
    candidates += [Path(__file__).resolve().parents[3] / "examples", Path.cwd() / "examples"]
    for folder in candidates:
        if (folder / "gemm_scale_bn.py").is_file():
            return folder
    raise FileNotFoundError(
        "the bundled models are not here: run in a source tree of Ingot, or give their folder"
    )
