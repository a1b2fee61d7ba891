"""Writes `model_new.py`: the original's file with a `ModelNew` that runs through Ingot."""

from __future__ import annotations

import textwrap
from typing import Any

import jinja2

from ingot.model_file import ModelFile

WIDTH = 96


def bullet(text: str, indent: int = 4) -> str:
    """One item of a docstring's list, wrapped; nothing in it can end the docstring."""
    text = in_docstring(text)
    pad = " " * indent
    return textwrap.fill(
        text,
        width=WIDTH,
        initial_indent=f"{pad}- ",
        subsequent_indent=f"{pad}  ",
        break_long_words=False,
    )


def in_docstring(text: Any) -> str:
    """One line, of which nothing ends a docstring or a comment."""
    return " ".join(str(text).split()).replace("\\", "\\\\").replace('"""', "'''")


def environment() -> jinja2.Environment:
    result = jinja2.Environment(
        loader=jinja2.PackageLoader("ingot", "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.filters["bullet"] = bullet
    result.filters["python"] = repr
    return result


def render_model(original: ModelFile, report: dict[str, Any], precision: str | None) -> str:
    """The text of model_new.py. report: an optimised module's `ingot_report()`."""
    from ingot import __version__

    text = (
        environment()
        .get_template("model_new.py.j2")
        .render(
            source=original.source.rstrip() + "\n",
            origin=in_docstring(original.path.name),
            version=__version__,
            class_name=original.class_name,
            precision=precision,
            report=report,
        )
    )
    compile(text, "model_new.py", "exec")
    return text
