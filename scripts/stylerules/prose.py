"""The prose of Markdown, comments, docstrings and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from stylerules.findings import StyleFinding
from stylerules.words import ADVICE

COLUMNS: Final = 100
"""Columns of a line of Markdown outside of tables and code."""
LINK: Final = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
"""A link to a file of ours, without its anchor."""
QUESTION: Final = re.compile(r"(?:what|how|who|whom|whose|which|where|when|why)\b", re.IGNORECASE)
BANNED_PHRASES: Final = re.compile(
    r"\b(?:besides?|anew|so many|so long|told|hears?|come(?:s)? to|came to|(?-i:is none|are none)|for want of"
    r"|by itself|by themselves|whom|stands? in)\b",
    re.IGNORECASE,
)
COUNTED_PHRASES: Final = re.compile(
    r"\b(?P<those_of>[Tt]hose\s+of)\b|\b(?P<that_of>[Tt]hat\s+of)\b"
    r"|\b(?P<what_is>what\s+(?:is|are|was|were|it|they|has|have|can|must|may))\b"
    r"|(?P<final_too>,\s+too(?=\s*(?:[.;:)]|\Z)))"
)
"""Phrases that stand for a noun, or trail behind a sentence. The name of a group is its rule."""
LITERAL_OR_COMMENT: Final = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""|"(?:\\[\s\S]|[^"\\\n])*"'
    r"|'''(?:\\[\s\S]|[^\\])*?'''|'(?:\\[\s\S]|[^'\\\n])*'"
    r"|(?P<comment>#[^\n]*(?:\n[ \t]*#[^\n]*)*)"
)
"""A string, or a comment of one or more lines."""


def find_phrases(path: str, line: int, text: str) -> Iterator[StyleFinding]:
    """Yield the counted phrases of a text that begins on a line of a file."""
    for match in COUNTED_PHRASES.finditer(text):
        rule = str(match.lastgroup)
        phrase = " ".join(match.group().split())
        place = line + text.count("\n", 0, match.start())
        yield StyleFinding(path, place, rule, f"{phrase!r} in prose", ADVICE[rule])


def comments_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module with their first lines, without the marks."""
    if "#" in text:
        for match in LITERAL_OR_COMMENT.finditer(text):
            if match["comment"]:
                line = 1 + text.count("\n", 0, match.start())
                yield line, re.sub(r"(?m)^[ \t]*#", "", match["comment"])


def prose_of(text: str) -> str:
    """Return a Markdown text with empty lines in place of tables and code."""
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        hides = is_fence or is_code or line.startswith(("    ", "|"))
        lines.append("" if hides else line)
    return "\n".join(lines)


def banned_words(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the banned words of texts, each with its file and line."""
    return [
        f"{path}: {match.group()!r} in {line.strip()!r}"
        for path, text in texts
        for line in text.splitlines()
        for match in BANNED_PHRASES.finditer(line)
    ]


def wide_lines(prose: Mapping[str, str]) -> list[str]:
    """Return the lines of Markdown that are too wide, each with its file."""
    return [
        f"{path}: {line}"
        for path, text in prose.items()
        for line in text.splitlines()
        if len(line) > COLUMNS
    ]


def dead_links(root: Path, prose: Mapping[str, str]) -> list[str]:
    """Return the relative links of Markdown files that lead to no file."""
    return [
        f"{path}: {target}"
        for path, text in prose.items()
        for target in LINK.findall(text)
        if not (root / path).parent.joinpath(target).exists()
    ]


def unlisted_decisions(root: Path) -> list[str]:
    """Return the pages of decisions that their index does not list by their title."""
    folder = root / "docs" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("2*.md")}
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in pages.items()}
    return [name for name, title in titles.items() if f"[{title}]({name})" not in index]
