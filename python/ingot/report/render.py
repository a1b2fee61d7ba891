"""From the gathered values to one HTML file that needs nothing else."""

from __future__ import annotations

import os
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ingot.model_file import write_whole


def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("ingot", "templates/report"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["ticks"] = _ticks
    made.filters["at"] = lambda value: f"{value:.1f}"
    return made


def _ticks(words: str) -> Markup:
    """`names` in backticks as code."""
    parts = str(words).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else escape(part)
        for place, part in enumerate(parts)
    )


def render(template: str, view: dict[str, Any]) -> str:
    from ingot import __version__

    return environment().get_template(template).render(version=__version__, **view)


def write_report(path: os.PathLike | str, template: str, view: dict[str, Any]) -> None:
    """Writes the report, whole or not at all. Raises ModelFileError where it cannot."""
    write_whole(path, render(template, view))
