"""Drawings as SVG that follows the page's theme."""

from __future__ import annotations

import html
import io
import re
from typing import Final

import matplotlib as mpl

from tessera.simulator.report.model import Plot
from tessera.simulator.report.style import LIGHT

SVG_ID_SALT: Final = "tessera"
"""The salt of SVG ids, so that the same drawing gives the same SVG."""
_VARIABLE: Final = {colour: f"var(--{name})" for name, colour in LIGHT.items()}


def render_svg(plot: Plot, prefix: str) -> str:
    """Return the drawing as an SVG element.

    ``prefix`` makes its ids differ from those of other pictures.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": SVG_ID_SALT, "svg.fonttype": "path"}):
        plot.drawing.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-")
    for colour, variable in _VARIABLE.items():
        text = text.replace(colour, variable)
    box = re.search(r'viewBox="[^"]*"', text)
    if box is None:
        raise AssertionError("matplotlib writes a viewBox")
    opening = f'<svg role="img" aria-label="{html.escape(plot.alt)}" {box[0]} '
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return opening + names + text[text.index(">") + 1 :].strip()
