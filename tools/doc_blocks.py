"""Runs the commands and code of the documents, so that what they show is what happens.

Blocks of a page run in order, in one empty folder, by the fence's words:

    ```bash                  run by bash -e; `ingot` is the command line of this tree
    ```bash root             the same, in the repository's root
    ```python                run by a Python of its own
    ```python file=NAME      written to NAME in the folder, and compiled
    ```python gpu            needs a GPU: compiled only, or run where there is one (--gpu); the page
                             must say "GPU" in the paragraph before
    ```cpp file=NAME         written to NAME
    ```text                  what the block before printed: its lines must occur there in this
                             order, where … stands for anything
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
_LIMIT_S = 300.0


class BlockError(Exception):
    """A block that fails, or does not print what the page says."""


@dataclass(frozen=True)
class Block:
    language: str
    words: tuple
    text: str
    line: int
    before: str  # the paragraph before it

    @property
    def file(self) -> str:
        return next((w[5:] for w in self.words if w.startswith("file=")), "")


def blocks_of(text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        before = text[: found.start()].strip().rsplit("\n\n", 1)[-1]
        yield Block(found[1], tuple(found[2].split()), found[3], line, before)


class Page:
    """The blocks of one page, in a folder of their own."""

    def __init__(self, path: Path, python: str, gpu: bool = False, installed: bool = False) -> None:
        """installed: by the package that `python` has, not by the tree's."""
        self._path = path
        self._python = python
        self._gpu = gpu
        self._installed = installed
        self._printed = ""
        self.ran = self.compiled = 0

    def run(self) -> list:
        """The problems, each with its line."""
        with tempfile.TemporaryDirectory(prefix="ingot-docs-") as name:
            folder = Path(name)
            self._environment = _environment(folder, self._python, self._installed)
            for block in blocks_of(self._path.read_text(encoding="utf-8")):
                try:
                    self._do(block, folder / "work")
                except (BlockError, SyntaxError, subprocess.TimeoutExpired) as error:
                    where = self._path.relative_to(ROOT)
                    return [f"{where}:{block.line}: {error}"]  # later blocks rest on this one
        return []

    def _do(self, block: Block, folder: Path) -> None:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "text":
            _check_printed(block.text, self._printed)
        elif block.language == "python":
            self._python_block(block, folder)
        elif block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            self._start(command, ROOT if "root" in block.words else folder)

    def _python_block(self, block: Block, folder: Path) -> None:
        compile(block.text, f"{self._path.name}:{block.line}", "exec")
        needs_gpu = "gpu" in block.words
        if needs_gpu and "GPU" not in block.before:
            raise BlockError("a block that is not run: the paragraph before it must say GPU")
        if block.file or (needs_gpu and not self._gpu):
            self.compiled += 1
            return
        self._start([self._python, "-c", block.text], folder)

    def _start(self, command: list, folder: Path) -> None:
        answer = subprocess.run(
            command,
            cwd=folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        self._printed = answer.stdout
        self.ran += 1
        if answer.returncode:
            tail = "\n".join(answer.stdout.splitlines()[-25:])
            raise BlockError(f"exit status {answer.returncode}:\n{tail}")


def _environment(folder: Path, python: str, installed: bool) -> dict:
    """With `ingot` and `python` on the PATH, and nothing written outside the folder."""
    for name in ("bin", "work", "cache"):
        (folder / name).mkdir()
    for name, command in {"ingot": f"{python} -m ingot", "python": python}.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
        "PREFIX": str(folder / "prefix"),
        "INGOT_CACHE_DIR": str(folder / "cache"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    # Small models: a second thread would only wait for the first, and spin while others work.
    environment["OMP_NUM_THREADS"] = "1"
    if installed:
        for name in ("PYTHONPATH", "INGOT_LIBRARY"):
            environment.pop(name, None)
        return environment
    environment.setdefault("INGOT_LIBRARY", str(ROOT / "build" / "release" / "libingot.so"))
    return environment


def _check_printed(expected: str, printed: str) -> None:
    """Each expected line must occur, in order; … stands for anything within a line, and a line of
    its own for any lines."""
    lines = iter(printed.splitlines())
    for line in expected.splitlines():
        if line.strip() in ("", "…"):
            continue
        parts = [r"\s+".join(map(re.escape, p.split())) for p in line.split("…")]
        pattern = re.compile(r"\s*" + r".*".join(parts) + r"\s*")
        if not any(pattern.fullmatch(found) for found in lines):
            raise BlockError(f"the page shows\n    {line.strip()}\nbut what came was\n{printed}")


def run_pages(pages: list, python: str, gpu: bool = False) -> list:
    """Two at a time: a page waits for much that uses one core."""

    def run(path: Path) -> list:
        started = time.monotonic()
        page = Page(path, python, gpu)
        found = page.run()
        print(
            f"{path.relative_to(ROOT)}: {page.ran} blocks run, {page.compiled} compiled only, "
            f"{time.monotonic() - started:.0f} s{', FAILED' if found else ''}",
            flush=True,
        )
        return found

    with ThreadPoolExecutor(2) as pool:
        return [problem for found in pool.map(run, pages) for problem in found]


def main(arguments: list) -> int:
    gpu = "--gpu" in arguments
    names = [a for a in arguments if not a.startswith("--")]
    problems = run_pages([Path(n).resolve() for n in names], sys.executable, gpu)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
