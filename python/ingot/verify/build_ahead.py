"""Builds the extensions of a standalone file that its first call does not need:
`python -m ingot.verify.build_ahead FILE`."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from .loading import load_file

_TEXTS = ("_INGOT_STORING", "_INGOT_BACKWARD")


def main() -> None:
    os.nice(5)
    module = load_file(sys.argv[1], {})
    texts = [getattr(module, name) for name in _TEXTS if hasattr(module, name)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(module._ingot_extension, texts))


if __name__ == "__main__":
    main()
