"""Source text with a little colour, as HTML whose colours are the report's own."""

from __future__ import annotations

from markupsafe import Markup
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import CudaLexer, PythonLexer

_LEXERS = {"cuda": CudaLexer, "python": PythonLexer}


def coloured(source: str, language: str) -> Markup:
    """Escaped spans whose classes style.css knows; no <pre> around them."""
    lexer = _LEXERS[language](stripall=False, ensurenl=False)
    return Markup(highlight(source.rstrip() + "\n", lexer, HtmlFormatter(nowrap=True)))
