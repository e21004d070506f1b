"""The code blocks of a Markdown file: commands, transcripts, files and their outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"^\s*(```|~~~)(\w*)")
INDENT = "    "
PROMPT = "$ "
SHOWN_FILE = re.compile(r"cat (\S+)$")


@dataclass(frozen=True)
class Block:
    """A code block. ``line`` is its first line in the file, counted from 1."""

    line: int
    lines: tuple[str, ...]

    @property
    def first(self) -> str:
        """Return the first line without its trailing comment. It names the block in the tests.

        Spaces in a row count as one, so that a wider column of a table does not rename its block.
        """
        return " ".join(without_comment(next(text for text in self.lines if text.strip())).split())


@dataclass(frozen=True)
class Step:
    """A command of a block, with its output in the document, or "" without output."""

    command: str
    shown: str = ""

    @property
    def made_file(self) -> str:
        """Return the file that the document shows with ``cat``, or "" for another command."""
        match = SHOWN_FILE.fullmatch(without_comment(self.command))
        return match[1] if match and self.shown else ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced and the indented code blocks of a Markdown text, in order."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if match := FENCE.match(lines[at]):
            end = next(
                (k for k in range(at + 1, len(lines)) if lines[k].strip() == match[1]), len(lines)
            )
            if any(text.strip() for text in lines[at + 1 : end]):
                yield Block(at + 1, tuple(lines[at + 1 : end]))
            at = end + 1
        elif lines[at].startswith(INDENT) and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith(INDENT) or not lines[end].strip()):
                end += 1
            body = [text[len(INDENT) :] for text in lines[at:end]]
            while not body[-1].strip():
                body.pop()
            yield Block(at + 1, tuple(body))
            at = end
        else:
            at += 1


def steps(block: Block) -> list[Step]:
    """Return the commands of a block: the lines after ``$``, or all lines of a block without ``$``."""
    if not any(text.startswith(PROMPT) for text in block.lines):
        whole = "\n".join(block.lines).replace("\\\n", " ")
        return [Step(text) for text in whole.splitlines() if without_comment(text)]
    commands: list[Step] = []
    shown: list[str] = []
    whole = "\n".join(block.lines).replace(" \\\n", " ")  # a command may continue on the next line
    for text in [*whole.splitlines(), PROMPT]:
        if text.startswith(PROMPT):
            if commands:
                commands[-1] = Step(commands[-1].command, "\n".join(shown).strip("\n"))
            commands.append(Step(text.removeprefix(PROMPT)))
            shown = []
        else:
            shown.append(text)
    return commands[:-1]


def without_comment(command: str) -> str:
    """Return a shell command without its trailing comment, if any."""
    return re.sub(r"(^|\s+)#\s.*$", "", command).strip()
