"""Tables in Markdown."""

from __future__ import annotations


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def line(texts: list) -> str:
    return f"| {' | '.join(texts)} |"


def folded(summary: str, headings: list, texts: int, rows: list) -> list:
    """A table that is opened by its summary: lines. texts: how many of its columns hold words."""
    rule = "|" + " --- |" * texts + " ---: |" * (len(headings) - texts)
    begin = ["", f"<details><summary>{summary}</summary>", ""]
    return [*begin, line(headings), rule, *rows, "", "</details>"]
