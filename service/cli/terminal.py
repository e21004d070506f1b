"""Text for terminals: control characters made visible, and a pager for what does not fit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console, RenderableType

DEFAULT_PAGER: Final = "less"

LESS_OPTIONS: Final = "FRX"
"""Options of less unless LESS is set: end if the text fits, pass colours on, leave the text there."""

_CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Characters that a terminal obeys, or that change the order of text, except tabs and newlines."""

_LINE_CONTROLS: Final = re.compile(r"[\t\n]")


def visible_form(character: str) -> str:
    """Return a control character as text, e.g. ``^[`` for escape."""
    number = ord(character)
    if number < 32:
        return f"^{chr(number + 64)}"
    if number == 127:
        return "^?"
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def make_visible(text: str) -> str:
    """Return ``text`` with its control characters as text. Tabs and newlines stay."""
    return _CONTROLS.sub(lambda match: visible_form(match[0]), text)


def make_cell(text: str) -> str:
    """Return ``text`` for a cell of a table, which has one line and no tabs."""
    return _LINE_CONTROLS.sub(lambda match: visible_form(match[0]), make_visible(text))


def print_long(parts: Sequence[tuple[Console, RenderableType]]) -> None:
    """Print parts below each other, each on its console of stdout.

    What does not fit on a terminal goes through a pager.
    """
    texts: list[str] = []
    for console, part in parts:
        if not console.is_terminal:
            console.print(part)
            continue
        with console.capture() as capture:
            console.print(part)
        texts.append(capture.get())
    text = "".join(texts)
    if not text:
        return
    console = parts[0][0]
    if text.count("\n") < console.height or not _page(text, os.environ):
        console.file.write(text)
        console.file.flush()


def _page(text: str, environment: Mapping[str, str]) -> bool:
    """Show text in the user's pager; return whether there is one."""
    command = pager_command(environment)
    if not command:
        return False
    pager = subprocess.Popen(
        command, stdin=subprocess.PIPE, env={"LESS": LESS_OPTIONS, **environment}
    )
    try:
        pager.communicate(text.encode("utf-8", "replace"))  # the user may leave before the end
    except KeyboardInterrupt:
        pager.wait()  # Ctrl-C is the pager's: it ends a search
    return True


def pager_command(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the user's pager, or [] if none is to be used.

    An empty ``PAGER``, or the value ``cat``, stands for none.
    """
    try:
        command = shlex.split(environment.get("PAGER", DEFAULT_PAGER))
    except ValueError:  # a quote is missing
        return []
    if not command or command == ["cat"] or environment.get("TERM") == "dumb":
        return []
    return command if shutil.which(command[0], path=environment.get("PATH")) else []
