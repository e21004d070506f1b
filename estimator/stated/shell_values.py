"""Texts of a shell script whose parts may be unknown, and what a shell computes from texts.

An unknown part of a text is a mark. What it stands for is in :class:`Unknowns`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
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
    """What the marks in texts stand for."""

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


_TOKEN: Final = re.compile(
    r"\s*(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,2}#[0-9a-zA-Z]{1,15}|[0-9]{1,18}|[A-Za-z_]\w*"
    r"|\*\*|&&|\|\||<=|>=|==|!=|<<|>>|\+\+|--|[-+*/%&|^]=|[-+*/%<>!~?:()=&|^,])"
)
_LEVELS: Final[tuple[Mapping[str, Callable[[int, int], int]], ...]] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {
        "<<": lambda a, b: a << b if 0 <= b < 64 else 0,
        ">>": lambda a, b: a >> b if 0 <= b < 64 else 0,
    },
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {
        "*": lambda a, b: a * b,
        "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
        "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    },
)
"""The operators of arithmetic, those that bind least first."""


class Calculation:
    """An arithmetic expression with the variables that it reads and changes.

    Raises:
        ValueError: the expression is not one, or has an unknown value.
    """

    def __init__(
        self, text: str, read: Callable[[str], str], write: Callable[[str, str], None]
    ) -> None:
        self._assumed = ASSUMED in text
        text = plain(text).strip()
        if is_unknown(text) or len(text) > 500 or len(re.findall(r"[(?=]|\*\*", text)) > 20:
            raise ValueError("it is unknown or too long")
        self._tokens: list[str] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at:]!r} is not arithmetic")
            self._tokens.append(match[1])
            at = match.end()
        self._tokens.reverse()
        self._read, self._write = read, write

    def result(self) -> str:
        """Return the value of the expression."""
        value = self._comma() if self._tokens else 0
        if self._tokens:
            raise ValueError("it goes on after its end")
        return f"{value}{ASSUMED * self._assumed}"

    def _next(self, *wanted: str) -> str:
        return self._tokens.pop() if self._tokens and self._tokens[-1] in wanted else ""

    def _comma(self) -> int:
        value = self._assigned()
        while self._next(","):
            value = self._assigned()
        return value

    def _assigned(self) -> int:
        tokens = self._tokens
        if len(tokens) >= 2 and re.match(r"[A-Za-z_]", tokens[-1]):
            name, operator = tokens[-1], tokens[-2]
            if operator == "=" or (
                len(operator) == 2 and operator[1] == "=" and operator[0] in "+-*/%"
            ):
                del tokens[-2:]
                value = self._assigned()
                if operator != "=":
                    level = next(level for level in _LEVELS if operator[0] in level)
                    value = self._checked(level[operator[0]], self._variable(name), value)
                self._write(name, str(value))
                return value
        return self._choice()

    def _choice(self) -> int:
        condition = self._level(0)
        if not self._next("?"):
            return condition
        first = self._assigned()
        if not self._next(":"):
            raise ValueError("':' is missing")
        second = self._assigned()
        return first if condition else second

    def _level(self, number: int) -> int:
        if number == len(_LEVELS):
            return self._power()
        value = self._level(number + 1)
        while operator := self._next(*_LEVELS[number]):
            value = self._checked(_LEVELS[number][operator], value, self._level(number + 1))
        return value

    def _checked(self, function: Callable[[int, int], int], left: int, right: int) -> int:
        try:
            value = function(left, right)
        except ZeroDivisionError as error:
            raise ValueError("it divides by 0") from error
        if abs(value) >= 2**63:
            raise ValueError("it is too large")
        return value

    def _power(self) -> int:
        value = self._unary()
        if self._next("**"):
            exponent = self._power()
            if not 0 <= exponent < 64:
                raise ValueError("it is too large")
            return self._checked(lambda a, b: a**b, value, exponent)
        return value

    def _unary(self) -> int:
        operator = self._next("-", "+", "!", "~", "(", "++", "--")
        if operator == "(":
            value = self._comma()
            if not self._next(")"):
                raise ValueError("')' is missing")
            return value
        if operator in ("++", "--"):
            return self._stepped(self._tokens.pop() if self._tokens else "", operator)
        if operator:
            value = self._unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[operator]
        token = self._tokens.pop() if self._tokens else ""
        if re.match(r"[A-Za-z_]", token):
            value = self._variable(token)
            if step := self._next("++", "--"):
                self._stepped(token, step)
            return value
        return _literal(token)

    def _stepped(self, name: str, operator: str) -> int:
        if not re.match(r"[A-Za-z_]", name):
            raise ValueError("a name is missing")
        value = self._variable(name) + (1 if operator == "++" else -1)
        self._write(name, str(value))
        return value

    def _variable(self, name: str) -> int:
        text = self._read(name)
        if is_unknown(text):
            raise ValueError(f"{name} is not known")
        self._assumed |= ASSUMED in text
        text = plain(text).strip()
        return _literal(text) if text else 0


def _literal(text: str) -> int:
    try:
        if "#" in text:
            base, _, digits = text.partition("#")
            return int(digits, int(base))
        if text[:2].lower() == "0x":
            return int(text, 16)
        if re.fullmatch(r"-?0[0-9]+", text):
            return int(text, 8)
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            return int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number") from error
    raise ValueError(f"{text!r} is not a number")
