"""The parts of shell scripts: commands, conditions, loops and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """A literal part of a word."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a variable. ``operator`` is "" or e.g. ":-", and ``operand`` the word after it."""

    source: str
    name: str
    index: Word | None
    operator: str
    operand: Word
    quoted: bool
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The value of an arithmetic expression."""

    source: str
    expression: Word
    quoted: bool
    line: int


@dataclass(frozen=True, slots=True)
class Substitution:
    """The output of a command."""

    source: str
    script: str
    quoted: bool
    line: int


Part: TypeAlias = Text | Use | Arithmetic | Substitution
Word: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of a text, of an element, or of a list of words to a variable."""

    name: str
    index: Word | None
    appended: bool
    value: Word
    elements: tuple[Word, ...] | None


@dataclass(slots=True)
class HereDocument:
    """The text of a here-document, which the parser reads after the line of its command."""

    delimiter: str
    quoted: bool
    tabs_stripped: bool
    text: Word = ()


@dataclass(frozen=True, slots=True)
class Redirection:
    """A redirection to or from a file."""

    operator: str
    target: Word
    document: HereDocument | None = None


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its assignments, words and redirections."""

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]
    redirections: tuple[Redirection, ...]


@dataclass(frozen=True, slots=True)
class DoubleBrackets:
    """A condition in double brackets. Its operators are words."""

    line: int
    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Computation:
    """An arithmetic expression as a command."""

    line: int
    expression: Word


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with the commands after each, and the commands if none holds."""

    line: int
    arms: tuple[tuple[Node, Node], ...]
    otherwise: Node | None


@dataclass(frozen=True, slots=True)
class For:
    """A loop over words. They are None for the script's own arguments."""

    line: int
    name: str
    words: tuple[Word, ...] | None
    body: Node


@dataclass(frozen=True, slots=True)
class While:
    """A loop with a condition, which is None if it is not read."""

    line: int
    condition: Node | None
    until: bool
    body: Node


@dataclass(frozen=True, slots=True)
class Case:
    """A choice by patterns."""

    line: int
    subject: Word
    arms: tuple[tuple[tuple[Word, ...], Node], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    name: str
    body: Node


@dataclass(frozen=True, slots=True)
class Group:
    """Commands in braces, or in a shell of their own."""

    body: Node
    own_shell: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands that are joined by pipes."""

    parts: tuple[Node, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands after each other. Before each there is "&&", "||" or ";"."""

    parts: tuple[tuple[str, Node], ...]


Node: TypeAlias = (
    Simple
    | DoubleBrackets
    | Computation
    | If
    | For
    | While
    | Case
    | Function
    | Group
    | Pipeline
    | Chain
)
