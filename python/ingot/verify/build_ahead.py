"""Builds the extensions of a standalone file that its first call does not need:
`python -m ingot.verify.build_ahead FILE`."""

from __future__ import annotations

import os
import sys

from .loading import load_file


def main() -> None:
    os.nice(5)
    module = load_file(sys.argv[1], {})
    text = getattr(module, "_INGOT_STORING", None)
    if text is not None:
        module._ingot_extension(text)


if __name__ == "__main__":
    main()
