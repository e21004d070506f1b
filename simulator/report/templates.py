"""The templates of reports, which are files in this package."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape


def read_resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath(name).read_text("utf-8")


TEMPLATES: Final = Environment(
    loader=FunctionLoader(read_resource),
    autoescape=select_autoescape(("html.jinja",)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
"""Templates of pages, which escape text unless it is marked safe."""
