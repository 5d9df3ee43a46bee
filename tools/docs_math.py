"""Formulas of the documentation as MathML when it is built: readers need neither scripts nor a network for them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# what pymdownx.arithmatex (generic) leaves around a formula
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*(?:\\\((.*?)\\\)|\\\[(.*?)\\\])\s*</\1>', re.DOTALL)

# the names of functions stand off from what follows, as TeX has it: log q, not logq
_FUNCTION = re.compile(r"<mi>(?:log|exp)</mi>(?!<mo)")


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with a page's HTML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    inline, display = match.group(2), match.group(3)
    latex = html.unescape(inline if inline is not None else display).strip()
    formula = convert(latex, display="inline" if inline is not None else "block")
    formula = _FUNCTION.sub(r'\g<0><mspace width="0.17em" />', formula)
    return formula if inline is not None else f'<div class="formula">{formula}</div>'
