"""Loading the files of a pair. A model file is a program: loading it runs it."""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_file(path: str, overrides: dict) -> ModuleType:
    """Executes the file as a module of its own, with the constants that it assigns at the top
    replaced by `overrides`, so that what the file computes from them follows."""
    source = Path(path).read_text(encoding="utf-8")
    tree = ast.parse(source, filename=path)
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            if isinstance(target, ast.Name) and target.id in overrides:
                value = ast.Constant(overrides[target.id])
                statement.value = ast.copy_location(value, statement.value)
    name = f"_ingot_pair_{abs(hash((path, source)))}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    sys.modules[name] = module  # torch.compile, pickle and load_inline look classes up here
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


def model_class(namespace: Any, path: str, names: list) -> type:
    for name in names:
        found = getattr(namespace, name, None)
        if isinstance(found, type):
            return found
    raise AttributeError(f"{path} defines no class {' or '.join(names)}")
