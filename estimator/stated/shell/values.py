"""Texts of a shell script whose parts may be unknown, and what a shell computes from texts.

An unknown part of a text is a mark. What it stands for is in :class:`Unknowns`.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

Value: TypeAlias = str | list[str]
"""The value of a variable: a text or a list of texts."""

ASSUMED: Final = "\1"
"""The mark of a text that holds only while a variable of the environment is not set."""
_MARK: Final = re.compile("\0([0-9]+)\0")
_LONE: Final = re.compile("\0[0-9]+\0\1?")
_FIELD: Final = re.compile(r"[^ \t\n]+")
MAX_CHOICES: Final = 4
"""Deepest nesting of choices in choices that are followed."""
MAX_PATTERN_SUBJECT: Final = 1000
"""Longest text on which patterns are tried."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that only a run of the script decides.

    ``choices`` are the values between which a condition decides, if they are known.
    """

    source: str
    line: int
    choices: tuple[Value, ...] = ()

    def __str__(self) -> str:
        texts = {" ".join(fields_of(choice)) for choice in self.choices}
        known = self.choices and all("\0" not in text and len(text) <= 20 for text in texts)
        shown = " or ".join(sorted(text.replace(ASSUMED, "") or "nothing" for text in texts))
        return f"{shown if known else self.source} (line {self.line})"


class ShellWord(str):
    """A word of a command, with what is unknown in it.

    ``lone`` is set if the word may stand for any number of words. ``assumed`` is set if it holds
    only while variables of the environment are not set.
    """

    unknown: tuple[Unknown, ...] = ()
    lone: bool = False
    assumed: bool = False
    choices: tuple[tuple[ShellWord, ...], ...] = ()
    """The words between which a condition decides, if this one stands for them."""

    def part(self, text: str) -> ShellWord:
        """Return a part of this word, which is unknown and assumed like the whole."""
        word = ShellWord(text)
        word.unknown, word.assumed = self.unknown, self.assumed
        return word


class Unknowns:
    """The unknown things for which marks in texts stand."""

    def __init__(self) -> None:
        self._all: list[Unknown] = []
        self._choices: dict[tuple[int, int], tuple[tuple[ShellWord, ...], ...]] = {}

    def mark(self, source: str, line: int, choices: tuple[Value, ...] = ()) -> str:
        """Return the mark of something unknown."""
        self._all.append(Unknown(source, line, choices))
        return f"\0{len(self._all) - 1}\0"

    def word(self, text: str, depth: int = 0) -> ShellWord:
        """Return a text as a word of a command."""
        numbers = [int(number) for number in _MARK.findall(text)]
        shown = _MARK.sub(lambda match: self._all[int(match[1])].source, text)
        word = ShellWord(shown.replace(ASSUMED, ""))
        word.unknown = tuple(self._all[number] for number in numbers)
        word.assumed = ASSUMED in text
        word.lone = bool(_LONE.fullmatch(text))
        if word.lone and depth < MAX_CHOICES:
            place = (numbers[0], depth)
            if place not in self._choices:
                self._choices[place] = tuple(
                    tuple(self.word(field, depth + 1) for field in fields_of(choice))
                    for choice in word.unknown[0].choices
                )
            word.choices = self._choices[place]
        return word


def fields_of(value: Value) -> list[str]:
    """Return the words into which an unquoted use of a value is split."""
    texts = [value] if isinstance(value, str) else value
    return [field for text in texts for field in _FIELD.findall(text)]


def is_unknown(text: str) -> bool:
    """Return whether a part of a text is unknown."""
    return "\0" in text


def may_be_empty(text: str) -> bool:
    """Return whether a text that has unknown parts consists of them alone."""
    return not _MARK.sub("", text).replace(ASSUMED, "")


def plain(text: str) -> str:
    """Return a known text without the mark of an assumption."""
    return text.replace(ASSUMED, "")


def number_of(text: str) -> int | None:
    """Return the whole number that a text is, or None."""
    text = plain(text).strip()
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None


def pattern_of(text: str) -> str:
    """Return the regular expression of a shell's pattern."""
    return fnmatch.translate(text.replace("[^", "[!"))


def matches(subject: str, pattern: str) -> bool | None:
    """Return whether a text matches a shell's pattern, or None if that is not tried."""
    if not re.search(r"[*?\[]", pattern):
        return subject == re.sub(r"\\(.)", r"\1", pattern)
    if len(subject) > MAX_PATTERN_SUBJECT or pattern.count("*") > 8 or "\\" in pattern:
        return None
    return bool(re.match(pattern_of(pattern), subject))


def edit(text: str, operator: str, operand: str) -> str | None:
    """Return a text that was edited as in ``${NAME<operator><operand>}``, or None if unknown."""
    if len(text) > MAX_PATTERN_SUBJECT or "\\" in operand:
        return None
    if operator in ("^^", "^", ",,", ",") and not operand:
        count = None if len(operator) == 2 else 1
        changed = text.upper() if operator[0] == "^" else text.lower()
        return changed if count is None else changed[:1] + text[1:]
    if operator == ":":
        match = re.fullmatch(r"\s*([0-9]{1,6}|\s-[0-9]{1,6})\s*(?::\s*([0-9]{1,6})\s*)?", operand)
        if match is None:
            return None
        rest = text[int(match[1]) :]
        return rest if match[2] is None else rest[: int(match[2])]
    if operator in ("#", "##", "%", "%%") and operand.count("*") <= 2:
        cuts = range(len(text) + 1)
        order = cuts if operator in ("#", "%%") else reversed(cuts)
        for at in order:
            piece = text[:at] if operator[0] == "#" else text[at:]
            if matches(piece, operand):
                return text[at:] if operator[0] == "#" else text[:at]
        return text
    if operator in ("/", "//"):
        old, _, new = operand.partition("/")
        if not old or re.search(r"[*?\[#%&]", old):
            return None
        return text.replace(old, new, -1 if operator == "//" else 1)
    return None
