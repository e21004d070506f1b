"""Plug-ins: schedulers and objectives of users' own modules, by references such as ``my_lab.values:running``.

This is the only list of what this process may use, and nothing is imported here. Tools that run on
a user's own machine load a reference when the user names it (``tessera.solvers.plugins``). A server
loads those that its operator allows when it starts. A reference in a request is only looked up here,
so that a client cannot choose code that the server imports.
"""

from __future__ import annotations

import re
from typing import Final

REFERENCE_PATTERN: Final = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""A module and a name in it."""
_REFERENCE: Final = re.compile(REFERENCE_PATTERN, re.ASCII)

_PLUGINS: Final[dict[str, object]] = {}


def is_reference(text: str) -> bool:
    """Return whether ``text`` has the form of a reference, ``MODULE:NAME``."""
    return _REFERENCE.fullmatch(text) is not None


def references_in(text: str) -> list[str]:
    """Return the references in an objective, e.g. ``0.5*my_lab.values:running + jct``."""
    return list(dict.fromkeys(_REFERENCE.findall(text)))


def add_plugin(reference: str, plugin: object) -> None:
    """Let this process use ``plugin`` under ``reference``. A later one replaces an earlier one."""
    _PLUGINS[reference] = plugin


def find_plugin(reference: str) -> object | None:
    """Return the plug-in of ``reference``, or None if this process may not use it."""
    return _PLUGINS.get(reference)
