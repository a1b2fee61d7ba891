"""What Ingot says while it works: `logging`'s "ingot" here, stderr in the library.

INGOT_LOG=debug|info|warning|error|off chooses for both, here and in processes started from here.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "INGOT_LOG"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
DEFAULT = "warning"

logger = logging.getLogger("ingot")


def level() -> str:
    """The level that INGOT_LOG asks for. Raises ValueError where that is none."""
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in LEVELS:
        raise ValueError(f"{VARIABLE} is {name!r}; it must be one of {', '.join(LEVELS)}")
    return name


def set_level(name: str) -> None:
    """For the Python front, and for the library and processes that are loaded or started later."""
    if name not in LEVELS:
        raise ValueError(f"{name!r} is no level; it must be one of {', '.join(LEVELS)}")
    os.environ[VARIABLE] = name
    logger.setLevel(LEVELS[name])


def show() -> None:
    """Writes the messages to stderr as the library writes its own."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_LevelFirst())
        logger.addHandler(handler)


class _LevelFirst(logging.Formatter):
    """ "ingot: info: ..." """

    def format(self, record: logging.LogRecord) -> str:
        return f"ingot: {record.levelname.lower()}: {record.getMessage()}"


# Asked for by the environment: also where another program than the command line uses Ingot.
if os.environ.get(VARIABLE) in LEVELS:
    set_level(os.environ[VARIABLE])
    show()
