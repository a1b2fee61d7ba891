"""What `tools/gpu-suite` runs: stages, each a list of steps, each of which passes or fails.

A new stage is an entry of STAGES: its steps, and how one is done. A step says whether it must have
the machine for itself because times are measured; the others run beside each other, each in a
process of its own.
"""

from __future__ import annotations

from gpu_stages import examples, programs, scripts
from gpu_stages.steps import Stage, Step

STAGES = {
    "user": Stage(
        scripts.user_steps,
        lambda scenario, settings: scenario(settings),
        "what users type, with an installed wheel: every command, page, setting; seed models",
        seconds=60.0,
        missing=scripts.user_missing,
    ),
    "correctness": Stage(
        examples.correctness_steps,
        examples.verify_example,
        "each example verified against fp64, in both modes, on hostile inputs too",
        seconds=30.0,
    ),
    "models": Stage(
        scripts.model_steps,
        scripts.models,
        "every model of tests/models against fp64, in fp32 and bf16, replayed calls, gradients",
        seconds=120.0,
    ),
    "torch": Stage(
        scripts.torch_steps,
        scripts.torch_suites,
        "PyTorch's own suites of modules and operators, forward and backward, against PyTorch",
        seconds=200.0,
    ),
    "rows": Stage(
        scripts.row_steps,
        scripts.rows,
        "sweeps along rows of awkward lengths, the loss over them, 16-bit products, against fp64",
        seconds=120.0,
        missing=scripts.rows_missing,
    ),
    "adversaries": Stage(
        lambda settings: [Step("checked", "checked"), Step("timed", "timed", alone=True)],
        scripts.adversaries,
        "verify itself, against honest and dishonest CUDA candidates",
        seconds=60.0,
    ),
    "sanitizer": Stage(
        lambda settings: [Step(tool, tool) for tool in examples.SANITIZER_TOOLS],
        examples.sanitize,
        "compute-sanitizer over small calls",
        seconds=30.0,
        missing=examples.sanitizer_missing,
    ),
    "arithmetic": Stage(
        lambda settings: [
            Step("against IEEE 754", "arithmetic_check"),
            Step("special functions", "functions_check"),
        ],
        programs.arithmetic,
        "the kernels' own division and comparisons against IEEE 754, functions against fp64",
        seconds=15.0,
        missing=programs.nvcc_missing,
    ),
    "errors": Stage(
        lambda settings: [Step("curves")],
        scripts.error_curves,
        "errors against K and dynamic range, beside cuBLAS, TF32 and the naive split",
        seconds=40.0,
    ),
    "stress": Stage(
        lambda settings: [Step("10000 calls", 10_000, alone=True)],
        scripts.stress,
        "calls from many threads and streams, CUDA graphs among them, every bit compared",
        seconds=75.0,
    ),
    "devices": Stage(
        lambda settings: [
            Step("one process", "check_devices.py"),
            Step("a process a GPU", "check_ranks.py", alone=True),
        ],
        scripts.devices,
        "several GPUs: the same bits on each; DDP, FSDP2, tensor parallel beside PyTorch's",
        seconds=90.0,
    ),
    "golden": Stage(
        lambda settings: [Step("outputs", "outputs"), Step("times", "times", alone=True)],
        scripts.golden,
        "the bits and the times of an older build of the library",
        seconds=240.0,
        missing=scripts.golden_missing,
    ),
    "latency": Stage(
        lambda settings: [Step("first calls", alone=True)],
        scripts.latency,
        "the first call with an empty cache, from the cache, and the host's time of a call",
        seconds=60.0,
    ),
    "standalone": Stage(
        examples.standalone_steps,
        examples.standalone,
        "standalone files compiled there: the library's bits, and its time",
        seconds=60.0,
        missing=examples.standalone_missing,
    ),
    "bench": Stage(
        examples.bench_steps,
        examples.bench,
        "the bundled models against eager, eager with TF32 and torch.compile max-autotune",
        seconds=70.0,
        own_process=False,
    ),
    "ladder": Stage(
        examples.ladder_steps,
        examples.ladder,
        "the bundled models under every policy, and PyTorch's: error and time in the same rounds",
        seconds=120.0,
    ),
    "chains": Stage(
        lambda settings: [Step("models of tests/models", alone=True)],
        scripts.chains,
        "twenty other chains at real sizes, against eager and the limit",
        seconds=110.0,
    ),
    "halves": Stage(
        lambda settings: [Step(kind, kind, alone=True) for kind in ("bf16", "fp16")],
        scripts.halves,
        "the models of tests/models in 16 bits, against eager and torch.compile max-autotune",
        seconds=420.0,
    ),
    "conv_chains": Stage(
        lambda settings: [Step("behind convolutions", alone=True)],
        scripts.conv_chains,
        "forty chains behind convolutions, against eager",
        seconds=190.0,
    ),
    "operators": Stage(
        lambda settings: [Step("operators alone", alone=True)],
        scripts.operators,
        "operators alone and losses, against eager and a copy of their bytes",
        seconds=100.0,
    ),
    "networks": Stage(
        scripts.network_steps,
        scripts.networks,
        "whole networks of torchvision, timm, transformers: right, and how fast, in six settings",
        seconds=120.0,
    ),
    "blas": Stage(
        scripts.blas_steps,
        scripts.blas,
        "products with libingot_blas.so in front of cuBLAS, of PyTorch and in programs of several "
        "frameworks, against fp64 and cuBLAS",
        seconds=300.0,
        missing=scripts.blas_missing,
    ),
    "products": Stage(
        lambda settings: [
            Step(name, name, alone=True)
            for name in ("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "TF32_TF32_F32_X3")
        ],
        scripts.xla_product,
        "the matrix product alone, by XLA's emulations of fp32",
        seconds=40.0,
        missing=scripts.products_missing,
    ),
    "sweep": Stage(
        lambda settings: [Step("build", "build"), Step("36 shapes", "run", alone=True)],
        programs.sweep,
        "every configuration of the Hopper product on 36 shapes",
        seconds=60.0,
        missing=programs.sweep_missing,
    ),
}
