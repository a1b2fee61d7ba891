"""The bundled models at the sizes that Ingot promises to be fast at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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


# rows, inner, columns of a linear layer.
PRODUCTS = (
    # cubes
    *((size, size, size) for size in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
    # a matrix times one vector, and times a few
    *((1, size, size) for size in (16, 256, 1024, 4096, 8192)),
    *((rows, 4096, 4096) for rows in (2, 4, 8, 16, 32, 64, 128)),
    (1, 512, 32768),
    # layers of usual models
    *((32, 512, 512), (64, 1024, 1024), (128, 1024, 4096), (128, 4096, 1024), (512, 1024, 1024)),
    # tall
    *((65536, 16, 16), (16384, 64, 64), (16384, 256, 256), (16384, 1024, 1024), (4096, 4096, 1)),
    # wide, deep
    *((16, 64, 16384), (64, 256, 16384), (64, 16384, 64), (16, 65536, 16)),
    # odd
    *((3, 5, 7), (33, 65, 129), (127, 1023, 511), (100, 1000, 10), (1000, 784, 300)),
    (17, 4097, 4099),
    # the bundled models'
    *((1024, 8192, 8192), (16384, 4096, 4096)),
)
PRODUCT_MODEL = "linear"


def product_cases(half: bool = False, shapes: Iterable[tuple] = PRODUCTS) -> list:
    """A linear layer alone, in eval mode."""
    return [
        Case(PRODUCT_MODEL, *sizes, dtype, dtype, "eval")
        for dtype in (("fp32", "bf16", "fp16") if half else ("fp32",))
        for sizes in shapes
    ]


def products_folder() -> Path:
    """The folder of their model, which is part of the package."""
    return Path(__file__).resolve().parent / "models"


def examples_folder(given: str | None = None) -> Path:
    """The folder of the bundled models: given, or beside the package in a source tree."""
    beside = [Path(__file__).resolve().parents[3] / "examples", Path.cwd() / "examples"]
    for folder in [Path(given)] if given else beside:
        if (folder / "gemm_scale_bn.py").is_file():
            return folder
    where = f"in {given}" if given else "here"
    raise FileNotFoundError(
        f"the bundled models are not {where}: run in a source tree of Ingot, or give their folder "
        "with --examples"
    )
