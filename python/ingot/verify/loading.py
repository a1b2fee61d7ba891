"""Loading a candidate's file, which need not be a whole model file: ModelNew is enough."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..model_file import constants_of, override_constants

CANDIDATE_MODULE = "ingot_candidate"


def load_file(path: str, overrides: dict, place: str = "") -> ModuleType:
    """Executes the file. Of the overrides those apply whose constants it has: inputs and
    constructor's arguments come from the original. place: the path that the file will have, where
    that is another: what it imports or reads from its folder is there. What it raises is passed
    on."""
    source = Path(path).read_text(encoding="utf-8-sig")
    if overrides:
        known = constants_of(source, path)
        source = override_constants(source, {k: v for k, v in overrides.items() if k in known})
    folder = str(Path(place or path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last: its files must not stand in for anybody else's
    module = ModuleType(CANDIDATE_MODULE)
    module.__file__ = place or path
    sys.modules[CANDIDATE_MODULE] = module  # where torch.compile and pickle look classes up
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def model_class(namespace: Any, path: str, names: list) -> type:
    for name in names:
        found = getattr(namespace, name, None)
        if isinstance(found, type):
            return found
    raise AttributeError(f"{path} defines no class {' or '.join(names)}")
