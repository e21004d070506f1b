"""The templates of reports, which lie beside this module."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape


def resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text("utf-8")


TEMPLATES: Final = Environment(
    loader=FunctionLoader(resource),
    autoescape=select_autoescape(("html.jinja",)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
"""What goes into a page is escaped unless the template calls it safe; Markdown is not."""
