"""A hook of MkDocs that turns formulas into MathML, which browsers show without scripts.

The extension ``pymdownx.arithmatex`` marks the formulas of a page (``mkdocs.yml``).
"""

from __future__ import annotations

import html
import re
from typing import Any, Final

from latex2mathml.converter import convert

FORMULA: Final = re.compile(
    r'<span class="arithmatex">\\\((?P<inline>.*?)\\\)</span>'
    r'|<div class="arithmatex">\s*\\\[(?P<block>.*?)\\\]</div>',
    re.DOTALL,
)
NUMBER: Final = re.compile(r"\\tag\{([^}]*)\}")
"""The number of an equation, which is shown after it."""


def on_page_content(content: str, **_: Any) -> str:
    """Return the HTML of a page with MathML in place of TeX."""
    return FORMULA.sub(typeset, content)


def typeset(match: re.Match[str]) -> str:
    """Return the MathML of a formula that ``FORMULA`` matches."""
    display = "inline" if match["block"] is None else "block"
    formula = html.unescape(match["inline"] or match["block"])
    formula = NUMBER.sub(r"\\qquad\\text{(\1)}", formula)
    # latex2mathml knows the environment for aligned lines by its other name only.
    return convert(formula.replace("{aligned}", "{align*}"), display=display)
