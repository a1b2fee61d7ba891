"""Compiles an original by torch.compile into a cache of its own, but for its Triton kernels, which
go where the next process looks: `python -m ingot.verify.compile_ahead REQUEST`.

REQUEST: {"original", "overrides", "folder"}, as Python writes it. What does not work here is left
to that process, which then compiles as if this one had not been.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime import cache_dir_utils

from ..bench.subjects import COMPILE, baselines
from ..model_file import load_model_file
from . import execution
from .ahead import room_beside
from .confinement import confine_worker
from .passing import tensors_of

_GPU_MEMORY_SHARE = 0.2


def main() -> None:
    request = ast.literal_eval(sys.argv[1])
    confine_worker()
    device = torch.device("cuda")
    os.nice(10)
    mark = _mark(request)
    if mark.exists():
        return
    # Triton's cache is known by its kernels' sources; Inductor's remembers what was the fastest,
    # which nobody can say while others use the GPU.
    os.environ["TRITON_CACHE_DIR"] = cache_dir_utils.triton_cache_dir(torch.cuda.current_device())
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = request["folder"]
    if compile_once(request["original"], request["overrides"], device):
        mark.touch()


def _mark(request: dict) -> Path:
    """A file that goes with Inductor's own cache: what is compiled there already needs no more."""
    text = Path(request["original"]).read_bytes() + repr(request["overrides"]).encode()
    digest = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:16]
    return Path(cache_dir_utils.cache_dir()) / f"ingot-{digest}"


def compile_once(original: str, overrides: dict, device: torch.device) -> bool:
    """Whether it was: on a GPU that has much room."""
    loaded = load_model_file(original, overrides)
    with loaded.at_home():
        module = execution.construct(loaded.Model, loaded.get_init_inputs(), 0)
    inputs = loaded.make_inputs()
    sizes = [t.numel() * t.element_size() for t in (*module.parameters(), *tensors_of(inputs))]
    if not room_beside(sum(sizes), device):
        return False
    torch.cuda.set_per_process_memory_fraction(_GPU_MEMORY_SHARE)
    placed: Any = execution.on_device(inputs, device)
    subjects = baselines(module.to(device).train(), [placed], device, True, False)
    subjects[COMPILE](0)
    execution.synchronize(device)
    return True


if __name__ == "__main__":
    main()
